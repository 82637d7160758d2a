"""Every actor may be killed: at rest the system comes back and answers, in mid-stream no token is lost."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING

import httpx
import pytest
from launches import CAPITAL, Launch, wait_until

from tools import observe

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.model]

ACTORS = ("health", "allocator", "scheduler", "replicator", "front", "prefill", "decode")
LIGHT = ("health", "allocator", "scheduler", "replicator", "front")
"""Actors that crunch no numbers."""
LIGHT_START = 2.5
"""Times what the libraries of every actor take to load: half a second where those take a fifth."""
LIBRARIES = "import msgspec, structlog, trio, zmq"
STARTS = 6
TOKENS = 24


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """One system for all: it has to survive every test."""
    settings = ("launch.restart_attempts=1000", "launch.restart_most_s=0.2", "health.deadline_s=1.0")
    with Launch(tmp_path_factory.mktemp("deaths"), "local", *settings) as launch:
        yield launch.wait_ready()


@pytest.fixture(scope="module")
def undisturbed(launch: Launch) -> str:
    """The greedy answer that every disturbed stream must equal."""
    return launch.ask(CAPITAL + " Tell me its history.", max_tokens=TOKENS)


def tells_of(launch: Launch, life: observe.Life, name: str) -> list[str]:
    """What the launcher's log says of an incarnation."""
    return [line["event"] for line in launch.log("launcher") if line.get("process") == f"{name}@{life.epoch}"]


@pytest.mark.parametrize("name", ACTORS)
def test_an_actor_killed_at_rest_comes_back(launch: Launch, name: str) -> None:
    killed = launch.kill(name)
    took = launch.wait_restarted(killed, name)
    print(f"{name}: back and ready after {took:.2f} s")
    assert "Paris" in launch.ask(max_tokens=10)
    assert tells_of(launch, killed, name)[-1] == "process_exited"
    assert f"estafet: {name}@{killed.epoch} was ended by signal 9; starting it again" in launch.said
    assert launch.life(name).epoch > killed.epoch
    launch.wait_quiet()


def seconds_to_start(launch: Launch, name: str) -> float:
    """From the spawning of an actor's newest incarnation to its being ready, by the logs."""
    life = launch.life(name)
    incarnation = f"{name}@{life.epoch}"
    spawned = next(
        line["timestamp"]
        for line in launch.log("launcher")
        if line["event"] == "process_spawned" and line["process"] == incarnation
    )
    ready = next(
        line["timestamp"]
        for line in launch.log(name)
        if line["event"] == "actor_ready" and line["epoch"] == life.epoch
    )
    return (datetime.fromisoformat(ready) - datetime.fromisoformat(spawned)).total_seconds()


def seconds_to_load() -> float:
    """A fresh interpreter with the libraries that every actor has."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", LIBRARIES], check=True)
    return time.monotonic() - began


@pytest.mark.parametrize("name", LIGHT)
def test_actors_without_numbers_are_light(launch: Launch, name: str) -> None:
    """They never load the tensor library, and start in a small multiple of what their libraries take.

    The best of a few counts on both sides: what else the machine does can only make either slower.
    """
    libraries = min(seconds_to_load() for _ in range(STARTS))
    took: list[float] = []
    while len(took) < STARTS and min(took, default=math.inf) >= LIGHT_START * libraries:
        launch.wait_restarted(launch.kill(name), name)
        took.append(seconds_to_start(launch, name))
    life = launch.life(name)
    print(
        f"{name}: ready {took} s after it was spawned, libraries {libraries:.3f} s; {observe.usage(life.pid)}"
    )
    assert min(took) < LIGHT_START * libraries
    with open(f"/proc/{life.pid}/maps", encoding="utf-8") as maps:
        assert "libtorch" not in maps.read()


@pytest.mark.parametrize("name", ["decode", "health"])
def test_a_stopped_actor_is_killed_and_comes_back(launch: Launch, name: str) -> None:
    """Whoever stands still is noticed: by the health monitor, and it by the launcher."""
    stopped = launch.kill(name, signal.SIGSTOP)
    took = launch.wait_restarted(stopped, name)
    print(f"{name}, stopped: noticed, killed, back and ready after {took:.2f} s")
    assert tells_of(launch, stopped, name)[-2:] == ["process_killed", "process_exited"]
    launch.wait_restarted(launch.kill("scheduler"), "scheduler")
    assert "Paris" in launch.ask(max_tokens=10)


@pytest.mark.parametrize("name", ["scheduler", "allocator", "health", "replicator", "prefill", "decode"])
def test_a_stream_does_not_notice_a_death(launch: Launch, name: str, undisturbed: str) -> None:
    with launch.stream(CAPITAL + " Tell me its history.", max_tokens=TOKENS) as stream:
        stream.read(4)
        killed = launch.kill(name)
        assert stream.read() == undisturbed
    assert (stream.done, stream.finish_reason, stream.error) == (True, "length", None)
    launch.wait_restarted(killed, name)
    launch.wait_quiet()


def test_a_gateway_that_dies_takes_its_requests_with_it(launch: Launch) -> None:
    """Its clients' connections break, nothing stays behind, and the door is open again."""
    with launch.stream(max_tokens=200) as stream:
        stream.read(2)
        killed = launch.kill("front")
        with pytest.raises(httpx.TransportError):
            stream.read()
    launch.wait_restarted(killed, "front")
    launch.wait_quiet()
    wait_until(lambda: launch.statistics()["front"]["requests_orphaned"] == 1, 2, "the orphan is counted")
    assert "Paris" in launch.ask(max_tokens=10)
