"""The client that comes back: what it does when a server breaks off, refuses or says nothing."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tools.resuming import ResumingStream, StreamLost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HEAD = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\nretry: 500\n\n"
DONE = b"data: [DONE]\n\n"


def event(text: str, number: int) -> bytes:
    data = json.dumps({"choices": [{"delta": {"content": text}}]})
    return f"id: r/{number}\ndata: {data}\n\n".encode()


@contextmanager
def server(*answers: bytes) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Answers one connection after the other, then no more; the headers of every request."""
    asked: list[dict[str, str]] = []

    def serve(listener: socket.socket, answers: Sequence[bytes]) -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as stream:
                lines = iter(stream.readline, b"\r\n")
                headers = dict(line.decode().strip().split(": ", 1) for line in list(lines)[1:])
                stream.read(int(headers["Content-Length"]))
                asked.append({name.lower(): value for name, value in headers.items()})
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener, answers))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        thread.join()


def test_it_goes_on_behind_its_last_whole_event() -> None:
    first = HEAD + event("one ", 1) + event("two ", 2) + event("cut", 3)[:-9]
    with server(b"", first, HEAD + event("three", 3) + DONE) as (url, asked):
        stream = ResumingStream(url, {"messages": []})
        assert stream.read() == "one two three"
    assert [headers.get("last-event-id") for headers in asked] == [None, None, "r/2"]
    assert all(headers["x-estafet-resumable"] == "true" for headers in asked)
    assert stream.resumed == 1


def test_a_full_queue_is_asked_again_and_a_lost_stream_is_not() -> None:
    full = b"HTTP/1.0 429 Full\r\n\r\n{}"
    lost = b"HTTP/1.0 404 No\r\n\r\nnot kept"
    with (
        server(full, HEAD + event("x", 1), lost) as (url, _),
        pytest.raises(StreamLost, match="HTTP 404: not kept"),
    ):
        ResumingStream(url, {}).read()


def test_an_error_in_the_stream_is_its_end() -> None:
    failed = b'data: {"error": {"message": "it failed"}}\n\n'
    with server(HEAD + event("x", 1) + failed) as (url, _), pytest.raises(StreamLost, match="it failed"):
        ResumingStream(url, {}).read()


def test_patience_has_an_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(StreamLost, match=r"no progress within 0\.1 s"):
        ResumingStream(url, {}, patience_s=0.1).read()
