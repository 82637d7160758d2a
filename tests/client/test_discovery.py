"""Which system a client means that names none."""

from __future__ import annotations

import fcntl
import json
import os
from typing import TYPE_CHECKING

import pytest

from engine.client import Client, NoEndpoint
from engine.client.discovery import VARIABLE, find_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Launches:
    """Run directories as launches leave them."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.locks: list[int] = []

    def add(self, name: str, *endpoints: str, alive: bool = True, ready: bytes | None = None) -> Path:
        path = self.base / name
        path.mkdir()
        lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR)
        self.locks.append(lock)
        if alive:
            fcntl.flock(lock, fcntl.LOCK_EX)
        facts = {"url": "", "run_dir": str(path), "pid": 1, "endpoints": {"front": list(endpoints)}}
        (path / "ready.json").write_bytes(json.dumps(facts).encode() if ready is None else ready)
        return path


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    launches = Launches(tmp_path)
    yield launches
    for lock in launches.locks:
        os.close(lock)


def test_the_one_launch_that_runs(launches: Launches) -> None:
    launches.add("dead", "ipc:///dead", alive=False)
    launches.add("starting", ready=b"")
    launches.add("older", ready=b'{"url": "x"}')
    launches.add("running", "ipc:///running", "tcp://127.0.0.1:1")
    assert find_endpoint({}, launches.base) == "ipc:///running"


def test_the_environment_goes_before(launches: Launches) -> None:
    launches.add("running", "ipc:///running")
    assert find_endpoint({VARIABLE: "tcp://elsewhere:1"}, launches.base) == "tcp://elsewhere:1"
    assert find_endpoint({VARIABLE: ""}, launches.base) == "ipc:///running"


@pytest.mark.parametrize("base", ["", "missing"])
def test_none_says_what_to_do(tmp_path: Path, base: str) -> None:
    with pytest.raises(NoEndpoint, match=rf"no launch is ready in .*tools/up.*{VARIABLE}"):
        find_endpoint({}, tmp_path / base)


def test_several_are_listed(launches: Launches) -> None:
    launches.add("one", "ipc:///one")
    launches.add("two", "ipc:///two")
    with pytest.raises(NoEndpoint, match=r"(?s)2 launches are ready.*ipc:///one.*ipc:///two"):
        find_endpoint({}, launches.base)


@pytest.mark.parametrize(
    "endpoint", ["", "nonsense", "tcp://", "tcp://127.0.0.1", "http://127.0.0.1:1", "ipc://"]
)
async def test_what_is_no_endpoint_is_said_at_once(endpoint: str) -> None:
    with pytest.raises(NoEndpoint, match="expected ipc://PATH or tcp://HOST:PORT"):
        async with Client(endpoint):
            pass
