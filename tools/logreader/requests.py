"""The life of a request out of its log lines: where it is, how long each part took, who died on it.

queued ──▶ prefill ──▶ hand-over ──▶ decoding ──▶ ended
  ▲           │            │            │
  └───────────┴────────────┴────────────┘  its worker died, or it was preempted: again, all of it

A request that can be resumed outlives its gateway: the next incarnation adopts it, and it is queued again.
One of several choices has ended when all of them have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tools.logreader.records import iso

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tools.logreader.records import Record

GAP_S = 1.0
"""A pause between two tokens that is worth showing; gateways log shorter ones at the debug level only."""
LATE_S = 2.0
"""How long after the end of a request its workers may still have something to say of it."""
ALWAYS_NEEDED = frozenset({"scheduler", "allocator"})
"""Actors that never name a request and yet keep all of them waiting when they die."""

RESTARTS = frozenset({"process_spawned", "process_exited", "process_killed", "worker_suspected"})
"""What others say of a process; `process` or `peer` names it."""
OWN_LIFE = frozenset({"actor_ready", "actor_stopped"})
"""What an actor says of itself and every reader of a timeline wants to know."""


class Phase(NamedTuple):
    """A part of a life that a line ends, and how long it took."""

    name: str
    seconds: float


@dataclass
class Life:
    """What is known of a request after so many of its lines; `take` is told each of them, in order."""

    request_id: str
    gap_s: float = GAP_S
    began: float = 0.0
    owner: str = ""
    """The incarnation of the gateway; with it the request dies, unless it can be resumed."""
    resumable: bool = False
    choices: int = 1
    stage: str = "queued"
    state: str | None = None
    """How it ended: its finish reason, "lost" or "cut off"; None while it goes on."""
    ended: float | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """Known when it has ended."""
    tokens_seen: int = 0
    """There were so many at least."""
    queued_s: float | None = None
    """All its waiting for a place, also after it was taken back."""
    ttft_s: float | None = None
    total_s: float | None = None
    replacements: int = 0
    adoptions: int = 0
    """Gateways that died on it."""
    gaps: list[tuple[int, float]] = field(default_factory=list)
    """(tokens before it, seconds) of every pause."""
    touched: set[str] = field(default_factory=set)
    """Names of the actors that had to do with it."""
    saw_tokens: bool = False
    """Every token has a line, so that no gap is too short to be seen."""
    _since: float = 0.0
    """When the present stage began."""
    _term: int | None = None
    _last_token: float | None = None
    _ended: int = 0
    """Choices that have."""

    def take(self, record: Record) -> Phase | None:
        """Learn from a line that names the request; the phase that the line ends, if any."""
        if not self.touched:
            self.began = self._since = record.at
        self.touched.add(record.actor)
        fields = record.fields
        match record.event:
            case "request_admitted":
                self.owner = record.who
                self.prompt_tokens = record.whole("prompt_tokens")
                self.resumable = record.fields.get("resumable") is True
                self.choices = record.whole("choices") or 1
            case "request_adopted":
                self.owner = record.who
                self.adoptions += 1
                self._enter("queued", record.at)
            case "request_placed":
                self.touched |= {str(fields.get(role)).partition("@")[0] for role in ("prefill", "decode")}
                self._term = record.whole("term")
                waited = self._enter("prefill", record.at)
                self.queued_s = (self.queued_s or 0.0) + waited
                return Phase("queued", waited)
            case "hand_over_offered" | "decode_started" if self._fills(record):
                return Phase("prefill", self._enter("hand-over", record.at))
            case "request_handed_over":
                return Phase("hand-over", self._enter("decoding", record.at))
            case "first_token_committed" if self.ttft_s is None:
                self.ttft_s = record.seconds(otherwise=record.at - self.began)
                self._last_token = record.at
                self.tokens_seen = 1
                return Phase("first token", record.at - self._since)
            case "stream_resumed" | "token_gap_seen":
                after, seconds = record.whole("after") or 0, record.seconds(otherwise=0.0)
                # However short, a pause that a death or a preemption made is part of the story.
                return self._pause(after, seconds, record.at, shown=record.event == "stream_resumed")
            case "token_committed":
                self.saw_tokens = True
                after = (record.whole("number") or 1) - 1
                before = record.at if self._last_token is None else self._last_token
                return self._pause(after, record.at - before, record.at)
            case "request_taken_back" | "request_preempted":
                self._give_back(record.at)
            case "sequence_lost" if fields.get("reason") != "fault":
                self._give_back(record.at)
            case "request_ended":
                self.completion_tokens = (self.completion_tokens or 0) + (
                    record.whole("completion_tokens") or 0
                )
                self._ended += 1
                if self._ended < self.choices:
                    return None
                self.state = str(fields.get("reason") or "error")
                self.error = None if fields.get("error") is None else str(fields["error"])
                self.ended = record.at
                self.total_s = record.seconds(otherwise=record.at - self.began)
                return Phase("total", self.total_s)
        return None

    def lose(self, at: float) -> None:
        """Its gateway is gone, and its client's connection with it: the end, if nobody can adopt it."""
        if self.resumable:
            self._enter("orphaned", at)
            return
        self.state = "lost"
        self.ended = at
        self.total_s = at - self.began

    def _enter(self, stage: str, at: float) -> float:
        """Begin a stage; how long the last one took."""
        took, self.stage, self._since = at - self._since, stage, at
        return took

    def _fills(self, record: Record) -> bool:
        """Whether a worker speaks of the prefill that is going on, and not of one before it."""
        term = record.whole("term")
        late = term is not None and self._term is not None and term < self._term
        return self.stage == "prefill" and not late

    def _give_back(self, at: float) -> None:
        self.replacements += 1
        self._enter("queued", at)

    def _pause(self, after: int, seconds: float, at: float, shown: bool = False) -> Phase | None:
        """A token came so many seconds after the one before it."""
        self._last_token = at
        self.tokens_seen = after + 1
        if seconds < self.gap_s and not shown:
            return None
        self.gaps.append((after, seconds))
        return Phase("gap", seconds)

    def summary(self) -> dict[str, object]:
        """What is known as JSON shows it."""
        return {
            "request_id": self.request_id,
            "began": iso(self.began),
            "gateway": self.owner,
            "state": self.state or self.stage,
            "error": self.error,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "tokens_seen": self.completion_tokens or self.tokens_seen,
            "queued_s": _rounded(self.queued_s),
            "ttft_s": _rounded(self.ttft_s),
            "total_s": _rounded(self.total_s),
            "replacements": self.replacements,
            "adoptions": self.adoptions,
            "gaps": [{"after": after, "seconds": _rounded(seconds)} for after, seconds in self.gaps],
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def lost_owner(record: Record) -> str | None:
    """The incarnation whose requests this line ends without a word: its process is gone."""
    return str(record.fields.get("process")) if record.event == "process_exited" else None


# ── all requests ──────────────────────────────────────────────────────────────────────────────


def list_lives(records: Iterable[Record], passes: Callable[[Record], bool]) -> Iterator[Life]:
    """The requests of which a line passes, in the order in which they were admitted.

    Each is given out when it and all before it have ended and their late lines are through, so that
    only those are held which ran beside the oldest open one; what never ended comes at the end.
    """
    lives: dict[str, Life] = {}
    wanted: set[str] = set()
    for record in records:
        if (dead := lost_owner(record)) is not None:
            for life in lives.values():
                if life.owner == dead and life.state is None:
                    life.lose(record.at)
        elif record.request_id is not None:
            life = lives.get(record.request_id) or Life(record.request_id)
            # Of what ended long ago only late lines come: they begin no new life.
            if record.request_id in lives or record.event == "request_admitted":
                lives[record.request_id] = life
                life.take(record)
                if passes(record):
                    wanted.add(life.request_id)
        while lives:
            first = next(iter(lives.values()))
            if first.ended is None or record.at <= first.ended + LATE_S:
                break
            del lives[first.request_id]
            if first.request_id in wanted:
                wanted.remove(first.request_id)
                yield first
    yield from (life for life in lives.values() if life.request_id in wanted)


# ── one request ───────────────────────────────────────────────────────────────────────────────


class Moment(NamedTuple):
    """One line of a timeline."""

    record: Record
    phase: Phase | None


def timeline(records: Iterable[Record], life: Life) -> Iterator[Moment]:
    """What happened to a request and to the actors that had to do with it, in order.

    It ends with the records, or a little after the request did.
    """
    for record in records:
        if life.ended is not None and record.at > life.ended + LATE_S:
            return
        if record.concerns(life.request_id):
            phase = None if record.request_id is None else life.take(record)
            if phase is not None or record.event != "token_gap_seen":
                yield Moment(record, phase)
        elif life.touched and life.ended is None and _matters(record, life):
            yield Moment(record, None)
            if life.state is None and lost_owner(record) == life.owner:
                life.lose(record.at)


def _matters(record: Record, life: Life) -> bool:
    """Whether a line of no request tells why this one went as it did."""
    names = life.touched | ALWAYS_NEEDED
    if record.event in RESTARTS:
        subject = str(record.fields.get("process", record.fields.get("peer")))
        return subject.partition("@")[0] in names
    if record.actor not in names or record.request_id is not None:
        return False
    return record.event in OWN_LIFE or record.severity > 20
