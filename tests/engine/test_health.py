"""The health monitor: silence and exits become kills and rosters, never more of them than needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import Send
from engine.health import HealthMonitor
from engine.ids import Incarnation
from engine.messages import Drain, Kill, ProcessFact, ProcessFacts, Roster, Stop, Suspicion

LAUNCHER = Incarnation("launcher", 1)
ME = Incarnation("health", 2)
TICK, DEADLINE = 1.0, 5.0


def monitor() -> HealthMonitor:
    return HealthMonitor(ME, deadline_s=DEADLINE, tick_s=TICK)


def fact(
    name: str = "w", epoch: int = 1, *, endpoint: str = "e", ready: bool = True, exited: bool = False
) -> ProcessFact:
    return ProcessFact(name, "worker", 0, epoch, endpoint, ready, exited)


def tell(core: HealthMonitor, *facts: ProcessFact) -> list[Send]:
    sends = core.handle(LAUNCHER, ProcessFacts(facts), 0.0)
    core.check()
    return sends


def roster_of(sends: list[Send]) -> Roster:
    [send] = sends
    assert send.to == "launcher"
    assert isinstance(send.message, Roster)
    return send.message


W = Incarnation("w", 1)


# ── rosters ───────────────────────────────────────────────────────────────────────────────────


def test_a_roster_lists_who_has_an_endpoint_and_has_not_exited() -> None:
    core = monitor()
    roster = roster_of(
        tell(core, fact("a"), fact("b", endpoint=""), fact("c", exited=True), fact("d", ready=False))
    )
    assert [(member.name, member.ready) for member in roster.members] == [("a", True), ("d", False)]
    assert core.alive == roster.members
    assert core.statistics()["members"] == 2
    assert core.statistics()["ready"] == 1


def test_no_roster_without_a_change() -> None:
    core = monitor()
    assert tell(core) == []
    roster_of(tell(core, fact()))
    assert tell(core, fact()) == []
    assert tell(core, fact(), fact("starting", endpoint="")) == []


def test_every_change_gives_a_later_version() -> None:
    core = monitor()
    versions = [
        roster_of(tell(core, change)).version
        for change in (
            fact(ready=False),
            fact(),
            fact(exited=True),
            fact(epoch=2, ready=False),
            fact(epoch=2),
        )
    ]
    assert versions == [(2, n) for n in range(1, 6)]
    assert core.statistics()["deaths"] == 1


def test_the_next_monitor_speaks_in_later_versions() -> None:
    before = roster_of(tell(monitor(), fact()))
    after = roster_of(tell(HealthMonitor(Incarnation("health", 3), deadline_s=5, tick_s=1), fact()))
    assert after.version > before.version
    assert after.members == before.members


STATES = st.builds(fact, st.sampled_from("abc"), st.integers(1, 3), ready=st.booleans(), exited=st.booleans())


@given(st.lists(st.lists(STATES, max_size=4, unique_by=lambda f: f.name), max_size=12))
def test_versions_rise_and_rosters_are_what_was_reported(reports: list[list[ProcessFact]]) -> None:
    core = monitor()
    version, shown = (0, 0), []
    for report in reports:
        expected = [f.name for f in report if not f.exited]
        sends = tell(core, *report)
        if sends:
            roster = roster_of(sends)
            assert roster.version > version
            version = roster.version
            shown = [member.name for member in roster.members]
        assert shown == expected


# ── silence ───────────────────────────────────────────────────────────────────────────────────


def silent(core: HealthMonitor, turns: int, start: float = 0.0, turn: float = TICK) -> list[float]:
    """Tick without a beat; when somebody was killed."""
    kills = []
    for n in range(1, turns + 1):
        now = start + n * turn
        if sends := core.tick({W: 7}, now):
            kill, roster = sends
            assert isinstance(kill.message, Kill)
            assert (kill.to, kill.message.target) == ("launcher", W)
            assert isinstance(roster.message, Roster)
            assert roster.message.dying == (W,)
            kills.append(now)
        core.check()
    return kills


def test_a_still_heart_is_killed_once_and_only_after_the_deadline() -> None:
    core = monitor()
    tell(core, fact())
    kills = silent(core, 50)
    assert len(kills) == 1
    assert DEADLINE < kills[0] <= DEADLINE + 2 * TICK
    assert core.statistics()["kills"] == 1
    assert not core.alive, "others go on without it at once"


def test_who_is_killed_is_dying_until_its_exit_is_reported() -> None:
    core = monitor()
    tell(core, fact(), fact("other"))
    [_, declared] = core.handle(LAUNCHER, Suspicion(W, "it is silent"), 0.0)
    assert isinstance(declared.message, Roster)
    assert [member.name for member in declared.message.members] == ["other"]
    assert declared.message.dying == (W,)
    assert tell(core, fact(), fact("other")) == [], "it has not exited yet, and is not alive again"
    [reaped] = tell(core, fact(exited=True), fact("other"))
    assert isinstance(reaped.message, Roster)
    assert reaped.message.dying == ()
    assert reaped.message.members == declared.message.members
    core.check()


def test_a_beat_starts_the_silence_again() -> None:
    core = monitor()
    tell(core, fact())
    for n in range(100):
        assert core.tick({W: n // 4}, n * TICK) == []


def test_what_the_monitor_slept_through_is_not_silence() -> None:
    """The whole machine stood still: everybody gets the time back (field report 19)."""
    core = monitor()
    tell(core, fact())
    assert core.tick({W: 7}, 0.0) == []
    assert core.tick({W: 7}, 1000.0) == []
    assert core.tick({W: 8}, 1001.0) == []
    assert core.tick({W: 8}, 5000.0) == []
    assert len(silent(core, 10, start=5000.0)) == 1


def test_slow_ticks_still_find_the_dead() -> None:
    core = monitor()
    tell(core, fact())
    assert len(silent(core, 20, turn=10 * TICK)) == 1


def test_the_next_incarnation_has_a_heart_of_its_own() -> None:
    core = monitor()
    tell(core, fact())
    assert len(silent(core, 10)) == 1
    tell(core, fact(exited=True))
    tell(core, fact(epoch=2))
    second = Incarnation("w", 2)
    assert core.tick({second: 7}, 11.0) == []
    later = [send for n in range(12, 30) for send in core.tick({second: 7}, float(n))]
    kills = [send.message.target for send in later if isinstance(send.message, Kill)]
    assert kills == [second]


def test_who_exited_is_not_killed() -> None:
    core = monitor()
    tell(core, fact(exited=True))
    assert silent(core, 20) == []


def test_nobody_unknown_is_killed() -> None:
    core = monitor()
    assert silent(core, 20) == []
    assert core.handle(W, Suspicion(Incarnation("stranger", 1), "x"), 0.0) == []


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 20.0)), max_size=40))
def test_nobody_is_killed_before_a_whole_deadline_without_a_beat(turns: list[tuple[bool, float]]) -> None:
    core = monitor()
    tell(core, fact())
    now = beaten = count = 0
    first = core.tick({W: count}, now)
    assert first == []
    for beat, passed in turns:
        now += passed
        count += beat
        if core.tick({W: count}, now):
            assert now - beaten + TICK > DEADLINE
            break
        beaten = now if beat else beaten


# ── suspicion ─────────────────────────────────────────────────────────────────────────────────


def test_a_suspicion_kills_once_and_says_why() -> None:
    core = monitor()
    tell(core, fact())
    source = Incarnation("gateway", 4)
    [send, _] = core.handle(source, Suspicion(W, "it does not take its messages"), 0.0)
    assert send == Send("launcher", Kill(W, "gateway@4 says: it does not take its messages"))
    assert core.handle(source, Suspicion(W, "again"), 0.0) == []
    assert silent(core, 20) == []


def test_a_suspicion_of_an_earlier_life_is_ignored() -> None:
    core = monitor()
    tell(core, fact(epoch=2))
    assert core.handle(LAUNCHER, Suspicion(W, "late"), 0.0) == []


@pytest.mark.parametrize("message", [Drain(), Stop(), Roster((1, 1), ())])
def test_what_is_the_shells_own_changes_nothing(message: Drain | Stop | Roster) -> None:
    core = monitor()
    assert core.handle(LAUNCHER, message, 0.0) == []
    assert core.peers((), (), 0.0) == []


@settings(max_examples=50)
@given(st.data())
def test_memory_does_not_grow_with_lives(data: st.DataObject) -> None:
    """Field report 26: pulses of the dead are forgotten with them."""
    core = monitor()
    for epoch in range(1, 30):
        tell(core, fact(epoch=epoch))
        core.tick({Incarnation("w", epoch): data.draw(st.integers(0, 3))}, float(epoch))
    assert len(core._pulses) <= 1
