"""Asking a system, and starting one for it: a scripted launcher stands in for the real one."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.ask import NoAnswer, ask, main
from tools.system import SystemFailed, launch_command, running_system

ROOT = Path(__file__).parents[2]
LAUNCHER = """\
import http.server, json, os, signal, sys
mode, ready = sys.argv[1], int(sys.argv[3])
assert sys.argv[2] == "--ready-fd"
if mode.startswith("exit"):
    sys.exit(int(mode[4:]))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, json.dumps({"data": [{"id": "m"}]}).encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if mode == "refuse":
            return self.answer(429, json.dumps({"error": {"message": "too many"}}).encode())
        texts = ["You asked: ", asked["messages"][0]["content"]]
        events = [{"choices": [{"delta": {"content": text}}]} for text in texts]
        if mode == "fail":
            events.append({"error": {"message": "no pages"}})
        data = b"".join(b"data: %b\\n\\n" % json.dumps(event).encode() for event in events)
        self.answer(200, data + (b"" if mode == "cut" else b"data: [DONE]\\n\\n"))
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
asked = 0
def stop(*_):
    global asked
    asked += 1
    print("asked to stop", flush=True)
    if mode == "slow" and asked < 2:
        return
    print("stopped", flush=True)
    os._exit(9 if mode == "dirty" else 0)

signal.signal(signal.SIGTERM, stop)
with os.fdopen(ready, "w") as ready:
    print(json.dumps({"url": f"http://127.0.0.1:{server.server_port}", "run_dir": "/run"}), file=ready)
server.serve_forever()
"""


def launcher(mode: str) -> list[str]:
    return [sys.executable, "-c", LAUNCHER, mode]


def test_the_answer_alone_goes_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with running_system(launcher("ok")) as system:
        assert system.run_dir == "/run"
        assert main(["--url", system.url, "Why?"]) == 0
    out, err = capfd.readouterr()
    assert out == "You asked: Why?\n"
    assert "stopped" in err


@pytest.mark.parametrize(
    ("mode", "message"), [("refuse", "too many"), ("fail", "no pages"), ("cut", "broke off")]
)
def test_what_went_wrong_is_said(mode: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with running_system(launcher(mode)) as system:
        with pytest.raises(NoAnswer, match=message):
            ask(system.url, "Why?", io.StringIO())
        assert main(["--url", system.url, "Why?"]) == 1
    assert message in capfd.readouterr().err
    assert main(["--url", system.url, "Why?"]) == 1, "nobody is there any more"


@pytest.mark.parametrize(("code", "given"), [(2, 2), (3, 3), (70, 3), (0, 3)])
def test_a_system_that_does_not_start(code: int, given: int) -> None:
    with (
        pytest.raises(SystemFailed, match="could not be started") as failed,
        running_system(launcher(f"exit{code}")),
    ):
        pytest.fail("it started")
    assert failed.value.code == given


def test_a_system_that_does_not_stop_cleanly() -> None:
    with pytest.raises(SystemFailed, match=r"exit code 9\b") as failed, running_system(launcher("dirty")):
        pass
    assert failed.value.code == 70


def test_every_gateway_of_the_topology_gets_a_free_port(tmp_path: Path) -> None:
    topology = tmp_path / "two.toml"
    topology.write_text("[gateway.a]\nport = 1\n[gateway.b]\n[worker.w]\n")
    _, *arguments = launch_command(str(topology), ["--set", "gateway.b.port=2"])
    assert arguments[2:] == [
        *(str(topology), "--set", "gateway.a.port=0", "--set", "gateway.b.port=0"),
        *("--set", "gateway.b.port=2"),
    ]
    assert "gateway.front.port=0" in launch_command("local", [])
    assert launch_command(str(tmp_path / "none.toml"), [])[3:] == [str(tmp_path / "none.toml")]


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_behind(kill: signal.Signals) -> None:
    script = f"""\
import signal, sys
from tools.interrupts import leave_in_order
from tools.system import running_system
signal.signal(signal.SIGTERM, leave_in_order)
with running_system({launcher("ok")!r}):
    print("ready", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as asker:
        assert asker.stdout is not None
        assert asker.stderr is not None
        assert asker.stdout.readline() == b"ready\n"
        os.kill(asker.pid, kill)
        # The launcher writes to our stderr pipe: it ends when both are gone.
        assert b"stopped" in asker.stderr.read()
    assert asker.returncode != 0


def test_a_second_ctrl_c_is_passed_on_and_kills_nothing() -> None:
    script = f"""\
import sys
from tools import interrupts
from tools.system import running_system
def main():
    with running_system({launcher("slow")!r}):
        print("ready", flush=True)
        sys.stdin.read()
sys.exit(interrupts.guarded(main))
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as asker:
        assert asker.stdout is not None
        assert asker.stderr is not None
        assert asker.stdout.readline() == b"ready\n"
        os.kill(asker.pid, signal.SIGINT)
        said = asker.stderr.readline().splitlines()
        os.kill(asker.pid, signal.SIGINT)
        said += asker.stderr.read().splitlines()
    assert said == [b"asked to stop", b"asked to stop", b"stopped", b"estafet: interrupted"]
    assert asker.returncode == 130
