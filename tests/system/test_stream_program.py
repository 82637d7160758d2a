"""Streams over WebSockets to a real system: cut, resumed and killed, they tell exactly the same text."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from launches import ROOT, STORY, Launch, wait_until
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from engine.transcript import tail_hash

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.model]

ASKED = {"max_tokens": 30, "temperature": 0.8, "seed": 7, "n": 2}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """One system for all: it has to survive every test."""
    settings = ("launch.restart_attempts=1000", "launch.restart_most_s=0.2", "health.deadline_s=1.0")
    with Launch(tmp_path_factory.mktemp("streams"), "local", *settings) as launch:
        yield launch.wait_ready()


@pytest.fixture(scope="module")
def undisturbed(launch: Launch) -> list[str]:
    """What both choices say when nothing happens, over plain HTTP."""
    response = launch.client.post("/v1/chat/completions", json=launch.body(STORY, **ASKED))
    assert response.status_code == 200, response.text
    texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert len(set(texts)) == 2
    return texts


class Reader:
    """One request, read over as many connections as it takes."""

    def __init__(self, launch: Launch) -> None:
        self._body = launch.body(STORY, **ASKED)
        self._url = launch.url.replace("http://", "ws://").removesuffix("/v1") + "/v1/stream"
        self.request = ""
        self.texts = ["", ""]
        self.sequences = [0, 0]
        self.reasons = ["", ""]
        self.error: dict[str, Any] | None = None
        self.socket: ClientConnection | None = None

    def connect(self) -> ClientConnection:
        """A new connection; the gateway may be starting."""

        def try_to() -> ClientConnection | None:
            with contextlib.suppress(OSError, WebSocketException):
                return connect(self._url, proxy=None, open_timeout=10)
            return None

        self.socket = wait_until(try_to, 30, "a connection")
        return self.socket

    def create(self, **envelope: Any) -> None:
        self.say(type="create", stream="s", endpoint="chat", body=self._body, **envelope)

    def resume(self) -> None:
        positions = [
            {"sequence": sequence, "tail": tail_hash(text)}
            for sequence, text in zip(self.sequences, self.texts, strict=True)
        ]
        self.say(type="resume", stream="s", request=self.request, positions=positions)

    def say(self, **message: Any) -> None:
        self.connect().send(json.dumps(message))

    def read(self, deltas: int | None = None) -> None:
        """Read so many deltas, or up to the terminal message."""
        assert self.socket is not None
        while deltas != 0:
            message = json.loads(self.socket.recv(timeout=60))
            choice = message.get("choice", 0)
            match message["type"]:
                case "opened":
                    self.request = message["request"]
                case "delta":
                    self.texts[choice] += message["text"]
                    self.sequences[choice] = message["sequence"]
                    deltas = None if deltas is None else deltas - 1
                case "end":
                    self.reasons[choice] = message["reason"]
                    if message.get("done"):
                        return
                case _:
                    self.error = message["error"]
                    return

    def cut(self) -> None:
        """Lose the connection without a word."""
        assert self.socket is not None
        self.socket.socket.shutdown(socket.SHUT_RDWR)


def test_the_example_for_people_works(launch: Launch) -> None:
    section = (
        (ROOT / "actors" / "doors" / "README.md")
        .read_text()
        .partition("## Streams over WebSocket and ZeroMQ")[2]
    )
    example = section.partition("```python\n")[2].partition("```")[0]
    host = launch.url.removeprefix("http://").removesuffix("/v1")
    example = example.replace("127.0.0.1:8000", host)
    said = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=True, env={}
    )
    assert "Paris" in said.stdout


def test_a_stream_says_what_http_says(launch: Launch, undisturbed: list[str]) -> None:
    reader = Reader(launch)
    reader.create()
    reader.read()
    assert reader.texts == undisturbed
    assert set(reader.reasons) <= {"stop", "length"}


@pytest.mark.parametrize("deltas", [1, 25])
def test_a_cut_connection_loses_nothing(launch: Launch, undisturbed: list[str], deltas: int) -> None:
    reader = Reader(launch)
    reader.create()
    reader.read(deltas)
    reader.cut()
    reader.resume()
    reader.read()
    assert reader.error is None
    assert reader.texts == undisturbed


def test_a_connection_that_looks_alive_is_taken_over(launch: Launch, undisturbed: list[str]) -> None:
    reader, old = Reader(launch), Reader(launch)
    reader.create()
    reader.read(5)
    old.socket, reader.socket = reader.socket, None
    reader.resume()
    reader.read()
    assert reader.texts == undisturbed
    old.read()
    assert old.error is not None
    assert old.error["code"] == "superseded"


@pytest.mark.parametrize("deltas", [1, 25])
def test_a_killed_gateway_loses_nothing(launch: Launch, undisturbed: list[str], deltas: int) -> None:
    reader = Reader(launch)
    reader.create()
    reader.read(deltas)
    killed = launch.kill("front")
    with pytest.raises(ConnectionClosed):
        # What was under way may still come.
        reader.read(1000)
    reader.resume()
    reader.read()
    assert reader.error is None
    assert reader.texts == undisturbed
    launch.wait_restarted(killed, "front")


def test_asking_again_with_its_key_after_a_kill_makes_no_second_request(
    launch: Launch, undisturbed: list[str]
) -> None:
    key = uuid.uuid4().hex
    first, second = Reader(launch), Reader(launch)
    first.create(key=key)
    first.read(3)
    killed = launch.kill("front")
    second.create(key=key)
    second.read()
    assert second.request == first.request
    assert second.texts == undisturbed
    launch.wait_restarted(killed, "front")


def test_a_cancelled_stream_frees_everything(launch: Launch) -> None:
    reader = Reader(launch)
    reader.create()
    reader.read(3)
    assert reader.socket is not None
    reader.socket.send(json.dumps({"type": "cancel", "stream": "s"}))
    reader.read()
    assert reader.reasons == ["cancelled", "cancelled"]
    launch.wait_quiet()


def test_a_tail_that_is_not_what_was_sent_is_refused(launch: Launch) -> None:
    reader = Reader(launch)
    reader.create()
    reader.read(3)
    reader.cut()
    reader.texts = ["something", "else"]
    reader.resume()
    reader.read()
    assert reader.error is not None
    assert reader.error["code"] == "diverged"
