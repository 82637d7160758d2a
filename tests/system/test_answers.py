"""Every topology that ships answers, and answers the same."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from launches import CAPITAL, STORY, Launch, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.model]

SETUPS = {
    "local": ("local",),
    "unified": ("unified",),
    "two-decode": ("two-decode",),
    "local-tcp": ("local", 'launch.link="tcp"'),
}


@pytest.fixture(scope="module")
def dreams() -> dict[str, str]:
    """What each setup sampled, for comparison with the others."""
    return {}


@pytest.mark.parametrize("setup", SETUPS)
def test_every_topology_gives_the_same_answers(
    setup: str, tmp_path: Path, model_folder: Path, dreams: dict[str, str]
) -> None:
    with Launch(tmp_path, *SETUPS[setup]) as launch:
        launch.wait_ready()
        whole = launch.ask(CAPITAL)
        assert "Paris" in whole
        with launch.stream(CAPITAL) as stream:
            assert stream.read() == whole
        assert (stream.done, stream.finish_reason) == (True, "stop")

        sampled = {"temperature": 1, "seed": 7, "max_tokens": 8}
        dream = launch.ask(STORY, **sampled)
        with launch.stream(STORY, **sampled) as stream:
            assert stream.read() == dream
        assert stream.finish_reason == "length"
        assert launch.ask(STORY, **{**sampled, "seed": 8}) != dream
        dreams[setup] = dream
        assert set(dreams.values()) == {dream}, "the topology shows in what is sampled"

        if setup == "local-tcp":
            sockets = [path.name for path in launch.base.rglob("*") if path.is_socket()]
            assert sockets == ["front.zmq"], "clients on this host, and no actor"
        launch.wait_quiet()


def test_another_decode_worker_goes_on_at_once(tmp_path: Path) -> None:
    """With two of them, nobody waits for the dead one to come back."""
    with Launch(tmp_path, "two-decode") as launch:
        launch.wait_ready()
        whole = launch.ask(STORY, max_tokens=300)
        with launch.stream(STORY, max_tokens=300) as stream:
            stream.read(3)

            def working() -> set[str]:
                """The decode workers that tell of a sequence."""
                return {name for name, of in launch.statistics().items() if of.get("sequences_decode")}

            (dead,) = wait_until(working, 5, "a worker tells of the sequence")
            killed = launch.kill(dead)
            began = time.monotonic()
            wait_until(lambda: working() - {dead}, 5, "the other one goes on with it")
            gap_s = time.monotonic() - began
            assert launch.statistics()[dead]["epoch"] == killed.epoch, "it waited for the restart"
            assert stream.read() == whole
        print(f"{dead} killed in mid-stream: the other one told of the sequence {gap_s:.2f} s later")
        launch.wait_restarted(killed, dead)
        launch.wait_quiet()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a core each needs two cores")
def test_a_pinned_decode_worker_has_its_core_for_itself(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    settings = [f"worker.prefill.cores=[{first}]", f"worker.decode.cores=[{second}]"]
    with Launch(tmp_path, "local", *settings) as launch:
        launch.wait_ready()
        actors = ("health", "allocator", "scheduler", "replicator", "front", "prefill", "decode")
        cores = {name: os.sched_getaffinity(launch.life(name).pid) for name in actors}
        assert cores.pop("decode") == {second}
        assert cores.pop("prefill") == {first}
        assert all(second not in on for on in cores.values()), cores
        assert "Paris" in launch.ask(max_tokens=10)
        killed = launch.kill("decode")
        launch.wait_restarted(killed, "decode")
        assert os.sched_getaffinity(launch.life("decode").pid) == {second}
