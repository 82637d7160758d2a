"""One request and its answer, over as many connections and gateways as it takes. Pure.

    waiting ──asked──▶ asked ──opened──▶ open ──over──▶ over
       ▲                 │ ▲               │ │
       └──────lost───────┘ └────asked──────┘ │      asked again: a gap, a silence, no answer
       └───────────────lost──────────────────┘      the connection is gone, or the gateway busy

It is asked by `resume` while the gateway knows the request and every choice knows its place, else by
`create`, whose key finds the request again, or whose seed makes the same text anew. Each time it gets a
new stream name, so that what still comes of an earlier attempt is nobody's.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Literal, assert_never

import msgspec

from engine.client.errors import (
    ClientError,
    ConnectionLost,
    DeadlineExceeded,
    Diverged,
    GenerationFailed,
    ProtocolViolated,
    Refused,
)
from engine.client.events import Finish, Piece
from engine.client.progress import Progress
from engine.client.window import Window
from engine.stream_protocol import Cancel, Create, Credit, Delta, End, Failed, Opened, Resume

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.client.events import Event
    from engine.client.patience import Patience
    from engine.client.request import Request
    from engine.stream_protocol import StreamError, ToClient, ToGateway

State = Literal["waiting", "asked", "open", "over"]
Move = Literal["asked", "opened", "lost", "over"]

MOVES: dict[tuple[State, Move], State] = {
    ("waiting", "asked"): "asked",
    ("asked", "asked"): "asked",
    ("open", "asked"): "asked",
    ("asked", "opened"): "open",
    ("waiting", "lost"): "waiting",
    ("asked", "lost"): "waiting",
    ("open", "lost"): "waiting",
    ("waiting", "over"): "over",
    ("asked", "over"): "over",
    ("open", "over"): "over",
}

NOT_KEPT = "not_kept"
DIVERGED = "diverged"
SUPERSEDED = "superseded"
BUSY = (429, 503)
MAX_CHOICES = 64


class Exchange:
    """One request; owned by a ClientCore, read by one reader."""

    def __init__(
        self,
        number: int,
        request: Request,
        patience: Patience,
        say: Callable[[ToGateway], None],
        now: float,
    ) -> None:
        self.request = request
        self.state: State = "waiting"
        self.request_id: str | None = None
        """The gateway's name of it, once it was accepted; another one when it had to be asked anew."""
        self.model: str | None = None
        self.error: ClientError | None = None
        """What its reader is told instead of more events."""
        self.news: Callable[[], None] = _ignore
        """Called when there is something new for the reader."""
        self._number = number
        self._patience = patience
        self._say = say
        self._attempt = 0
        self._choices: list[Progress] = []
        self._window = Window(request.window)
        self._is_kept = False
        """A gateway has it, as far as we know."""
        self._resuming = False
        self._recreations = 0
        self._takeovers = 0
        self._cancelling = False
        self._wanted = True
        self._unanswered: float | None = now
        """Since when no gateway has it."""
        self._heard = now
        self._said = now
        self._not_before = -inf

    @property
    def name(self) -> str:
        """Of the stream of this attempt."""
        return f"{self._number}.{self._attempt}"

    @property
    def choices(self) -> int:
        """How many there are; 0 before it was accepted."""
        return len(self._choices)

    @property
    def is_complete(self) -> bool:
        """Nothing more will come for the reader than what `take` has."""
        return not self._wanted or self.error is not None or self.state == "over"

    # ── the reader ────────────────────────────────────────────────────────────────────────────

    @property
    def has_news(self) -> bool:
        """`take` has something to give, to raise, or never will have again."""
        return bool(self._window) or self.is_complete

    def take(self, now: float, *, quietly: bool = False) -> Event | None:
        """The next event, or None when there is none now; raises what ended the stream early.

        `quietly`: that can wait for the next time.
        """
        if self._window:
            event = self._window.take()
            self._grant(now)
            return event
        if self.error is not None and not quietly:
            raise self.error
        return None

    def cancel(self, now: float) -> None:
        """Give the request up everywhere: its choices end with the reason "cancelled"."""
        if self._cancelling or self.state == "over":
            return
        self._cancelling = True
        if self._attempt == 0:
            # Nobody has heard of it.
            self._end_cancelled()
        elif self.state != "waiting":
            self._say(Cancel(self.name))
            self._said = now

    def abandon(self, now: float, error: ClientError | None = None) -> None:
        """Nobody reads it any more, or not further than `error`: cancel it."""
        self.cancel(now)
        if self._wanted:
            self._wanted = False
            self._window.clear()
            self.error = self.error or error
            self.news()
            self._grant(now)

    # ── the connection ────────────────────────────────────────────────────────────────────────

    def ask(self, now: float) -> None:
        """Say it on this connection, for the first time or again."""
        self._move("asked")
        self._attempt += 1
        window = self._window.restart()
        self._said = self._heard = now
        if self._unanswered is None:
            self._unanswered = now
        self._resuming = self._is_kept and not self._is_behind()
        if self._resuming:
            assert self.request_id is not None
            positions = [choice.position() for choice in self._choices]
            self._say(Resume(self.name, self.request_id, positions, window))
        else:
            for choice in self._choices:
                choice.rewind()
            request = self.request
            self._say(Create(self.name, request.endpoint, request.body, request.key, window))
        if self._cancelling:
            self._say(Cancel(self.name))

    def lost(self, now: float) -> None:
        """The connection is gone."""
        if self.state == "over":
            return
        self._move("lost")
        self._not_before = -inf
        if self._unanswered is None:
            self._unanswered = now

    def handle(self, message: ToClient, now: float) -> None:
        """Take a message to the stream of this attempt."""
        self._heard = now
        try:
            match message:
                case Opened():
                    self._opened(message)
                case Delta():
                    self._delta(message, now)
                case End():
                    self._end(message, now)
                case Failed():
                    self._failed(message, now)
                case _:
                    assert_never(message)  # type: ignore[arg-type]  # a Pong has no stream
        except (Diverged, ProtocolViolated) as error:
            if self.state != "over":
                self._say(Cancel(self.name))
            self._fail(error)

    def turn(self, now: float, connected: bool) -> None:
        """Do what the time has come for."""
        if self.state == "over":
            return
        deadline = self.request.deadline
        if deadline is not None and now >= deadline and self._wanted:
            self.abandon(now, DeadlineExceeded("the answer was not complete in time"))
        elif now >= self._lost_at():
            # A gateway that says nothing may have it nevertheless.
            if self.state == "asked":
                self._say(Cancel(self.name))
            self._fail(ConnectionLost(self._what_was_lost()))
        elif connected:
            self._turn_connected(now)

    def next_turn(self, connected: bool) -> float:
        """When `turn` has something to do, if nothing happens before."""
        if self.state == "over":
            return inf
        deadline = self.request.deadline
        due = self._lost_at()
        if deadline is not None and self._wanted:
            due = min(due, deadline)
        if connected:
            due = min(due, self._ask_at(), self._repeat_at())
        return due

    def check(self) -> None:
        """Assert what always holds."""
        self._window.check()
        assert self.state != "open" or self._choices, "open without choices"

    # ── inside ────────────────────────────────────────────────────────────────────────────────

    def _turn_connected(self, now: float) -> None:
        if now >= self._ask_at():
            self.ask(now)
        elif now >= self._repeat_at():
            # Either may have been lost, and both may be said twice.
            self._said = now
            if self._cancelling:
                self._say(Cancel(self.name))
            else:
                self._say(Credit(self.name, self._window.granted))

    def _lost_at(self) -> float:
        return inf if self._unanswered is None else self._unanswered + self._patience.lost_s

    def _ask_at(self) -> float:
        match self.state:
            case "waiting":
                return self._not_before
            case "asked":
                return self._heard + self._patience.answer_s
            case "open":
                # Without a credit the gateway has reason to be silent.
                silent = self._window.received < self._window.granted or self._cancelling
                return self._heard + self._patience.stall_s if silent else inf
            case "over":
                return inf
            case _:
                assert_never(self.state)

    def _repeat_at(self) -> float:
        if self.state != "open":
            return inf
        return max(self._heard, self._said) + self._patience.ping_s

    def _opened(self, message: Opened) -> None:
        if self.state != "asked":
            return
        if not 1 <= message.choices <= MAX_CHOICES or self.choices not in (0, message.choices):
            raise ProtocolViolated(f"the gateway opened the request with {message.choices} choices")
        self._move("opened")
        self._unanswered = None
        self._is_kept = True
        self.request_id = message.request
        self.model = message.model
        if not self._choices:
            self._choices = [Progress() for _ in range(message.choices)]
            self.news()

    def _delta(self, message: Delta, now: float) -> None:
        if self.state != "open":
            return
        window = self._window
        if message.number and message.number <= window.received:
            return
        window.received += 1
        if message.number > window.received:
            self.ask(now)
            return
        progress = self._choice(message.choice)
        tokens = () if message.tokens is msgspec.UNSET else message.tokens
        text, news = progress.push(message.text, tokens, message.sequence)
        if (text or news) and self._wanted:
            window.put(Piece(text, message.choice, news))
            self.news()
        else:
            self._grant(now)

    def _end(self, message: End, now: float) -> None:
        if self.state == "asked" and self._cancelling and message.done:
            # It was cancelled before it was accepted: there is one end for all choices.
            self._end_cancelled()
            return
        if self.state != "open":
            return
        if message.number > self._window.received:
            self.ask(now)
            return
        progress = self._choice(message.choice)
        if message.reason == "error":
            if not message.done:
                self._say(Cancel(self.name))
            self._fail(GenerationFailed(message.error or "the request failed inside the server"))
            return
        finish = Finish(
            message.reason,
            message.prompt_tokens,
            message.completion_tokens,
            message.choice,
            message.cached_tokens,
            message.cache,
        )
        if progress.end(finish) and self._wanted:
            self._window.put(finish)
            self.news()
        if all(choice.finish is not None for choice in self._choices) and not self._is_behind():
            self._over()
        elif message.done:
            self.ask(now)

    def _end_cancelled(self) -> None:
        """Whatever its choices still had to say, they have ended."""
        for index in range(self.choices or 1):
            if self._wanted and not (self._choices and self._choices[index].finish):
                self._window.put(Finish("cancelled", 0, 0, index))
        self._over()

    def _failed(self, message: Failed, now: float) -> None:
        error = message.error
        if self._cancelling:
            # There is nothing left to cancel.
            self._end_cancelled()
        elif error.code == SUPERSEDED and self._takeovers < self._patience.takeovers:
            self._takeovers += 1
            self._put_off(now, error)
        elif self.state != "asked":
            self._fail(GenerationFailed(error.message))
        elif not self._choices:
            self._fail(Refused(error))
        elif self._resuming and error.code == DIVERGED:
            self._fail(Diverged(error.message))
        elif self._resuming and error.code == NOT_KEPT:
            if self._recreations >= self._patience.recreations:
                times = "once" if self._recreations == 1 else f"{self._recreations} times"
                self._fail(ConnectionLost(f"the request was asked anew {times} and forgotten each time"))
                return
            self._recreations += 1
            self._is_kept = False
            self.ask(now)
        elif error.status in BUSY:
            self._put_off(now, error)
        else:
            self._fail(Refused(error))

    def _put_off(self, now: float, error: StreamError) -> None:
        """Ask again a little later."""
        self.lost(now)
        self._not_before = now + max(error.retry_after_s or 0.0, self._patience.retry_s)

    def _is_behind(self) -> bool:
        return any(choice.behind for choice in self._choices)

    def _choice(self, index: int) -> Progress:
        if not 0 <= index < len(self._choices):
            raise ProtocolViolated(f"the gateway told of choice {index} of {len(self._choices)}")
        return self._choices[index]

    def _grant(self, now: float) -> None:
        """Let the gateway go on when half of the window is free."""
        if self.state == "open" and self._window.grant():
            self._say(Credit(self.name, self._window.granted))
            self._said = now

    def _what_was_lost(self) -> str:
        seconds = f"{self._patience.lost_s:g} s"
        if self._choices:
            return f"no gateway took the request up again within {seconds}"
        return f"no gateway took the request of {len(bytes(self.request.body))} bytes within {seconds}"

    def _fail(self, error: ClientError) -> None:
        if self._wanted:
            self.error = self.error or error
        self._over()

    def _over(self) -> None:
        self._move("over")
        self.news()

    def _move(self, move: Move) -> None:
        self.state = MOVES[self.state, move]


def _ignore() -> None:
    """Nobody listens yet."""
