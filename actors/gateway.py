"""The gateway actor: client sessions over the ledger, and the doors that clients come through."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

import msgspec
import structlog
import trio

from actors.boot import LAUNCHER, TOKEN_LOG
from actors.metrics import Exposition, RequestMetrics, SystemCollector, Traffic
from actors.sessions import Delta, DeltaToken, Draining, End, QueueFull
from actors.shell import Actor
from engine.core import Send
from engine.detokenizer import StopFilter
from engine.ids import request_name
from engine.layout import TokenLogArena
from engine.ledger import Closed, Committed, Ledger, LedgerFull
from engine.messages import Drained, Place, Preempt, SequenceLost, TermAccepted
from engine.model import ModelConfig, read_config
from engine.text import TextCodec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from actors.boot import World
    from actors.sessions import FinishReason, Generation
    from engine.core import Statistics
    from engine.ids import Incarnation, SequenceKey
    from engine.ledger import Effect
    from engine.messages import Member, Message, ToGateway
    from engine.sampling import TokenLogprobs

log = structlog.get_logger()

GAP_S = 1.0
"""A pause between two tokens of a stream that is worth a line in the log."""

STALL_S = 30.0
"""With requests open and no token for so long, the system is not ready."""

SHUT_DOWN = "the server shut down before the answer was complete"


class GatewaySession:
    """One open request: folds committed tokens into text, and hands it to one reader.

    What the reader has not taken yet is one string, so that a slow reader costs the length of its
    answer and no more.
    """

    def __init__(self, gateway: GatewayActor, key: SequenceKey, generation: Generation, now: float) -> None:
        self.key = key
        self._gateway = gateway
        self._generation = generation
        self._detokenizer = gateway.text.detokenizer()
        self._stops = StopFilter(generation.stop, show=generation.show_stop)
        eos = () if generation.ignore_eos else gateway.model.eos_tokens
        self._hidden = frozenset((*eos, *(() if generation.show_stop else generation.stop_tokens)))
        self._tells_tokens = generation.token_ids or generation.logprobs is not None
        self._told: list[DeltaToken] = []
        self._text = ""
        self._end: End | None = None
        self._end_shown = False
        self._news = trio.Event()
        self._tokens = 0
        self._opened = now
        self._last_token = now
        self._resuming = False
        self._strangers = ""
        self._placed = False
        self._metrics = gateway.metrics
        self._logs_tokens = gateway.boot.topology.launch.log_level == "debug"

    @property
    def request_id(self) -> str:
        """How logs and clients name the request."""
        return request_name(self.key.request)

    def events(self) -> AsyncIterator[Delta | End]:
        """Deltas as they are committed, then exactly one End. May be left at any point."""
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta | End:
        while not (self._text or self._told):
            if self._end_shown:
                raise StopAsyncIteration
            if self._end is not None:
                self._end_shown = True
                return self._end
            self._news = trio.Event()
            await self._news.wait()
        text, self._text = self._text, ""
        if not self._told:
            return Delta(text)
        tokens, self._told = tuple(self._told), []
        return Delta(text, tokens)

    def cancel(self, by: str) -> None:
        """Give the request up everywhere at once."""
        self._gateway.cancel(self, by)

    # ── called by the gateway ─────────────────────────────────────────────────────────────────

    def placed(self) -> None:
        """It got a place; the first time ends the queueing that is measured."""
        if not self._placed:
            self._placed = True
            self._metrics.queue_time.observe(trio.current_time() - self._opened)

    def handed_over(self) -> None:
        """A decode worker has it: if it had tokens before, the next one ends a pause worth telling."""
        self._resuming = self._tokens > 0

    def placement_refused(self, strangers: str) -> None:
        """It was placed on workers that this gateway does not know: told once, though tried many times.

        Rosters reach the scheduler and the gateway one after the other, when a worker comes or dies.
        """
        if strangers != self._strangers:
            self._strangers = strangers
            log.info("placement_refused", request_id=self.request_id, strangers=strangers)

    def push(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Take a committed token; True when a stop string was hit."""
        now = trio.current_time()
        if self._tokens == 0:
            seconds = now - self._opened
            self._metrics.first_token(seconds, len(self._generation.prompt))
            log.info("first_token_committed", request_id=self.request_id, seconds=round(seconds, 4))
        else:
            gap = now - self._last_token
            self._metrics.inter_token.observe(gap)
            if self._resuming or gap > GAP_S:
                event = "stream_resumed" if self._resuming else "token_gap_seen"
                log.info(event, request_id=self.request_id, after=self._tokens, seconds=round(gap, 4))
        self._resuming = False
        self._last_token = now
        self._tokens += 1
        if self._logs_tokens:
            log.debug("token_committed", request_id=self.request_id, number=self._tokens)
        # A stop token comes once, as the last one.
        hidden = token in self._hidden
        if self._tells_tokens:
            self._told.append(DeltaToken(token, None if hidden else logprobs))
            self._news.set()
        text, hit = "" if hidden else self._detokenizer.push(token), False
        if self._tokens > self._generation.min_tokens:
            text, hit = self._stops.push(text)
        if text:
            self._text += text
            self._news.set()
        return hit

    def end(self, reason: FinishReason, error: str | None = None, *, flush: bool = True) -> None:
        """The terminal event; `flush` shows what was held back in case it became a stop string."""
        if self._end is not None:
            return
        if flush:
            text, hit = self._stops.push(self._detokenizer.finish())
            self._text += text if hit else text + self._stops.finish()
        prompt = len(self._generation.prompt)
        self._end = End(reason, prompt, self._tokens, error)
        self._news.set()
        seconds = trio.current_time() - self._opened
        self._metrics.ended(reason, seconds)
        log.info(
            "request_ended",
            request_id=self.request_id,
            reason=reason,
            error=error,
            prompt_tokens=prompt,
            completion_tokens=self._tokens,
            seconds=round(seconds, 4),
        )


class GatewayActor(Actor):
    """Implements `actors.sessions.Sessions` for its doors."""

    text: TextCodec
    model: ModelConfig

    def __init__(self, world: World) -> None:
        super().__init__(world)
        topology = self.boot.topology
        arena = TokenLogArena(world.segments[TOKEN_LOG], topology.log_slots, self.boot.context_length)
        self.core = Ledger(self.me, self.boot.ordinal, arena, topology.log_slots_of(self.me.name))
        self.metrics = RequestMetrics()
        self._sessions: dict[SequenceKey, GatewaySession] = {}
        self._progress = trio.current_time()
        self._idle = trio.Event()
        self._shut_door = trio.Event()
        self._door_closed = trio.Event()
        if self.core.orphans:
            log.warning("requests_orphaned", count=self.core.orphans)

    # ── what the doors see ────────────────────────────────────────────────────────────────────

    def draw_seed(self) -> int:
        """A fresh unsigned 64-bit seed."""
        return secrets.randbits(64)

    def open(self, generation: Generation) -> GatewaySession:
        """Accept a request, or raise Refused."""
        if self.draining.is_set() or self.stopping.is_set():
            self.metrics.refused("draining")
            raise Draining
        now = trio.current_time()
        if not self._sessions:
            self._progress = now
        prompt = generation.prompt
        limit = len(prompt) + generation.max_tokens
        if limit > self.boot.context_length:
            raise ValueError(f"{limit} tokens do not fit a context of {self.boot.context_length}")
        try:
            key, effects = self.core.open(
                prompt,
                limit,
                (*(() if generation.ignore_eos else self.model.eos_tokens), *generation.stop_tokens),
                generation.sampling,
                now,
                min_tokens=generation.min_tokens,
                logprobs=generation.logprobs,
            )
        except LedgerFull:
            self.metrics.refused("queue_full")
            raise QueueFull from None
        session = GatewaySession(self, key, generation, now)
        self._sessions[key] = session
        log.info(
            "request_admitted",
            request_id=session.request_id,
            prompt_tokens=len(prompt),
            max_tokens=generation.max_tokens,
            seed=generation.sampling.seed,
        )
        self._apply(effects)
        return session

    def not_ready(self) -> str | None:
        """Why no token could be produced now, or None."""
        if self.draining.is_set():
            return "the system is shutting down"
        kinds = {member.kind for member in self.members.values()}
        missing = sorted({"scheduler", "allocator"} - kinds)
        roles = {
            self.boot.topology.worker[member.name].role
            for member in self.members.values()
            if member.kind == "worker"
        }
        missing += [f"{role} worker" for role in ("prefill", "decode") if not roles & {role, "both"}]
        if missing:
            return f"waiting for: {', '.join(missing)}"
        silent = trio.current_time() - self._progress
        if self._sessions and silent > STALL_S:
            return f"requests are open and no token came for {silent:.0f} s"
        return None

    def system_statistics(self) -> dict[str, dict[str, int | float]]:
        """What every actor of the topology last published, by name."""
        return {actor.name: self.vitals.statistics(actor.ordinal) for actor in self.boot.topology.actors()}

    def render_metrics(self) -> bytes:
        """The body of GET /metrics."""
        return self._exposition.render()

    # ── sessions ──────────────────────────────────────────────────────────────────────────────

    def cancel(self, session: GatewaySession, by: str) -> None:
        """The client of a session does not want it any more; a no-op after its end."""
        if self._sessions.pop(session.key, None) is None:
            return
        log.info("request_cancelled", request_id=session.request_id, by=by)
        session.end("cancelled", flush=False)
        self._apply(self.core.cancel(session.key))

    def _apply(self, effects: Iterable[Effect]) -> None:
        sends: list[Send] = []
        for effect in effects:
            match effect:
                case Committed(key=key, token=token, logprobs=logprobs):
                    self._progress = trio.current_time()
                    session = self._sessions.get(key)
                    if session is not None and session.push(token, logprobs):
                        del self._sessions[key]
                        session.end("stop", flush=False)
                        sends += [left for left in self.core.finish(key) if isinstance(left, Send)]
                case Closed(key=key, reason=reason, error=error):
                    session = self._sessions.pop(key, None)
                    if session is not None:
                        session.end(reason or "error", error)
                case _:
                    sends.append(effect)
        self.send(sends)
        if not self._sessions:
            self._idle.set()

    # ── the shell ─────────────────────────────────────────────────────────────────────────────

    async def prepare(self) -> None:
        folder = Path(self.boot.model_folder)
        config = read_config(folder)
        name = self.boot.topology.model.name or config.name
        # What fits the pool may be less than what the model allows.
        self.model = msgspec.structs.replace(config, name=name, context_length=self.boot.context_length)
        self.text = await self.world.compute(partial(TextCodec.load, folder))
        actors, traffic = self.boot.topology.actors(), Traffic.of(folder, self.model, self.boot.page_shape)
        collector = SystemCollector(
            self.metrics, self.core.statistics, actors, self.vitals, self.model, traffic
        )
        self._exposition = Exposition(collector)

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_when_drained)
            if self.world.serve_door is not None:
                await self.world.serve_door(self, self._shut_door)
                self._door_closed.set()

    async def _tell_when_drained(self) -> None:
        await self.draining.wait()
        while self._sessions:
            self._idle = trio.Event()
            await self._idle.wait()
        self.send([Send(LAUNCHER, Drained())])

    async def wind_down(self) -> None:
        """End what is still open with a word to its client, then close the door."""
        for session in list(self._sessions.values()):
            del self._sessions[session.key]
            session.end("error", SHUT_DOWN)
            self._apply(self.core.cancel(session.key))
        self._shut_door.set()
        if self.world.serve_door is not None:
            await self._door_closed.wait()

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> None:
        for entry in self.core.entries:
            if lost := entry.holders & set(down):
                dead = ", ".join(map(str, sorted(lost)))
                log.warning("request_taken_back", request_id=request_name(entry.key.request), dead=dead)
        self._apply(self.core.peers(up, down, now))

    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        match message:
            case Place(key=key) | TermAccepted(key=key) | Preempt(key=key) | SequenceLost(key=key):
                entry = next((entry for entry in self.core.entries if entry.key == key), None)
                before = entry and (entry.term, entry.state)
                effects = self.core.handle(source, cast("ToGateway", message), now)
                # What came too late changed nothing, and is no part of the request's story.
                if entry is not None and (entry.term, entry.state) != before:
                    self._tell(source, message)
            case _:
                effects = self.core.handle(source, cast("ToGateway", message), now)
        self._apply(effects)

    def _tell(self, source: Incarnation, message: Place | TermAccepted | Preempt | SequenceLost) -> None:
        """Log a message that moved a request."""
        bound = log.bind(request_id=request_name(message.key.request))
        match message:
            case Place(term=term, prefill=prefill, decode=decode):
                strangers = [str(worker) for worker in (prefill, decode) if worker not in self.members]
                if strangers:
                    self._sessions[message.key].placement_refused(", ".join(strangers))
                else:
                    bound.info("request_placed", term=term + 1, prefill=str(prefill), decode=str(decode))
                    self._sessions[message.key].placed()
            case TermAccepted(term=term):
                bound.info("request_handed_over", term=term)
                self._sessions[message.key].handed_over()
            case Preempt(term=term):
                bound.info("request_preempted", term=term)
            case SequenceLost(term=term, reason=reason, detail=detail):
                bound.warning("sequence_lost", term=term, by=str(source), reason=reason, detail=detail)

    def check(self) -> None:
        self.core.check()
        assert self._sessions.keys() == {entry.key for entry in self.core.entries}, "a session leaked"

    def statistics(self) -> Statistics:
        return self.core.statistics()
