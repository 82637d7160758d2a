"""The ledger: one owner of each request's term, one log that only grows, one end."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core import Send
from engine.ids import Incarnation, SequenceKey, owner_of
from engine.layout import TokenLogArena
from engine.ledger import (
    MAX_FAULTS,
    MAX_REFUSALS,
    AdmissionRecord,
    Closed,
    Committed,
    Effect,
    Ledger,
    LedgerFull,
)
from engine.lifecycle import RequestState
from engine.messages import (
    Cached,
    Cancel,
    Member,
    Place,
    Preempt,
    RequestEnded,
    RequestFact,
    SequenceLost,
    StartPrefill,
    StepTokens,
    TermAccepted,
    TokenRow,
)
from engine.sampling import SamplingParams

ME = Incarnation("front", 3)
ORDINAL = 4
SLOTS = range(2, 5)
CAPACITY = 32
SCHEDULER = Incarnation("scheduler", 1)
PREFILL, DECODE, BOTH = Incarnation("p", 1), Incarnation("d", 1), Incarnation("b", 1)
PROMPT = (5, 6, 7)


def member(incarnation: Incarnation, kind: str = "worker") -> Member:
    return Member(incarnation.name, kind, 0, incarnation.epoch, "", True)  # type: ignore[arg-type]


class Desk:
    """A ledger with everybody alive."""

    def __init__(self, arena: TokenLogArena | None = None) -> None:
        size = 6 * TokenLogArena.slot_bytes(CAPACITY)
        self.arena = arena or TokenLogArena(memoryview(bytearray(size)), 6, CAPACITY)
        self.core = Ledger(ME, ORDINAL, self.arena, SLOTS)
        up = [member(SCHEDULER, "scheduler"), *map(member, (PREFILL, DECODE, BOTH))]
        assert self.core.peers(up, (), 0.0) == []

    def open(self, limit: int = 20, prompt: tuple[int, ...] = PROMPT) -> SequenceKey:
        (key,), effects = self.core.open(prompt, limit, (1,), SamplingParams(seed=9), 1.5)
        self.core.check()
        assert [type(send.message) for send in effects if isinstance(send, Send)] == [RequestFact]
        return key

    def tell(self, source: Incarnation, message: object) -> list[Effect]:
        effects = self.core.handle(source, message, 0.0)  # type: ignore[arg-type]
        self.core.check()
        return effects

    def place(
        self, key: SequenceKey, prefill: Incarnation = PREFILL, decode: Incarnation = DECODE
    ) -> list[Effect]:
        return self.tell(SCHEDULER, Place(key, self.term(key), prefill, decode))

    def decoding(self, limit: int = 20) -> SequenceKey:
        key = self.open(limit)
        self.place(key)
        self.tell(DECODE, TermAccepted(key, self.term(key) + 1))
        return key

    def token(
        self,
        key: SequenceKey,
        token: int,
        finish: str | None = None,
        *,
        term: int | None = None,
        position: int | None = None,
    ) -> list[Effect]:
        term = self.term(key) if term is None else term
        position = len(self.log(key)) if position is None else position
        return self.tell(DECODE, StepTokens((TokenRow(key, term, position, token, finish),)))  # type: ignore[arg-type]

    def entry(self, key: SequenceKey):  # type: ignore[no-untyped-def]
        return next(entry for entry in self.core.entries if entry.key == key)

    def term(self, key: SequenceKey) -> int:
        return self.entry(key).term  # type: ignore[no-any-return]

    def log(self, key: SequenceKey) -> list[int]:
        return self.entry(key).log  # type: ignore[no-any-return]

    def is_open(self, key: SequenceKey) -> bool:
        return key in {entry.key for entry in self.core.entries}


def messages(effects: list[Effect], kind: type) -> list[tuple[str, object]]:
    return [(str(e.to), e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def fact(effects: list[Effect]) -> RequestFact:
    [(to, message)] = messages(effects, RequestFact)
    assert to == "scheduler"
    assert isinstance(message, RequestFact)
    return message


# ── a life ────────────────────────────────────────────────────────────────────────────────────


def test_a_request_is_told_to_the_scheduler_and_lies_in_the_arena() -> None:
    desk = Desk()
    (key,), effects = desk.core.open(PROMPT, 20, (1, 2), SamplingParams(seed=9, choice=2), 1.5)
    assert owner_of(key.request) == (ORDINAL, ME.epoch)
    assert key.choice == 2
    assert fact(effects) == RequestFact(key, 0, "waiting", 1.5, 3, 20)
    [record] = [record for slot in SLOTS if (record := desk.arena.read(slot))]
    assert (record.request, record.choice, record.tokens) == (key.request, 2, PROMPT)
    admitted = msgspec.msgpack.decode(record.parameters, type=AdmissionRecord)
    assert admitted == AdmissionRecord(20, (1, 2), SamplingParams(seed=9, choice=2), 1.5)


def test_what_was_generated_begins_where_the_prompt_ended_also_when_placed_again() -> None:
    desk = Desk()
    (key,), _ = desk.core.open(PROMPT, 20, (1,), SamplingParams(seed=9), 1.5, min_tokens=5)
    [(_, start)] = messages(desk.place(key), StartPrefill)
    assert isinstance(start, StartPrefill)
    assert (start.spec.prompt_length, start.spec.min_tokens) == (len(PROMPT), 5)
    desk.tell(DECODE, TermAccepted(key, desk.term(key) + 1))
    desk.token(key, 7)
    desk.core.peers((), (DECODE,), 0.0)
    desk.core.peers((member(DECODE),), (), 0.0)
    [(_, again)] = messages(desk.place(key), StartPrefill)
    assert isinstance(again, StartPrefill)
    assert again.spec.log == (*PROMPT, 7)
    assert (again.spec.prompt_length, again.spec.min_tokens) == (len(PROMPT), 5)


def test_the_largest_request_that_a_door_lets_in_fits_its_slot() -> None:
    desk = Desk()
    biases = tuple((2**31 - 1 - n, 0.1 + n) for n in range(300))
    sampling = SamplingParams(0.1, 2**31 - 1, 0.1, 0.1, 2**64 - 1, 2**32 - 1, 0.1, 0.1, 1.1, biases)
    stops = tuple(range(2**31 - 65, 2**31 - 1))
    (key,), _ = desk.core.open(PROMPT, 20, (*range(10), *stops), sampling, 1e9 / 3, min_tokens=2**31 - 1)
    assert desk.is_open(key)


def test_the_terms_of_a_life() -> None:
    desk = Desk()
    key = desk.open()
    [(to, start)] = messages(desk.place(key), StartPrefill)
    assert to == "p@1"
    assert isinstance(start, StartPrefill)
    assert (start.term, start.decode, start.spec.log, start.spec.limit) == (1, DECODE, PROMPT, 20)
    assert start.spec.gateway == ME
    accepted = fact(desk.tell(DECODE, TermAccepted(key, 2)))
    assert (accepted.term, accepted.stage, accepted.decode) == (2, "decoding", DECODE)
    assert desk.token(key, 8) == [Committed(key, 8)]
    effects = desk.token(key, 1, "stop")
    assert effects[0] == Committed(key, 1)
    assert effects[-1] == Closed(key, "stop")
    assert messages(effects, RequestEnded) == [("scheduler", RequestEnded(key, 2, 5))]
    assert not messages(effects, Cancel), "nobody holds it any more"
    assert desk.core.open_requests == 0
    assert all(desk.arena.read(slot) is None for slot in SLOTS)


def test_losing_a_prefill_skips_the_term_that_was_granted_ahead() -> None:
    desk = Desk()
    key = desk.open()
    desk.place(key)
    effects = desk.tell(PREFILL, SequenceLost(key, 1, "refused", "x"))
    assert fact(effects).term == 3
    assert sorted(messages(effects, Cancel)) == [("d@1", Cancel(key, 2)), ("p@1", Cancel(key, 2))]


def test_losing_a_decode_raises_the_term_by_one_and_keeps_the_log() -> None:
    desk = Desk()
    key = desk.decoding()
    desk.token(key, 8)
    effects = desk.core.peers((), [DECODE], 0.0)
    desk.core.check()
    assert fact(effects) == RequestFact(key, 3, "waiting", 1.5, 4, 20)
    [(_, start)] = messages(desk.place(key, BOTH, BOTH), StartPrefill)
    assert isinstance(start, StartPrefill)
    assert (start.term, start.spec.log) == (4, (*PROMPT, 8))


# ── what was found of a prompt ────────────────────────────────────────────────────────────────


def test_the_salt_lies_in_the_record_and_goes_to_the_worker() -> None:
    desk = Desk()
    (key,), _ = desk.core.open(PROMPT, 20, (1,), SamplingParams(), 1.5, cache_salt="tenant")
    [(_, start)] = messages(desk.place(key), StartPrefill)
    assert isinstance(start, StartPrefill)
    assert start.spec.cache_salt == "tenant"
    [record] = [record for slot in SLOTS if (record := desk.arena.read(slot))]
    assert msgspec.msgpack.decode(record.parameters, type=AdmissionRecord).cache_salt == "tenant"


def test_what_was_found_first_counts_and_what_is_found_again_does_not() -> None:
    desk = Desk()
    key = desk.open()
    desk.place(key)
    assert desk.entry(key).cached is None
    desk.tell(DECODE, TermAccepted(key, 2, Cached(memory=1, worker=1)))
    assert desk.entry(key).cached == Cached(memory=1, worker=1)
    desk.token(key, 8)
    desk.core.peers((), [DECODE], 0.0)
    desk.place(key, BOTH, BOTH)
    desk.tell(BOTH, TermAccepted(key, desk.term(key) + 1, Cached(memory=3)))
    assert desk.entry(key).cached == Cached(memory=1, worker=1)


def test_pages_that_a_lost_worker_may_have_filled_for_it_are_no_hit() -> None:
    desk = Desk()
    key = desk.open()
    desk.place(key)
    desk.core.peers((), [PREFILL], 0.0)
    desk.place(key, BOTH, BOTH)
    desk.tell(BOTH, TermAccepted(key, desk.term(key) + 1, Cached(memory=2)))
    assert desk.entry(key).state is RequestState.DECODING
    assert desk.entry(key).cached is None, "nobody knows what the first one had found"


def test_a_placement_that_never_began_changes_nothing_of_it() -> None:
    desk = Desk()
    key = desk.open()
    desk.place(key, PREFILL, Incarnation("d", 2))
    desk.core.peers([member(Incarnation("d", 2))], [], 0.0)
    desk.place(key)
    desk.tell(DECODE, TermAccepted(key, desk.term(key) + 1, Cached(host=2)))
    assert desk.entry(key).cached == Cached(host=2)


@pytest.mark.parametrize(
    ("told", "counted"),
    [
        (Cached(1, 1, 1, 0), Cached(1, 1, 1, 0)),
        (Cached(2, 1, 1, 0), Cached(2, 1, 0, 0)),
        (Cached(0, 0, 0, 99), Cached(0, 0, 0, 3)),
        (Cached(-5, 2, 0, 0), Cached(0, 2, 0, 0)),
    ],
)
def test_no_more_is_found_than_the_prompt_has(told: Cached, counted: Cached) -> None:
    desk = Desk()
    key = desk.open()
    desk.place(key)
    desk.tell(DECODE, TermAccepted(key, 2, told))
    assert desk.entry(key).cached == counted


def test_a_new_gateway_does_not_know_what_was_found() -> None:
    desk = Desk()
    (key,), _ = desk.core.open(PROMPT, 20, (1,), SamplingParams(), 1.5, keepsake=b"x", cache_salt="tenant")
    core = Ledger(Incarnation("front", 4), ORDINAL, desk.arena, SLOTS)
    core.peers([member(SCHEDULER, "scheduler"), member(BOTH)], (), 0.0)
    entry = core.entry(key)
    assert entry is not None
    assert entry.record.cache_salt == "tenant"
    core.handle(SCHEDULER, Place(key, entry.term, BOTH, BOTH), 0.0)
    core.handle(BOTH, TermAccepted(key, entry.term + 1, Cached(memory=2)), 0.0)
    core.check()
    assert (entry.state, entry.cached) == (RequestState.DECODING, None)


# ── stale and wrong ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("term", [0, 1, 3])
def test_tokens_of_another_term_are_answered_with_its_cancel(term: int) -> None:
    desk = Desk()
    key = desk.decoding()
    assert desk.token(key, 8, term=term) == [Send(DECODE, Cancel(key, term))]
    assert desk.log(key) == list(PROMPT)
    assert desk.core.statistics()["stale_terms"] == 1


def test_tokens_of_an_ended_request_are_answered_with_a_cancel() -> None:
    desk = Desk()
    key = desk.decoding()
    desk.core.cancel(key)
    row = TokenRow(key, 2, 3, 8, None)
    assert desk.tell(DECODE, StepTokens((row,))) == [Send(DECODE, Cancel(key, 2))]


def test_an_acceptance_counts_once_and_only_from_who_was_chosen() -> None:
    desk = Desk()
    key = desk.open()
    desk.place(key)
    assert desk.tell(BOTH, TermAccepted(key, 2)) == [Send(BOTH, Cancel(key, 2))]
    assert desk.tell(DECODE, TermAccepted(key, 1)) == [Send(DECODE, Cancel(key, 1))]
    assert fact(desk.tell(DECODE, TermAccepted(key, 2))).stage == "decoding"
    assert desk.tell(DECODE, TermAccepted(key, 2)) == [], "said again, it is no news"
    assert desk.entry(key).state is RequestState.DECODING


@pytest.mark.parametrize("position", [0, 2, 4, 99])
def test_tokens_out_of_order_are_not_committed(position: int) -> None:
    desk = Desk()
    key = desk.decoding()
    effects = desk.token(key, 8, position=position)
    assert not any(isinstance(effect, Committed) for effect in effects)
    assert fact(effects).stage == "waiting"
    assert messages(effects, Cancel) == [("d@1", Cancel(key, 2))]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_none_is_a_fault_of_its_worker(token: int) -> None:
    desk = Desk()
    key = desk.decoding()
    assert fact(desk.token(key, token)).stage == "waiting"
    assert desk.log(key) == list(PROMPT)


@pytest.mark.parametrize("limit", [5, CAPACITY])
def test_a_token_beyond_the_limit_is_a_fault_of_its_worker(limit: int) -> None:
    desk = Desk()
    key = desk.decoding(limit)
    for n in range(limit - 3):
        desk.token(key, n)
    assert fact(desk.token(key, 99)).stage == "waiting"
    assert len(desk.log(key)) == limit


def test_a_row_at_fault_does_not_take_the_others_of_its_step_down() -> None:
    """Field report 29."""
    desk = Desk()
    good, bad, ended = desk.decoding(), desk.decoding(), desk.decoding()
    desk.core.cancel(ended)
    rows = (
        TokenRow(bad, 2, 99, 8, None),
        TokenRow(ended, 2, 3, 8, None),
        TokenRow(good, 2, 3, 8, None),
    )
    assert Committed(good, 8) in desk.tell(DECODE, StepTokens(rows))
    assert desk.entry(good).state is RequestState.DECODING


def test_a_placement_counts_once_and_only_in_its_term() -> None:
    desk = Desk()
    key = desk.open()
    assert desk.tell(SCHEDULER, Place(key, 1, PREFILL, DECODE)) == []
    assert desk.tell(SCHEDULER, Place(SequenceKey(1, 0), 0, PREFILL, DECODE)) == []
    desk.place(key)
    assert desk.tell(SCHEDULER, Place(key, 0, PREFILL, DECODE)) == []
    assert desk.place(key) == []


def test_a_placement_on_the_dead_is_taken_back_at_once() -> None:
    desk = Desk()
    key = desk.open()
    desk.core.peers((), [DECODE], 0.0)
    effects = desk.place(key)
    assert not messages(effects, StartPrefill)
    assert (fact(effects).term, fact(effects).stage) == (3, "waiting")


def test_preemption_takes_back_the_placement_that_was_meant() -> None:
    desk = Desk()
    key = desk.open()
    assert desk.tell(SCHEDULER, Preempt(key, 0)) == [], "it holds nothing"
    desk.place(key)
    effects = desk.tell(SCHEDULER, Preempt(key, 1))
    assert (fact(effects).term, fact(effects).stage) == (3, "waiting")
    assert desk.tell(SCHEDULER, Preempt(key, 1)) == []
    desk.place(key)
    assert desk.tell(SCHEDULER, Preempt(key, 1)) == [], "that was another life"
    desk.tell(DECODE, TermAccepted(key, 5))
    assert fact(desk.tell(SCHEDULER, Preempt(key, 4))).stage == "waiting", (
        "it was placed in 4, handed over in 5"
    )


# ── giving up ─────────────────────────────────────────────────────────────────────────────────


def test_workers_that_die_on_a_request_in_a_row_end_it() -> None:
    desk = Desk()
    key = desk.open()
    for n in range(MAX_FAULTS):
        assert desk.is_open(key), n
        desk.place(key)
        effects = desk.core.peers((), [PREFILL], 0.0)
        desk.core.peers([member(PREFILL)], (), 0.0)
    [closed] = [effect for effect in effects if isinstance(effect, Closed)]
    assert closed.reason is None
    assert "died" in str(closed.error)
    assert not desk.is_open(key)


def test_a_token_forgives_the_faults_before_it() -> None:
    desk = Desk()
    key = desk.open()
    for n in range(3 * MAX_FAULTS):
        desk.place(key)
        desk.tell(DECODE, TermAccepted(key, desk.term(key) + 1))
        assert Committed(key, n) in desk.token(key, n)
        desk.core.peers((), [DECODE], 0.0)
        desk.core.peers([member(DECODE)], (), 0.0)
    assert desk.is_open(key)


def test_refusals_in_a_row_end_a_request_and_an_acceptance_forgives_them() -> None:
    desk = Desk()
    key = desk.open()
    for _ in range(2):
        for _ in range(MAX_REFUSALS - 1):
            desk.place(key)
            desk.tell(PREFILL, SequenceLost(key, desk.term(key), "refused", "no room"))
        desk.place(key)
        desk.tell(DECODE, TermAccepted(key, desk.term(key) + 1))
        desk.tell(SCHEDULER, Preempt(key, desk.term(key)))
    for _ in range(MAX_REFUSALS):
        desk.place(key)
        effects = desk.tell(PREFILL, SequenceLost(key, desk.term(key), "refused", "no room"))
    assert Closed(key, None, "no room") in effects


def test_a_fault_of_the_request_itself_ends_it_at_once() -> None:
    desk = Desk()
    key = desk.decoding()
    effects = desk.tell(DECODE, SequenceLost(key, 2, "fault", "no finite logit"))
    assert Closed(key, None, "no finite logit") in effects
    assert messages(effects, RequestEnded)


def test_a_loss_of_another_term_is_ignored() -> None:
    desk = Desk()
    key = desk.decoding()
    for term in (0, 1, 3):
        assert desk.tell(DECODE, SequenceLost(key, term, "fault", "late")) == []
    assert desk.is_open(key)


# ── the doors ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding"])
@pytest.mark.parametrize("how", ["cancel", "finish"])
def test_cancel_and_finish_end_once_in_every_state(how: str, stage: str) -> None:
    """A stop string may be found after the request was taken back from its worker."""
    desk = Desk()
    key = desk.decoding() if stage == "decoding" else desk.open()
    if stage == "prefilling":
        desk.place(key)
    end = desk.core.cancel if how == "cancel" else desk.core.finish
    effects = end(key)
    desk.core.check()
    told = {"waiting": [], "prefilling": ["d@1", "p@1"], "decoding": ["d@1"]}[stage]
    assert sorted(to for to, _ in messages(effects, Cancel)) == told
    assert len(messages(effects, RequestEnded)) == 1
    assert not any(isinstance(effect, Closed) for effect in effects), "the door knows"
    assert desk.core.cancel(key) == desk.core.finish(key) == []


def test_a_full_ledger_says_so_and_has_room_again_after_an_end() -> None:
    desk = Desk()
    keys = [desk.open() for _ in SLOTS]
    with pytest.raises(LedgerFull):
        desk.open()
    desk.core.check()
    desk.core.cancel(keys[1])
    assert desk.open() not in keys


@pytest.mark.parametrize(
    ("prompt", "limit", "stops"),
    [
        ((), 5, ()),
        ((1, 2), 2, ()),
        ((1, 2), CAPACITY + 1, ()),
        ((1,) * (CAPACITY + 1), CAPACITY + 2, ()),
        ((1, 2**32), 5, ()),
        ((1,), 5, tuple(range(20_000))),
    ],
)
def test_a_request_that_does_not_fit_its_slot_leaves_nothing(
    prompt: tuple[int, ...], limit: int, stops: tuple[int, ...]
) -> None:
    desk = Desk()
    for _ in range(2 * len(SLOTS)):
        with pytest.raises(ValueError):
            desk.core.open(prompt, limit, stops, SamplingParams(), 0.0)
        desk.core.check()
    assert desk.core.statistics()["log_slots_free"] == len(SLOTS)
    desk.open()


# ── births and deaths ─────────────────────────────────────────────────────────────────────────


def test_a_new_scheduler_is_told_everything() -> None:
    desk = Desk()
    waiting, prefilling, decoding = desk.open(), desk.open(), desk.decoding()
    desk.place(prefilling)
    effects = desk.core.peers([member(Incarnation("scheduler", 2), "scheduler")], [SCHEDULER], 0.0)
    facts = {m.key: m.stage for _, m in messages(effects, RequestFact) if isinstance(m, RequestFact)}
    assert facts == {waiting: "waiting", prefilling: "prefilling", decoding: "decoding"}


def test_a_restarted_gateway_clears_its_own_slots_and_no_others() -> None:
    desk = Desk()
    desk.open()
    desk.decoding()
    desk.arena.open(0, 77, 0, (1,), b"")
    desk.arena.open(5, 78, 0, (1,), b"")
    again = Desk(desk.arena)
    assert again.core.orphans == 2
    again.core.check()
    assert [desk.arena.read(slot) is not None for slot in range(6)] == [True, *[False] * 4, True]


class Machine(RuleBasedStateMachine):
    """A ledger between a scheduler and workers that say anything, against a log of what they committed."""

    @initialize()
    def begin(self) -> None:
        self.desk = Desk()
        self.logs: dict[SequenceKey, list[int]] = {}
        self.terms: dict[SequenceKey, int] = {}
        self.ended: dict[SequenceKey, int] = {}
        self.dead: set[Incarnation] = set()

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Committed(key=key, token=token):
                    assert key not in self.ended
                    self.logs[key].append(token)
                case Closed(key=key):
                    assert key in self.ended, "closed for its client, but not for the scheduler"
                case Send(to=to, message=RequestEnded(key=key)):
                    assert to == "scheduler"
                    assert key not in self.ended, "ended twice"
                    self.ended[key] = 1
                case Send(to=to, message=RequestFact() as told):
                    assert told.key not in self.ended
                    assert told.term >= self.terms.get(told.key, 0), "a term fell"
                    assert told.length == len(self.logs[told.key])
                case Send(to=to, message=StartPrefill(spec=spec, term=term)):
                    assert spec.log == tuple(self.logs[spec.key])
                    assert term > self.terms.get(spec.key, -1)
                    assert to not in self.dead
        for entry in self.desk.core.entries:
            assert entry.term >= self.terms.get(entry.key, 0)
            self.terms[entry.key] = entry.term

    @rule(length=st.integers(1, 4), more=st.integers(1, 5))
    def open(self, length: int, more: int) -> None:
        try:
            (key,), effects = self.desk.core.open(
                tuple(range(length)), length + more, (1,), SamplingParams(), float(len(self.logs))
            )
        except LedgerFull:
            assert self.desk.core.open_requests == len(SLOTS)
            return
        self.logs[key] = list(range(length))
        self.act(effects)

    @precondition(lambda self: self.logs)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "finish"]))
    def end(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.logs)))
        self.act(self.desk.core.cancel(key) if how == "cancel" else self.desk.core.finish(key))
        assert key in self.ended

    @precondition(lambda self: self.logs)
    @rule(
        data=st.data(),
        off=st.sampled_from([0, 0, 0, 0, -1, 1]),
        worker=st.sampled_from([PREFILL, DECODE, BOTH]),
        what=st.sampled_from(
            ["place", "accept", "accept", "token", "token", "finish", "lost", "fault", "preempt"]
        ),
    )
    def say(self, data: st.DataObject, off: int, worker: Incarnation, what: str) -> None:
        if worker in self.dead:
            return
        key = data.draw(st.sampled_from(sorted(self.logs)))
        term = self.terms[key] + off
        position = len(self.logs[key]) + data.draw(st.sampled_from([0, 0, 0, 1, -1]))
        match what:
            case "place":
                self.act(self.desk.tell(SCHEDULER, Place(key, term, worker, DECODE)))
            case "accept":
                self.act(self.desk.tell(worker, TermAccepted(key, term + 1)))
            case "token":
                self.act(self.desk.tell(worker, StepTokens((TokenRow(key, term, position, 3, None),))))
            case "finish":
                self.act(self.desk.tell(worker, StepTokens((TokenRow(key, term, position, 1, "stop"),))))
            case "lost":
                self.act(self.desk.tell(worker, SequenceLost(key, term, "refused", "x")))
            case "fault":
                self.act(self.desk.tell(worker, SequenceLost(key, term, "fault", "x")))
            case _:
                self.act(self.desk.tell(SCHEDULER, Preempt(key, term)))

    @rule(worker=st.sampled_from([PREFILL, DECODE, BOTH]))
    def die_or_live(self, worker: Incarnation) -> None:
        if worker in self.dead:
            self.dead.discard(worker)
            self.act(self.desk.core.peers([member(worker)], (), 0.0))
        else:
            self.dead.add(worker)
            self.act(self.desk.core.peers((), [worker], 0.0))
            for entry in self.desk.core.entries:
                assert worker not in entry.holders

    @rule()
    def new_scheduler(self) -> None:
        effects = self.desk.core.peers([member(SCHEDULER, "scheduler")], [SCHEDULER], 0.0)
        assert len(messages(effects, RequestFact)) == self.desk.core.open_requests
        self.act(effects)

    @invariant()
    def the_arena_is_the_log(self) -> None:
        if not hasattr(self, "desk"):
            return
        self.desk.core.check()
        shown = {
            SequenceKey(record.request, record.choice): list(record.tokens)
            for slot in range(6)
            if (record := self.desk.arena.read(slot)) is not None
        }
        assert shown == {key: log for key, log in self.logs.items() if key not in self.ended}


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


# ── placements with workers that this gateway does not know ───────────────────────────────────


def test_a_placement_with_an_unknown_worker_is_not_asked_for_again_until_it_is_known() -> None:
    """Else gateway and scheduler say it to each other until the roster arrives, thousands of times."""
    desk = Desk()
    key = desk.open()
    newer = Incarnation("d", 2)
    effects = desk.place(key, PREFILL, newer)
    [fact] = [send.message for send in effects if isinstance(send, Send) and send.to == "scheduler"]
    assert isinstance(fact, RequestFact)
    assert (fact.stage, fact.excluding) == ("waiting", (newer,))
    [known] = desk.core.peers([member(newer)], [], 0.0)
    assert isinstance(known, Send)
    assert known.message == msgspec.structs.replace(fact, excluding=())
    assert [type(send.message) for send in desk.place(key, PREFILL, newer) if isinstance(send, Send)] == [
        StartPrefill
    ]


def test_workers_where_it_is_of_no_use_are_excluded_in_every_life_of_theirs() -> None:
    desk = Desk()
    (key,), effects = desk.core.open(
        PROMPT, 20, (1,), SamplingParams(), 1.5, avoids=frozenset({"d", "elsewhere"})
    )
    assert fact(effects).excluding == (DECODE,)
    newer = Incarnation("elsewhere", 2)
    effects = desk.core.peers([member(newer)], [DECODE], 0.0)
    desk.core.check()
    assert fact(effects).excluding == (newer,)
    effects = desk.place(key, PREFILL, newer)
    assert not messages(effects, StartPrefill), "the scheduler had not heard of it yet"
    assert fact(effects).excluding == (newer,)
    assert messages(desk.place(key, PREFILL, BOTH), StartPrefill)
