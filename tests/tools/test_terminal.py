"""Who writes where on a shared terminal, and what a person sees of pip."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr
from typing import TYPE_CHECKING

import pytest

from tools.pip import StatusLine, run_pip
from tools.terminal import Relay, Screen

if TYPE_CHECKING:
    from pathlib import Path


class Tty(io.StringIO):
    """Text that was written to a terminal."""

    def isatty(self) -> bool:
        return True


def test_an_answer_and_the_launchers_words_do_not_glue_together() -> None:
    terminal = Tty()
    screen = Screen(terminal, terminal)
    screen.write("I can assist you")
    screen.relay(b"estafet: a worker restarts\n")
    screen.write(", gladly")
    with redirect_stderr(terminal):
        screen.interrupted()
        screen.interrupted()
    assert terminal.getvalue().split("\n") == [
        *("I can assist you", "estafet: a worker restarts", ", gladly", "\restafet: interrupted", "")
    ]


def test_a_progress_bar_that_went_away_leaves_no_empty_line() -> None:
    terminal = Tty()
    screen = Screen(terminal, terminal)
    screen.relay(b"starting 1/2")
    screen.relay(b"\rstarting 2/2")
    screen.relay(b"\r            \r")
    screen.write("Yes.\n")
    screen.relay(b"estafet: stopped\n")
    assert terminal.getvalue() == "starting 1/2\rstarting 2/2\r            \rYes.\nestafet: stopped\n"


def test_a_file_gets_the_answer_alone() -> None:
    out, words = io.StringIO(), Tty()
    screen = Screen(out, words)
    assert not screen.is_shared
    screen.write("The")
    with redirect_stderr(words):
        screen.interrupted()
    assert (out.getvalue(), words.getvalue()) == ("The", "\restafet: interrupted\n")


def test_a_relay_passes_on_all_that_is_written_to_its_terminal() -> None:
    terminal = Tty()
    relay = Relay(Screen(terminal, terminal))
    with relay as descriptor:
        assert os.isatty(descriptor)
        os.write(descriptor, b"one\ntwo\n")
        relay.begin()
    assert terminal.getvalue() == "one\ntwo\n"


def test_the_status_line_follows_pips_log() -> None:
    line = StatusLine()
    assert line.text == "  starting pip (0 s)"
    line.feed(b"Collecting torch==2.13.0\r\n")
    assert line.text == "  looking for torch==2.13.0 (0 s)"
    line.feed(b"  Downloading https://example.org/a/torch-2.13.0%2Bcpu-cp311.whl (190 MB)\r\n\x1b[?25l\r")
    assert line.text == "  downloading torch 2.13.0+cpu (0 s)"
    line.feed(b"\x1b[2K     \xe2\x94\x81\xe2\x94\x81 20.1/190.0 MB 9.1 MB/s eta 0:00:19\r")
    assert line.text == "  downloading torch 2.13.0+cpu, 20.1/190.0 MB 9.1 MB/s eta 0:00:19 (0 s)"
    line.feed(b"Installing collected packages: mpmath, torch\r\n")
    assert line.text == "  unpacking 2 packages (0 s)"


@pytest.mark.parametrize("stderr", [io.StringIO, Tty])
def test_what_pip_complains_about_is_passed_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], stderr: type[io.StringIO]
) -> None:
    script = tmp_path / "pip.py"
    script.write_text(
        "import sys\nprint('Collecting x')\nprint('ERROR: no x', file=sys.stderr)\nsys.exit(7)\n"
    )
    shown = stderr()
    with redirect_stderr(shown):
        assert run_pip([sys.executable, str(script)], ["install", "x"]) == 7
    out, err = capfd.readouterr()
    assert (out, err) == ("", "ERROR: no x\n")
    assert ("looking for x" in shown.getvalue()) <= shown.isatty()
