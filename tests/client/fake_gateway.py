"""A gateway and a bad network in virtual time, for the client's core.

What a request is answered depends on its seed alone; how far it has come, on the time alone. The
network loses, repeats, delays and reorders; connections are cut, with or without a word; the gateway
starts again, with its requests or without them.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from engine.client.core import ClientCore
from engine.client.events import Event, Finish, Piece
from engine.client.request import completion
from engine.stream_protocol import (
    Cancel,
    Create,
    Credit,
    Delta,
    End,
    Failed,
    Opened,
    Ping,
    Pong,
    Resume,
    ScoredToken,
    StreamError,
    decode_to_gateway,
    encode,
)
from engine.transcript import tail_hash

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.client.exchange import Exchange
    from engine.client.patience import Patience
    from engine.stream_protocol import ToClient

PIECES = ("", "a", "be", " see", "ü", "→", "🏮", "\n", "漢字", "x" * 300)


def pieces_of(seed: int, choice: int) -> list[str]:
    """The text that each token of an answer makes certain; the last one is the flush."""
    chance = random.Random(f"{seed}/{choice}")
    return [chance.choice(PIECES) for _ in range(chance.randint(1, 40))]


@dataclass
class Trouble:
    """What goes wrong, until it does not any more."""

    loss: float = 0.0
    repetition: float = 0.0
    most_delay_s: float = 0.001
    until: float = 0.0
    cuts: list[float] = field(default_factory=list)
    """Times at which the connection is lost and the client told."""
    silences: list[float] = field(default_factory=list)
    """Times at which the connection is lost and nobody told."""
    restarts: list[tuple[float, bool]] = field(default_factory=list)
    """Times at which the gateway dies, and whether the next one has its requests."""


@dataclass
class Asked:
    """A request as the gateway has it."""

    request: str
    key: str
    seed: int
    choices: int
    began: float
    answer: list[list[str]]
    cancelled: float | None = None

    def known(self, now: float, token_s: float) -> int:
        """Tokens of a choice that are there."""
        return int(((self.cancelled or now) - self.began) / token_s)


@dataclass
class Told:
    """A stream of a request on a connection."""

    connection: int
    name: str
    asked: Asked
    places: list[int]
    granted: int
    sent: int = 0
    ended: set[int] = field(default_factory=set)


class World:
    """The client's core, the network and the gateway."""

    def __init__(
        self, seed: int, trouble: Trouble, *, token_s: float = 0.5, patience: Patience | None = None
    ) -> None:
        self.now = 0.0
        self.core = ClientCore(patience)
        self.chance = random.Random(seed)
        self.trouble = trouble
        self.token_s = token_s
        self.requests: dict[str, Asked] = {}
        self.streams: list[Told] = []
        self.forgets_at_once = False
        self.refusal: StreamError | None = None
        self.told: list[type] = []
        """Kinds of messages that reached the gateway."""
        self.connection = 0
        self.most_waiting = 0
        self._alive = False
        self._numbers = itertools.count(1)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        for time in trouble.cuts:
            self.at(time, self.cut)
        for time in trouble.silences:
            self.at(time, self._silence)
        for time, keeps in trouble.restarts:
            self.at(time, lambda keeps=keeps: self._restart(keeps))
        self._connect()

    # ── time ──────────────────────────────────────────────────────────────────────────────────

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._numbers), action))

    def run(self, until: Callable[[], bool], seconds: float) -> None:
        """Let the time pass until something holds."""
        end = self.now + seconds
        while not until():
            due = self._queue[0][0] if self._queue else inf
            turn = max(self.core.next_turn(), self.now)
            assert min(due, turn) <= end, f"not within {seconds} s: {self.core.statistics()}"
            if turn < due:
                self.now = turn
                self.core.turn(self.now)
                if self.core.is_dead(self.now):
                    self.cut()
            else:
                time, _, action = heapq.heappop(self._queue)
                self.now = max(time, self.now)
                action()
            self.flush()
            self.core.check()

    # ── the network ───────────────────────────────────────────────────────────────────────────

    def flush(self) -> None:
        for data in self.core.take_outgoing():
            begins = isinstance(decode_to_gateway(data), Create | Resume)
            self._carry(lambda data=data, at=self.connection: self._arrive(at, data), repeats=not begins)

    def _carry(self, action: Callable[[], None], *, repeats: bool = True) -> None:
        """Bring a message over, or not.

        What begins a stream is not repeated: no carrier does, and once its stream has ended nobody could
        tell the second stream of that name from the first. The client says it again under another name.
        """
        trouble, chance = self.trouble, self.chance
        bad = self.now < trouble.until
        if not self._alive or (bad and chance.random() < trouble.loss):
            return
        times = 2 if bad and repeats and chance.random() < trouble.repetition else 1
        for _ in range(times):
            # Without trouble a connection keeps the order.
            delay = chance.uniform(0, trouble.most_delay_s) if bad else trouble.most_delay_s
            self.at(self.now + delay, action)

    def cut(self) -> None:
        """The connection is lost, and there will be another one."""
        self.core.disconnected(self.now)
        self._forget()
        self.at(self.now + self.chance.uniform(0, 0.3), self._connect)

    def _silence(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._alive = False
        self.connection += 1
        self.streams.clear()

    def _connect(self) -> None:
        if not self._alive and not self.core.is_connected:
            self._alive = True
            self.core.connected(self.now)

    def _restart(self, keeps: bool) -> None:
        if not keeps:
            self.requests.clear()
        if self.core.is_connected:
            self.cut()

    # ── the gateway ───────────────────────────────────────────────────────────────────────────

    def _tell(self, message: ToClient, connection: int) -> None:
        data = encode(message)

        def arrive() -> None:
            if connection == self.connection and self.core.is_connected:
                self.core.receive(data, self.now)

        self._carry(arrive)

    def _arrive(self, connection: int, data: bytes) -> None:
        if connection != self.connection or not self._alive:
            return
        message = decode_to_gateway(data)
        self.told.append(type(message))
        match message:
            case Ping():
                self._tell(Pong(), connection)
            case Create():
                self._create(message, connection)
            case Resume():
                self._resume(message, connection)
            case Credit():
                for told in self._named(message.stream):
                    told.granted = max(told.granted, message.upto)
                    self._pump(told)
            case Cancel():
                for told in self._named(message.stream):
                    told.asked.cancelled = told.asked.cancelled or self.now
                    self._pump(told)

    def _named(self, name: str) -> list[Told]:
        return [told for told in self.streams if told.name == name]

    def _create(self, create: Create, connection: int) -> None:
        if self._named(create.stream):
            self._tell(Failed(StreamError("in use", 409, "stream_in_use")), connection)
            return
        if self.refusal is not None:
            self._tell(Failed(self.refusal, create.stream), connection)
            return
        body = json.loads(bytes(create.body))
        asked = next((each for each in self.requests.values() if each.key == create.key), None)
        resumed = asked is not None
        if asked is None:
            choices = body.get("n", 1)
            answer = [pieces_of(body["seed"], choice) for choice in range(choices)]
            name = f"r{next(self._numbers)}"
            asked = Asked(name, create.key or "", body["seed"], choices, self.now, answer)
            self.requests[name] = asked
        self._open(create.stream, connection, asked, [0] * asked.choices, create.window or 1 << 20, resumed)

    def _resume(self, resume: Resume, connection: int) -> None:
        if self._named(resume.stream):
            self._tell(Failed(StreamError("in use", 409, "stream_in_use")), connection)
            return
        asked = None if self.forgets_at_once else self.requests.get(resume.request)
        if asked is None:
            self._tell(Failed(StreamError("not kept", 404, "not_kept"), resume.stream), connection)
            return
        known = asked.known(self.now, self.token_s)
        for pieces, position in zip(asked.answer, resume.positions, strict=True):
            text = "".join(pieces[: position.sequence])
            if position.sequence > known or tail_hash(text) != position.tail:
                self._tell(Failed(StreamError("diverged", 409, "diverged"), resume.stream), connection)
                return
        places = [position.sequence for position in resume.positions]
        self._open(resume.stream, connection, asked, places, resume.window or 1 << 20, True)

    def _open(
        self, name: str, connection: int, asked: Asked, places: list[int], window: int, resumed: bool
    ) -> None:
        for told in [told for told in self.streams if told.asked is asked]:
            self.streams.remove(told)
            self._tell(Failed(StreamError("superseded", 409, "superseded"), told.name), connection)
        told = Told(connection, name, asked, places, window)
        self.streams.append(told)
        self._tell(Opened(name, asked.request, "fake", 3, asked.choices, resumed), connection)
        self._pump(told)

    def _pump(self, told: Told) -> None:
        """Send what there is and may be sent; look again when there is more."""
        if told not in self.streams:
            return
        asked = told.asked
        known = asked.known(self.now, self.token_s)
        more = False
        for choice, pieces in enumerate(asked.answer):
            if choice in told.ended:
                continue
            upto = min(known, len(pieces))
            news = pieces[told.places[choice] : upto]
            if news:
                if told.sent >= told.granted and asked.cancelled is None:
                    continue
                told.sent += 1
                tokens = [ScoredToken(index) for index in range(told.places[choice], upto)]
                told.places[choice] = upto
                delta = Delta(told.name, upto, "".join(news), choice, tokens, told.sent)
                self._tell(delta, told.connection)
            if upto == len(pieces) or asked.cancelled is not None:
                told.ended.add(choice)
                done = len(told.ended) == asked.choices
                reason = "cancelled" if upto < len(pieces) else "stop"
                self._tell(End(told.name, reason, 3, upto, choice, None, done, told.sent), told.connection)
                if done:
                    self.streams.remove(told)
            else:
                more = True
        if more:
            step = self.token_s * self.chance.choice((1, 1, 3))
            self.at(self.now + step, lambda: self._pump(told))


class Reader:
    """A reader of one exchange, who may be slow."""

    def __init__(
        self, world: World, seed: int, *, choices: int = 1, window: int = 4, slow_s: float = 0
    ) -> None:
        self.world = world
        self.seed = seed
        self.texts = [""] * choices
        self.tokens: list[list[int]] = [[] for _ in range(choices)]
        self.finishes: dict[int, Finish] = {}
        self.error: Exception | None = None
        self.most_waiting = 0
        key = f"key-of-request-{seed:08}"
        request = completion("hello", {"n": choices, "window": window}, key=key, seed=seed, now=world.now)
        self.exchange: Exchange = world.core.open(request, world.now)
        world.flush()
        self._slow_s = slow_s
        if slow_s:
            world.at(world.now + slow_s, self._read_slowly)
        else:
            self.exchange.news = self.read_all

    @property
    def is_over(self) -> bool:
        return self.error is not None or len(self.finishes) == len(self.texts)

    def read_all(self) -> None:
        while self._read() is not None:
            pass

    def _read_slowly(self) -> None:
        self.most_waiting = max(self.most_waiting, self.exchange._window.waiting)
        self._read()
        if not self.is_over:
            self.world.at(self.world.now + self._slow_s, self._read_slowly)

    def _read(self) -> Event | None:
        try:
            event = self.exchange.take(self.world.now)
        except Exception as error:
            self.error = error
            return None
        match event:
            case Piece(text=text, choice=choice, tokens=tokens):
                assert choice not in self.finishes, "text behind the end"
                self.texts[choice] += text
                self.tokens[choice] += [token.token for token in tokens]
            case Finish(choice=choice):
                assert choice not in self.finishes, "two ends"
                self.finishes[choice] = event
        return event

    def check_complete(self) -> None:
        """It has all of its answer, once."""
        assert self.error is None, self.error
        for choice, text in enumerate(self.texts):
            pieces = pieces_of(self.seed, choice)
            assert text == "".join(pieces)
            assert self.finishes[choice].reason == "stop"
            assert self.tokens[choice] == list(range(len(pieces))), "tokens were lost or repeated"
