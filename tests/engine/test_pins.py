"""Pins: what is to stay in the cache is asked for, filled, asked for again, and let go of, whoever dies."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.chain import token_bytes
from engine.core import Send
from engine.ids import Incarnation
from engine.lifecycle import PinState
from engine.messages import Member, PinFact, PinWanted
from engine.pins import (
    MAX_FILLS,
    MOST_PINS,
    REFILL_S,
    Cease,
    Fill,
    PinEffect,
    Pins,
    PinsFull,
    Prefix,
    Settled,
)

ME = Incarnation("front", 3)
PAGE = 4
TOKENS = tuple(range(100, 111))
WHOLE = len(TOKENS) // PAGE


def allocator(epoch: int, name: str = "allocator") -> Member:
    return Member(name, "allocator", 1, epoch, "", True)


def prefix(length: int = len(TOKENS), ttl_s: int = 100) -> Prefix:
    return Prefix(TOKENS[:length], ttl_s, "tenant", client="me")


class Desk:
    """Pins whose allocator and requests the test plays."""

    def __init__(self) -> None:
        self.core = Pins(ME, 4, PAGE)

    def open(self, length: int = len(TOKENS), ttl_s: int = 100) -> str:
        name, effects = self.core.open(prefix(length, ttl_s), 10.0)
        assert wanted(effects).name == name
        self.core.check()
        return name

    def answer(self, name: str, pages: int, refused: str = "") -> list[PinEffect]:
        effects = self.core.handle(PinFact(name, pages, refused))
        self.core.check()
        return effects

    def filled(self, name: str, failed: str = "", now: float = 11.0) -> list[PinEffect]:
        effects = self.core.filled(name, now, failed)
        self.core.check()
        return effects

    def established(self) -> str:
        name = self.open()
        assert self.answer(name, WHOLE) == [Settled(name, "pinned")]
        return name


def wanted(effects: list[PinEffect]) -> PinWanted:
    [effect] = effects
    assert isinstance(effect, Send)
    assert effect.to == "allocator"
    assert isinstance(effect.message, PinWanted)
    return effect.message


def let_go(name: str) -> Send:
    return Send("allocator", PinWanted(name, "tenant", b"", 110.0))


def test_what_is_there_is_pinned_at_once() -> None:
    desk = Desk()
    name, effects = desk.core.open(prefix(), 10.0)
    assert name == "prefix-0400000300000001"
    assert wanted(effects) == PinWanted(name, "tenant", token_bytes(TOKENS[: WHOLE * PAGE]), 110.0)
    assert desk.answer(name, WHOLE) == [Settled(name, "pinned")]
    pin = desk.core.get(name)
    assert pin is not None
    assert (pin.pages, pin.found, pin.established) == (WHOLE, WHOLE, True)
    assert desk.answer(name, 0) == [], "it did not ask"
    assert pin.pages == WHOLE


@pytest.mark.parametrize(
    ("length", "prompt"),
    [(len(TOKENS), TOKENS[:9]), (WHOLE * PAGE, (*TOKENS[:8], TOKENS[7])), (5, TOKENS[:5])],
)
def test_what_is_missing_is_filled_by_one_token_more_and_asked_for_again(
    length: int, prompt: tuple[int, ...]
) -> None:
    desk = Desk()
    whole = length // PAGE
    name = desk.open(length)
    assert desk.answer(name, whole - 1) == [Fill(name, prompt, prefix(length))]
    assert desk.answer(name, whole) == [], "nothing was asked meanwhile"
    assert wanted(desk.filled(name)).name == name
    assert desk.filled(name) == []
    assert desk.answer(name, whole) == [Settled(name, "pinned")]
    pin = desk.core.get(name)
    assert pin is not None
    assert (pin.found, pin.pages) == (whole - 1, whole)


def test_what_does_not_stay_is_filled_so_often_and_then_given_up() -> None:
    desk = Desk()
    name = desk.open()
    for _ in range(MAX_FILLS):
        [fill] = desk.answer(name, 1)
        assert isinstance(fill, Fill)
        desk.filled(name)
    assert desk.answer(name, 1) == [
        let_go(name),
        Settled(name, "unfilled", f"1 of its {WHOLE} pages stayed in memory"),
    ]
    assert desk.core.get(name) is None


def test_a_request_that_fails_is_made_again_after_a_pause() -> None:
    desk = Desk()
    name = desk.open()
    desk.answer(name, 0)
    assert desk.filled(name, "the queue is full", 20.0) == []
    assert desk.core.next_turn() == 20.0 + REFILL_S
    assert desk.core.tick(20.0 + REFILL_S / 2) == []
    [fill] = desk.core.tick(20.0 + REFILL_S)
    assert isinstance(fill, Fill)
    assert desk.core.next_turn() == 110.0
    desk.filled(name, "the queue is full", 30.0)
    desk.core.tick(40.0)
    assert desk.filled(name, "a worker died", 50.0) == [
        let_go(name),
        Settled(name, "unfilled", "a worker died"),
    ]


@pytest.mark.parametrize("fills", [0, 1])
def test_what_is_refused_ends(fills: int) -> None:
    desk = Desk()
    name = desk.open()
    for _ in range(fills):
        desk.answer(name, 0)
        desk.filled(name)
    assert desk.answer(name, 0, "no room") == [let_go(name), Settled(name, "refused", "no room")]
    assert desk.core.pins == ()


def test_a_new_allocator_is_told_everything_and_what_has_gone_is_filled_again() -> None:
    desk = Desk()
    settled, asking, filling = desk.established(), desk.open(), desk.open()
    desk.answer(filling, 0)
    assert desk.core.peers([allocator(2, "allocator-other")]) == []
    effects = desk.core.peers([allocator(2)])
    assert [wanted([effect]).name for effect in effects] == [settled, asking]
    [fill] = desk.answer(settled, 1)
    assert isinstance(fill, Fill)
    assert desk.answer(asking, WHOLE) == [Settled(asking, "pinned")]
    assert wanted(desk.filled(filling)).name == filling
    desk.filled(settled)
    assert desk.answer(settled, WHOLE) == [Settled(settled, "pinned")]


def test_an_established_pin_stays_with_what_there_is() -> None:
    desk = Desk()
    name = desk.established()
    desk.core.peers([allocator(2)])
    for _ in range(MAX_FILLS):
        desk.answer(name, 1)
        desk.filled(name)
    [settled] = desk.answer(name, 1)
    assert settled == Settled(name, "short", f"1 of its {WHOLE} pages stayed in memory")
    # The next allocator is another chance, also when no request comes through.
    desk.core.peers([allocator(3)])
    desk.answer(name, 0)
    for attempt in range(MAX_FILLS):
        effects = desk.filled(name, "the queue is full", 20.0 + attempt)
        desk.core.tick(21.5 + attempt)
    assert wanted(effects).tokens
    assert desk.answer(name, 1) == [Settled(name, "short", "the queue is full")]
    desk.core.peers([allocator(4)])
    assert desk.answer(name, 0, "no room") == [Settled(name, "refused", "no room")]
    pin = desk.core.get(name)
    assert pin is not None
    assert pin.pages == 0


@pytest.mark.parametrize("stage", ["asking", "filling", "pausing", "settled"])
@pytest.mark.parametrize("how", ["released", "expired"])
def test_it_ends_in_every_state(stage: str, how: str) -> None:
    desk = Desk()
    name = desk.established() if stage == "settled" else desk.open()
    if stage in ("filling", "pausing"):
        desk.answer(name, 0)
    if stage == "pausing":
        desk.filled(name, "no", 109.5)
    expected: list[PinEffect] = [Cease(name)] if stage == "filling" else []
    expected.append(let_go(name))
    if how == "released":
        assert desk.core.release(name) == expected
        assert desk.core.release(name) == []
    else:
        assert desk.core.next_turn() == 110.0
        if stage != "settled":
            expected.append(Settled(name, "expired", "its time was over before it was filled"))
        assert desk.core.tick(110.0) == expected
    assert desk.core.pins == ()
    assert desk.core.next_turn() is None
    assert desk.answer(name, WHOLE) == desk.filled(name) == []


def test_there_are_so_many_and_none_without_a_page() -> None:
    desk = Desk()
    with pytest.raises(ValueError, match="3 tokens are no page of 4"):
        desk.core.open(prefix(3), 0.0)
    names = [desk.open() for _ in range(MOST_PINS)]
    with pytest.raises(PinsFull):
        desk.core.open(prefix(), 0.0)
    desk.core.release(names[3])
    assert desk.open() not in names, "a name is used once"


# ── against an allocator whose pages come and go ──────────────────────────────────────────────


@dataclass
class ScriptedAllocator:
    """One incarnation: which pages of each prefix are in its cache, and which pins it has."""

    refuses: bool = False
    pinned: dict[str, int] = field(default_factory=dict)
    asked: deque[PinWanted] = field(default_factory=deque)
    answers: deque[PinFact] = field(default_factory=deque)


class Machine(RuleBasedStateMachine):
    """Pins, an allocator that dies, evicts and refuses, and requests that fill or fail."""

    @initialize()
    def begin(self) -> None:
        self.core = Pins(ME, 4, PAGE)
        self.now = 0.0
        self.epoch = 1
        self.allocator: ScriptedAllocator | None = ScriptedAllocator()
        self.cached: dict[str, int] = {}
        self.running: set[str] = set()
        self.waiting: set[str] = set()
        """Names whose clients have not heard how it went."""
        self.known: set[str] = set()

    def act(self, effects: list[PinEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(to=to, message=PinWanted() as message):
                    assert to == "allocator"
                    if self.allocator is not None:
                        questions = [ask for ask in self.allocator.asked if ask.name == message.name]
                        assert not message.tokens or not [ask for ask in questions if ask.tokens]
                        assert not any(fact.name == message.name for fact in self.allocator.answers) or (
                            not message.tokens
                        ), "asked again before it was answered"
                        self.allocator.asked.append(message)
                case Fill(name=name, prompt=prompt):
                    assert name not in self.running
                    assert len(prompt) == len(prompt) // PAGE * PAGE + 1
                    self.running.add(name)
                case Cease(name=name):
                    self.running.remove(name)
                case Settled(name=name, outcome=outcome):
                    if outcome not in ("pinned", "short"):
                        assert outcome == "refused" or self.core.get(name) is None
                    if self.core.get(name) is None:
                        assert name in self.waiting, "ended twice"
                    self.waiting.discard(name)
        self.core.check()

    @rule(pages=st.integers(1, 3), more=st.integers(0, PAGE - 1), ttl_s=st.integers(5, 60))
    def open(self, pages: int, more: int, ttl_s: int) -> None:
        if len(self.core.pins) == MOST_PINS:
            return
        name, effects = self.core.open(Prefix(TOKENS[: min(pages * PAGE + more, 11)], ttl_s), self.now)
        assert name not in self.known
        self.known.add(name)
        self.waiting.add(name)
        self.act(effects)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.act(self.core.release(name))
        self.waiting.discard(name)
        assert self.core.get(name) is None

    @precondition(lambda self: self.allocator and self.allocator.asked)
    @rule(refuses=st.sampled_from([False, False, False, True]))
    def ask(self, refuses: bool) -> None:
        assert self.allocator is not None
        message = self.allocator.asked.popleft()
        self.allocator.pinned.pop(message.name, None)
        if not message.tokens or message.until <= self.now:
            return
        if refuses:
            self.allocator.answers.append(PinFact(message.name, 0, "no room"))
            return
        pages = min(self.cached.get(message.name, 0), len(message.tokens) // (4 * PAGE))
        self.allocator.pinned[message.name] = pages
        self.allocator.answers.append(PinFact(message.name, pages))

    @precondition(lambda self: self.allocator and self.allocator.answers)
    @rule()
    def answer(self) -> None:
        assert self.allocator is not None
        self.act(self.core.handle(self.allocator.answers.popleft()))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.sampled_from(["", "", "it failed"]))
    def finish(self, data: st.DataObject, failed: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(name)
        if not failed:
            self.cached[name] = 3
        self.act(self.core.filled(name, self.now, failed))

    @precondition(lambda self: self.cached)
    @rule(data=st.data(), pages=st.integers(0, 2))
    def evict(self, data: st.DataObject, pages: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.cached)))
        kept = self.allocator.pinned.get(name, 0) if self.allocator is not None else 0
        self.cached[name] = max(kept, min(self.cached[name], pages))

    @precondition(lambda self: self.allocator is not None)
    @rule()
    def die(self) -> None:
        self.allocator = None

    @precondition(lambda self: self.allocator is None)
    @rule()
    def live(self) -> None:
        self.epoch += 1
        self.allocator = ScriptedAllocator()
        self.act(self.core.peers([allocator(self.epoch)]))

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.core.tick(self.now))
        turn = self.core.next_turn()
        assert turn is None or turn > self.now

    @rule()
    def come_to_rest(self) -> None:
        """With an allocator that answers and requests that fill, everything is there in a few steps."""
        if self.allocator is None:
            self.live()
        assert self.allocator is not None
        for _ in range(4 * MAX_FILLS * (len(self.core.pins) + 1)):
            while self.allocator.asked:
                self.ask(refuses=False)
            while self.allocator.answers:
                self.answer()
            for name in sorted(self.running):
                self.running.remove(name)
                self.cached[name] = 3
                self.act(self.core.filled(name, self.now))
            self.now += REFILL_S
            self.act(self.core.tick(self.now))
            if not (self.allocator.asked or self.allocator.answers or self.running):
                break
        for pin in self.core.pins:
            assert pin.state is PinState.SETTLED
            assert self.allocator.pinned.get(pin.name, 0) == pin.pages
        assert not self.waiting
        assert self.allocator.pinned.keys() <= {pin.name for pin in self.core.pins}

    @invariant()
    def every_request_that_fills_is_wanted(self) -> None:
        if not hasattr(self, "core"):
            return
        filling = {pin.name for pin in self.core.pins if pin.state is PinState.FILLING}
        assert filling == self.running
        assert self.waiting == {pin.name for pin in self.core.pins if not pin.established}


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
