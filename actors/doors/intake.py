"""The front half of every door: from a body in OpenAI's form to a checked Generation and an open session."""

from __future__ import annotations

import time
from datetime import datetime
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
import trio

from actors.doors.openai_error import ApiError
from actors.doors.openai_response import Detokenized, Tokens
from actors.doors.ticket import Ticket
from actors.doors.wishes import (
    RawPrompt,
    Wishes,
    parse_chat,
    parse_detokenize,
    parse_prefix,
    parse_text,
    parse_tokenize,
)
from actors.sessions import Draining, Generation, QueueFull, Refused
from engine.chat_template import TemplateError
from engine.pins import Prefix

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.doors.wishes import Conversation
    from actors.sessions import Session, Sessions

THREAD_CHARS = 16 * 2**10
"""Longer texts are tokenised in a thread."""
RETRY_AFTER_S = 1
"""When a client may knock again that found the queue full."""
BEHIND_PREFIX = 2
"""Tokens that a context must have room for behind a prefix: one that follows it, and one of the answer."""
_Done = TypeVar("_Done")


class Asked(msgspec.Struct, frozen=True):
    """A request that can be opened."""

    generation: Generation
    """Complete: with client, priority, choices, seed and ticket."""
    wishes: Wishes
    """What the body said, for a door that wants to know whether to stream."""
    name: str | None
    """The client's own id of the request."""


class Intake:
    """Turns bodies into requests: decodes, checks, tokenises (long texts in a thread) and opens them.

    It knows no protocol: HTTP, WebSocket and ZeroMQ doors call it alike, and tell an ApiError in their
    own way. The usual life of a request in a door:

        asked = await intake.chat(body, client=client_of_key(authorization))
        session = intake.open(asked.generation)
        answer = answer_for(session.generation, session.request_id, sessions.model, sessions.text)

    One intake serves any number of requests at once; long texts queue for its one thread.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._tokenising = trio.CapacityLimiter(1)

    async def chat(
        self,
        body: bytes,
        *,
        client: str = "",
        name: str | None = None,
        resumable: bool = False,
    ) -> Asked:
        """A body of /v1/chat/completions; an ApiError names what is wrong with it.

        `client`: the API key that asks, as `client_of_key` names it; it and the body's `user` together
        say whose share it is. `name`: the client's own id of the request, unless the body has one.
        `resumable`: its events, in OpenAI's form, may be gone on with on another connection.
        """
        model = self._sessions.model
        prompt, wishes = parse_chat(body, model=model.name, vocab_size=model.vocab_size)
        tokens = await self._tokens(prompt)
        ticket = self._ticket("chat", wishes, name)
        return self._asked(tokens, wishes, ticket, "messages", client, resumable)

    async def completion(
        self,
        body: bytes,
        *,
        client: str = "",
        name: str | None = None,
        resumable: bool = False,
    ) -> Asked:
        """A body of /v1/completions; otherwise as `chat`."""
        model = self._sessions.model
        prompt, wishes = parse_text(body, model=model.name, vocab_size=model.vocab_size)
        if resumable and wishes.logprobs is not None:
            # Their text_offset counts from the beginning, which who resumes does not send again.
            raise ApiError(
                400,
                "A completion with 'logprobs' cannot be resumed; a chat can.",
                param="logprobs",
            )
        tokens = await self._tokens(prompt)
        echo = None
        if wishes.echo:
            begun = isinstance(prompt.text, str) and prompt.bos
            echo = len(self._sessions.text.encode("", special=True)) if begun else 0
        ticket = self._ticket("completion", wishes, name, echo)
        return self._asked(tokens, wishes, ticket, "prompt", client, resumable)

    async def prefix(self, body: bytes, *, client: str = "") -> Prefix:
        """A body of /v1/prefixes: what is to be kept. `client`: the API key that asks."""
        model = self._sessions.model
        prompt, wishes = parse_prefix(body, model=model.name, vocab_size=model.vocab_size)
        tokens = await self._tokens(prompt)
        room = model.context_length - BEHIND_PREFIX
        if len(tokens) > room:
            source = "prompt" if isinstance(prompt, RawPrompt) else "messages"
            raise ApiError(
                400,
                f"A prefix can have {room} tokens at most, so that something fits the context behind it: "
                f"this has {len(tokens)}.",
                param=source,
                code="context_length_exceeded",
            )
        return Prefix(
            tuple(tokens),
            wishes.ttl_s,
            wishes.salt,
            owner=client,
            client=_client(client, wishes.user),
            created=int(time.time()),
        )

    async def tokenize(self, body: bytes) -> Tokens:
        """The answer to a body of /tokenize."""
        model = self._sessions.model
        tokens = await self._tokens(parse_tokenize(body, model=model.name))
        return Tokens(len(tokens), model.context_length, tokens)

    async def detokenize(self, body: bytes) -> Detokenized:
        """The answer to a body of /detokenize."""
        model = self._sessions.model
        tokens = parse_detokenize(body, model=model.name, vocab_size=model.vocab_size)
        decode = partial(self._sessions.text.decode, tokens)
        return Detokenized(await self._worked(decode, len(tokens)))

    def open(self, generation: Generation) -> Session:
        """Open a session, or say why not as an ApiError: 429 with `retry_after_s`, or 503."""
        try:
            return self._sessions.open(generation)
        except QueueFull as refusal:
            raise ApiError(
                429,
                f"Too many requests are open{_because(refusal)}; try again later.",
                kind="rate_limit_error",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        except Draining as refusal:
            message = f"The server is shutting down{_because(refusal)}."
            raise ApiError(503, message, kind="server_error", code="draining") from None
        except Refused as refusal:
            raise ApiError(503, f"The request was refused{_because(refusal)}.", kind="server_error") from None

    # ── from a prompt to a generation ─────────────────────────────────────────────────────────

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
            return await self._worked(encode, prompt.chars)
        except TemplateError as error:
            raise ApiError(400, f"The messages do not fit the model: {error}.", param="messages") from None
        except RecursionError:
            raise ApiError(
                400, "'chat_template_kwargs' are nested too deeply.", param="chat_template_kwargs"
            ) from None

    async def _worked(self, work: Callable[[], _Done], size: int) -> _Done:
        """The outcome of work on text, in a thread when it is long."""
        if size <= THREAD_CHARS:
            return work()
        return await trio.to_thread.run_sync(work, limiter=self._tokenising, abandon_on_cancel=True)

    def _ticket(
        self, kind: Literal["chat", "completion"], wishes: Wishes, name: str | None, echo: int | None = None
    ) -> Ticket:
        return Ticket(
            kind, wishes.name or name, int(time.time()), wishes.include_usage, echo, wishes.tells_cache
        )

    def _asked(
        self,
        prompt: list[int],
        wishes: Wishes,
        ticket: Ticket,
        source: str,
        client: str,
        resumable: bool,
    ) -> Asked:
        """Fit a prompt, which came as the parameter `source`, and what is wanted of it into the context."""
        seed = self._sessions.draw_seed() if wishes.seed is None else wishes.seed
        generation = Generation(
            prompt=tuple(prompt),
            max_tokens=fit(len(prompt), wishes, source, self._sessions.model.context_length),
            sampling=msgspec.structs.replace(wishes.sampling, seed=seed),
            stop=wishes.stop,
            stop_tokens=wishes.stop_tokens,
            show_stop=wishes.show_stop,
            min_tokens=wishes.min_tokens,
            ignore_eos=wishes.ignore_eos,
            logprobs=wishes.logprobs,
            token_ids=wishes.token_ids,
            n=wishes.n,
            client=_client(client, wishes.user),
            priority=wishes.priority,
            cache_salt=wishes.cache_salt,
            resumable=resumable,
            ticket=ticket.encode(),
        )
        return Asked(generation, wishes, ticket.name)


def fit(prompt: int, wishes: Wishes, source: str, context: int) -> int:
    """Tokens that may be generated behind so many of a prompt; an ApiError says how many are too many."""
    if not prompt:
        raise ApiError(400, f"{source!r} has no token.", param=source)
    room = context - prompt
    wanted = wishes.max_tokens
    if room < (wanted or 1):
        over = (wanted or 1) - room
        have = "have" if source == "messages" else "has"
        raise ApiError(
            400,
            f"The context holds {context} tokens: the {source} {have} {prompt} and "
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
    return max_tokens


def client_of_key(authorization: bytes | None) -> str:
    """Who asks, by the `Authorization: Bearer KEY` of a request; "" without a key.

    The key itself is a secret and goes nowhere: the name is made of a digest of it.
    """
    scheme, _, key = (authorization or b"").strip().partition(b" ")
    key = key.strip()
    if scheme.lower() != b"bearer" or not key:
        return ""
    return f"key:{blake2b(key, digest_size=8).hexdigest()}"


def _client(key: str, user: str) -> str:
    """Whose share a request counts against: an API key, as `client_of_key` names it, and a body's user."""
    return "/".join(filter(None, (key, f"user:{user}" if user else "")))


def _because(refusal: Refused) -> str:
    return f": {refusal}" if str(refusal) else ""
