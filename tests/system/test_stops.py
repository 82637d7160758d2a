"""However a launch ends, by signal, by force or by its own decision, it ends soon and wholly."""

from __future__ import annotations

import os
import shutil
import signal
import time
from signal import SIGINT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING

import httpx
import pytest
from gguf_files import write_tiny_gguf
from launches import GONE_S, Launch, wait_until

from engine.model import WEIGHTS
from kernels.prepare import prepare
from tools import observe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.model]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared random model that loads at once."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_gguf(folder / "tiny.gguf")
    return prepare(folder / "tiny.gguf", folder / "cache", progress=False)


def test_two_launches_at_once_and_one_of_them_killed(tmp_path: Path) -> None:
    """They share the base of their run directories and nothing else; the next launch sweeps."""
    with Launch(tmp_path, "unified") as one, Launch(tmp_path, "unified") as other:
        one.wait_ready()
        other.wait_ready()
        assert one.url != other.url
        answer = one.ask(max_tokens=10)
        assert "Paris" in answer

        one.send(SIGKILL)
        assert one.wait() == -SIGKILL
        wait_until(lambda: not observe.tagged(one.tag), GONE_S, "its actors died with it")
        wait_until(lambda: not (one.run_dir / "s").exists(), GONE_S, "its janitor removed the sockets")
        assert not (one.run_dir / "ready.json").exists()

        assert other.is_ready()
        assert other.ask(max_tokens=10) == answer
        assert (other.run_dir / "ready.json").exists()
        assert other.stop(SIGINT) == 0


def test_the_next_launch_sweeps_what_nobody_was_left_to_remove(tmp_path: Path, tiny_folder: Path) -> None:
    """The launcher and its janitor die together, as with the machine."""
    setting = f'model.path="{tiny_folder}"'
    first = Launch(tmp_path, "unified", setting).wait_ready()
    first.send(signal.SIGSTOP)
    for pid in observe.tagged(first.tag) - {first.process.pid}:
        os.kill(pid, SIGKILL)
    first.send(SIGKILL)
    first.wait()
    assert first.leftovers(), "nobody was left to remove them"
    with Launch(tmp_path, "unified", setting) as second:
        second.wait_ready()
        assert not (first.run_dir / "s").exists()
        assert not (first.run_dir / "ready.json").exists()
        assert (first.run_dir / "logs" / "launcher.jsonl").exists()
    with first:
        first.assert_gone()


def test_a_launcher_killed_in_mid_stream_takes_everything_along(tmp_path: Path) -> None:
    with Launch(tmp_path, "unified") as launch:
        launch.wait_ready()
        with launch.stream(max_tokens=400) as stream:
            stream.read(3)
            launch.send(SIGKILL)
            with pytest.raises(httpx.TransportError):
                stream.read()
        assert launch.wait() == -SIGKILL
        print(f"gone {launch.assert_gone():.2f} s after SIGKILL")


def test_a_stream_may_end_within_the_drain_time(tmp_path: Path) -> None:
    """SIGTERM in mid-stream: the answer is completed, new ones are refused, the exit code is 0."""
    with Launch(tmp_path, "unified", "launch.drain_s=30") as launch:
        launch.wait_ready()
        with launch.stream(max_tokens=20) as stream:
            stream.read(3)
            launch.send(SIGTERM)
            wait_until(lambda: not launch.is_ready(), 3, "it drains")
            refused = launch.client.post("/v1/chat/completions", json=launch.body("Hello", max_tokens=3))
            assert refused.status_code == 503
            stream.read()
        assert (stream.done, stream.finish_reason, stream.error) == (True, "length", None)
        assert launch.wait() == 0


def test_a_stream_that_is_too_long_to_drain_ends_with_an_error_event(tmp_path: Path) -> None:
    drain_s = 3.0
    with Launch(tmp_path, "unified", f"launch.drain_s={drain_s}") as launch:
        launch.wait_ready()
        with launch.stream(max_tokens=4000) as stream:
            stream.read(3)
            began = time.monotonic()
            launch.send(SIGINT)
            stream.read()
        assert stream.finish_reason is None
        assert stream.error == "the server shut down before the answer was complete"
        assert launch.wait() == 0
        took = time.monotonic() - began
        print(f"stopped {took:.2f} s after SIGINT, drain_s = {drain_s}")
        assert took < drain_s + 1.0


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with Launch(tmp_path, "unified", "launch.drain_s=60") as launch:
        launch.wait_ready()
        with launch.stream(max_tokens=4000) as stream:
            stream.read(3)
            launch.send(SIGINT)
            wait_until(lambda: "draining" in launch.said, 3, "it drains")
            began = time.monotonic()
            launch.send(SIGINT)
            stream.read()
        assert stream.error is not None
        assert launch.wait() == 0
        print(f"stopped {time.monotonic() - began:.2f} s after the second SIGINT")
        assert time.monotonic() - began < 4.0


MOMENTS: dict[str, Callable[[Launch], object]] = {
    "imports": lambda launch: catches(launch.process.pid, SIGTERM),
    "run directory": lambda launch: "run directory" in launch.said,
    "first process": lambda launch: len(observe.tagged(launch.tag)) >= 3,
    "first actor": lambda launch: seen(launch, "actor_started"),
    "first ready": lambda launch: seen(launch, "actor_ready"),
    "backend": lambda launch: seen(launch, "backend_opened"),
}


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal: our launcher's first deed."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        mask = next(line.split()[1] for line in status if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def seen(launch: Launch, event: str) -> bool:
    """Whether any actor has logged this event."""
    return any(event in path.read_text() for path in launch.base.rglob("logs/*.jsonl"))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [SIGINT, SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_it_starts(
    tmp_path: Path, tiny_folder: Path, moment: str, number: signal.Signals
) -> None:
    with Launch(tmp_path, "unified", f'model.path="{tiny_folder}"') as launch:
        wait_until(lambda: MOMENTS[moment](launch), 20, moment)
        began = time.monotonic()
        launch.send(number)
        assert launch.wait() == 0, launch.said
        print(f"gone {time.monotonic() - began:.2f} s after {number.name}: {launch.said.splitlines()[-1:]}")
        assert "Traceback" not in launch.said
        # Before the imports are done it has nothing to say.
        assert launch.said == "" or launch.said.splitlines()[-1].startswith("estafet: ")


@pytest.mark.parametrize("moment", ["run directory", "first process", "first actor", "backend"])
def test_a_launcher_killed_while_it_starts(tmp_path: Path, tiny_folder: Path, moment: str) -> None:
    """Children that have not yet asked to die with it look whether it is there."""
    with Launch(tmp_path, "unified", f'model.path="{tiny_folder}"') as launch:
        wait_until(lambda: MOMENTS[moment](launch), 20, moment)
        launch.send(SIGKILL)
        assert launch.wait() == -SIGKILL
        print(f"gone {launch.assert_gone():.2f} s after SIGKILL")


def test_a_shower_of_signals(tmp_path: Path, tiny_folder: Path) -> None:
    """Impatience does not cut the cleaning up short."""
    with Launch(tmp_path, "unified", f'model.path="{tiny_folder}"') as launch:
        launch.wait_ready()
        while launch.process.poll() is None:
            launch.send(SIGINT)
            launch.send(SIGTERM)
            time.sleep(0.001)
        assert launch.wait() == 0, launch.said
        assert "Traceback" not in launch.said


def test_an_actor_that_cannot_start_again_ends_the_launch(tmp_path: Path, tiny_folder: Path) -> None:
    """Field report 19: a crashed child never leaves the parent exiting 0."""
    source = tiny_folder.parents[1] / "tiny.gguf"
    folder = prepare(source, tmp_path / "cache", progress=False)
    with Launch(tmp_path, "unified", f'model.path="{folder}"') as launch:
        launch.wait_ready()
        # What the worker maps, and what that is made of.
        shutil.rmtree(folder / "packed")
        (folder / WEIGHTS).unlink()
        launch.kill("both")
        assert launch.wait() == 3
        last = launch.said.splitlines()[-1]
        assert WEIGHTS in last
        assert "Traceback" not in launch.said


def test_an_actor_that_keeps_dying_ends_the_launch(tmp_path: Path, tiny_folder: Path) -> None:
    settings = (f'model.path="{tiny_folder}"', "launch.restart_attempts=2")
    with Launch(tmp_path, "unified", *settings) as launch:
        launch.wait_ready()
        launch.wait_restarted(launch.kill("scheduler"), "scheduler")
        launch.kill("scheduler")
        assert launch.wait() == 70
        assert "scheduler@2 was ended by signal 9" in launch.said.splitlines()[-1]
