"""What a gateway leaves behind in the arena, and what the next incarnation makes of it."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core import Send
from engine.ids import Incarnation, SequenceKey
from engine.layout import TokenLogArena
from engine.ledger import Ledger, LedgerFull
from engine.messages import (
    Cancel,
    Member,
    Place,
    RequestFact,
    StartPrefill,
    StepTokens,
    TermAccepted,
    TokenRow,
)
from engine.sampling import SamplingParams

ORDINAL = 4
SLOTS = range(1, 7)
CAPACITY = 16
END = 1
SCHEDULER = Member("scheduler", "scheduler", 2, 1, "", True)
WORKER = Member("w", "worker", 9, 1, "", True)
W = WORKER.incarnation
PROMPT = (5, 6, 7)


def arena() -> TokenLogArena:
    return TokenLogArena(memoryview(bytearray(8 * TokenLogArena.slot_bytes(CAPACITY))), 8, CAPACITY)


def restarted(shared: TokenLogArena, epoch: int) -> tuple[Ledger, dict[SequenceKey, RequestFact]]:
    """The next incarnation, and what it says to the scheduler when it meets everybody."""
    ledger = Ledger(Incarnation("front", epoch), ORDINAL, shared, SLOTS)
    effects = ledger.peers([SCHEDULER, WORKER], (), 0.0)
    ledger.check()
    facts = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, RequestFact)]
    assert len(facts) == len(effects)
    return ledger, {fact.key: fact for fact in facts}


def opened(ledger: Ledger, *, n: int = 1, keepsake: bytes = b"x", limit: int = 8) -> tuple[SequenceKey, ...]:
    keys, _ = ledger.open(PROMPT, limit, (END,), SamplingParams(seed=3), 1.5, n=n, keepsake=keepsake)
    return keys


def decode(ledger: Ledger, key: SequenceKey, *tokens: int) -> None:
    """Place it and have tokens committed, the end token as the worker would say it."""
    term = next(entry.term for entry in ledger.entries if entry.key == key)
    ledger.handle(SCHEDULER.incarnation, Place(key, term, W, W), 0.0)
    ledger.handle(W, TermAccepted(key, term + 2), 0.0)
    for number, token in enumerate(tokens):
        position = len(PROMPT) + number
        finish = "stop" if token == END else None
        ledger.handle(W, StepTokens((TokenRow(key, term + 2, position, token, finish),)), 0.0)


def test_a_request_goes_on_in_a_term_that_nobody_holds() -> None:
    shared = arena()
    first, _ = restarted(shared, 1)
    waiting, prefilling, decoding = (opened(first)[0] for _ in range(3))
    first.handle(SCHEDULER.incarnation, Place(prefilling, 0, W, W), 0.0)
    decode(first, decoding, 30, 31)
    second, facts = restarted(shared, 2)
    assert {key: (fact.term, fact.stage, fact.length) for key, fact in facts.items()} == {
        waiting: (2, "waiting", 3),
        prefilling: (3, "waiting", 3),
        decoding: (4, "waiting", 5),
    }
    assert [entry.log for entries in second.adopted.values() for entry in entries][2] == [*PROMPT, 30, 31]
    # Whoever held it speaks of a term that is over.
    late = second.handle(W, StepTokens((TokenRow(decoding, 2, 5, 32, None),)), 0.0)
    assert late == [Send(W, Cancel(decoding, 2))]
    [start] = second.handle(SCHEDULER.incarnation, Place(decoding, 4, W, W), 0.0)
    assert isinstance(start, Send)
    assert isinstance(start.message, StartPrefill)
    assert (start.message.term, start.message.spec.log) == (5, (*PROMPT, 30, 31))
    assert (start.message.spec.prompt_length, start.message.spec.sampling.seed) == (3, 3)


def test_one_that_is_complete_is_kept_and_not_placed_again() -> None:
    shared = arena()
    first, _ = restarted(shared, 1)
    (ended,) = opened(first)
    (full,) = opened(first, limit=5)
    decode(first, ended, 30, END)
    decode(first, full, 30, 31)
    assert first.statistics()["log_slots_kept"] == 1, "the one whose worker has said that it is over"
    second, facts = restarted(shared, 2)
    assert facts == {}
    assert second.statistics()["log_slots_kept"] == 2
    assert second.cancel(ended) == []
    second.release([full, full])
    second.check()
    assert second.statistics()["log_slots_free"] == len(SLOTS)


def test_what_nobody_comes_back_for_is_closed() -> None:
    shared = arena()
    first, _ = restarted(shared, 1)
    opened(first, keepsake=b"")
    half = opened(first, n=2)
    slot = next(entry.slot for entry in first.entries if entry.key == half[1])
    shared.close(slot)  # it died between the two
    second, facts = restarted(shared, 2)
    assert facts == {}
    assert second.orphans == 2
    assert second.statistics()["log_slots_free"] == len(SLOTS)


class Machine(RuleBasedStateMachine):
    """Requests of several choices under a gateway that dies whenever it likes."""

    @initialize()
    def begin(self) -> None:
        self.arena = arena()
        self.epoch = 1
        self.ledger, _ = restarted(self.arena, 1)
        self.logs: dict[SequenceKey, list[int]] = {}
        self.groups: dict[int, tuple[SequenceKey, ...]] = {}
        self.ended: set[SequenceKey] = set()
        self.terms: dict[SequenceKey, int] = {}

    @rule(n=st.integers(1, 3), stays=st.booleans())
    def open(self, n: int, stays: bool) -> None:
        free = self.ledger.statistics()["log_slots_free"]
        try:
            keys = opened(self.ledger, n=n, keepsake=b"k" if stays else b"")
        except LedgerFull:
            assert free < n
            return
        self.groups[keys[0].request] = keys if stays else ()
        self.logs.update((key, list(PROMPT)) for key in keys)

    @precondition(lambda self: self.ledger.entries)
    @rule(data=st.data(), token=st.sampled_from([END, 30, 31]))
    def advance(self, data: st.DataObject, token: int) -> None:
        entry = data.draw(st.sampled_from(self.ledger.entries))
        key, term = entry.key, entry.term
        if entry.state.value == "waiting":
            self.ledger.handle(SCHEDULER.incarnation, Place(key, term, W, W), 0.0)
        elif entry.state.value == "prefilling":
            self.ledger.handle(W, TermAccepted(key, term + 1), 0.0)
        else:
            full = len(entry.log) + 1 == entry.record.limit
            finish = "stop" if token == END else "length" if full else None
            self.ledger.handle(W, StepTokens((TokenRow(key, term, len(entry.log), token, finish),)), 0.0)
            self.logs[key].append(token)
            if finish is not None:
                self.over(key)

    def over(self, key: SequenceKey) -> None:
        if self.groups[key.request]:
            self.ended.add(key)
        else:
            del self.logs[key]

    @precondition(lambda self: self.logs)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "release"]))
    def let_go(self, data: st.DataObject, how: str) -> None:
        request = data.draw(st.sampled_from(sorted({key.request for key in self.logs})))
        keys = [key for key in self.logs if key.request == request]
        if how == "release" and not self.ended.issuperset(keys):
            return
        for key in keys:
            if how == "cancel":
                self.ledger.cancel(key)
            else:
                self.ledger.release([key])
            del self.logs[key]
            self.ended.discard(key)

    @rule()
    def die(self) -> None:
        self.epoch += 1
        before = {entry.key: entry.term for entry in self.ledger.entries}
        self.ledger, facts = restarted(self.arena, self.epoch)
        self.logs = {key: log for key, log in self.logs.items() if self.groups[key.request]}
        assert facts.keys() == self.logs.keys() - self.ended
        for key, fact in facts.items():
            assert fact.term > before[key] + 1, "somebody may hold it in this term"
            assert fact.length == len(self.logs[key])
        adopted = {e.key: e.log for entries in self.ledger.adopted.values() for e in entries}
        assert adopted == self.logs

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        shown = {
            SequenceKey(record.request, record.choice): list(record.tokens)
            for slot in range(8)
            if (record := self.arena.read(slot)) is not None
        }
        assert shown == self.logs


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
