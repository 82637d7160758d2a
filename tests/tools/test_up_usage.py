"""What `tools/up` and `tools.ask` say to a wrong command line or a Ctrl-C, before anything is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools import quickstart
from tools.ask import main as ask_main
from tools.interrupts import guarded

ROOT = Path(__file__).parents[2]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "Installer", None)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["two-decode"], "'two-decode': for a topology, --topology two-decode"),
        (["--port", "9000"], "'--port': for a port, --set gateway.front.port=9000"),
        (["--port=9001"], "for a port, --set gateway.front.port=9001"),
        (["What is the capital?"], "for a question, --ask"),
        (["--nonsense"], "tools/up --help"),
        (["--ask", " "], "the question is empty"),
        (["--ask", "x", "--check"], "--check starts nothing"),
        (["--topology", "none"], "none: no such topology file; those that ship are: local"),
    ],
)
def test_what_up_does_not_know_it_says_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quickstart.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("estafet: ")
    assert err.count("\n") == 1
    assert said in err


def test_the_default_model_is_fetched_only_for_a_system_that_takes_it(tmp_path: Path) -> None:
    own, bare = tmp_path / "own.toml", tmp_path / "bare.toml"
    own.write_text('[model]\npath = "/models/own.gguf"\n')
    bare.write_text("[worker.w]\n")
    takes = quickstart._takes_default_model
    assert takes("local", [])
    assert takes(str(bare), ["launch.log_level=debug"])
    assert takes(str(own), ["model.path=default"])
    assert not takes(str(own), [])
    assert not takes("local", ["model.path=/models/own.gguf"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topology", "local", ""], "the question is empty"),
        (["--topology", "local", "--max-tokens", "0", "x"], "'0' is not a number of tokens"),
        (["--topology", "local", "--temperature", "3", "x"], "'3' is not a number from 0 to 2"),
        (["--url", "https://127.0.0.1:8000", "x"], "is no address such as http://"),
        (["--url", "http://", "x"], "is no address such as http://"),
        (["--url", "127.0.0.1:port", "x"], "is no address such as http://"),
    ],
)
def test_ask_checks_before_it_starts_anything(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        ask_main(arguments)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_a_url_needs_no_scheme_and_a_refusal_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask_main(["--url", "127.0.0.1:1", "x"]) == 1
    assert "http://127.0.0.1:1: nobody listens there; is it running? `tools/up`" in capsys.readouterr().err


def test_a_python_that_cannot_be_used_is_named() -> None:
    environment = {**os.environ, "PYTHON": "/none such"}
    up = subprocess.run(
        ["tools/up", "--help"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (up.returncode, up.stdout) == (3, "")
    assert up.stderr.startswith("estafet: PYTHON=/none such is no Python 3.11")
    assert up.stderr.count("\n") == 1


FAKE_PIP = """\
import sys, time
print("up", file=sys.stderr, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("Traceback: half of pip", file=sys.stderr)
"""
INTERRUPTED = """\
import sys
from tools import interrupts
interrupts.at_once()
from tools.pip import run_pip
sys.exit(interrupts.guarded(lambda: run_pip([sys.executable, "-c", sys.argv[1]], ["install"])))
"""


def test_ctrl_c_while_pip_runs_is_one_line() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, FAKE_PIP], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "estafet: interrupted\n"
    assert process.returncode == 130


def test_ctrl_c_while_it_imports_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text(
        "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nsys.exit('it went on')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for module in ("tools.fetch", "tools.ask"):
        ran = subprocess.run(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (130, "estafet: interrupted\n")


def test_sigterm_lets_a_program_tidy_up() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit) as left:
            guarded(lambda: os.kill(os.getpid(), signal.SIGTERM) or 0)
        assert left.value.code == 143
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
