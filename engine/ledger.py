"""The ledger of a gateway: its open requests, their token logs and their terms.

The gateway owns the term of each of its requests. It goes up by one at every placement:

    WAITING t ── Place ──▶ PREFILLING t+1 ── TermAccepted ──▶ DECODING t+2
       ▲                        │ lost: t+3                       │ lost: t+3
       └────────────────────────┴─────────────────────────────────┘

(t+2 is granted together with t+1, so losing either skips to t+3.) Only tokens of the current term
are committed, and only the one whose position is the length of the log. Whatever a worker says
about a term that is not current is answered with a Cancel of that term: a sequence that nobody
wants any more, whichever message about it was lost or late, is dropped the first time it speaks.

Losing a worker loses no token: the request waits again with its whole log, and since a sampled
token is a pure function of the log, the next worker goes on with the same bits.

What was found of a prompt instead of being computed counts once, when it is taken up for the first time: a
choice that is placed again finds the pages that it has filled itself, and that is no hit of its client's.

Losing the gateway loses none either. A request with a *keepsake* (what its door needs to go on) is
taken over by the next incarnation as if its worker had been lost: its logs are in the arena. Its
slots stay when it has ended, until `release` says that its client has everything:

    slots = free + open + kept
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, assert_never

import msgspec

from engine.chain import token_bytes
from engine.core import Send, Statistics
from engine.ids import SequenceKey, pack_request
from engine.layout import MASK32
from engine.lifecycle import REQUEST, RequestEvent, RequestState, advance
from engine.messages import (
    Cached,
    Cancel,
    Drain,
    PinFact,
    Place,
    Preempt,
    RequestEnded,
    RequestFact,
    Roster,
    SequenceLost,
    SequenceSpec,
    Stage,
    StartPrefill,
    StepTokens,
    Stop,
    TermAccepted,
)
from engine.sampling import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.ids import Incarnation
    from engine.layout import TokenLogArena
    from engine.messages import Finish, Member, ToGateway, TokenRow

MAX_FAULTS = 3
"""Workers in a row that may die on one request before it is given up: it may be what kills them."""

MAX_REFUSALS = 100
"""Placements in a row that workers may refuse, as they do while the roster is still spreading."""

STAGES: dict[RequestState, Stage] = {
    RequestState.WAITING: "waiting",
    RequestState.PREFILLING: "prefilling",
    RequestState.DECODING: "decoding",
}


class AdmissionRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The immutable parameters of a choice, as they lie in the arena beside its log."""

    limit: int
    stop_tokens: tuple[int, ...]
    sampling: SamplingParams
    arrival: float
    min_tokens: int = 0
    logprobs: int | None = None
    client: str = ""
    priority: int = 0
    choices: int = 1
    keepsake: bytes = b""
    """What the door needs to go on with it; without one a request dies with its gateway."""
    cache_salt: str = ""
    """Pages are found again by requests of equal salt only."""


class Committed(NamedTuple):
    """A token became part of the log; to be delivered."""

    key: SequenceKey
    token: int
    logprobs: TokenLogprobs | None = None


class Closed(NamedTuple):
    """The one terminal event of a choice."""

    key: SequenceKey
    reason: Finish | None
    """None when it failed."""
    error: str | None = None


class LedgerFull(Exception):
    """No log slot is free."""


Effect = Send | Committed | Closed


@dataclass(slots=True)
class Entry:
    """One open choice."""

    key: SequenceKey
    slot: int
    record: AdmissionRecord
    log: list[int]
    prompt_length: int
    state: RequestState = RequestState.WAITING
    term: int = 0
    prefill: Incarnation | None = None
    decode: Incarnation | None = None
    faults: int = 0
    refusals: int = 0
    holders: set[Incarnation] = field(default_factory=set)
    """Workers that may hold a sequence of the current term."""
    excluding: set[Incarnation] = field(default_factory=set)
    """Workers that it was placed with and that this gateway did not know."""
    avoids: frozenset[str] = frozenset()
    """Names of workers where it would be of no use."""
    starts: int = 0
    """Times that a worker may have begun with it."""
    cached: Cached | None = None
    """What of its prompt was found; None before the first worker has said so, or when that one was lost."""

    @property
    def complete(self) -> bool:
        """Its last token ended it, as a worker would say."""
        last = self.log[-1] if len(self.log) > self.prompt_length else None
        return last in self.record.stop_tokens or len(self.log) >= self.record.limit


class Ledger:
    """All open requests of one incarnation of a gateway."""

    def __init__(
        self,
        me: Incarnation,
        ordinal: int,
        arena: TokenLogArena,
        slots: range,
        *,
        tells_tokens: bool = False,
    ) -> None:
        """`tells_tokens`: the scheduler hears the logs of those that wait, to place them by who has pages."""
        self.me = me
        self._tells_tokens = tells_tokens
        self.ordinal = ordinal
        self.arena = arena
        self._free_slots = list(reversed(slots))
        self._slots = len(slots)
        self._entries: dict[SequenceKey, Entry] = {}
        self._kept: dict[SequenceKey, int] = {}
        self._alive: set[Incarnation] = set()
        self._counter = 0
        self.orphans = 0
        self.committed = 0
        self.stale = 0
        self.replacements = 0
        self.adopted: dict[int, list[Entry]] = {}
        """Requests of an earlier incarnation that go on, and their choices in order; to be taken once."""
        self._adopt(slots)
        self.adoptions = len(self.adopted)

    # ── from the doors ────────────────────────────────────────────────────────────────────────

    def open(
        self,
        prompt: tuple[int, ...],
        limit: int,
        stop_tokens: tuple[int, ...],
        sampling: SamplingParams,
        now: float,
        *,
        n: int = 1,
        min_tokens: int = 0,
        logprobs: int | None = None,
        client: str = "",
        priority: int = 0,
        keepsake: bytes = b"",
        cache_salt: str = "",
        avoids: frozenset[str] = frozenset(),
    ) -> tuple[tuple[SequenceKey, ...], list[Effect]]:
        """Open the logs of a new request's choices, from the index that `sampling` has on, and submit them.

        `avoids`: names of workers where it would be of no use. LedgerFull when there are not enough slots;
        ValueError when it does not fit one.
        """
        if not 0 < len(prompt) < limit <= self.arena.capacity:
            raise ValueError(f"{len(prompt)} prompt tokens, {limit} in all, room for {self.arena.capacity}")
        if n > len(self._free_slots):
            raise LedgerFull
        request = pack_request(self.ordinal, self.me.epoch, self._counter + 1)
        opened = []
        for choice in range(sampling.choice, sampling.choice + n):
            of_choice = msgspec.structs.replace(sampling, choice=choice)
            record = AdmissionRecord(
                limit,
                stop_tokens,
                of_choice,
                now,
                min_tokens,
                logprobs,
                client,
                priority,
                n,
                keepsake,
                cache_salt,
            )
            slot = self._free_slots[-1]
            self.arena.open(slot, request, choice, prompt, msgspec.msgpack.encode(record))
            self._free_slots.pop()
            key = SequenceKey(request, choice)
            entry = Entry(key, slot, record, list(prompt), len(prompt), avoids=avoids)
            self._entries[entry.key] = entry
            opened.append(entry)
        self._counter += 1
        return tuple(entry.key for entry in opened), [self._fact(entry) for entry in opened]

    def release(self, keys: Iterable[SequenceKey]) -> None:
        """Let go of the logs of choices that have ended: their client has everything, or nobody wants it."""
        for key in keys:
            slot = self._kept.pop(key, None)
            if slot is not None:
                self._free(slot)

    def _adopt(self, slots: range) -> None:
        """Take over what the last incarnation left in the arena and somebody may come back for."""
        found: dict[int, list[Entry]] = {}
        for slot in slots:
            record = self.arena.read(slot)
            if record is None:
                continue
            admitted = msgspec.msgpack.decode(record.parameters, type=AdmissionRecord)
            key = SequenceKey(record.request, record.choice)
            # Whoever held it, in the term that the arena has or in the next one, holds it no more.
            entry = Entry(
                key, slot, admitted, list(record.tokens), record.prompt_length, term=record.term + 2, starts=1
            )
            found.setdefault(record.request, []).append(entry)
        for request, entries in found.items():
            entries.sort(key=lambda entry: entry.key)
            whole = len(entries) == entries[0].record.choices
            if not (entries[0].record.keepsake and whole):
                # The client is gone with its connection, or never heard that it was admitted.
                for entry in entries:
                    self.arena.close(entry.slot)
                    self.orphans += 1
                continue
            self.adopted[request] = entries
            for entry in entries:
                self.arena.set_term(entry.slot, entry.term)
                if entry.complete:
                    entry.state = RequestState.ENDED
                    self._kept[entry.key] = entry.slot
                else:
                    self._entries[entry.key] = entry
        taken = {entry.slot for entries in self.adopted.values() for entry in entries}
        self._free_slots = [slot for slot in self._free_slots if slot not in taken]

    def cancel(self, key: SequenceKey) -> list[Effect]:
        """The client does not want it any more, also when it has ended already."""
        entry = self._entries.get(key)
        effects = [] if entry is None else self._end(entry, RequestEvent.CANCELLED)
        self.release([key])
        return effects

    def finish(self, key: SequenceKey) -> list[Effect]:
        """The text is complete (a stop string was hit), though the worker would go on."""
        entry = self._entries.get(key)
        if entry is None:
            return []
        # Taken back since its last token, it is not computed any more: its end is the client's.
        decoding = entry.state is RequestState.DECODING
        return self._end(entry, RequestEvent.FINISHED if decoding else RequestEvent.CANCELLED)

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> list[Effect]:
        """Take requests back from the dead, and restate them all to a new scheduler."""
        self._alive |= {member.incarnation for member in up}
        self._alive.difference_update(down)
        effects: list[Effect] = []
        for entry in list(self._entries.values()):
            if not entry.holders.isdisjoint(down):
                entry.faults += 1
                effects += self._take_back(entry, f"{entry.faults} workers died while they ran it")
        news = any(member.kind == "scheduler" for member in up)
        for entry in self._entries.values():
            known = entry.excluding & self._alive
            entry.excluding -= known
            if news or known or any(member.name in entry.avoids for member in up):
                effects.append(self._fact(entry))
        return effects

    def handle(self, source: Incarnation, message: ToGateway, now: float) -> list[Effect]:
        """Take one message; tokens and ends come out in the order in which they are to be delivered."""
        match message:
            case Place():
                return self._placed(message)
            case TermAccepted():
                return self._accepted(source, message)
            case StepTokens():
                effects: list[Effect] = []
                for row in message.rows:
                    effects += self._token(source, row)
                return effects
            case Preempt():
                entry = self._entries.get(message.key)
                if entry is None or entry.state is RequestState.WAITING or entry.term < message.term:
                    return []
                if entry.term > message.term + 1:
                    return []
                return self._take_back(entry, None)
            case SequenceLost():
                return self._lost(message)
            case Roster() | Drain() | Stop() | PinFact():
                return []
            case _:
                assert_never(message)

    def _placed(self, message: Place) -> list[Effect]:
        entry = self._entries.get(message.key)
        if entry is None or entry.state is not RequestState.WAITING or entry.term != message.term:
            return []
        entry.state = advance(REQUEST, entry.state, RequestEvent.PLACED)
        self._set_term(entry, entry.term + 1)
        entry.prefill, entry.decode = message.prefill, message.decode
        entry.holders = {message.prefill, message.decode}
        if wrong := {who for who in entry.holders if who not in self._alive or who.name in entry.avoids}:
            # Dead, or too new for this gateway's roster: without a word the scheduler would say it again.
            entry.excluding |= wrong
            return self._take_back(entry, None)
        record = entry.record
        spec = SequenceSpec(
            entry.key,
            self.me,
            record.arrival,
            tuple(entry.log),
            record.limit,
            record.stop_tokens,
            record.sampling,
            entry.prompt_length,
            record.min_tokens,
            record.logprobs,
            record.client,
            record.priority,
            record.cache_salt,
        )
        entry.starts += 1
        start = StartPrefill(entry.term, spec, message.decode, message.elsewhere, message.elsewhere_pages)
        return [Send(message.prefill, start)]

    def _accepted(self, source: Incarnation, message: TermAccepted) -> list[Effect]:
        entry = self._entries.get(message.key)
        if entry is not None and entry.state is RequestState.DECODING and message.term == entry.term:
            return []
        if (
            entry is None
            or entry.state is not RequestState.PREFILLING
            or message.term != entry.term + 1
            or source != entry.decode
        ):
            return self._disown(source, message.key, message.term)
        entry.state = advance(REQUEST, entry.state, RequestEvent.HANDED_OVER)
        self._set_term(entry, message.term)
        entry.holders = {source}
        entry.refusals = 0
        if entry.starts == 1:
            entry.cached = _within(message.cached, entry.prompt_length)
        return [self._fact(entry)]

    def _token(self, source: Incarnation, row: TokenRow) -> list[Effect]:
        entry = self._entries.get(row.key)
        if entry is None or entry.state is not RequestState.DECODING or row.term != entry.term:
            return self._disown(source, row.key, row.term)
        next_position = len(entry.log)
        in_order = row.position == next_position < entry.record.limit
        if not in_order or not 0 <= row.token <= MASK32:
            entry.faults += 1
            said = f"a worker sent token {row.token} for position {row.position}"
            return self._take_back(entry, f"{said}; {next_position} of {entry.record.limit} are there")
        entry.log.append(row.token)
        self.arena.append(entry.slot, row.token)
        self.committed += 1
        entry.faults = 0
        effects: list[Effect] = [Committed(entry.key, row.token, row.logprobs)]
        if row.finish is not None:
            entry.holders = set()
            effects += self._end(entry, RequestEvent.FINISHED)
            effects.append(Closed(entry.key, row.finish))
        return effects

    def _lost(self, message: SequenceLost) -> list[Effect]:
        entry = self._entries.get(message.key)
        if entry is None or message.term != entry.term or entry.state is RequestState.WAITING:
            return []
        if message.reason == "fault":
            return self._fail(entry, message.detail)
        entry.refusals += 1
        return self._take_back(entry, message.detail)

    # ── terms ─────────────────────────────────────────────────────────────────────────────────

    def _disown(self, source: Incarnation, key: SequenceKey, term: int) -> list[Effect]:
        """Answer for a term that is not current: whoever holds it may drop it."""
        self.stale += 1
        return [Send(source, Cancel(key, term))]

    def _take_back(self, entry: Entry, complaint: str | None) -> list[Effect]:
        """Let a placed request wait again, with a term that nobody holds, or give it up."""
        if complaint is not None and (entry.faults >= MAX_FAULTS or entry.refusals >= MAX_REFUSALS):
            return self._fail(entry, complaint)
        effects = self._cancels(entry)
        granted = 2 if entry.state is RequestState.PREFILLING else 1
        entry.state = advance(REQUEST, entry.state, RequestEvent.LOST)
        self._set_term(entry, entry.term + granted)
        entry.prefill = entry.decode = None
        entry.holders = set()
        self.replacements += 1
        return [*effects, self._fact(entry)]

    def _fail(self, entry: Entry, error: str) -> list[Effect]:
        return [*self._end(entry, RequestEvent.FAILED), Closed(entry.key, None, error)]

    def _end(self, entry: Entry, event: RequestEvent) -> list[Effect]:
        """Close the log, or keep it until its client has everything; whoever may hold a sequence drops it."""
        effects = self._cancels(entry)
        entry.state = advance(REQUEST, entry.state, event)
        del self._entries[entry.key]
        if entry.record.keepsake:
            self._kept[entry.key] = entry.slot
        else:
            self._free(entry.slot)
        return [*effects, Send("scheduler", RequestEnded(entry.key, entry.term, len(entry.log)))]

    def _free(self, slot: int) -> None:
        self.arena.close(slot)
        self._free_slots.append(slot)

    def _cancels(self, entry: Entry) -> list[Effect]:
        # The term that was granted ahead to the decode worker is cancelled too.
        term = entry.term + (entry.state is RequestState.PREFILLING)
        return [Send(worker, Cancel(entry.key, term)) for worker in sorted(entry.holders)]

    def _set_term(self, entry: Entry, term: int) -> None:
        entry.term = term
        self.arena.set_term(entry.slot, term)

    def _fact(self, entry: Entry) -> Send:
        tells = self._tells_tokens and entry.state is RequestState.WAITING
        excluding = entry.excluding | {who for who in self._alive if who.name in entry.avoids}
        return Send(
            "scheduler",
            RequestFact(
                entry.key,
                entry.term,
                STAGES[entry.state],
                entry.record.arrival,
                len(entry.log),
                entry.record.limit,
                entry.prefill,
                entry.decode,
                tuple(sorted(excluding)),
                entry.record.client,
                entry.record.priority,
                token_bytes(entry.log) if tells else b"",
                entry.record.cache_salt,
            ),
        )

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    @property
    def open_requests(self) -> int:
        """Choices that have not ended."""
        return len(self._entries)

    def entry(self, key: SequenceKey) -> Entry | None:
        """An open choice, or None when it is not open."""
        return self._entries.get(key)

    @property
    def slots_free(self) -> int:
        """Logs that could be opened now."""
        return len(self._free_slots)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The open choices."""
        return tuple(self._entries.values())

    def check(self) -> None:
        slots = len(self._entries) + len(self._kept) + len(self._free_slots)
        assert slots == self._slots, "a log slot leaked"
        assert not self._entries.keys() & self._kept.keys(), "an open request is kept as one that has ended"
        for key, entry in self._entries.items():
            record = self.arena.read(entry.slot)
            assert record is not None
            assert (record.request, record.choice) == (key.request, key.choice)
            assert record.term == entry.term
            assert list(record.tokens) == entry.log
            assert entry.prompt_length <= len(entry.log) <= entry.record.limit
            assert entry.state is not RequestState.ENDED
            assert entry.cached is None or 0 <= entry.cached.tokens <= entry.prompt_length
            assert (entry.state is RequestState.WAITING) == (not entry.holders)

    def statistics(self) -> Statistics:
        states = [entry.state for entry in self._entries.values()]
        return {
            "requests": len(states),
            "requests_waiting": states.count(RequestState.WAITING),
            "requests_prefilling": states.count(RequestState.PREFILLING),
            "requests_decoding": states.count(RequestState.DECODING),
            "log_slots_free": len(self._free_slots),
            "log_slots_kept": len(self._kept),
            "tokens_committed": self.committed,
            "stale_terms": self.stale,
            "replacements": self.replacements,
            "requests_orphaned": self.orphans,
            "requests_adopted": self.adoptions,
        }


def _within(cached: Cached, tokens: int) -> Cached:
    """What a worker says that it found, of so many tokens: nobody is told of more than there are."""
    if cached.tokens <= tokens and min(cached.memory, cached.worker, cached.host, cached.file) >= 0:
        return cached
    counts = []
    for count in (cached.memory, cached.worker, cached.host, cached.file):
        counts.append(max(0, min(count, tokens)))
        tokens -= counts[-1]
    return Cached(*counts)
