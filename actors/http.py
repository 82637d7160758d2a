"""The HTTP door: OpenAI's API and health, over whatever stands behind `Sessions`.

    POST /v1/chat/completions    whole or streamed
    POST /v1/completions         the same for a prompt that is taken as it is
    POST /tokenize               what a prompt or a conversation is to the model
    POST /detokenize             the text of tokens
    GET  /v1/models[/ID]         the served model
    GET  /health/live            the process answers
    GET  /health/ready           a token could be produced now
    GET  /statistics             what every actor last published of itself
    GET  /metrics                the same and more for Prometheus
    GET  /v1/stream              a WebSocket (`actors.websocket`)

Plain ASGI: there are few routes, and a framework between a token and its socket costs more than
it gives. A client that goes away, or shuts its sending side down, cancels its session at once.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import structlog
import trio

from actors.answers import answer_for
from actors.http_reply import Client, Receive, Reply, Send
from actors.http_server import ServerLimits, serve_app
from actors.metrics import CONTENT_TYPE
from actors.openai_error import ApiError, server_error
from actors.openai_response import Model, ModelList
from actors.requests import Intake, client_of_key
from actors.websocket import PATH as WEBSOCKET_PATH
from actors.websocket import WebSocketDoor
from actors.wishes import check_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import msgspec

    from actors.requests import Asked
    from actors.sessions import Sessions

Scope = MutableMapping[str, Any]

log = structlog.get_logger()

MAX_BODY_BYTES = 4 * 2**20
_ENVELOPE_BYTES = 2**16
"""What a message on a WebSocket may have around its body."""
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
    limits = limits or ServerLimits()
    door = HttpDoor(sessions, max_body_bytes=max_body_bytes, shutdown=shutdown, grace_s=limits.grace_s)
    log.info("http_door_opened")
    await serve_app(
        door,  # type: ignore[arg-type]  # hypercorn types messages one by one, ASGI calls them mappings
        listener_fd=listener_fd,
        shutdown=shutdown,
        limits=limits,
        max_message_bytes=max_body_bytes + _ENVELOPE_BYTES,
    )
    log.info("http_door_closed")


class HttpDoor:
    """The ASGI application."""

    def __init__(
        self, sessions: Sessions, *, max_body_bytes: int, shutdown: trio.Event, grace_s: float
    ) -> None:
        self._sessions = sessions
        self._max_body_bytes = max_body_bytes
        self._intake = Intake(sessions)
        self._websocket = WebSocketDoor(sessions, self._intake, shutdown=shutdown, grace_s=grace_s)
        self._model = Model(sessions.model.name, created=int(time.time()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
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
            await self._generate(scope, client, self._intake.chat)
        elif path == "/v1/completions":
            _allow(method, "POST")
            await self._generate(scope, client, self._intake.completion)
        elif path == "/tokenize":
            _allow(method, "POST")
            await self._tell(scope, client, self._intake.tokenize)
        elif path == "/detokenize":
            _allow(method, "POST")
            await self._tell(scope, client, self._intake.detokenize)
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
        elif path == WEBSOCKET_PATH:
            raise ApiError(
                426,
                f"{path} is a WebSocket: it needs the headers of an upgrade.",
                code="upgrade_required",
                headers=((b"upgrade", b"websocket"),),
            )
        else:
            raise ApiError(404, f"There is nothing at {method} {path[:200]}.", code="unknown_url")

    async def _generate(self, scope: Scope, client: Client, prepare: Callable[..., Awaitable[Asked]]) -> None:
        headers = dict(scope["headers"])
        name = headers.get(b"x-request-id")
        name = None if name is None else check_name(name.decode("latin-1"))
        body = await self._body(scope, client)
        if body is None:
            return
        asked = await prepare(body, client=client_of_key(headers.get(b"authorization")), name=name)
        session = self._intake.open(asked.generation)
        if asked.name is not None:
            # What the client knows its request by; logs have both names.
            log.info("request_named", request_id=session.request_id, name=asked.name)
        sessions = self._sessions
        answer = answer_for(asked.generation, session.request_id, sessions.model, sessions.text)
        reply = Reply(session, client, answer, asked.name or session.request_id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.watch, session)
            await reply.run(stream=asked.wishes.stream)
            nursery.cancel_scope.cancel()

    async def _tell(
        self, scope: Scope, client: Client, work: Callable[[bytes], Awaitable[msgspec.Struct]]
    ) -> None:
        """Answer a body that asks for nothing to be generated."""
        body = await self._body(scope, client)
        if body is not None:
            await client.send_json(200, await work(body))

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


def _allow(method: str, *allowed: str) -> None:
    if method not in allowed:
        names = ", ".join(allowed)
        raise ApiError(
            405,
            f"{method} is not allowed here; use {' or '.join(allowed)}.",
            code="method_not_allowed",
            headers=((b"allow", names.encode()),),
        )
