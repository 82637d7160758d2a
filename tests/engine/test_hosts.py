"""Several hosts: in whatever order they start, break and end, there is one truth about who is alive."""

from __future__ import annotations

import msgspec
import pytest
from cluster import DEADLINE, TICK, TOPOLOGY, Cluster
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.hosts import DEADLINES, LEAVE_S
from engine.ids import LIFE_BITS, Incarnation
from engine.messages import HostFacts, Join, ProcessFact, Suspicion
from engine.supervision import STOP_S, Over, Phase
from engine.topology_file import parse

LATE = round(DEADLINE / TICK) + 3
"""Turns after which silence has been noticed."""


def running(*settings: str) -> Cluster:
    cluster = Cluster(*settings)
    cluster.start("a")
    cluster.start("b")
    cluster.turns(2)
    assert cluster.settled()
    return cluster


# ── starting ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_hosts_start_in_any_order(order: str) -> None:
    cluster = Cluster()
    for host in order:
        cluster.start(host)
        cluster.turns(4)
    cluster.turns(2)
    assert cluster.settled()
    assert cluster.listed == cluster.all
    assert {incarnation.epoch for incarnation in cluster.born} == {1}
    assert cluster.heard("a").count("ready") == cluster.heard("b").count("ready") == 1
    assert "waiting" in cluster.heard(order[0])


def test_nothing_is_started_on_another_host_before_the_first_has_answered() -> None:
    cluster = Cluster("launch.start_s=30")
    host = cluster.start("b")
    cluster.turns(29)
    assert not host.alive
    cluster.turns(2)
    code, said = cluster.over["b"]
    assert code == 3
    assert said is not None
    assert "the first host did not answer at there within launch.start_s = 30 s" in said


def test_the_first_host_waits_for_the_others_as_long_as_it_takes() -> None:
    cluster = Cluster("launch.start_s=30")
    cluster.start("a")
    cluster.turns(100)
    assert cluster.hosts["a"].core.phase is Phase.RUNNING
    assert cluster.listed == cluster.of("a")
    assert "ready" not in cluster.heard("a")
    cluster.start("b")
    cluster.turns(2)
    assert cluster.heard("a")[-2:] == ["joined", "ready"]


def test_a_host_that_read_another_topology_is_refused() -> None:
    cluster = Cluster()
    cluster.start("a")
    cluster.start("b", parse(TOPOLOGY, "", ["kv.pages=77"]))
    code, said = cluster.over["b"]
    assert code == 2
    assert said is not None
    assert "refused: its topology has other hosts, actors or pages" in said
    cluster.turns(2)
    assert cluster.listed == cluster.of("a")
    cluster.start("b", parse(TOPOLOGY, "", ["gateway.back.port=0", "worker.wb.threads=3"]))
    cluster.turns(2)
    assert cluster.settled(), "what concerns one host alone may differ"


# ── deaths ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["wb", "back", "allocator-b", "wa", "scheduler", "health"])
def test_an_actor_of_any_host_dies_and_comes_back(name: str) -> None:
    cluster = running()
    cluster.kill(name)
    if name != "health":
        assert cluster.listed == cluster.all - {name}
    cluster.turns(3)
    assert cluster.settled()
    assert Incarnation(name, 2) in cluster.rosters


def test_a_new_health_monitor_is_told_of_all_hosts_at_once() -> None:
    cluster = running()
    cluster.kill("health")
    host = cluster.hosts["a"]
    child = host.core.children["health"]
    assert child.spawn_at is not None
    cluster.now = child.spawn_at
    cluster._do(host, host.core.tick(cluster.now))
    cluster.pump()
    assert cluster.listed >= cluster.of("b")


def test_a_still_heart_on_another_host_is_killed_there() -> None:
    cluster = running()
    victim = Incarnation("wb", 1)
    cluster.hosts["b"].still.add(victim)
    cluster.turns(LATE)
    assert victim not in cluster.hosts["b"].alive
    cluster.turns(3)
    assert cluster.settled()
    assert Incarnation("wb", 2) in cluster.rosters


def test_who_is_suspected_on_another_host_is_killed_there() -> None:
    cluster = running()
    assert cluster.monitor is not None
    host = cluster.hosts["a"]
    suspicion = Suspicion(Incarnation("back", 1), "it does not take its messages")
    cluster._tell(host, cluster.monitor.handle(Incarnation("front", 1), suspicion, cluster.now))
    cluster.pump()
    assert Incarnation("back", 1) not in cluster.hosts["b"].alive
    cluster.turns(3)
    assert cluster.settled()


def test_a_host_whose_launcher_was_killed_is_declared_dead_by_its_silence() -> None:
    cluster = running()
    cluster.kill_launcher("b")
    cluster.turns(round(DEADLINE / TICK) - 1)
    assert cluster.listed == cluster.all, "it may only be slow"
    cluster.turns(LATE)
    assert cluster.listed == cluster.of("a")
    assert "lost" in cluster.heard("a")
    assert cluster.hosts["a"].core.phase is Phase.RUNNING
    cluster.start("b")
    cluster.turns(2)
    assert cluster.settled()


def test_a_host_that_comes_back_within_the_deadline_has_its_former_life_declared_dead() -> None:
    cluster = running()
    cluster.kill_launcher("b")
    cluster.turns(1)
    cluster.start("b")
    cluster.turns(2)
    assert cluster.settled()
    assert "lost" not in cluster.heard("a")


def test_no_epoch_is_used_twice_in_whatever_life_of_a_launcher() -> None:
    """`Cluster` asserts that no incarnation is born twice."""
    cluster = running()
    for life in range(1, 4):
        cluster.kill("wb")
        cluster.turns(3)
        assert cluster.settled()
        assert Incarnation("wb", ((life - 1) << LIFE_BITS) + 2) in cluster.rosters
        cluster.kill_launcher("b")
        cluster.start("b")
        cluster.turns(2)
        assert Incarnation("wb", (life << LIFE_BITS) + 1) in cluster.rosters


def test_words_of_a_former_life_of_a_launcher_are_not_heard() -> None:
    cluster = running()
    former = cluster.hosts["b"].me
    cluster.kill_launcher("b")
    cluster.start("b")
    cluster.turns(2)
    host = cluster.hosts["a"]
    fact = ProcessFact("wb", "worker", 9, 1, "e", True, False, 7)
    assert host.core.handle(former, HostFacts((fact,), False, False), cluster.now) == []
    assert host.core.handle(former, HostFacts((), False, True), cluster.now) == []
    assert cluster.settled()


# ── the link ──────────────────────────────────────────────────────────────────────────────────


def test_a_short_cut_is_nobodys_death() -> None:
    cluster = running()
    cluster.cut()
    cluster.turns(round(DEADLINE / TICK) - 1)
    cluster.heal()
    cluster.turns(5)
    assert cluster.settled()
    assert {incarnation.epoch for incarnation in cluster.born} == {1}


def test_after_a_longer_cut_the_actors_that_were_given_up_start_anew() -> None:
    cluster = running()
    cluster.cut()
    cluster.turns(LATE)
    assert cluster.listed == cluster.of("a")
    assert {incarnation.name for incarnation in cluster.hosts["b"].alive} == cluster.of("b")
    cluster.heal()
    cluster.turns(5)
    assert cluster.settled()
    assert cluster.heard("a")[-2:] == ["lost", "heard"]
    assert {i.epoch for i in cluster.hosts["b"].alive} == {2}, "what was declared dead is dead"
    assert {i.epoch for i in cluster.hosts["a"].alive} == {1}


def test_a_host_that_is_cut_off_for_good_ends_what_it_started_and_says_so() -> None:
    cluster = running()
    cluster.cut()
    cluster.turns(round(DEADLINES * DEADLINE / TICK) + 2)
    code, said = cluster.over["b"]
    assert code == 70
    assert said is not None
    assert "the first host at there is silent for" in said
    assert cluster.hosts["a"].core.phase is Phase.RUNNING
    cluster.heal()
    cluster.start("b")
    cluster.turns(3)
    assert cluster.settled()


def test_the_first_launcher_killed_ends_the_others_in_time() -> None:
    cluster = running()
    cluster.kill_launcher("a")
    cluster.turns(round(DEADLINES * DEADLINE / TICK) + 2)
    assert cluster.over["b"].code == 70


# ── the end ───────────────────────────────────────────────────────────────────────────────────


def test_the_first_host_stops_all_of_them_and_waits_for_their_last_word() -> None:
    cluster = running()
    cluster.signal("a")
    cluster.turns(2)
    assert cluster.over == {"a": Over(0, None), "b": Over(0, None)}
    assert cluster.heard("a")[-2:] == ["drain", "left"]


def test_all_hosts_wait_for_open_requests_of_any_gateway() -> None:
    cluster = running("launch.drain_s=30")
    cluster.hosts["b"].busy.add("back")
    cluster.signal("a")
    cluster.turns(10)
    assert not cluster.over
    assert {one.name for host in cluster.hosts.values() for one in host.alive} == cluster.all
    cluster.drained("back")
    cluster.turns(2)
    assert cluster.over == {"a": Over(0, None), "b": Over(0, None)}


def test_the_other_host_serves_on_while_the_first_drains() -> None:
    cluster = running("launch.drain_s=30")
    cluster.hosts["a"].busy.add("front")
    cluster.signal("a")
    cluster.turns(10)
    assert {i.name for i in cluster.hosts["b"].alive} == cluster.of("b"), "its workers may be needed"
    cluster.drained("front")
    cluster.turns(2)
    assert cluster.over == {"a": Over(0, None), "b": Over(0, None)}


def test_a_second_signal_stops_all_at_once() -> None:
    cluster = running("launch.drain_s=30")
    cluster.hosts["b"].busy.add("back")
    cluster.signal("a")
    cluster.turns(1)
    cluster.signal("a")
    cluster.turns(1)
    assert cluster.over == {"a": Over(0, None), "b": Over(0, None)}


def test_a_host_leaves_and_the_others_go_on() -> None:
    cluster = running()
    cluster.signal("b")
    cluster.turns(2)
    assert cluster.over == {"b": Over(0, None)}
    assert cluster.listed == cluster.of("a")
    assert cluster.heard("a")[-1] == "left"
    cluster.turns(2 * LATE)
    assert "lost" not in cluster.heard("a")
    cluster.start("b")
    cluster.turns(2)
    assert cluster.settled()


def test_a_host_that_gives_up_takes_nobody_along() -> None:
    cluster = running("launch.restart_attempts=1")
    cluster.kill("wb")
    cluster.turns(3)
    assert cluster.over["b"].code == 70
    assert cluster.listed == cluster.of("a")
    assert cluster.hosts["a"].core.phase is Phase.RUNNING


def test_the_first_host_does_not_wait_for_one_that_is_lost() -> None:
    cluster = running()
    cluster.kill_launcher("b")
    cluster.turns(LATE)
    cluster.signal("a")
    cluster.turns(1)
    assert cluster.over == {"a": Over(0, None)}


def test_the_first_host_does_not_wait_forever_for_a_last_word() -> None:
    cluster = running()
    cluster.kill_launcher("b")
    began = cluster.now
    cluster.signal("a")
    while "a" not in cluster.over:
        cluster.turns(1)
    # It drains as long as it may: nobody said that the gateway there has nothing open any more.
    assert cluster.now - began <= cluster.topology.launch.drain_s + STOP_S + LEAVE_S + TICK
    assert cluster.over["a"] == Over(0, None)


def test_a_host_that_is_stopped_while_it_waits_for_the_first_just_ends() -> None:
    cluster = Cluster()
    cluster.start("b")
    cluster.turns(3)
    cluster.signal("b")
    assert cluster.over == {"b": Over(0, None)}
    cluster.start("a")
    cluster.turns(3)
    assert cluster.listed == cluster.of("a")


def test_a_host_that_joins_while_the_first_stops_is_sent_away() -> None:
    cluster = Cluster("launch.drain_s=30")
    cluster.start("a")
    cluster.hosts["a"].busy.add("front")
    cluster.turns(1)
    cluster.signal("a")
    cluster.start("b")
    cluster.turns(1)
    assert "b" not in cluster.over, "it drains with the first"
    cluster.drained("front")
    cluster.turns(2)
    assert cluster.over == {"a": Over(0, None), "b": Over(0, None)}


def test_a_launcher_speaks_for_its_own_host_only() -> None:
    cluster = Cluster()
    host = cluster.start("a")
    stranger = Incarnation("launcher-c", 1)
    assert not host.core.others.expects(stranger)
    join = Join("b", "e", cluster.topology.agreement())
    assert host.core.handle(stranger, join, cluster.now) == []
    other = Incarnation("launcher-b", 1)
    assert host.core.handle(other, msgspec.structs.replace(join, host="c"), cluster.now) == []


# ── any order of things ───────────────────────────────────────────────────────────────────────


class AnyOrder(RuleBasedStateMachine):
    """Whatever breaks, in whatever order: once it stops breaking, all is well again soon."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster("launch.restart_attempts=1000", "launch.restart_most_s=1")
        self.cluster.start("a")

    @precondition(lambda self: "b" not in self.cluster.hosts)
    @rule()
    def start(self) -> None:
        self.cluster.start("b")

    @precondition(lambda self: "b" in self.cluster.hosts)
    @rule()
    def kill_launcher(self) -> None:
        self.cluster.kill_launcher("b")

    @precondition(lambda self: "b" in self.cluster.hosts)
    @rule()
    def leave(self) -> None:
        self.cluster.signal("b")

    @rule(name=st.sampled_from(["wb", "back", "allocator-b", "wa", "front", "scheduler", "health"]))
    def kill(self, name: str) -> None:
        self.cluster.kill(name)

    @rule(name=st.sampled_from(["wb", "back", "wa", "allocator-a"]))
    def stand_still(self, name: str) -> None:
        for host in self.cluster.hosts.values():
            host.still.update(one for one in host.alive if one.name == name)

    @rule()
    def cut(self) -> None:
        self.cluster.cut()

    @rule()
    def heal(self) -> None:
        self.cluster.heal()

    @rule(number=st.integers(1, 12))
    def pass_time(self, number: int) -> None:
        self.cluster.turns(number)

    @invariant()
    def the_first_goes_on(self) -> None:
        assert self.cluster.hosts["a"].core.phase is Phase.RUNNING
        self.cluster.check()

    def teardown(self) -> None:
        cluster = self.cluster
        cluster.heal()
        for _ in range(60):
            if "b" not in cluster.hosts:
                cluster.start("b")
            cluster.turns(1)
            if cluster.settled():
                break
        assert cluster.settled()
        cluster.signal("a")
        for _ in range(20):
            cluster.turns(1)
        assert cluster.over == {"a": Over(0, None), "b": Over(0, None)}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
