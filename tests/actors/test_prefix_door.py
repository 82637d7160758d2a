"""/v1/prefixes: what a body may say, what is answered, and who may see and delete what."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import trio
from scripted_sessions import KEPT, MODEL, ScriptedSessions, served

from actors.doors.intake import BEHIND_PREFIX, Intake, client_of_key
from actors.doors.openai_error import ApiError
from actors.doors.openai_request import DEFAULT_TTL_S, MAX_SALT, MAX_TTL_S
from actors.sessions import Draining, PrefixRefused, PrefixTooShort, PrefixUnfilled, QueueFull, Refused

if TYPE_CHECKING:
    from engine.pins import Prefix

SHOWN = {
    "object": "prefix",
    "id": KEPT.name,
    "created": 1000,
    "expires_at": 4600,
    "tokens": 35,
    "cached_tokens": 16,
    "pinned_tokens": 32,
    "pinned_pages": 2,
}
KEY = {"authorization": "Bearer sk-mine"}


async def asked(sessions: ScriptedSessions | None = None, client: str = "", **said: object) -> Prefix:
    return await Intake(sessions or ScriptedSessions()).prefix(json.dumps(said).encode(), client=client)


async def test_messages_are_templated_without_a_turn_behind_them() -> None:
    sessions = ScriptedSessions()
    messages = [{"role": "developer", "content": "You are"}]
    prefix = await asked(sessions, messages=messages, chat_template_kwargs={"a": 1})
    assert sessions.text.messages == [{"role": "system", "content": "You are"}]
    assert sessions.text.variables == {"add_generation_prompt": False, "a": 1}
    assert prefix.tokens == (1, *b"You are")
    assert (prefix.ttl_s, prefix.salt, prefix.owner, prefix.client) == (DEFAULT_TTL_S, "", "", "")
    assert prefix.created > 1.7e9


async def test_a_prompt_is_taken_as_it_is() -> None:
    prefix = await asked(client="key:1", prompt="hi", user="me", cache_salt="tenant", ttl_s=MAX_TTL_S)
    assert prefix.tokens == (2, *b"hi")
    assert (prefix.ttl_s, prefix.salt) == (MAX_TTL_S, "tenant")
    assert (prefix.owner, prefix.client) == ("key:1", "key:1/user:me")
    assert (await asked(prompt="hi", add_special_tokens=False)).tokens == tuple(b"hi")
    assert (await asked(prompt=[7, 8])).tokens == (7, 8)


@pytest.mark.parametrize(
    ("said", "param", "code"),
    [
        ({}, "prompt", None),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt", None),
        ({"messages": []}, "messages", None),
        ({"prompt": []}, "prompt", None),
        ({"prompt": [MODEL.vocab_size]}, "prompt", None),
        ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs", None),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
            None,
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
            None,
        ),
        ({"prompt": "x", "cache_salt": "x" * (MAX_SALT + 1)}, "cache_salt", None),
        ({"prompt": "x", "ttl_s": 0}, "ttl_s", None),
        ({"prompt": "x", "ttl_s": MAX_TTL_S + 1}, "ttl_s", None),
        ({"prompt": "x", "ttl_s": 1.5}, "ttl_s", None),
        ({"prompt": "x", "max_tokens": 1}, "max_tokens", "unknown_parameter"),
        ({"prompt": "x", "model": "other"}, "model", "model_not_found"),
        ({"prompt": "x" * MODEL.context_length}, "prompt", "context_length_exceeded"),
        (
            {"messages": [{"role": "user", "content": "x" * MODEL.context_length}]},
            "messages",
            "context_length_exceeded",
        ),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(
    said: dict[str, object], param: str, code: str | None
) -> None:
    with pytest.raises(ApiError) as refusal:
        await asked(**said)
    assert (refusal.value.body.error.param, refusal.value.body.error.code) == (param, code)
    assert refusal.value.status == (404 if code == "model_not_found" else 400)


async def test_as_much_fits_as_leaves_room_for_a_request() -> None:
    most = MODEL.context_length - BEHIND_PREFIX
    assert len((await asked(prompt=[7] * most)).tokens) == most
    with pytest.raises(ApiError, match=f"{most} tokens at most"):
        await asked(prompt=[7] * (most + 1))


async def test_a_prefix_is_kept_shown_and_let_go_of() -> None:
    sessions = ScriptedSessions()
    async with served(sessions) as door:
        response = await door.client.post("/v1/prefixes", json={"prompt": "hello", "ttl_s": 60})
        assert (response.status_code, response.json()) == (200, SHOWN)
        assert sessions.prefixes.asked[0].ttl_s == 60
        response = await door.client.get("/v1/prefixes")
        assert response.json() == {"object": "list", "data": [SHOWN]}
        response = await door.client.get(f"/v1/prefixes/{KEPT.name}")
        assert response.json() == SHOWN
        response = await door.client.delete(f"/v1/prefixes/{KEPT.name}")
        assert response.json() == {"object": "prefix", "id": KEPT.name, "deleted": True}
        assert sessions.prefixes.forgotten == [KEPT.name]


async def test_another_key_sees_nothing_and_deletes_nothing() -> None:
    sessions = ScriptedSessions()
    async with served(sessions) as door:
        await door.client.post("/v1/prefixes", json={"prompt": "hello"}, headers=KEY)
        assert sessions.prefixes.asked[0].owner == client_of_key(b"Bearer sk-mine")
        assert (await door.client.get("/v1/prefixes", headers=KEY)).json()["data"] == []
        for method in ("GET", "DELETE"):
            response = await door.client.request(method, f"/v1/prefixes/{KEPT.name}", headers=KEY)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "prefix_not_kept")
        sessions.prefixes.owners[KEPT.name] = client_of_key(b"Bearer sk-mine")
        assert (await door.client.get("/v1/prefixes", headers=KEY)).json()["data"] == [SHOWN]
        assert (await door.client.get("/v1/prefixes")).json()["data"] == []


@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry"),
    [
        (PrefixTooShort("3 tokens are no page of 16"), 400, "prefix_too_short", None),
        (PrefixRefused("5 pages would pass the 4"), 409, "prefix_refused", None),
        (QueueFull("64 prefixes are kept"), 429, "too_many_prefixes", "1"),
        (PrefixUnfilled("not within 120 s"), 503, "prefix_not_filled", "1"),
        (Draining(), 503, "draining", None),
        (Refused("x"), 503, None, None),
    ],
)
async def test_refusals_have_a_status(
    refusal: Refused, status: int, code: str | None, retry: str | None
) -> None:
    sessions = ScriptedSessions()
    sessions.prefixes.refusal = refusal
    async with served(sessions) as door:
        response = await door.client.post("/v1/prefixes", json={"prompt": "hello"})
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert response.headers.get("retry-after") == retry
        assert str(refusal) in response.json()["error"]["message"]


async def test_a_bug_behind_the_door_is_a_500() -> None:
    sessions = ScriptedSessions()
    sessions.prefixes.refusal = RuntimeError("a bug in the gateway")
    async with served(sessions) as door:
        assert (await door.client.post("/v1/prefixes", json={"prompt": "hello"})).status_code == 500


async def test_who_goes_away_before_it_is_filled_keeps_nothing() -> None:
    sessions = ScriptedSessions()
    sessions.prefixes.go = trio.Event()
    async with served(sessions) as door:
        payload = b'{"prompt": "hello"}'
        stream = await trio.open_tcp_stream("127.0.0.1", door.port)
        await stream.send_all(
            b"POST /v1/prefixes HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(payload), payload)
        )
        await sessions.prefixes.waits.wait()
        await stream.aclose()
        await sessions.prefixes.cancelled.wait()
