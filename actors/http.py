"""The HTTP door: OpenAI's chat API and health, over whatever stands behind `Sessions`.

    POST /v1/chat/completions    whole or streamed
    GET  /v1/models[/ID]         the served model
    GET  /health/live            the process answers
    GET  /health/ready           a token could be produced now
    GET  /statistics             what every actor last published of itself
    GET  /metrics                the same and more for Prometheus

Plain ASGI: there are few routes, and a framework between a token and its socket costs more than
it gives. A client that goes away, or shuts its sending side down, cancels its session at once.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
import trio

from actors.answers import ChatAnswer
from actors.http_reply import Client, Receive, Reply, Send, server_error
from actors.http_server import ServerLimits, serve_app
from actors.metrics import CONTENT_TYPE
from actors.openai import ApiError, ChatRequest, Model, ModelList, parse_chat
from actors.sessions import Draining, Generation, QueueFull, Refused
from engine.chat_template import TemplateError

if TYPE_CHECKING:
    from actors.sessions import Sessions

Scope = MutableMapping[str, Any]

log = structlog.get_logger()

MAX_BODY_BYTES = 4 * 2**20
_THREAD_CHARS = 16 * 2**10
"""Longer conversations are tokenised in a thread."""
_BODY_S = 60.0
"""How long a body may take to arrive."""


async def serve_http(
    sessions: Sessions,
    *,
    listener_fd: int,
    shutdown: trio.Event,
    max_body_bytes: int = MAX_BODY_BYTES,
    limits: ServerLimits | None = None,
) -> None:
    """Serve the door on a bound socket (which stays the caller's) until `shutdown` is set."""
    door = HttpDoor(sessions, max_body_bytes=max_body_bytes)
    log.info("http_door_opened")
    await serve_app(
        door,  # type: ignore[arg-type]  # hypercorn types messages one by one, ASGI calls them mappings
        listener_fd=listener_fd,
        shutdown=shutdown,
        limits=limits or ServerLimits(),
    )
    log.info("http_door_closed")


class HttpDoor:
    """The ASGI application."""

    def __init__(self, sessions: Sessions, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._sessions = sessions
        self._max_body_bytes = max_body_bytes
        self._tokenising = trio.CapacityLimiter(1)
        self._model = Model(sessions.model.name, created=int(time.time()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000, "reason": None})
            return
        client = Client(receive, send)
        try:
            await self._route(scope, client)
        except ApiError as refusal:
            error = refusal.body.error
            log.info("http_request_refused", status=refusal.status, code=error.code, param=error.param)
            await client.send_json(refusal.status, refusal.body, refusal.headers)
        except Exception:
            log.exception("http_request_failed")
            await client.send_json(500, server_error("The request failed inside the server."))

    async def _route(self, scope: Scope, client: Client) -> None:
        path: str = scope["path"]
        method: str = scope["method"]
        model_id = path.removeprefix("/v1/models/") if path.startswith("/v1/models/") else None
        if path == "/v1/chat/completions":
            _allow(method, "POST")
            await self._chat(scope, client)
        elif path == "/v1/models":
            _allow(method, "GET", "HEAD")
            await client.send_json(200, ModelList([self._model]))
        elif model_id is not None:
            _allow(method, "GET", "HEAD")
            if model_id != self._model.id:
                raise ApiError(
                    404,
                    f"The model {model_id[:200]!r} does not exist.",
                    param="model",
                    code="model_not_found",
                )
            await client.send_json(200, self._model)
        elif path == "/health/live":
            _allow(method, "GET", "HEAD")
            await client.send_json(200, {"status": "live"})
        elif path == "/health/ready":
            _allow(method, "GET", "HEAD")
            reason = self._sessions.not_ready()
            if reason is None:
                await client.send_json(200, {"status": "ready"})
            else:
                await client.send_json(503, {"status": "not ready", "reason": reason})
        elif path == "/statistics":
            _allow(method, "GET", "HEAD")
            await client.send_json(200, self._sessions.system_statistics())
        elif path == "/metrics":
            _allow(method, "GET", "HEAD")
            await client.send_whole(200, self._sessions.render_metrics(), CONTENT_TYPE)
        else:
            raise ApiError(404, f"There is nothing at {method} {path[:200]}.", code="unknown_url")

    async def _chat(self, scope: Scope, client: Client) -> None:
        body = await self._body(scope, client)
        if body is None:
            return
        request = parse_chat(body, model=self._model.id, vocab_size=self._sessions.model.vocab_size)
        generation = await self._generation(request)
        try:
            session = self._sessions.open(generation)
        except QueueFull as refusal:
            raise ApiError(
                429,
                f"Too many requests are open{_because(refusal)}; try again later.",
                kind="rate_limit_error",
                code="queue_full",
                headers=((b"retry-after", b"1"),),
            ) from None
        except Draining as refusal:
            message = f"The server is shutting down{_because(refusal)}."
            raise ApiError(503, message, kind="server_error", code="draining") from None
        except Refused as refusal:
            raise ApiError(503, f"The request was refused{_because(refusal)}.", kind="server_error") from None
        answer = ChatAnswer(
            session.request_id,
            self._sessions.model,
            self._sessions.text,
            generation,
            include_usage=request.include_usage,
        )
        reply = Reply(session, client, answer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.watch, session)
            await reply.run(stream=request.stream)
            nursery.cancel_scope.cancel()

    async def _body(self, scope: Scope, client: Client) -> bytes | None:
        """The request's body, or None when the client went away before it was complete."""
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            # A browser sends other types across sites without asking first.
            raise ApiError(415, "The body must come with the header 'Content-Type: application/json'.")
        too_large = ApiError(
            413, f"The body is larger than {self._max_body_bytes} bytes.", code="request_too_large"
        )
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self._max_body_bytes:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            with trio.fail_after(_BODY_S):
                while data := await client.receive_body():
                    size += len(data)
                    if size > self._max_body_bytes:
                        raise too_large
                    parts.append(data)
        except trio.TooSlowError:
            raise ApiError(408, f"The body did not arrive within {_BODY_S:g} s.") from None
        return None if client.gone else b"".join(parts)

    async def _generation(self, request: ChatRequest) -> Generation:
        """Tokenise the conversation and fit it into the context."""
        # Some templates tell the model what day it is.
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        encode = partial(self._sessions.text.encode_chat, request.messages, now=now)
        try:
            if request.chars > _THREAD_CHARS:
                prompt = await trio.to_thread.run_sync(
                    encode, limiter=self._tokenising, abandon_on_cancel=True
                )
            else:
                prompt = encode()
        except TemplateError as error:
            raise ApiError(400, f"The messages do not fit the model: {error}.", param="messages") from None
        context = self._sessions.model.context_length
        room = context - len(prompt)
        wanted = request.max_tokens
        if room < (wanted or 1):
            over = (wanted or 1) - room
            raise ApiError(
                400,
                f"The context holds {context} tokens: the messages have {len(prompt)} and "
                f"{wanted or 'at least 1'} to generate, {over} too many"
                + (f"; 'max_tokens' can be {room} at most." if room > 0 else "."),
                param="messages" if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        max_tokens = wanted or room
        if request.min_tokens > max_tokens:
            raise ApiError(
                400,
                f"'min_tokens' ({request.min_tokens}) is more than can be generated ({max_tokens}).",
                param="min_tokens",
            )
        seed = self._sessions.draw_seed() if request.seed is None else request.seed
        return Generation(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=msgspec.structs.replace(request.sampling, seed=seed),
            stop=request.stop,
            stop_tokens=request.stop_tokens,
            show_stop=request.show_stop,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            logprobs=request.logprobs,
            token_ids=request.token_ids,
        )


def _because(refusal: Refused) -> str:
    return f": {refusal}" if str(refusal) else ""


def _allow(method: str, *allowed: str) -> None:
    if method not in allowed:
        names = ", ".join(allowed)
        raise ApiError(
            405,
            f"{method} is not allowed here; use {' or '.join(allowed)}.",
            code="method_not_allowed",
            headers=((b"allow", names.encode()),),
        )
