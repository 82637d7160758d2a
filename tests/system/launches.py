"""Launches whole systems as a person would, and proves that nothing of them remains.

Every process of a launch inherits a tag of its own in its environment, so that /proc tells exactly
which processes are ours, orphans included.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tools import observe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

ROOT = Path(__file__).parents[2]
CAPITAL = "What is the capital of France?"
STORY = "Tell me a long story about an old lighthouse and its keeper."
READY_S = 60.0
GONE_S = 2.0
"""How long after the launcher's end anything of it may still be there."""
STOP_S = 15.0


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until the condition is true and return its value; AssertionError names what did not happen."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
    return value


class Stream:
    """One streamed answer as it comes."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        self.request_id = response.headers["x-request-id"]
        self.text = ""
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.done = False

    def read(self, deltas: int | None = None) -> str:
        """Read so many more pieces of text, or all the rest; the text so far."""
        while not self.done and self.error is None and deltas != 0:
            line = next(self._lines)
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                self.done = True
                continue
            event = json.loads(data)
            if "error" in event:
                self.error = event["error"]["message"]
                continue
            choice = event["choices"][0]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if piece := choice["delta"].get("content"):
                self.text += piece
                deltas = None if deltas is None else deltas - 1
        return self.text


class Launch:
    """One launcher and everything that came of it."""

    def __init__(
        self, base: Path, topology: str = "local", *settings: str, host: str = "", **environment: str
    ) -> None:
        """Start the launcher on a free port; `settings` are `key=value`, for --set, and `host` for --host."""
        self.base = base
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.tag = f"ESTAFET_TEST_LAUNCH={uuid.uuid4().hex}"
        name, _, value = self.tag.partition("=")
        self._errors = base / f"{value}.stderr"
        command = [sys.executable, "-m", "engine.launch", topology, "--run-dir", str(base / "r")]
        for setting in ("gateway.front.port=0", *settings):
            command += ["--set", setting]
        if host:
            command += ["--host", host]
        self._ready, writing = os.pipe()
        try:
            with self._errors.open("wb") as stderr:
                self.began = time.monotonic()
                self.process = subprocess.Popen(
                    [*command, "--ready-fd", str(writing)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(writing,),
                    cwd=ROOT,
                    env={**os.environ, **environment, name: value},
                )
        finally:
            os.close(writing)
        self.url = ""
        self.run_dir = base
        self._client: httpx.Client | None = None
        self._memory: set[int] = set()

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop it if it runs; unless the test has failed already, nothing may remain and it ended well."""
        try:
            if kind is None and self.process.poll() is None:
                assert self.stop() == 0, self.said
            if kind is None:
                self.assert_gone()
        finally:
            self._force()

    def _force(self) -> None:
        """Leave nothing behind of a test that failed."""
        if self._client is not None:
            self._client.close()
        os.close(self._ready)
        for pid in {self.process.pid} if self.process.poll() is None else set():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for pid in observe.tagged(self.tag):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # ── its life ──────────────────────────────────────────────────────────────────────────────

    def wait_ready(self, seconds: float = READY_S) -> Launch:
        """Wait for the line on --ready-fd."""
        readable, _, _ = select.select([self._ready], [], [], seconds)
        line = os.read(self._ready, 4096) if readable else b""
        assert line, f"not ready: {self.said}"
        facts = json.loads(line)
        assert facts["pid"] == self.process.pid
        self.url = facts["url"]
        self.run_dir = Path(facts["run_dir"])
        self._memory = observe.shared_memory(self.process.pid)
        self._client = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)
        return self

    def send(self, number: signal.Signals) -> None:
        """Send the launcher a signal."""
        self.process.send_signal(number)

    def wait(self, seconds: float = STOP_S) -> int:
        """The launcher's exit code."""
        return self.process.wait(seconds)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Have it stop; the exit code."""
        self.send(number)
        return self.wait()

    @property
    def said(self) -> str:
        """What the launcher wrote to stderr."""
        return self._errors.read_text(errors="replace")

    # ── its processes ─────────────────────────────────────────────────────────────────────────

    def life(self, name: str) -> observe.Life:
        """The newest incarnation of an actor that has started."""
        return observe.lives(self.run_dir)[name][-1]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> observe.Life:
        """Send the newest incarnation of an actor a signal; who that was."""
        life = self.life(name)
        os.kill(life.pid, number)
        return life

    def log(self, name: str) -> list[dict[str, Any]]:
        """The records of an actor's, or the launcher's, log."""
        return list(observe.log_lines(self.run_dir / "logs" / f"{name}.jsonl"))

    def assert_gone(self, within: float = GONE_S) -> float:
        """Nothing of the launch remains but its logs; the seconds that took."""
        assert self.process.poll() is not None, "the launcher still runs"
        began = time.monotonic()
        wait_until(lambda: not observe.tagged(self.tag), within, "every process is gone")
        wait_until(lambda: not self.leftovers(), within, "sockets and ready files are gone")
        took = time.monotonic() - began
        # The kernel takes a dying process's environment away before its descriptors.
        wait_until(lambda: not self.holders(), within, "nobody holds its shared memory")
        for path in self.base.rglob("*.jsonl"):
            lines = path.read_bytes().splitlines()
            # Only a SIGKILL in the middle of a write may cut the last one.
            assert all(isinstance(json.loads(line), dict) for line in lines[:-1]), path
        return took

    def holders(self) -> list[int]:
        """Processes that hold the launch's shared memory, whosever they are."""
        everybody = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [pid for pid in everybody if observe.shared_memory(pid) & self._memory]

    def leftovers(self) -> list[Path]:
        """Sockets and ready files under the launch's own folder."""
        return [path for path in self.base.rglob("*") if path.is_socket() or path.name in ("ready.json", "s")]

    # ── what it serves ────────────────────────────────────────────────────────────────────────

    @property
    def client(self) -> httpx.Client:
        assert self._client is not None, "not ready yet"
        return self._client

    def body(self, question: str, **parameters: Any) -> dict[str, Any]:
        """A chat request; greedy unless told otherwise."""
        messages = [{"role": "user", "content": question}]
        model = self.client.get("/v1/models").json()["data"][0]["id"]
        return {"model": model, "messages": messages, "temperature": 0, **parameters}

    def ask(self, question: str = CAPITAL, **parameters: Any) -> str:
        """The whole answer to a question."""
        response = self.client.post("/v1/chat/completions", json=self.body(question, **parameters))
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    @contextlib.contextmanager
    def stream(self, question: str = STORY, **parameters: Any) -> Iterator[Stream]:
        """An answer as it comes; leaving the block closes the connection."""
        body = self.body(question, stream=True, **parameters)
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            yield Stream(response)

    def statistics(self) -> observe.Figures:
        """What every actor last published; empty when the door is not there."""
        with contextlib.suppress(OSError, httpx.HTTPError, ValueError):
            return observe.statistics(self.url)
        return {}

    def is_ready(self) -> bool:
        """Whether /health/ready says so."""
        with contextlib.suppress(httpx.HTTPError):
            return self.client.get("/health/ready").status_code == 200
        return False

    def wait_restarted(self, before: observe.Life, name: str, seconds: float = 30.0) -> float:
        """Wait until a later incarnation of an actor serves and the system is ready; the seconds."""
        began = time.monotonic()

        def is_back() -> bool:
            return self.statistics().get(name, {}).get("epoch", 0) > before.epoch and self.is_ready()

        wait_until(is_back, seconds, f"{name} is back after epoch {before.epoch}")
        return time.monotonic() - began

    def wait_quiet(self, seconds: float = 3.0) -> None:
        """Wait until no actor holds anything of any request, and every page is free or cached."""
        deadline = time.monotonic() + seconds
        while (complaints := self.held()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not complaints, complaints

    def held(self) -> list[str]:
        """What an idle system should not hold."""
        figures = self.statistics()
        return observe.held(figures) if figures else ["the door does not answer"]
