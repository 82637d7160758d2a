"""What must not decide whether anybody lives: logs, nested garbage, janitors, late children, many clients."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from actors.doors.http_server import ServerLimits, serve_app
from actors.logs import LossyStream
from actors.processes import _last_line, _open_errors
from actors.rundir import LOGS, READY, SOCKETS, RunDir
from transport.frames import MALFORMED, ProtocolError, decode_frame

if TYPE_CHECKING:
    from pathlib import Path

DEEP = b"\x91" * 5000 + b"\xc0"


@pytest.mark.parametrize(
    "head", [b"\x97\x01\xa1x\x00\x00\x01\x00", b"\x97\x02", b"\x98\x01\xa1x\x00\x00\x01\x00\xc0"]
)
def test_frames_nested_thousands_deep_are_refused(head: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_frame(head + DEEP)
    with pytest.raises(MALFORMED):
        msgspec.msgpack.decode(DEEP)


def test_a_log_that_cannot_be_written_costs_its_lines_only(tmp_path: Path) -> None:
    stream = LossyStream(tmp_path / "gone" / "log.jsonl")
    assert stream.write(b"lost\n") == 5
    assert stream.lost == 1
    (tmp_path / "gone").mkdir()
    stream.write(b"kept\n")
    stream.close()
    assert (tmp_path / "gone" / "log.jsonl").read_bytes() == b"kept\n"
    full = LossyStream(tmp_path / "full")
    (tmp_path / "full").symlink_to("/dev/full")
    assert full.write(b"x\n") == 2
    assert full.lost == 1
    full.close()


def test_a_lost_log_folder_does_not_keep_a_child_from_starting_or_ending(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "decode.stderr"
    with _open_errors(path) as stream:
        stream.write(b"nowhere")
    assert _last_line(path, 0) == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_launch_ends_cleanly_without_its_janitor(tmp_path: Path, number: signal.Signals) -> None:
    run = RunDir.create(tmp_path, "test")
    (run.path / SOCKETS / "a.1").touch()
    (run.path / READY).touch()
    (run.path / LOGS / "a.jsonl").touch()
    os.kill(run._janitor.pid, number)
    began = time.monotonic()
    run.close()
    assert time.monotonic() - began < 10
    assert sorted(path.name for path in run.path.iterdir()) == ["lock", LOGS]
    assert run._janitor.returncode is not None


def test_a_run_directory_that_somebody_removed_is_closed_all_the_same(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "test")
    subprocess.run([sys.executable, "-c", f"import shutil; shutil.rmtree({str(run.path)!r})"], check=True)
    run.close()


async def test_clients_cannot_take_the_descriptors_that_the_actor_needs() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    shutdown = trio.Event()
    with trio.fail_after(20), listening:
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                await serve_app(
                    _never,  # type: ignore[arg-type]
                    listener_fd=listening.fileno(),
                    shutdown=shutdown,
                    limits=ServerLimits(grace_s=0.1, connections=20),
                    max_message_bytes=1000,
                )

            nursery.start_soon(serve)
            port = listening.getsockname()[1]
            streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(25)]
            refused = 0
            for stream in streams[20:]:
                try:
                    refused += await stream.receive_some(1) == b""
                except trio.BrokenResourceError:
                    refused += 1
            assert refused == 5
            shutdown.set()
        for stream in streams:
            await stream.aclose()


async def _never(*_: object) -> None:
    raise AssertionError("nobody sent a request")
