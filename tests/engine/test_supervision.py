"""The supervisor: starts, restarts with back-off, gives up, drains, stops; and always comes to an end."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core import Send
from engine.errors import StartError
from engine.ids import Incarnation
from engine.messages import Drain, Drained, Hello, Kill, Member, ProcessFacts, Ready, Roster, Stop
from engine.supervision import (
    STABLE_S,
    STOP_S,
    Announce,
    Command,
    KillProcess,
    Over,
    Spawn,
    Supervisor,
    describe_exit,
    raise_if_failed,
)
from engine.supervision import (
    Phase as Launch,
)
from engine.topology import Actor, LaunchTable

ACTORS = (
    Actor("health", "health", 0),
    Actor("allocator", "allocator", 1),
    Actor("front", "gateway", 2),
    Actor("back", "gateway", 3),
    Actor("w", "worker", 4),
)
KINDS = {actor.name: actor for actor in ACTORS}
T = TypeVar("T")


class House:
    """A supervisor, its epoch counters and its clock."""

    def __init__(self, launch: LaunchTable | None = None) -> None:
        self.launch = launch or LaunchTable()
        self.epochs = [0] * len(ACTORS)
        self.now = 100.0
        self.core = Supervisor(ACTORS, self.launch, self._next_epoch, self.now)

    def _next_epoch(self, ordinal: int) -> int:
        self.epochs[ordinal] += 1
        return self.epochs[ordinal]

    def me(self, name: str) -> Incarnation:
        """The newest incarnation of an actor."""
        return self.core.children[name].incarnation

    def _checked(self, commands: list[Command]) -> list[Command]:
        self.core.check()
        return commands

    def tick(self, after: float = 0.0) -> list[Command]:
        self.now += after
        return self._checked(self.core.tick(self.now))

    def tell(self, name: str, message: Hello | Ready | Drained | Roster | Kill) -> list[Command]:
        return self._checked(self.core.handle(self.me(name), message, self.now))

    def hello(self, name: str) -> list[Command]:
        actor = KINDS[name]
        return self.tell(name, Hello(actor.kind, actor.ordinal, 1000 + actor.ordinal, f"ipc://{name}"))

    def exit(self, name: str, code: int = -9, said: str = "", after: float = 0.0) -> list[Command]:
        self.now += after
        return self._checked(self.core.exited(self.me(name), code, said, self.now))

    def signal(self) -> list[Command]:
        return self._checked(self.core.signalled(self.now))

    def up(self) -> list[Command]:
        """Start everything; what the last Ready gave."""
        self.tick()
        for name in KINDS:
            self.hello(name)
        return [command for name in KINDS for command in self.tell(name, Ready())]


def only(kind: type[T], commands: list[Command]) -> list[T]:
    return [command for command in commands if isinstance(command, kind)]


def sent(commands: list[Command], message: type[object]) -> set[str]:
    """To whom a kind of message went."""
    return {str(send.to) for send in only(Send, commands) if isinstance(send.message, message)}


ALL = {f"{name}@1" for name in KINDS}


def running(launch: LaunchTable | None = None) -> House:
    house = House(launch)
    house.up()
    assert house.core.phase is Launch.RUNNING
    return house


# ── starting ──────────────────────────────────────────────────────────────────────────────────


def test_all_actors_start_at_once_in_their_first_epoch() -> None:
    house = House()
    assert house.core.deadline() == house.now
    spawns = only(Spawn, house.tick())
    assert [(s.actor, s.incarnation.epoch) for s in spawns] == [(actor, 1) for actor in ACTORS]
    assert house.tick() == []
    assert house.core.deadline() == house.now + house.launch.start_s


def test_the_launch_runs_when_everybody_is_ready() -> None:
    house = House()
    commands = house.up()
    assert [a.what for a in only(Announce, commands)] == ["ready"]
    assert house.core.phase is Launch.RUNNING
    assert house.core.deadline() is None
    assert house.core.statistics() == {"actors": 5, "ready": 5, "restarts": 0}


def test_messages_of_strangers_the_dead_and_out_of_turn_are_ignored() -> None:
    house = House()
    house.tick()
    assert house.core.handle(Incarnation("stranger", 1), Ready(), house.now) == []
    assert house.core.handle(Incarnation("w", 7), Ready(), house.now) == []
    assert house.tell("w", Ready()) == [], "not before its hello"
    house.hello("w")
    assert house.hello("w") == []
    house.tell("w", Ready())
    assert house.tell("w", Ready()) == []


@pytest.mark.parametrize("code", [2, 3])
def test_a_stated_failure_while_starting_ends_the_launch_with_its_words(code: int) -> None:
    house = House()
    house.tick()
    house.hello("w")
    commands = house.exit("w", code, "the model is missing")
    assert not only(Announce, commands), "it is not tried again"
    assert house.core.phase is Launch.STOPPING
    for name in ("health", "allocator", "front", "back"):
        commands = house.exit(name)
    assert only(Over, commands) == [Over(3, "the model is missing")]


def test_a_stated_failure_of_a_restarted_actor_ends_the_launch_too() -> None:
    house = running()
    house.exit("w")
    house.tick(1.0)
    house.exit("w", 3, "the model is gone")
    assert house.core.phase is Launch.STOPPING


def test_not_ready_in_time_names_who_is_late() -> None:
    house = House(LaunchTable(start_s=5))
    house.tick()
    for name in ("health", "allocator", "front", "back"):
        house.hello(name)
        house.tell(name, Ready())
    assert house.tick(4.9) == []
    commands = house.tick(0.2)
    assert only(KillProcess, commands) == [KillProcess(Incarnation("w", 1), "stopped while it started")]
    for name in KINDS:
        commands = house.exit(name)
    assert only(Over, commands) == [Over(3, "not ready after launch.start_s = 5 s: w")]


def test_one_that_hangs_before_its_hello_is_killed_and_started_again() -> None:
    """Nobody else can see it: the health monitor watches only those who have said where they are."""
    house = running(LaunchTable(start_s=5))
    house.exit("w")
    assert [spawn.incarnation for spawn in only(Spawn, house.tick(1.0))] == [Incarnation("w", 2)]
    assert house.core.deadline() == house.now + 5
    assert house.tick(4.9) == []
    [kill] = only(KillProcess, house.tick(0.2))
    assert kill.incarnation == Incarnation("w", 2)
    assert "launch.start_s = 5" in kill.reason
    assert house.tick(10.0) == [], "it is killed once"
    house.exit("w")
    assert [spawn.incarnation for spawn in only(Spawn, house.tick(1.0))] == [Incarnation("w", 3)]


def test_a_signal_while_starting_stops_with_success() -> None:
    house = House()
    house.tick()
    house.hello("health")
    commands = house.signal()
    assert sent(commands, Stop) == {"health@1"}
    assert {kill.incarnation.name for kill in only(KillProcess, commands)} == set(KINDS) - {"health"}
    for name in KINDS:
        commands = house.exit(name)
    assert only(Over, commands) == [Over(0, None)]


def test_a_signal_before_anything_was_started_is_over_at_once() -> None:
    assert House().signal() == [Over(0, None)]


# ── restarts ──────────────────────────────────────────────────────────────────────────────────


def test_restarts_back_off_and_give_up_with_70() -> None:
    launch = LaunchTable(restart_first_s=0.5, restart_most_s=3, restart_attempts=6)
    house = running(launch)
    pauses = []
    for _ in range(5):
        [restart] = only(Announce, house.exit("w", 1, "boom"))
        assert restart.what == "restart"
        assert "exited with 1: boom" in restart.message
        due = house.core.deadline()
        assert due is not None
        pauses.append(due - house.now)
        assert house.tick(due - house.now - 0.01) == []
        assert len(only(Spawn, house.tick(0.01))) == 1
        house.hello("w")
        house.tell("w", Ready())
    assert pauses == pytest.approx([0.5, 1, 2, 3, 3])
    assert house.core.statistics()["restarts"] == 5
    commands = house.exit("w", -11)
    assert sent(commands, Stop) == ALL - {"w@1"}
    for name in set(KINDS) - {"w"}:
        commands = house.exit(name, 0)
    [over] = only(Over, commands)
    assert over == Over(70, "w@6 was ended by signal 11; it failed 6 times in a row")


def test_who_dies_before_it_is_ready_too_often_gives_3() -> None:
    house = House(LaunchTable(restart_attempts=2))
    house.tick()
    house.exit("w", 1)
    house.tick(10)
    house.exit("w", 1)
    for name in set(KINDS) - {"w"}:
        commands = house.exit(name, 0)
    assert only(Over, commands)[0].code == 3


def test_a_long_life_forgives_the_failures_before_it() -> None:
    house = running(LaunchTable(restart_attempts=3))
    for _ in range(5):
        house.exit("w", after=STABLE_S + 1)
        assert house.core.phase is Launch.RUNNING
        house.tick(10)
        house.hello("w")
        house.tell("w", Ready())
    house.exit("w", after=1.0)
    assert house.core.phase is Launch.RUNNING
    house.tick(10)
    house.exit("w", after=1.0)
    assert house.core.phase is Launch.STOPPING


def test_a_late_exit_of_an_earlier_life_is_ignored() -> None:
    house = running()
    first = house.me("w")
    house.exit("w")
    assert house.core.exited(first, -9, "", house.now) == []
    house.tick(1)
    assert house.core.exited(first, -9, "", house.now) == []
    assert house.core.children["w"].running


def test_a_clean_exit_that_nobody_asked_for_is_a_failure_too() -> None:
    """Field report 19: who ends without being told to is started again."""
    house = running()
    assert only(Announce, house.exit("w", 0))
    assert len(only(Spawn, house.tick(1))) == 1


# ── what others are told ──────────────────────────────────────────────────────────────────────


def facts_of(commands: list[Command]) -> dict[str, tuple[int, bool, bool]]:
    [send] = [send for send in only(Send, commands) if isinstance(send.message, ProcessFacts)]
    assert str(send.to).startswith("health@")
    return {fact.name: (fact.epoch, fact.ready, fact.exited) for fact in send.message.facts}  # type: ignore[union-attr]


def test_every_change_is_reported_whole_to_the_health_monitor() -> None:
    house = running()
    assert facts_of(house.exit("w")) == {
        **dict.fromkeys(KINDS, (1, True, False)),
        "w": (1, False, True),
    }
    house.tick(1)
    assert facts_of(house.hello("w"))["w"] == (2, False, False)
    assert facts_of(house.tell("w", Ready()))["w"] == (2, True, False)


def test_a_new_health_monitor_gets_the_whole_facts() -> None:
    house = running()
    assert not sent(house.exit("health"), ProcessFacts), "nobody is there to be told"
    house.exit("w")
    house.tick(1)
    facts = facts_of(house.hello("health"))
    assert facts == {
        **dict.fromkeys(KINDS, (1, True, False)),
        "health": (2, False, False),
        "w": (2, False, False),
    }


def roster(epoch: int, count: int) -> Roster:
    return Roster((epoch, count), (Member("w", "worker", 4, 1, "e", True),))


def test_a_roster_goes_to_everybody_and_to_late_starters() -> None:
    house = House()
    house.tick()
    house.hello("health")
    house.hello("front")
    assert sent(house.tell("health", roster(1, 1)), Roster) == {"health@1", "front@1"}
    assert sent(house.hello("w"), Roster) == {"w@1"}


def test_an_older_roster_is_not_passed_on() -> None:
    house = running()
    assert house.tell("health", roster(1, 5))
    assert house.tell("health", roster(1, 5)) == []
    assert house.tell("health", roster(1, 4)) == []
    assert house.tell("health", roster(2, 1)), "a new monitor counts anew"
    assert house.tell("health", roster(1, 9)) == []


def test_a_kill_is_done_only_to_the_life_that_is_meant() -> None:
    house = running()
    assert house.tell("health", Kill(Incarnation("w", 1), "still")) == [
        KillProcess(Incarnation("w", 1), "still")
    ]
    assert house.tell("health", Kill(Incarnation("w", 2), "x")) == []
    assert house.tell("health", Kill(Incarnation("nobody", 1), "x")) == []
    house.exit("w")
    assert house.tell("health", Kill(Incarnation("w", 1), "x")) == []


# ── draining and stopping ─────────────────────────────────────────────────────────────────────


def test_drain_then_stop_when_all_gateways_are_drained() -> None:
    house = running()
    commands = house.signal()
    assert sent(commands, Drain) == ALL
    assert not sent(commands, Stop)
    assert not sent(house.tell("front", Drained()), Stop)
    assert sent(house.tell("back", Drained()), Stop) == ALL
    for name in KINDS:
        commands = house.exit(name, 0)
    assert only(Over, commands) == [Over(0, None)]
    assert house.core.phase is Launch.OVER
    assert house.signal() == []
    assert house.core.deadline() is None


@pytest.mark.parametrize("drain_s", [0.5, 2.0, 10.0])
def test_everything_ends_within_the_drain_time(drain_s: float) -> None:
    house = running(LaunchTable(drain_s=drain_s))
    began = house.now
    commands = house.signal()
    stopped = began if sent(commands, Stop) else None
    killed = None
    while killed is None:
        due = house.core.deadline()
        assert due is not None
        commands = house.tick(due - house.now)
        if sent(commands, Stop):
            stopped = house.now
        if only(KillProcess, commands):
            assert {kill.incarnation.name for kill in only(KillProcess, commands)} == set(KINDS)
            killed = house.now
    assert stopped == pytest.approx(began + max(0.0, drain_s - STOP_S))
    assert killed == pytest.approx(began + drain_s)
    assert house.core.deadline() is None


def test_the_second_signal_stops_at_once_and_the_third_changes_nothing() -> None:
    house = running()
    house.signal()
    house.now += 1
    assert sent(house.signal(), Stop) == ALL
    assert house.signal() == []
    assert not only(KillProcess, house.tick(STOP_S - 0.01))
    assert len(only(KillProcess, house.tick(0.02))) == len(KINDS)
    assert house.tick(100) == []


def test_who_exits_while_draining_is_not_started_again() -> None:
    house = running()
    house.signal()
    commands = house.exit("w")
    assert not only(Announce, commands)
    assert not sent(commands, Stop)
    assert not only(Spawn, house.tick(1))
    assert not sent(house.exit("front"), Stop)
    assert sent(house.tell("back", Drained()), Stop) == {"health@1", "allocator@1", "back@1"}


def test_who_waits_to_be_restarted_is_not_waited_for() -> None:
    house = running()
    house.exit("front")
    house.exit("back")
    assert sent(house.signal(), Stop)
    assert not only(Spawn, house.tick(1))


def test_who_starts_while_draining_is_told_at_its_hello() -> None:
    house = running()
    house.exit("front")
    house.tick(1)
    assert "front@2" not in sent(house.signal(), Drain)
    house.tell("back", Drained())
    assert house.core.phase is Launch.DRAINING
    assert sent(house.hello("front"), Drain) == {"front@2"}
    assert sent(house.tell("front", Drained()), Stop)


def test_a_hello_while_stopping_is_answered_with_stop() -> None:
    house = House()
    house.tick()
    house.signal()
    assert sent(house.hello("w"), Stop) == {"w@1"}


def test_a_failure_while_stopping_keeps_the_first_outcome() -> None:
    house = running(LaunchTable(restart_attempts=1))
    house.exit("w", 1, "boom")
    for name in set(KINDS) - {"w"}:
        commands = house.exit(name, 5, "another")
    [over] = only(Over, commands)
    assert over.code == 70
    assert "boom" in str(over.message)
    with pytest.raises(StartError, match="boom") as caught:
        raise_if_failed(over)
    assert caught.value.exit_code == 70


def test_success_raises_nothing() -> None:
    raise_if_failed(Over(0, None))
    assert describe_exit(-9) == "was ended by signal 9"
    assert describe_exit(3) == "exited with 3"


# ── anything, in any order ────────────────────────────────────────────────────────────────────


class AnyOrder(RuleBasedStateMachine):
    """Processes that do what they like; the clock only ever moves to what `deadline` says, or less."""

    @initialize(
        drain_s=st.sampled_from([0.5, 3.0, 10.0]),
        attempts=st.sampled_from([1, 3, 8]),
        start_s=st.sampled_from([1.0, 60.0]),
    )
    def begin(self, drain_s: float, attempts: int, start_s: float) -> None:
        self.house = House(LaunchTable(drain_s=drain_s, restart_attempts=attempts, start_s=start_s))
        self.alive: set[Incarnation] = set()
        self.doomed: set[Incarnation] = set()
        self.seen: set[Incarnation] = set()
        self.over: list[Over] = []
        self.signalled_at: float | None = None

    def act(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Spawn(incarnation=incarnation):
                    assert incarnation not in self.seen, "an epoch is used twice"
                    assert incarnation.name not in {other.name for other in self.alive}
                    assert self.signalled_at is None, "started after a signal"
                    self.seen.add(incarnation)
                    self.alive.add(incarnation)
                case KillProcess(incarnation=incarnation):
                    assert incarnation in self.alive
                    self.doomed.add(incarnation)
                case Send(to=to, message=message):
                    assert to in self.alive, f"{message} for the dead"
                case Over():
                    assert not self.alive
                    self.over.append(command)
                    assert len(self.over) == 1

    @rule(name=st.sampled_from(sorted(KINDS)), what=st.sampled_from(["hello", "ready", "drained", "roster"]))
    def speak(self, name: str, what: str) -> None:
        if self.house.me(name) not in self.alive:
            return
        match what:
            case "hello":
                self.act(self.house.hello(name))
            case "ready":
                self.act(self.house.tell(name, Ready()))
            case "drained":
                self.act(self.house.tell(name, Drained()))
            case _:
                self.act(self.house.tell("health", roster(self.house.me("health").epoch, len(self.seen))))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), code=st.sampled_from([0, 1, 2, 3, 70, -9]), said=st.sampled_from(["", "boom"]))
    def exit(self, data: st.DataObject, code: int, said: str) -> None:
        incarnation = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.remove(incarnation)
        self.act(self.house.exit(incarnation.name, code, said))

    @rule(part=st.sampled_from([0.3, 1.0, 1.0]))
    def wait(self, part: float) -> None:
        """Until the deadline, or a part of the way, in which nothing may be due."""
        due = self.house.core.deadline()
        if due is None:
            assert self.house.tick(1000.0 if not self.alive else 0.0) == []
            return
        ahead = max(0.0, due - self.house.now)
        commands = self.house.tick(ahead * part)
        if part < 1 and ahead > 1e-6:
            assert commands == [], "something was due before the deadline"
        elif part == 1.0:
            after = self.house.core.deadline()
            assert commands or after is None or after > self.house.now, "the deadline stands still"
        self.act(commands)

    @rule()
    def signal(self) -> None:
        if self.signalled_at is None:
            self.signalled_at = self.house.now
        self.act(self.house.signal())

    @invariant()
    def the_core_is_sound(self) -> None:
        if hasattr(self, "house"):
            self.house.core.check()
            assert bool(self.over) == (self.house.core.phase is Launch.OVER)

    def teardown(self) -> None:
        """After a signal everything ends in time, if only those that are killed exit."""
        if not hasattr(self, "house") or self.over:
            return
        began = self.house.now
        if self.signalled_at is None:
            self.signal()
        for _ in range(20):
            for incarnation in sorted(self.doomed & self.alive):
                self.alive.discard(incarnation)
                self.act(self.house.exit(incarnation.name))
            if self.over:
                break
            due = self.house.core.deadline()
            assert due is not None, "it waits for ever"
            self.act(self.house.tick(max(0.0, due - self.house.now)))
        assert self.over
        assert self.house.now <= began + max(self.house.launch.drain_s, STOP_S) + 1e-6


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
