"""The gateway actor: client sessions over the ledger, and the doors that clients come through."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import structlog
import trio

from actors.boot import TOKEN_LOG
from actors.choice import Choice, Fold
from actors.grace import GracePeriod
from actors.metrics import Exposition, RequestMetrics, SystemCollector
from actors.open_request import OpenRequest, Reader
from actors.prefixes import PrefixKeeper, Surroundings
from actors.sessions import Draining, Generation, NotKept, QueueFull, Refused
from actors.shell import Actor
from engine.core import Send
from engine.fairness import Fairness
from engine.ids import owner_of, parse_request_name, request_name
from engine.layout import TokenLogArena
from engine.ledger import Closed, Committed, Ledger, LedgerFull
from engine.messages import Drained, PinFact, Place, Preempt, SequenceLost, TermAccepted
from engine.model import ModelConfig, read_config
from engine.pins import Pins
from engine.sampling import SamplingParams
from engine.text import TextCodec
from engine.topology import of_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from actors.boot import World
    from actors.sessions import FinishReason
    from engine.core import Statistics
    from engine.ids import Incarnation, SequenceKey
    from engine.ledger import Effect, Entry
    from engine.messages import Member, Message, ToGateway
    from engine.transcript import Position

log = structlog.get_logger()

STALL_S = 30.0
"""With requests open and no token for so long, the system is not ready."""

SHUT_DOWN = "the server shut down before the answer was complete"


class GatewayActor(Actor):
    """Implements `actors.sessions.Sessions` for its doors."""

    text: TextCodec
    model: ModelConfig

    def __init__(self, world: World) -> None:
        super().__init__(world)
        topology = self.boot.topology
        arena = TokenLogArena(
            world.segments[TOKEN_LOG], topology.log_slots(self.host), self.boot.context_length
        )
        slots = topology.log_slots_of(self.me.name)
        several = len(topology.hosts()) > 1
        self.core = Ledger(self.me, self.boot.ordinal, arena, slots, tells_tokens=several)
        self.metrics = RequestMetrics()
        self._requests: dict[int, OpenRequest] = {}
        """All that somebody may read or come back for."""
        self._choices: dict[SequenceKey, Choice] = {}
        """Those that have not ended: what the ledger has open."""
        self._keys: dict[str, OpenRequest] = {}
        table = topology.gateway[self.me.name]
        self._grace = GracePeriod(table.resume_grace_s, table.resume_most)
        self._reserved = Fairness(reserve=topology.scheduler.reserve).reserved(table.max_open)
        around = Surroundings.of(self.me.name, topology)
        allocator = topology.allocator_of(self.me.name)
        pins = Pins(self.me, self.boot.ordinal, self.boot.page_shape.tokens, allocator=allocator)
        self.prefixes = PrefixKeeper(pins, self.core, self._reserved, around, self._apply)
        self._left = trio.Event()
        """Somebody waits in there who did not when it was last looked at."""
        self._logs_tokens = topology.launch.log_level == "debug"
        self._progress = trio.current_time()
        self._idle = trio.Event()
        self._shut_door = trio.Event()
        self._door_closed = trio.Event()
        if self.core.orphans:
            log.warning("requests_orphaned", count=self.core.orphans)

    # ── what the doors see ────────────────────────────────────────────────────────────────────

    @property
    def resume_grace_s(self) -> float:
        """For so long a request is kept for a client that is gone."""
        return self._grace.seconds

    def draw_seed(self) -> int:
        """A fresh unsigned 64-bit seed."""
        return secrets.randbits(64)

    def open(self, generation: Generation) -> Reader:
        """Accept a request, or raise Refused."""
        if self.draining.is_set() or self.stopping.is_set():
            self.metrics.refused("draining")
            raise Draining
        if generation.key in self._keys:
            raise Refused("a request with this key is kept already")
        self._keep_reserve(generation)
        if generation.resumable and not generation.key:
            generation = msgspec.structs.replace(generation, key=secrets.token_hex(16))
        now = trio.current_time()
        if not self._choices:
            self._progress = now
        prompt = generation.prompt
        limit = len(prompt) + generation.max_tokens
        if limit > self.boot.context_length:
            raise ValueError(f"{limit} tokens do not fit a context of {self.boot.context_length}")
        try:
            keys, effects = self.core.open(
                prompt,
                limit,
                (*(() if generation.ignore_eos else self.model.eos_tokens), *generation.stop_tokens),
                generation.sampling,
                now,
                n=generation.n,
                min_tokens=generation.min_tokens,
                logprobs=generation.logprobs,
                client=generation.client,
                priority=generation.priority,
                keepsake=_keepsake(generation) if generation.resumable else b"",
                cache_salt=generation.cache_salt,
            )
        except LedgerFull:
            self.metrics.refused("queue_full")
            raise QueueFull from None
        request = self._enter(keys[0].request, generation, keys, now)
        self._choices.update((choice.key, choice) for choice in request.choices)
        log.info(
            "request_admitted",
            request_id=request.name,
            prompt_tokens=len(prompt),
            max_tokens=generation.max_tokens,
            seed=generation.sampling.seed,
            **({"choices": generation.n} if generation.n > 1 else {}),
            **({"resumable": True} if generation.resumable else {}),
            **({"client": generation.client} if generation.client else {}),
        )
        self._apply(effects)
        request.reader = Reader(self, request)
        return request.reader

    def _keep_reserve(self, generation: Generation) -> None:
        """QueueFull where the last logs would go to a client that has some: they are for those without."""
        if self.core.slots_free - generation.n >= self._reserved:
            return
        client = generation.client
        for request in self._requests.values():
            if request.generation.client == client and not request.delivered:
                self.metrics.refused("queue_full")
                raise QueueFull("the last places are kept for clients that have none")

    def find(self, key: str) -> str | None:
        """The resume id of the request that was opened under a client's own key, while it is kept."""
        request = self._keys.get(key)
        return None if request is None else request.resume_id

    def resume(self, resume_id: str, positions: Sequence[Position] | None) -> Reader:
        """Go on reading a request; NotKept or Diverged when that cannot be."""
        number = parse_request_name(resume_id.partition(".")[0])
        request = None if number is None else self._requests.get(number)
        if request is None or not (
            request.generation.resumable
            and secrets.compare_digest(request.resume_id.encode(), resume_id.encode())
        ):
            raise NotKept(self._why_not_kept(number))
        reader = Reader(self, request)
        request.read_by(reader, positions)
        self._grace.discard(request)
        self.metrics.resumed()
        log.info("request_resumed", request_id=request.name)
        return reader

    def _why_not_kept(self, number: int | None) -> str:
        if number is not None:
            ordinal, _ = owner_of(number)
            for actor in self.boot.topology.actors():
                if actor.kind == "gateway" and actor.ordinal == ordinal != self.boot.ordinal:
                    return f"it belongs to the gateway {actor.name!r}"
        return "it never was, it cannot be resumed, or its time is over"

    def not_ready(self) -> str | None:
        """Why no token could be produced now, or None."""
        if self.draining.is_set():
            return "the system is shutting down"
        if missing := self._missing():
            return f"waiting for: {', '.join(missing)}"
        silent = trio.current_time() - self._progress
        if self._choices and silent > STALL_S:
            return f"requests are open and no token came for {silent:.0f} s"
        return None

    def _missing(self) -> list[str]:
        """Who is not there that a token would need: workers for both roles, with their hosts' allocators."""
        topology = self.boot.topology
        names = {member.name for member in self.members.values()}
        allocators = {host: of_host("allocator", host) for host in topology.hosts()}
        actors = set() if "scheduler" in names else {"scheduler"}
        if names.isdisjoint(allocators.values()):
            actors.add(next(iter(allocators.values())))
        workers = []
        for role in ("prefill", "decode"):
            able = [
                host
                for host in topology.hosts()
                for name, table in topology.workers_on(host).items()
                if name in names and table.role in (role, "both")
            ]
            if not able:
                workers.append(f"{role} worker")
            elif names.isdisjoint(allocators[host] for host in able):
                actors.add(allocators[able[0]])
        return sorted(actors) + workers

    def system_statistics(self) -> dict[str, dict[str, int | float]]:
        """What every actor of this host last published, by name."""
        actors = self.boot.topology.actors(self.host)
        return {actor.name: self.vitals.statistics(actor.ordinal) for actor in actors}

    def render_metrics(self) -> bytes:
        """The body of GET /metrics."""
        return self._exposition.render()

    # ── requests ──────────────────────────────────────────────────────────────────────────────

    def _enter(
        self, number: int, generation: Generation, keys: Iterable[SequenceKey], opened: float
    ) -> OpenRequest:
        request = OpenRequest(number, generation)
        fold = Fold(generation, self.text, self.model)
        for key in keys:
            choice = Choice(
                key, generation, fold, self.metrics, request.wake, opened, logs_tokens=self._logs_tokens
            )
            request.choices.append(choice)
        self._requests[number] = request
        if generation.key:
            self._keys[generation.key] = request
        return request

    def _forget(self, request: OpenRequest) -> None:
        del self._requests[request.number]
        self._keys.pop(request.generation.key, None)
        self._grace.discard(request)

    def cancel(self, request: OpenRequest, by: str) -> None:
        """Nobody wants a request any more; a no-op after its end, but that it cannot be resumed then."""
        if request.number not in self._requests:
            return
        if not request.ended:
            log.info("request_cancelled", request_id=request.name, by=by)
        if request.generation.resumable:
            self._forget(request)
        for choice in request.choices:
            if self._choices.pop(choice.key, None) is not None:
                choice.finish("cancelled", flush=False)
            self._apply(self.core.cancel(choice.key))
        self._over(request)

    def leave(self, request: OpenRequest, by: str) -> None:
        """Its reader is gone: keep what can be resumed for a while, cancel everything else."""
        if not request.generation.resumable:
            self.cancel(request, by)
        elif request.number in self._requests and not request.delivered:
            request.forget_reader()
            log.info("request_left", request_id=request.name, by=by, grace_s=self._grace.seconds)
            self._wait_for_reader(request)

    def delivered(self, request: OpenRequest) -> None:
        """Its reader has everything; what was kept for a gateway after this one is not needed any more."""
        if request.number in self._requests:
            request.delivered = True
            self.core.release(choice.key for choice in request.choices)
            self._wait_for_reader(request)

    def _wait_for_reader(self, request: OpenRequest) -> None:
        for gone in self._grace.add(request, trio.current_time()):
            self._expire(gone, "too_many_kept")
        self._left.set()

    def _expire(self, request: OpenRequest, by: str) -> None:
        request.forget_reader()
        self.cancel(request, by)

    def _over(self, request: OpenRequest) -> None:
        """A request that cannot be resumed is forgotten at its end."""
        if request.ended and not request.generation.resumable and request.number in self._requests:
            self._forget(request)

    def _apply(self, effects: Iterable[Effect]) -> None:
        sends: list[Send] = []
        for effect in effects:
            match effect:
                case Committed(key=key, token=token, logprobs=logprobs):
                    self._progress = trio.current_time()
                    choice = self._choices.get(key)
                    if choice is not None and choice.push(token, logprobs):
                        self._end(choice, "stop", flush=False)
                        sends += [left for left in self.core.finish(key) if isinstance(left, Send)]
                case Closed(key=key, reason=reason, error=error):
                    choice = self._choices.get(key)
                    if choice is not None:
                        self._end(choice, reason or "error", error)
                    else:
                        self.prefixes.closed(key, error)
                case _:
                    sends.append(effect)
        self.send(sends)
        if not self._choices:
            self._idle.set()

    def _end(
        self, choice: Choice, reason: FinishReason, error: str | None = None, *, flush: bool = True
    ) -> None:
        del self._choices[choice.key]
        choice.finish(reason, error, flush=flush)
        self._over(self._requests[choice.key.request])

    def _adopt(self) -> None:
        """Take over the requests that the last incarnation left: their logs say how far they are."""
        for number, entries in self.core.adopted.items():
            first = entries[0]
            generation = msgspec.structs.replace(
                msgspec.msgpack.decode(first.record.keepsake, type=Generation),
                prompt=tuple(first.log[: first.prompt_length]),
                sampling=first.record.sampling,
                cache_salt=first.record.cache_salt,
            )
            keys = [entry.key for entry in entries]
            request = self._enter(number, generation, keys, first.record.arrival)
            for choice, entry in zip(request.choices, entries, strict=True):
                if choice.replay(entry.log[entry.prompt_length :]):
                    # Nobody was told of it yet, so there is nobody to be told that it is over.
                    self.core.finish(entry.key)
                    choice.finish("stop", flush=False)
                elif entry.complete:
                    choice.finish("stop" if entry.log[-1] in entry.record.stop_tokens else "length")
                else:
                    self._choices[entry.key] = choice
            log.warning(
                "request_adopted", request_id=request.name, committed=len(first.log) - first.prompt_length
            )
            self._wait_for_reader(request)
        self.core.adopted.clear()

    # ── the shell ─────────────────────────────────────────────────────────────────────────────

    async def prepare(self) -> None:
        folder = Path(self.boot.model_folder)
        config = read_config(folder)
        name = self.boot.topology.model.name or config.name
        # What fits the pool may be less than what the model allows.
        self.model = msgspec.structs.replace(config, name=name, context_length=self.boot.context_length)
        self.text = await self.world.compute(partial(TextCodec.load, folder))
        actors = self.boot.topology.actors(self.host)
        collector = SystemCollector(self.metrics, self.statistics, actors, self.vitals, self.model)
        self._exposition = Exposition(collector)
        self._adopt()

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_when_drained)
            nursery.start_soon(self._end_graces)
            nursery.start_soon(self.prefixes.keep_time)
            if self.world.serve_door is not None:
                await self.world.serve_door(self, self._shut_door)
                self._door_closed.set()

    async def _end_graces(self) -> None:
        while True:
            end = self._grace.next_end()
            if end is None:
                self._left = trio.Event()
                await self._left.wait()
                continue
            await trio.sleep_until(end)
            for request in self._grace.due(trio.current_time()):
                self._expire(request, "resume_grace_over")

    async def _tell_when_drained(self) -> None:
        await self.draining.wait()
        self.prefixes.drain()
        while self._choices:
            self._idle = trio.Event()
            await self._idle.wait()
        self.send([Send(self.boot.launcher, Drained())])

    async def wind_down(self) -> None:
        """End what is still open with a word to its client, then close the door."""
        self.prefixes.drain()
        for choice in list(self._choices.values()):
            self._end(choice, "error", SHUT_DOWN)
            self._apply(self.core.cancel(choice.key))
        self._shut_door.set()
        if self.world.serve_door is not None:
            await self._door_closed.wait()

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> None:
        for entry in self.core.entries:
            if lost := entry.holders & set(down):
                dead = ", ".join(map(str, sorted(lost)))
                log.warning("request_taken_back", request_id=request_name(entry.key.request), dead=dead)
        self._apply(self.core.peers(up, down, now))
        self.prefixes.peers(up)

    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        match message:
            case Place(key=key) | TermAccepted(key=key) | Preempt(key=key) | SequenceLost(key=key):
                entry = self.core.entry(key)
                before = entry and (entry.term, entry.state)
                effects = self.core.handle(source, cast("ToGateway", message), now)
                # What came too late changed nothing, and is no part of the request's story; what fills a
                # prefix has none.
                if entry is not None and (entry.term, entry.state) != before and key in self._choices:
                    self._tell(source, entry, message)
            case PinFact():
                self.prefixes.handle(message)
                return
            case _:
                effects = self.core.handle(source, cast("ToGateway", message), now)
        self._apply(effects)

    def _tell(
        self, source: Incarnation, entry: Entry, message: Place | TermAccepted | Preempt | SequenceLost
    ) -> None:
        """Log a message that moved a request."""
        bound = log.bind(request_id=request_name(message.key.request))
        match message:
            case Place(term=term, prefill=prefill, decode=decode):
                strangers = [str(worker) for worker in (prefill, decode) if worker not in self.members]
                if strangers:
                    self._choices[message.key].placement_refused(", ".join(strangers))
                else:
                    bound.info("request_placed", term=term + 1, prefill=str(prefill), decode=str(decode))
                    self._choices[message.key].placed()
            case TermAccepted(term=term):
                bound.info("request_handed_over", term=term)
                self._choices[message.key].handed_over(entry.cached)
            case Preempt(term=term):
                bound.info("request_preempted", term=term)
            case SequenceLost(term=term, reason=reason, detail=detail):
                bound.warning("sequence_lost", term=term, by=str(source), reason=reason, detail=detail)

    def check(self) -> None:
        self.core.check()
        open_keys = {entry.key for entry in self.core.entries}
        assert self._choices.keys() | self.prefixes.filling == open_keys, "a choice leaked"
        assert not self._choices.keys() & self.prefixes.filling
        self.prefixes.check()
        for key, choice in self._choices.items():
            assert choice.end is None, f"{key} has ended and is open"
            assert choice in self._requests[key.request].choices
        for request in self._requests.values():
            waits = request.expires < float("inf")
            assert waits or request.reader is not None, f"{request.name} waits for nobody"
            assert request.generation.resumable or not request.ended, f"{request.name} is over and kept"
        assert len(self._grace) == sum(r.expires < float("inf") for r in self._requests.values())

    def statistics(self) -> Statistics:
        return {**self.core.statistics(), "requests_kept": len(self._grace), **self.prefixes.statistics()}


def _keepsake(generation: Generation) -> bytes:
    """What the arena has not anyway."""
    return msgspec.msgpack.encode(
        msgspec.structs.replace(generation, prompt=(), sampling=SamplingParams(), cache_salt="")
    )
