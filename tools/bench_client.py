"""The client of a serving benchmark: one streamed answer, with the time of each piece."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import trio

from tools.bench_load import BenchFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUEST_S = 300.0
"""A request that has not been answered by then has failed."""


@dataclass(slots=True)
class Outcome:
    """How one request went. Times are seconds of time.perf_counter."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    """When each piece of text came."""
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cache: dict[str, int] | None = None
    """Where the prompt's tokens came from, when `x_estafet` asked for it and somebody knows."""
    error: str = ""


class Client:
    """Asks the door; one connection a request.

    HTTP/1.0, in which a body is all that comes until the end: there is nothing to decode between
    a piece of text and its time, and the client takes as little as it can of the machine it measures.
    """

    def __init__(self, url: str, patience_s: float = REQUEST_S) -> None:
        split = urlsplit(url)
        self._patience_s = patience_s
        self._host, self._port = split.hostname or "", split.port or 80
        self.model = ""
        self.options: dict[str, object] = {"temperature": 0}

    async def get(self, path: str) -> Any:
        """The JSON at a path; BenchFailed when there is none."""
        try:
            with trio.fail_after(30):
                status, body = await self._whole(self._head("GET", path, 0))
        except (OSError, trio.TooSlowError, trio.BrokenResourceError) as error:
            raise BenchFailed(f"http://{self._host}:{self._port}{path}: {error or 'no answer'}") from error
        if status != 200:
            raise BenchFailed(f"{path}: HTTP status {status}")
        return json.loads(body)

    async def ask(self, prompt: str | list[int], output: int) -> Outcome:
        """One streamed answer to a question, or to the tokens of a prompt as they are."""
        asked = (
            {"messages": [{"role": "user", "content": prompt}]}
            if isinstance(prompt, str)
            else {"prompt": prompt}
        )
        path = "/v1/chat/completions" if isinstance(prompt, str) else "/v1/completions"
        chat = {
            "model": self.model,
            **asked,
            "max_tokens": output,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        body = json.dumps(chat).encode()
        lines: list[tuple[float, bytes]] = []
        outcome = Outcome(time.perf_counter())
        try:
            with trio.fail_after(self._patience_s):
                request = self._head("POST", path, len(body)) + body
                stream = await trio.open_tcp_stream(self._host, self._port)
                async with stream:
                    await stream.send_all(request)
                    rest = b""
                    async for data in stream:
                        now = time.perf_counter()
                        *whole, rest = (rest + data).split(b"\n")
                        lines += [(now, line) for line in whole]
                    lines.append((time.perf_counter(), rest))
        except trio.TooSlowError:
            outcome.error = f"no answer within {self._patience_s:g} s"
        except (OSError, trio.BrokenResourceError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended = time.perf_counter()
        if not outcome.error:
            read_stream(lines, outcome)
        return outcome

    def _head(self, method: str, path: str, length: int) -> bytes:
        return (
            f"{method} {path} HTTP/1.0\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {length}\r\n\r\n"
        ).encode()

    async def _whole(self, request: bytes) -> tuple[int, bytes]:
        async with await trio.open_tcp_stream(self._host, self._port) as stream:
            await stream.send_all(request)
            answer = b"".join([data async for data in stream])
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, body


def read_stream(lines: Sequence[tuple[float, bytes]], outcome: Outcome) -> None:
    """Take the lines of a response, each with its time, into an outcome that begins empty."""
    status = lines[0][1].split()[1:2]
    if status != [b"200"]:
        code = status[0].decode() if status else "nothing"
        text = lines[-1][1].decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            text = text[:200]
        outcome.error = f"HTTP {code}: {text}"
        return
    done = False
    for at, line in lines:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            done = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            outcome.error = event["error"]["message"]
            return
        if event.get("usage"):
            outcome.prompt_tokens = event["usage"]["prompt_tokens"]
            outcome.output_tokens = event["usage"]["completion_tokens"]
        if "x_estafet" in event:
            outcome.cache = event["x_estafet"]["cache"]
        if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event["choices"]):
            outcome.pieces.append(at)
    if not done:
        outcome.error = "the stream broke off before its end"
