"""A gateway that says what the test tells it to, and the HTTP door in front of it on a real socket."""

from __future__ import annotations

import socket
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import trio

from actors.doors.http import serve_http
from actors.doors.http_server import ServerLimits
from actors.sessions import Delta, DeltaToken, End, Generation, KeptPrefix, NotKept, Superseded
from engine.chat_template import TemplateError
from engine.detokenizer import Detokenizer
from engine.model import ModelConfig
from engine.transcript import tail_hash

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from engine.messages import Cached
    from engine.pins import Prefix
    from engine.transcript import Position

MODEL = ModelConfig(
    name="Scripted-1M",
    architecture="llama",
    vocab_size=256,
    hidden_size=64,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=64,
    ffn_size=64,
    context_length=1000,
    rope_theta=1e4,
    rms_eps=1e-5,
    tied_embeddings=True,
    bos_token=None,
    eos_tokens=(0,),
    weights_id="0123456789abcdef0123456789abcdef",
)


KEPT = KeptPrefix("prefix-0400000300000001", 1000, 4600, 35, 16, 32, 2)


class ByteText:
    """One token a byte, and one a message."""

    def __init__(self) -> None:
        self.threads: list[bool] = []
        """For each call: whether it ran outside the event loop's thread."""
        self.messages: list[dict[str, str]] = []
        self.variables: dict[str, object] = {}
        """Of the last call."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def encode(self, text: str, *, special: bool, bos: bool = True) -> list[int]:
        assert special
        return [*((2,) if bos else ()), *text.encode()]

    def decode(self, tokens: Iterable[int], *, controls: bool = False) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.token_bytes)

    def encode_chat(
        self, messages: list[dict[str, str]], *, now: str | None = None, **variables: object
    ) -> list[int]:
        try:
            trio.lowlevel.current_trio_token()
            self.threads.append(False)
        except RuntimeError:
            self.threads.append(True)
        self.messages = messages
        self.variables = variables
        if messages[0]["role"] == "assistant":
            raise TemplateError("the first message must not be the assistant's")
        return [token for message in messages for token in (1, *message["content"].encode())]


class ScriptedSession:
    """One opened request; the test plays the rest of the system."""

    def __init__(self, request_id: str, generation: Generation) -> None:
        self.request_id = request_id
        self.generation = generation
        self.cancels: list[str] = []
        self.cancelled = trio.Event()
        self.left: list[str] = []
        self.superseded = trio.Event()
        self.gone = trio.Event()
        self.taken = 0
        """How many events the door has taken."""
        self.sequence = [0] * generation.n
        self.texts = [""] * generation.n
        self._send, self._receive = trio.open_memory_channel[Delta | End | Exception](100_000)

    @property
    def resume_id(self) -> str:
        return f"{self.request_id}.secret"

    def put(self, event: Delta | End) -> None:
        self._send.send_nowait(event)

    def say(self, *texts: str, choice: int = 0) -> None:
        for text in texts:
            self.sequence[choice] += 1
            tail = ""
            if self.generation.resumable:
                self.texts[choice] += text
                tail = tail_hash(self.texts[choice])
            self._send.send_nowait(Delta(text, (), choice, self.sequence[choice], tail))

    def tell(self, text: str, *tokens: DeltaToken) -> None:
        """Text with tokens, as for who asked for them."""
        self.sequence[0] += len(tokens)
        self._send.send_nowait(Delta(text, tokens, 0, self.sequence[0]))

    def end(
        self,
        reason: str = "stop",
        error: str | None = None,
        *,
        choice: int = 0,
        cached: Cached | None = None,
    ) -> None:
        self._send.send_nowait(End(reason, len(self.generation.prompt), 7, error, choice, cached))

    def crash(self, error: Exception | None = None) -> None:
        self._send.send_nowait(error or RuntimeError("a bug in the gateway"))

    async def events(self) -> AsyncIterator[Delta | End]:
        ended: set[int] = set()
        async for event in self._receive:
            self.taken += 1
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, End):
                ended.add(event.choice)
                if len(ended) == self.generation.n:
                    return

    def cancel(self, by: str) -> None:
        self.cancels.append(by)
        self.cancelled.set()
        for choice in range(self.generation.n):
            self.end("cancelled", choice=choice)

    def leave(self, by: str) -> None:
        self.left.append(by)
        self.gone.set()
        if self.generation.resumable:
            self.crash(Superseded())
        else:
            self.cancel(by)


class ScriptedPrefixes:
    """`Prefixes` that keeps `kept`, and refuses with `refusal`; the test says when by `go`."""

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.asked: list[Prefix] = []
        self.waits = trio.Event()
        self.cancelled = trio.Event()
        self.go = trio.Event()
        self.go.set()
        self.owners: dict[str, str] = {KEPT.name: ""}
        self.forgotten: list[str] = []

    async def keep(self, prefix: Prefix) -> KeptPrefix:
        self.asked.append(prefix)
        self.waits.set()
        try:
            await self.go.wait()
        except trio.Cancelled:
            self.cancelled.set()
            raise
        if self.refusal is not None:
            raise self.refusal
        return KEPT

    def kept(self, owner: str) -> list[KeptPrefix]:
        return [KEPT for known in self.owners.values() if known == owner]

    def find(self, owner: str, name: str) -> KeptPrefix:
        if self.owners.get(name) != owner:
            raise NotKept("it never was")
        return KEPT

    def forget(self, owner: str, name: str) -> KeptPrefix:
        kept = self.find(owner, name)
        self.forgotten.append(name)
        return kept


class ScriptedSessions:
    """`Sessions` whose requests the test takes with `next()`, or which answer `script` by themselves."""

    def __init__(self, script: tuple[str, ...] | None = None) -> None:
        self.model = MODEL
        self.text = ByteText()
        self.prefixes = ScriptedPrefixes()
        self.resume_grace_s = 30.0
        self.script = script
        self.refusal: Exception | None = None
        self.reason: str | None = None
        self.opened: list[ScriptedSession] = []
        self.readers: list[ScriptedSession] = []
        """All that were opened or resumed."""
        self.resumed: list[tuple[str, Sequence[Position] | None]] = []
        self._send, self._receive = trio.open_memory_channel[ScriptedSession](1000)

    def draw_seed(self) -> int:
        return 4711

    def open(self, generation: Generation) -> ScriptedSession:
        if self.refusal is not None:
            raise self.refusal
        session = ScriptedSession(f"r{len(self.opened)}", generation)
        self.opened.append(session)
        self.readers.append(session)
        if self.script is None:
            self._send.send_nowait(session)
        else:
            for choice in range(generation.n):
                session.say(*self.script, choice=choice)
                session.end(choice=choice)
        return session

    def find(self, key: str) -> str | None:
        return next((s.resume_id for s in self.opened if s.generation.key == key), None)

    def resume(self, resume_id: str, positions: Sequence[Position] | None) -> ScriptedSession:
        """A new reader, whom the test serves; `resumed` says who asked for what."""
        if self.refusal is not None:
            raise self.refusal
        before = next((s for s in self.opened if s.resume_id == resume_id), None)
        if before is None or not before.generation.resumable:
            raise NotKept
        self.resumed.append((resume_id, positions))
        session = ScriptedSession(before.request_id, before.generation)
        if positions is not None:
            session.sequence = [position.sequence for position in positions]
        self.readers.append(session)
        self._send.send_nowait(session)
        return session

    def system_statistics(self) -> dict[str, dict[str, int | float]]:
        return {"scheduler": {"requests": 0}}

    def render_metrics(self) -> bytes:
        return b"# nothing\n"

    def not_ready(self) -> str | None:
        return self.reason

    async def next(self) -> ScriptedSession:
        return await self._receive.receive()


class Door:
    """A served door, as a test uses it."""

    def __init__(
        self, sessions: ScriptedSessions, listener: socket.socket, client: httpx.AsyncClient
    ) -> None:
        self.sessions = sessions
        self.listener = listener
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = client
        self.shutdown = trio.Event()
        self.closed = trio.Event()

    async def chat(self, **parameters: object) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=body(**parameters))

    async def raw(self, payload: bytes) -> trio.SocketStream:
        """A plain socket on which `payload` has been sent as a chat request."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        await stream.send_all(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(payload), payload)
        )
        return stream


def body(**parameters: object) -> dict[str, object]:
    """A right request body, with changes."""
    return {"model": MODEL.name, "messages": [{"role": "user", "content": "hi"}]} | parameters


@asynccontextmanager
async def served(
    sessions: ScriptedSessions,
    *,
    limits: ServerLimits | None = None,
    max_body_bytes: int = 100_000,
    listener: socket.socket | None = None,
) -> AsyncIterator[Door]:
    """The door on an ephemeral port; everything must be over within the test's ten seconds."""
    with trio.fail_after(10), ExitStack() as stack:
        if listener is None:
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with (
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
            trio.open_nursery() as nursery,
        ):
            door = Door(sessions, listener, client)

            async def serve() -> None:
                await serve_http(
                    sessions,
                    listener_fd=door.listener.fileno(),
                    shutdown=door.shutdown,
                    max_body_bytes=max_body_bytes,
                    limits=limits or ServerLimits(grace_s=2.0),
                )
                door.closed.set()

            nursery.start_soon(serve)
            yield door
            door.shutdown.set()
