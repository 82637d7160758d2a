"""Two launches that are one system, each in a network namespace of its own, with a link that can be cut."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from signal import SIGINT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING

import pytest
from gguf_files import write_tiny_gguf
from launches import ROOT, Launch, wait_until

from engine.hosts import DEADLINES
from kernels.prepare import prepare
from tools import two_hosts
from tools.namespaces import FOLDER, HOSTS, TwoHosts, cannot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from launches import Stream

pytestmark = pytest.mark.system

ONE_SLOT = tuple(f"worker.both-{host}.{kind}_slots=1" for host in HOSTS for kind in ("prefill", "decode"))
"""With two requests there is one on each host."""
LISTENS = "0A"
"""Of a socket in /proc/net/tcp."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A prepared random model that loads at once, as a setting."""
    folder = tmp_path_factory.mktemp("tiny-two-hosts")
    write_tiny_gguf(folder / "tiny.gguf", metadata={"llama.context_length": 8192})
    return f'model.path="{prepare(folder / "tiny.gguf", folder / "cache", progress=False)}"'


@pytest.fixture
def pair() -> Iterator[TwoHosts]:
    """Two namespaces and the link; at the end nobody lives there and they are gone."""
    if (why := cannot()) is not None:
        pytest.skip(why)
    made = TwoHosts(f"estafet-test-{os.getpid()}")
    with made:
        yield made
        assert not made.processes()
    assert not list(FOLDER.glob(f"{made.name}-*"))


class System:
    """Both launches."""

    def __init__(self, pair: TwoHosts, base: Path, *settings: str) -> None:
        self.pair = pair
        self._base = base
        self._settings = (*settings, *ONE_SLOT, "scheduler.reserve=0")
        self.running: dict[str, Launch] = {}

    def start(self, host: str) -> Launch:
        """Start a host's launcher, there."""
        with self.pair.inside(host):
            launch = Launch(self._base / host, "two-hosts", *self._settings, host=host)
        self.running[host] = launch
        return launch

    def both_ready(self, order: str = "ab") -> tuple[Launch, Launch]:
        """Start both and wait until all actors of both are ready."""
        for host in order:
            self.start(host)
        for launch in self.running.values():
            launch.wait_ready()
        return self.running["a"], self.running["b"]

    def ended(self, host: str, *codes: int) -> str:
        """A launcher has ended, or does soon, with one of these codes and wholly; what it said last."""
        launch = self.running.pop(host)
        code = launch.wait()
        assert code in codes, launch.said
        launch.assert_gone()
        launch._force()
        assert "Traceback" not in launch.said
        return launch.said.splitlines()[-1]

    def close(self) -> None:
        for launch in self.running.values():
            launch._force()


@contextlib.contextmanager
def system_of(pair: TwoHosts, base: Path, *settings: str) -> Iterator[System]:
    system = System(pair, base, *settings)
    try:
        with pair.inside("a"):  # so that requests reach the door
            yield system
    finally:
        system.close()


def placed(launch: Launch) -> dict[str, list[str]]:
    """Where each request was placed, by its id, in order."""
    found: dict[str, list[str]] = {}
    for line in launch.log("front"):
        if line["event"] == "request_placed":
            found.setdefault(line["request_id"], []).append(line["decode"])
    return found


def alive(launch: Launch) -> list[str]:
    """Who is alive, as the health monitor declared last."""
    rosters = [line["alive"] for line in launch.log("health") if line["event"] == "roster_declared"]
    return list(rosters[-1]) if rosters else []


@contextlib.contextmanager
def streams_on_both(launch: Launch) -> Iterator[dict[str, Stream]]:
    """The same question twice, so that one is answered on each host; by the worker's name."""
    body = {"max_tokens": 1200, "ignore_eos": True}
    with launch.stream(**body) as one, launch.stream(**body) as other:
        one.read(2)
        other.read(2)
        where = placed(launch)
        yield {where[stream.request_id][-1].partition("@")[0]: stream for stream in (one, other)}


def assert_answered_alike(streams: dict[str, Stream]) -> None:
    """Both to the end, and to the bit."""
    texts = [stream.read() for stream in streams.values()]
    assert [stream.finish_reason for stream in streams.values()] == ["length", "length"]
    assert len(texts) == 2
    assert texts[0] == texts[1] != ""


def listeners(launch: Launch) -> set[str]:
    """The addresses at which anybody in the launcher's network listens."""
    with open(f"/proc/{launch.process.pid}/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table][1:]
    return {
        socket.inet_ntoa(bytes.fromhex(row[1].partition(":")[0])[::-1]) for row in rows if row[3] == LISTENS
    }


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_hosts_start_in_any_order_answer_together_and_stop_from_the_first(
    tmp_path: Path, tiny_model: str, pair: TwoHosts, order: str
) -> None:
    with system_of(pair, tmp_path, tiny_model) as system:
        first = system.start(order[0])
        waits = (
            "waiting for host b" if order == "ab" else "waiting for the first host at tcp://10.77.0.1:7450"
        )
        wait_until(lambda: waits in first.said, 30, "it says for whom it waits")
        second = system.start(order[1])
        first.wait_ready()
        second.wait_ready()
        a, b = system.running["a"], system.running["b"]
        with streams_on_both(a) as streams:
            assert set(streams) == {"both-a", "both-b"}
            assert_answered_alike(streams)
        assert listeners(a) == {"10.77.0.1", "127.0.0.1"}, "the door is the only one on loopback"
        assert listeners(b) == {"10.77.0.2"}
        a.wait_quiet()
        assert set(a.statistics()) == {
            "health",
            "allocator-a",
            "scheduler",
            "replicator-a",
            "front",
            "both-a",
        }
        a.send(SIGINT)
        assert system.ended("a", 0) == "estafet: stopped"
        assert system.ended("b", 0) == "estafet: stopped"


def test_a_killed_launcher_costs_no_token_and_its_host_comes_back(
    tmp_path: Path, tiny_model: str, pair: TwoHosts
) -> None:
    with system_of(pair, tmp_path, tiny_model, "health.deadline_s=2") as system:
        a, b = system.both_ready()
        with streams_on_both(a) as streams:
            b.send(SIGKILL)
            system.ended("b", -SIGKILL)
            assert_answered_alike(streams)
            assert len(placed(a)[streams["both-b"].request_id]) > 1, "it was placed elsewhere"
        wait_until(lambda: "host b is silent" in a.said, 5, "the first host says so")
        wait_until(lambda: not [name for name in alive(a) if "-b@" in name], 5, "it is declared dead")
        system.start("b").wait_ready()
        wait_until(lambda: "both-b@4097" in alive(a), 10, "it lives again, in a later epoch")
        with streams_on_both(a) as streams:
            assert set(streams) == {"both-a", "both-b"}
            assert_answered_alike(streams)
        a.wait_quiet()
        a.send(SIGTERM)
        system.ended("a", 0)
        system.ended("b", 0)


def test_a_link_that_is_cut_and_mended(tmp_path: Path, tiny_model: str, pair: TwoHosts) -> None:
    """What was declared dead meanwhile is killed and started anew."""
    with system_of(pair, tmp_path, tiny_model) as system:
        a, b = system.both_ready()
        with streams_on_both(a) as streams:
            pair.cut()
            wait_until(lambda: "both-b@1" not in alive(a), 10, "it is declared dead")
            assert b.process.poll() is None
            pair.heal()
            assert_answered_alike(streams)
        wait_until(lambda: "both-b@2" in alive(a), 15, "its worker lives again")
        with streams_on_both(a) as streams:
            assert set(streams) == {"both-a", "both-b"}
            assert_answered_alike(streams)
        a.wait_quiet()
        a.send(SIGINT)
        system.ended("a", 0)
        system.ended("b", 0)


def test_a_host_that_is_cut_off_ends_what_it_started(tmp_path: Path, tiny_model: str, pair: TwoHosts) -> None:
    deadline_s = 2.0
    with system_of(pair, tmp_path, tiny_model, f"health.deadline_s={deadline_s}") as system:
        a, _ = system.both_ready()
        pair.cut()
        began = time.monotonic()
        last = system.ended("b", 70)
        took = time.monotonic() - began
        assert "the first host at tcp://10.77.0.1:7450 is silent for" in last
        # Silence counts from the last word, which came before the cut.
        assert float(last.partition("is silent for ")[2].split()[0]) >= DEADLINES * deadline_s
        assert took < DEADLINES * deadline_s + 5
        with a.stream(max_tokens=100, ignore_eos=True) as stream:
            assert stream.read()
        pair.heal()
        system.start("b").wait_ready()
        with streams_on_both(a) as streams:
            assert_answered_alike(streams)
        a.send(SIGINT)
        system.ended("a", 0)
        system.ended("b", 0)


def test_a_host_leaves_in_mid_stream(tmp_path: Path, tiny_model: str, pair: TwoHosts) -> None:
    with system_of(pair, tmp_path, tiny_model) as system:
        a, b = system.both_ready()
        with streams_on_both(a) as streams:
            b.send(SIGINT)
            assert system.ended("b", 0) == "estafet: stopped"
            assert_answered_alike(streams)
        wait_until(lambda: "host b has left" in a.said, 2, "the first host says so")
        assert a.is_ready()
        a.send(SIGINT)
        system.ended("a", 0)


def test_the_first_launcher_killed_leaves_nothing_anywhere(
    tmp_path: Path, tiny_model: str, pair: TwoHosts
) -> None:
    with system_of(pair, tmp_path, tiny_model, "health.deadline_s=1") as system:
        a, _ = system.both_ready("ba")
        a.send(SIGKILL)
        system.ended("a", -SIGKILL)
        assert "everything here was stopped" in system.ended("b", 70)


def test_another_topology_is_refused(tmp_path: Path, tiny_model: str, pair: TwoHosts) -> None:
    with system_of(pair, tmp_path, tiny_model) as system:
        a = system.start("a")
        system._settings = (*system._settings, "kv.pages=77")
        system.start("b")
        assert "its topology has other hosts, actors or pages than that of the first host" in system.ended(
            "b", 2
        )
        wait_until(lambda: "host b was refused" in a.said, 10, "the first host says so too")
        a.send(SIGINT)
        system.ended("a", 0)


def test_the_program_that_runs_both(tmp_path: Path, tiny_model: str) -> None:
    """`python -m tools.two_hosts run`, asked through `exec`, stopped by Ctrl-C."""
    if (why := cannot()) is not None:
        pytest.skip(why)
    program = [sys.executable, "-m", "tools.two_hosts"]
    settings = ("--set", tiny_model, "--run-dir", str(tmp_path / "r"))
    (tmp_path / "r").mkdir(mode=0o700)
    said = tmp_path / "said"
    with said.open("wb") as stderr:
        run = subprocess.Popen([*program, "run", "--", *settings], cwd=ROOT, stderr=stderr)
    try:
        wait_until(lambda: "[a] estafet: ready" in said.read_text(), 60, "both are ready")
        asked = subprocess.run(
            [*program, "exec", "a", "curl", "-s", "http://127.0.0.1:8000/health/ready"],
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        assert b"ready" in asked.stdout, asked.stderr
        again = subprocess.run([*program, "up"], cwd=ROOT, capture_output=True, check=False)
        assert again.returncode == 3
        assert b"still run in estafet-*; end them first" in again.stderr
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 0, said.read_text()
    finally:
        run.kill()
        run.wait()
    text = said.read_text()
    assert "[a] estafet: stopped" in text
    assert "[b] estafet: stopped" in text
    assert not list(FOLDER.glob("estafet-[ab]"))


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert two_hosts.main(["up"]) == 3
    assert "can only be made by root" in capsys.readouterr().err
