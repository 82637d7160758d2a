"""`tools/up --ask`: one command, one answer, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from launches import CAPITAL, ROOT, wait_until

from tools import observe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.model]


class Asking:
    """`tools/up --ask` in a process of its own."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.tag = f"ESTAFET_TEST_LAUNCH={uuid.uuid4().hex}"
        name, _, value = self.tag.partition("=")
        with (base / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                ["tools/up", "--ask", CAPITAL, "--run-dir", str(base / "run")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env={**os.environ, name: value},
            )

    @property
    def said(self) -> str:
        return (self.base / "stderr").read_text(errors="replace")

    def assert_gone(self) -> None:
        """No process and no socket remains."""
        wait_until(lambda: not observe.tagged(self.tag), 2, "every process is gone")
        assert not [path for path in self.base.rglob("*") if path.is_socket() or path.name == "ready.json"]


@contextmanager
def asking(base: Path) -> Iterator[Asking]:
    asked = Asking(base)
    try:
        yield asked
    finally:
        if asked.process.poll() is None:
            asked.process.kill()
        asked.process.communicate()


def test_it_prints_the_answer_alone_and_leaves_nothing(tmp_path: Path) -> None:
    with asking(tmp_path) as asked:
        began = time.monotonic()
        answer, _ = asked.process.communicate(timeout=120)
        print(f"answered after {time.monotonic() - began:.1f} s: {answer!r}")
        assert asked.process.returncode == 0, asked.said
        assert answer == b"The capital of France is Paris.\n"
        assert "Traceback" not in asked.said
        asked.assert_gone()


def test_ctrl_c_while_it_starts_the_system_leaves_nothing(tmp_path: Path) -> None:
    with asking(tmp_path) as asked:
        wait_until(lambda: "run directory" in asked.said, 60, "the launcher runs")
        asked.process.send_signal(signal.SIGINT)
        answer, _ = asked.process.communicate(timeout=20)
        assert (answer, asked.process.returncode) == (b"", 130), asked.said
        assert "Traceback" not in asked.said
        asked.assert_gone()


def test_ctrl_c_in_mid_answer_leaves_nothing(tmp_path: Path) -> None:
    with asking(tmp_path) as asked:
        assert asked.process.stdout is not None
        assert asked.process.stdout.read(3) == b"The"
        asked.process.send_signal(signal.SIGINT)
        asked.process.communicate(timeout=20)
        assert asked.process.returncode == 130, asked.said
        assert "Traceback" not in asked.said
        asked.assert_gone()
