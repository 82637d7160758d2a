"""The HTTP door: OpenAI's API and health, over whatever stands behind `Sessions`.

    POST /v1/chat/completions    whole or streamed
    POST /v1/completions         the same for a prompt that is taken as it is
    POST /v1/prefixes            keep a prefix in the cache (`actors.doors.prefixes`)
    GET  /v1/prefixes[/ID]       what is kept
    DELETE /v1/prefixes/ID       keep it no longer
    POST /tokenize               what a prompt or a conversation is to the model
    POST /detokenize             the text of tokens
    GET  /v1/models[/ID]         the served model
    GET  /health/live            the process answers
    GET  /health/ready           a token could be produced now
    GET  /statistics             what every actor last published of itself
    GET  /metrics                the same and more for Prometheus
    GET  /openapi.json           all of this for programs (`actors.doors.openapi`)
    GET  /v1/stream              a WebSocket (`actors.doors.websocket`)

Plain ASGI: there are few routes, and a framework between a token and its socket costs more than
it gives. A client that goes away, or shuts its sending side down, cancels its session at once,
unless it asked with `X-Estafet-Resumable: true` for a stream that it may come back for: such events
have ids, and the same request with `Last-Event-ID` goes on behind one, also after the gateway has died.
"""

from __future__ import annotations

import re
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec
import structlog
import trio

from actors.doors.answers import answer_for
from actors.doors.event_id import HEADER, RESUMABLE, EventId
from actors.doors.http_reply import Client, Receive, Reply, Send
from actors.doors.http_server import ServerLimits, serve_app
from actors.doors.intake import Intake, client_of_key
from actors.doors.openai_error import ApiError, server_error
from actors.doors.openai_response import Model, ModelList
from actors.doors.openapi import openapi_document
from actors.doors.prefixes import PATH as PREFIXES
from actors.doors.prefixes import PrefixDoor
from actors.doors.ticket import ticket_of
from actors.doors.websocket import PATH as WEBSOCKET_PATH
from actors.doors.websocket import WebSocketDoor
from actors.doors.wishes import check_name
from actors.metrics import CONTENT_TYPE
from actors.sessions import Diverged, NotKept
from engine import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from actors.doors.intake import Asked
    from actors.sessions import Session, Sessions

Scope = MutableMapping[str, Any]
_URL = re.compile(rb"https?://[^/]*(?P<path>.*)", re.IGNORECASE)

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
        self._prefixes = PrefixDoor(sessions, self._intake)
        self._model = Model(sessions.model.name, created=int(time.time()))
        # Made once: it takes 10 to 20 ms, in which no token would be sent.
        self._document = msgspec.json.encode(openapi_document(sessions.model, __version__))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["raw_path"].startswith(b"/"):
            scope = {**scope, "path": _path_of_url(scope["raw_path"])}
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
        elif path == PREFIXES:
            _allow(method, "GET", "HEAD", "POST")
            if method == "POST":
                await self._keep(scope, client)
            else:
                await client.send_json(200, self._prefixes.kept(client=_key(scope)))
        elif path.startswith(f"{PREFIXES}/"):
            _allow(method, "GET", "HEAD", "DELETE")
            act = self._prefixes.forget if method == "DELETE" else self._prefixes.find
            await client.send_json(200, act(path.removeprefix(f"{PREFIXES}/"), client=_key(scope)))
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
        elif path == "/openapi.json":
            _allow(method, "GET", "HEAD")
            await client.send_whole(200, self._document, "application/json")
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
        resumable = _switch(headers, RESUMABLE)
        body = await self._body(scope, client)
        if body is None:
            return
        if last := headers.get(HEADER.lower().encode()):
            # An event source sends its request again, whose answer is under way.
            await self._go_on(client, last)
            return
        asked = await prepare(
            body, client=client_of_key(headers.get(b"authorization")), name=name, resumable=resumable
        )
        if resumable and not asked.wishes.stream:
            raise ApiError(
                400, f"Only a stream can be resumed: {RESUMABLE!r} needs 'stream' to be true.", param="stream"
            )
        session = self._intake.open(asked.generation)
        if asked.name is not None:
            # What the client knows its request by; logs have both names.
            log.info("request_named", request_id=session.request_id, name=asked.name)
        place = EventId.beginning(session) if resumable else None
        await self._reply(session, client, place, stream=asked.wishes.stream)

    async def _go_on(self, client: Client, last_event_id: bytes) -> None:
        """Answer with what follows an event that another connection brought."""
        place = EventId.parse(last_event_id)
        try:
            session = self._sessions.resume(place.resume_id, tuple(place.positions))
        except NotKept as refusal:
            raise ApiError(404, f"The stream is not kept: {refusal}.", code="stream_not_kept") from None
        except Diverged as refusal:
            raise ApiError(
                409, f"The stream cannot be gone on with: {refusal}.", param=HEADER, code="stream_diverged"
            ) from None
        await self._reply(session, client, place, stream=True, goes_on=True)

    async def _reply(
        self,
        session: Session,
        client: Client,
        place: EventId | None,
        *,
        stream: bool,
        goes_on: bool = False,
    ) -> None:
        """Answer one request to its end, while somebody listens."""
        sessions, generation = self._sessions, session.generation
        answer = answer_for(generation, session.request_id, sessions.model, sessions.text)
        name = ticket_of(generation).name or session.request_id
        reply = Reply(session, client, answer, name, place, goes_on=goes_on)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.watch, session)
            await reply.run(stream=stream)
            nursery.cancel_scope.cancel()

    async def _keep(self, scope: Scope, client: Client) -> None:
        """Keep a prefix, unless its client goes away before it is filled."""
        body = await self._body(scope, client)
        if body is None:
            return
        kept = await self._prefixes.keep(body, client.wait_gone, client=_key(scope))
        if kept is not None:
            await client.send_json(200, kept)

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


def _switch(headers: dict[bytes, bytes], name: str) -> bool:
    """Whether a header that is a switch is on; an ApiError when it says anything else than it may."""
    value = headers.get(name.lower().encode(), b"false").strip().lower()
    if value not in (b"true", b"1", b"false", b"0"):
        raise ApiError(400, f"The header {name!r} can be true, 1, false or 0.", param=name)
    return value in (b"true", b"1")


def _key(scope: Scope) -> str:
    """The name of the API key that asks."""
    return client_of_key(dict(scope["headers"]).get(b"authorization"))


def _path_of_url(target: bytes) -> str:
    """The path in a request target that is a whole URL, as clients write it who take us for a proxy."""
    url = _URL.match(target)
    return unquote((url["path"] if url else target).decode("ascii")) or "/"


def _allow(method: str, *allowed: str) -> None:
    if method not in allowed:
        names = ", ".join(allowed)
        raise ApiError(
            405,
            f"{method} is not allowed here; use {' or '.join(allowed)}.",
            code="method_not_allowed",
            headers=((b"allow", names.encode()),),
        )
