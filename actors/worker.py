"""The worker actor: plans a step, computes it in a thread, tells the results; prefill and decode alike."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import structlog
import trio

from actors.boot import POOL, POOL_NUMBER
from actors.shell import Actor
from engine.batching import full_pages
from engine.ids import request_name
from engine.messages import Cancel, HandOver, HandOverRefused, StartPrefill, TermAccepted
from engine.worker import Worker, WorkerLimits
from kernels.backend import Rows, TokenLog
from kernels.sampling import forbidding
from transport.checksum import page_checksum
from transport.pages import PagePool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from actors.boot import World
    from engine.batching import PageFork, Plan
    from engine.core import Send, Statistics
    from engine.ids import Incarnation
    from engine.messages import Member, Message, ToWorker
    from engine.shapes import PageRef
    from kernels.backend import Backend, StepResult

log = structlog.get_logger()

PHASES = ("prefill", "decode", "mixed")


class WorkerActor(Actor):
    """Runs the batch."""

    backend: Backend

    def __init__(self, world: World) -> None:
        super().__init__(world)
        table = self.boot.topology.worker[self.me.name]
        limits = WorkerLimits(
            prefill_slots=table.prefill_slots if table.role in ("prefill", "both") else 0,
            decode_slots=table.decode_slots if table.role in ("decode", "both") else 0,
            step_tokens=table.step_tokens,
            page_tokens=self.boot.page_shape.tokens,
            lease_ahead=table.lease_ahead,
            prefix_cache=self.boot.topology.allocator.prefix_cache,
        )
        self.core = Worker(
            self.me,
            self.boot.ordinal,
            self.page_table(),
            limits,
            allocator=self.boot.topology.allocator_of(self.me.name),
            replicator=self.boot.topology.replicator_of(self.me.name),
            host=self.host,
        )
        self._pages = PagePool(POOL_NUMBER, world.segments[POOL], self.boot.page_shape.page_bytes)
        self._news = trio.Event()
        self._busy_s = dict.fromkeys(PHASES, 0.0)
        self._steps = dict.fromkeys(PHASES, 0)
        self._positions_read = 0
        # Checked before the line is made: a line a step costs something even when nobody wants it.
        self._logs_steps = self.boot.topology.launch.log_level == "debug"

    async def prepare(self) -> None:
        open_backend = partial(self.world.open_backend, self.boot, self.world.segments[POOL])
        self.backend = await self.world.compute(open_backend)
        self.core.identity = f"{self.backend.numerics_id}:{self.boot.page_shape.tokens}"
        log.info("backend_opened", numerics_id=self.backend.numerics_id)

    async def serve(self) -> None:
        while True:
            plan, sends = self.core.plan()
            self.send(sends)
            if plan is None:
                await self._news.wait()
                self._news = trio.Event()
                continue
            began = trio.current_time()
            rows = rows_of(plan, self.backend.config.vocab_size)
            full = full_pages(plan, self.boot.page_shape.tokens)
            result, checksums = await self.world.compute(partial(self._compute, rows, plan.forks, full))
            now = trio.current_time()
            self._count(plan, now - began)
            if self._logs_steps:
                log_step(plan, now - began)
            tokens = result.tokens.tolist()
            self._tell(self.core.complete(plan, tokens, now, result.logprobs, checksums))

    def _compute(
        self, rows: Rows, forks: Sequence[PageFork], full: Iterable[PageRef]
    ) -> tuple[StepResult, dict[int, int]]:
        """One step, and the checksums of the pages that it fills, while they are in the caches still."""
        if forks:
            with self.world.writing():
                for fork in forks:
                    self._pages.slot(fork.target)[:] = self._pages.slot(fork.source)
        result = self.backend.step(rows)
        return result, {page.index: page_checksum(self._pages.slot(page)) for page in full}

    def _count(self, plan: Plan, seconds: float) -> None:
        phase = phase_of(plan)
        self._busy_s[phase] += seconds
        self._steps[phase] += 1
        self._positions_read += sum(piece.start + piece.length for piece in plan.slices)

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> None:
        self._act(self.core.peers(up, down, now))

    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        match message:
            case StartPrefill(term=term, spec=spec):
                log.info(
                    "prefill_started",
                    request_id=request_name(spec.key.request),
                    term=term,
                    tokens=len(spec.log),
                )
            case HandOver(term=term, spec=spec, filled=filled):
                log.info(
                    "hand_over_received", request_id=request_name(spec.key.request), term=term, filled=filled
                )
            case Cancel(key=key, term=term) if any(
                sequence.key == key and sequence.term <= term for sequence in self.core.sequences
            ):
                log.info("cancel_received", request_id=request_name(key.request), term=term)
        self._act(self.core.handle(source, cast("ToWorker", message), now))

    def _act(self, sends: Iterable[Send]) -> None:
        self._tell(sends)
        self._news.set()

    def _tell(self, sends: Iterable[Send]) -> None:
        """Send what the core decided, and log where it takes a request further."""
        sends = list(sends)
        for target, message in sends:
            match message:
                case HandOver(term=term, spec=spec, filled=filled, pages=pages):
                    log.info(
                        "hand_over_offered",
                        request_id=request_name(spec.key.request),
                        term=term,
                        decode=str(target),
                        filled=filled,
                        pages=len(pages),
                    )
                case HandOverRefused(key=key, term=term, reason=reason):
                    name = request_name(key.request)
                    log.warning("hand_over_refused", request_id=name, term=term, reason=reason)
                case TermAccepted(key=key, term=term):
                    log.info("decode_started", request_id=request_name(key.request), term=term)
        self.send(sends)

    def check(self) -> None:
        self.core.check()

    def statistics(self) -> Statistics:
        return {
            **self.core.statistics(),
            "busy_s": round(sum(self._busy_s.values()), 3),
            **{f"busy_{phase}_s": round(seconds, 3) for phase, seconds in self._busy_s.items()},
            **{f"steps_{phase}": count for phase, count in self._steps.items()},
            **self._bytes_read(),
            **{f"backend_{phase}_s": round(seconds, 4) for phase, seconds in self._phase_seconds().items()},
        }

    def _bytes_read(self) -> Statistics:
        """What the steps had to read from memory at the least: not measured, but counted.

        Weights: every matrix once a step, the LM head only by steps that sample, the embedding never (a row
        a token is looked up). KV: every position that a sequence attends to, once a step.
        """
        if not hasattr(self, "backend"):
            return {"weight_bytes_read": 0, "kv_bytes_read": 0}
        steps = sum(self._steps.values())
        return {
            "weight_bytes_read": steps * self.backend.body_bytes
            + (steps - self._steps["prefill"]) * self.backend.head_bytes,
            "kv_bytes_read": self._positions_read * self.backend.page_shape.token_bytes,
        }

    def _phase_seconds(self) -> dict[str, float]:
        return self.backend.phase_seconds() if hasattr(self, "backend") else {}


def phase_of(plan: Plan) -> str:
    """What a step does: "prefill" samples nothing, "decode" with every sequence, "mixed" with some."""
    samples = sum(piece.samples for piece in plan.slices)
    return "prefill" if samples == 0 else "decode" if samples == len(plan.slices) else "mixed"


def log_step(plan: Plan, seconds: float) -> None:
    """One line a step, with the requests that were in it: for the debug level."""
    log.debug(
        "step_computed",
        request_ids=[request_name(piece.sequence.key.request) for piece in plan.slices],
        rows=plan.rows,
        sampled=sum(piece.samples for piece in plan.slices),
        seconds=round(seconds, 5),
    )


def rows_of(plan: Plan, vocab_size: int) -> Rows:
    """The plan as arrays for the backend."""
    sequence: list[int] = []
    position: list[int] = []
    token: list[int] = []
    needs_logits: list[bool] = []
    masks: list[NDArray[np.uint32] | None] = []
    for index, piece in enumerate(plan.slices):
        end = piece.start + piece.length
        sequence += [index] * piece.length
        position += range(piece.start, end)
        token += piece.sequence.log[piece.start : end]
        needs_logits += [False] * (piece.length - 1) + [piece.samples]
        masks += [None] * piece.length
        if piece.samples and piece.sequence.stops_wait:
            masks[-1] = forbidding(vocab_size, piece.sequence.spec.stop_tokens)
    count = len(sequence)
    return Rows(
        sequence=np.array(sequence, np.int32),
        position=np.array(position, np.int32),
        token=np.array(token, np.int32),
        is_draft=np.zeros(count, np.bool_),
        needs_logits=np.array(needs_logits, np.bool_),
        masks=tuple(masks),
        block_tables=tuple(
            np.array([page.index for page in piece.sequence.pages], np.int32) for piece in plan.slices
        ),
        sampling=tuple(piece.sequence.spec.sampling for piece in plan.slices),
        logs=logs_of(plan),
        logprobs=logprobs_wanted(plan),
    )


def logprobs_wanted(plan: Plan) -> tuple[int | None, ...]:
    """How many logprobs each sequence asks for; empty when none does."""
    wanted = tuple(piece.sequence.spec.logprobs for piece in plan.slices)
    return wanted if any(count is not None for count in wanted) else ()


def logs_of(plan: Plan) -> tuple[TokenLog | None, ...]:
    """The logs of the sequences with penalties; empty when there is none."""
    if not any(piece.sequence.spec.sampling.needs_log for piece in plan.slices):
        return ()
    return tuple(
        TokenLog(np.array(piece.sequence.log, np.int32), piece.sequence.spec.prompt_length)
        if piece.sequence.spec.sampling.needs_log
        else None
        for piece in plan.slices
    )
