"""Server-sent events that outlive their connection: ids, and what follows the last one that came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
from scripted_sessions import ScriptedSessions, body, served

from actors.doors.event_id import EventId
from actors.doors.openai_error import ApiError
from actors.sessions import Diverged, NotKept, Superseded
from engine.transcript import Position, tail_hash

if TYPE_CHECKING:
    from collections.abc import Callable

    from scripted_sessions import Door, ScriptedSession

RESUMABLE = {"X-Estafet-Resumable": "true"}


def events_of(text: str) -> list[dict[str, str]]:
    """Blocks of an event stream, as the HTML standard takes them apart (without comments)."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if fields:
            found.append(fields)
    return found


def texts(events: list[dict[str, str]], choice: int = 0) -> str:
    said = [msgspec.json.decode(e["data"]) for e in events if e.get("data", "[DONE]") != "[DONE]"]
    return "".join(
        part["delta"].get("content") or ""
        for event in said
        for part in event["choices"]
        if part["index"] == choice
    )


async def exchange(
    door: Door, asked: dict[str, Any], play: Callable[[ScriptedSession], None], blocks: int | None = None
) -> tuple[ScriptedSession, list[dict[str, str]]]:
    """Ask, let the gateway play its part, and read so many blocks of the answer, or all of it."""
    played: list[ScriptedSession] = []

    async def gateway() -> None:
        played.append(await door.sessions.next())
        play(played[0])

    # HTTP/1.0, where a body is all that comes: this client goes away without ceremony.
    payload = msgspec.json.encode(asked["json"])
    headers = {"content-type": "application/json", "content-length": len(payload), **asked.get("headers", {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    text = ""
    async with (
        trio.open_nursery() as nursery,
        await trio.open_tcp_stream("127.0.0.1", door.port) as stream,
    ):
        nursery.start_soon(gateway)
        await stream.send_all(f"POST /v1/chat/completions HTTP/1.0\r\n{lines}\r\n".encode() + payload)
        async for piece in stream:
            text += piece.decode()
            if blocks is not None and text.partition("\r\n\r\n")[2].count("\n\n") >= blocks:
                break
    return played[0], events_of(text.partition("\r\n\r\n")[2])


def request(**more: Any) -> dict[str, Any]:
    return {"json": body(stream=True, **more), "headers": dict(RESUMABLE)}


def at(last: str, **more: Any) -> dict[str, Any]:
    return {"json": body(stream=True, **more), "headers": {**RESUMABLE, "Last-Event-ID": last}}


async def test_a_client_comes_back_behind_its_last_event() -> None:
    def begin(session: ScriptedSession) -> None:
        session.say("one ", "two ")

    def go_on(session: ScriptedSession) -> None:
        session.texts = ["one two "]
        session.say("three")
        session.end()

    async with served(ScriptedSessions()) as door:
        session, first = await exchange(door, request(), begin, blocks=4)
        assert session.generation.resumable
        await session.gone.wait()
        assert session.left == ["client_disconnect"]
        assert not session.cancels
        assert first[0] == {"retry": "500", "id": f"{session.resume_id}/0-{tail_hash('')}"}
        last = first[-1]["id"]
        assert last == f"{session.resume_id}/2-{tail_hash('one two ')}"

        _, rest = await exchange(door, at(last), go_on)
        assert door.sessions.resumed == [(session.resume_id, (Position(2, tail_hash("one two ")),))]
        assert texts(first) + texts(rest) == "one two three"
        assert rest[-1]["data"] == "[DONE]"
        said = [msgspec.json.decode(event["data"]) for event in (*first[1:], *rest[1:-1])]
        assert sum("role" in event["choices"][0]["delta"] for event in said) == 1
        assert len({event["id"] for event in said}) == len({event["created"] for event in said}) == 1


async def test_who_is_cut_off_before_the_first_token_comes_back() -> None:
    def begin(session: ScriptedSession) -> None:
        """It says nothing, yet."""

    def go_on(session: ScriptedSession) -> None:
        session.say("all of it")
        session.end()

    async with served(ScriptedSessions()) as door:
        session, first = await exchange(door, request(), begin, blocks=2)
        await session.gone.wait()
        _, rest = await exchange(door, at(first[0]["id"]), go_on)
        assert texts(rest) == "all of it"


async def test_an_end_is_told_once_a_choice() -> None:
    def begin(session: ScriptedSession) -> None:
        session.say("a", choice=1)
        session.end(choice=1)

    def go_on(session: ScriptedSession) -> None:
        session.end(choice=1)
        session.say("b")
        session.end("length")

    async with served(ScriptedSessions()) as door:
        session, first = await exchange(door, request(n=2), begin, blocks=5)
        await session.gone.wait()
        last = first[-1]["id"]
        assert last == f"{session.resume_id}/0-{tail_hash('')}/1-{tail_hash('a')}!"
        _, rest = await exchange(door, at(last, n=2), go_on)
        finishes = [
            (choice["index"], choice["finish_reason"])
            for event in (*first[1:], *rest[1:-1])
            for choice in msgspec.json.decode(event["data"])["choices"]
            if choice["finish_reason"]
        ]
        assert finishes == [(1, "stop"), (0, "length")]


async def test_without_the_header_a_client_that_leaves_cancels() -> None:
    async with served(ScriptedSessions()) as door:
        asked = {"json": body(stream=True)}
        session, events = await exchange(door, asked, lambda session: session.say("one"), blocks=2)
        assert not any("id" in event or "retry" in event for event in events)
        await session.cancelled.wait()


async def test_whoever_is_superseded_is_told() -> None:
    def superseded(session: ScriptedSession) -> None:
        session.say("one")
        session.crash(Superseded())

    async with served(ScriptedSessions()) as door:
        session, events = await exchange(door, request(), superseded)
        assert msgspec.json.decode(events[-1]["data"])["error"]["code"] == "superseded"
        assert not session.cancels


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (NotKept("its time is over"), 404, "stream_not_kept"),
        (Diverged("the text is another one"), 409, "stream_diverged"),
    ],
)
async def test_what_cannot_be_resumed_has_a_status(refusal: Exception, status: int, code: str) -> None:
    sessions = ScriptedSessions()
    async with served(sessions) as door:
        sessions.refusal = refusal
        response = await door.client.post("/v1/chat/completions", **at(f"r0.secret/1-{tail_hash('x')}"))
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert str(refusal) in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "last", ["x", "/", "r/1", "r/1-zz", "r/1-0123456789abcdef/", "r/-1-0123456789abcdef", "r/" + "9" * 5000]
)
async def test_an_id_that_is_none_is_refused(last: str) -> None:
    async with served(ScriptedSessions()) as door:
        response = await door.client.post("/v1/chat/completions", **at(last))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "Last-Event-ID"


async def test_only_streams_can_be_resumed() -> None:
    sessions = ScriptedSessions()
    async with served(sessions) as door:
        response = await door.client.post("/v1/chat/completions", json=body(), headers=RESUMABLE)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")
        response = await door.client.post(
            "/v1/chat/completions", json=body(stream=True), headers={"X-Estafet-Resumable": "perhaps"}
        )
        assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Estafet-Resumable")
        assert sessions.opened == []


def test_an_event_id_says_what_it_was_made_of() -> None:
    place = EventId("req-1.s", [Position(3, tail_hash("a")), Position(0, tail_hash(""))], {1})
    line = place.line()
    assert line.startswith(b"id: ")
    assert line.endswith(b"\n")
    again = EventId.parse(line[4:-1])
    assert (again.resume_id, again.positions, again.ended) == ("req-1.s", place.positions, {1})
    with pytest.raises(ApiError):
        EventId.parse(b"\xff/1-0")
