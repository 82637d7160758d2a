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

Plain ASGI: there are few routes, and a framework between a token and its socket costs more than
it gives. A client that goes away, or shuts its sending side down, cancels its session at once.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import structlog
import trio

from actors.answers import Answer, ChatAnswer, TextAnswer
from actors.http_reply import Client, Receive, Reply, Send, server_error
from actors.http_server import ServerLimits, serve_app
from actors.metrics import CONTENT_TYPE
from actors.openai import (
    ApiError,
    Conversation,
    Detokenized,
    Model,
    ModelList,
    RawPrompt,
    Tokens,
    Wishes,
    check_name,
    parse_chat,
    parse_detokenize,
    parse_text,
    parse_tokenize,
)
from actors.sessions import Draining, Generation, QueueFull, Refused
from engine.chat_template import TemplateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.sessions import Session, Sessions

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


_Done = TypeVar("_Done")


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
        elif path == "/v1/completions":
            _allow(method, "POST")
            await self._complete(scope, client)
        elif path == "/tokenize":
            _allow(method, "POST")
            await self._tokenize(scope, client)
        elif path == "/detokenize":
            _allow(method, "POST")
            await self._detokenize(scope, client)
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
        model = self._sessions.model
        conversation, wishes = parse_chat(body, model=self._model.id, vocab_size=model.vocab_size)
        given = wishes.name or _given_name(scope)
        generation = self._generation(await self._tokens(conversation), wishes, "messages")
        session = self._open(generation)
        name = _named(session, given)
        answer = ChatAnswer(name, model, self._sessions.text, generation, include_usage=wishes.include_usage)
        await _reply(session, client, answer, name, stream=wishes.stream)

    async def _complete(self, scope: Scope, client: Client) -> None:
        body = await self._body(scope, client)
        if body is None:
            return
        model = self._sessions.model
        prompt, wishes = parse_text(body, model=self._model.id, vocab_size=model.vocab_size)
        given = wishes.name or _given_name(scope)
        generation = self._generation(await self._tokens(prompt), wishes, "prompt")
        session = self._open(generation)
        name = _named(session, given)
        echo = ""
        if wishes.echo:
            echo = prompt.text if isinstance(prompt.text, str) else self._sessions.text.decode(prompt.text)
        answer = TextAnswer(name, model, generation, echo=echo, include_usage=wishes.include_usage)
        await _reply(session, client, answer, name, stream=wishes.stream)

    async def _tokenize(self, scope: Scope, client: Client) -> None:
        body = await self._body(scope, client)
        if body is not None:
            tokens = await self._tokens(parse_tokenize(body, model=self._model.id))
            context = self._sessions.model.context_length
            await client.send_json(200, Tokens(len(tokens), context, tokens))

    async def _detokenize(self, scope: Scope, client: Client) -> None:
        body = await self._body(scope, client)
        if body is not None:
            vocab_size = self._sessions.model.vocab_size
            tokens = parse_detokenize(body, model=self._model.id, vocab_size=vocab_size)
            decode = partial(self._sessions.text.decode, tokens)
            await client.send_json(200, Detokenized(await self._encoded(decode, len(tokens))))

    def _open(self, generation: Generation) -> Session:
        """Open a session, or say why not."""
        try:
            return self._sessions.open(generation)
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

    async def _tokens(self, prompt: Conversation | RawPrompt) -> list[int]:
        """The prompt's tokens."""
        text = self._sessions.text
        if isinstance(prompt, RawPrompt):
            if not isinstance(prompt.text, str):
                return list(prompt.text)
            # Who writes the whole prompt writes its control tokens too.
            encode = partial(text.encode, prompt.text, special=True, bos=prompt.bos)
        else:
            context = self._sessions.model.context_length
            if len(prompt.messages) > context:
                # Each is at least one token: not worth a minute of templating to find out.
                raise ApiError(
                    400,
                    f"The context holds {context} tokens: {len(prompt.messages)} messages are too many.",
                    param="messages",
                    code="context_length_exceeded",
                )
            # Some templates tell the model what day it is.
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            encode = partial(text.encode_chat, prompt.messages, now=now, **prompt.variables)
        try:
            return await self._encoded(encode, prompt.chars)
        except TemplateError as error:
            raise ApiError(400, f"The messages do not fit the model: {error}.", param="messages") from None
        except RecursionError:
            raise ApiError(
                400, "'chat_template_kwargs' are nested too deeply.", param="chat_template_kwargs"
            ) from None

    async def _encoded(self, work: Callable[[], _Done], size: int) -> _Done:
        """The outcome of work on text, in a thread when it is long."""
        if size <= _THREAD_CHARS:
            return work()
        return await trio.to_thread.run_sync(work, limiter=self._tokenising, abandon_on_cancel=True)

    def _generation(self, prompt: list[int], wishes: Wishes, source: str) -> Generation:
        """Fit a prompt, which came as the parameter `source`, and what is wanted of it into the context."""
        if not prompt:
            raise ApiError(400, f"{source!r} has no token.", param=source)
        context = self._sessions.model.context_length
        room = context - len(prompt)
        wanted = wishes.max_tokens
        if room < (wanted or 1):
            over = (wanted or 1) - room
            have = "have" if source == "messages" else "has"
            raise ApiError(
                400,
                f"The context holds {context} tokens: the {source} {have} {len(prompt)} and "
                f"{wanted or 'at least 1'} to generate, {over} too many"
                + (f"; 'max_tokens' can be {room} at most." if room > 0 else "."),
                param=source if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        max_tokens = wanted or min(room, wishes.default_max_tokens or room)
        if wishes.min_tokens > max_tokens:
            raise ApiError(
                400,
                f"'min_tokens' ({wishes.min_tokens}) is more than can be generated ({max_tokens}).",
                param="min_tokens",
            )
        seed = self._sessions.draw_seed() if wishes.seed is None else wishes.seed
        return Generation(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=msgspec.structs.replace(wishes.sampling, seed=seed),
            stop=wishes.stop,
            stop_tokens=wishes.stop_tokens,
            show_stop=wishes.show_stop,
            min_tokens=wishes.min_tokens,
            ignore_eos=wishes.ignore_eos,
            logprobs=wishes.logprobs,
            token_ids=wishes.token_ids,
        )


def _given_name(scope: Scope) -> str | None:
    """The client's own id of the request, where a header brings one."""
    name = dict(scope["headers"]).get(b"x-request-id")
    return None if name is None else check_name(name.decode("latin-1"))


def _named(session: Session, given: str | None) -> str:
    """What the client knows its request by; logs have both names."""
    if given is None:
        return session.request_id
    log.info("request_named", request_id=session.request_id, name=given)
    return given


async def _reply(session: Session, client: Client, answer: Answer, name: str, *, stream: bool) -> None:
    """Answer a request to its end, while somebody listens."""
    reply = Reply(session, client, answer, name)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.watch, session)
        await reply.run(stream=stream)
        nursery.cancel_scope.cancel()


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
