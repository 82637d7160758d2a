"""The intake: what a body becomes, before any door has opened a session."""

from __future__ import annotations

import json

import pytest
import trio
from scripted_sessions import MODEL, ScriptedSessions, body

from actors.doors.answers import answer_for
from actors.doors.intake import Asked, Intake, client_of_key
from actors.doors.openai_error import ApiError
from actors.doors.openai_request import MAX_SALT
from actors.doors.ticket import ticket_of
from actors.sessions import Draining, QueueFull, Refused


async def chat(intake: Intake | None = None, /, client: str = "", **parameters: object) -> Asked:
    intake = intake or Intake(ScriptedSessions())
    return await intake.chat(json.dumps(body(**parameters)).encode(), client=client)


async def complete(*, resumable: bool = False, **parameters: object) -> Asked:
    request = {"model": MODEL.name, "prompt": "hi"} | parameters
    return await Intake(ScriptedSessions()).completion(json.dumps(request).encode(), resumable=resumable)


async def test_choices_and_priority_reach_the_generation() -> None:
    generation = (await chat()).generation
    assert (generation.n, generation.priority, generation.client) == (1, 0, "")
    assert not generation.resumable
    generation = (await chat(n=16, priority=-100)).generation
    assert (generation.n, generation.priority) == (16, -100)
    generation = (await complete(n=2, best_of=2, priority=100, logprobs=5)).generation
    assert (generation.n, generation.priority, generation.logprobs) == (2, 100, 5)
    generation = (await complete(best_of=1, logprobs=0, echo=False)).generation
    assert (generation.n, generation.logprobs) == (1, 0)


async def test_what_is_said_of_the_cache_reaches_the_gateway_and_the_answer() -> None:
    asked = await chat()
    assert (asked.generation.cache_salt, ticket_of(asked.generation).cache) == ("", False)
    asked = await chat(cache_salt="tenant-7", x_estafet={"cache": True})
    assert (asked.generation.cache_salt, ticket_of(asked.generation).cache) == ("tenant-7", True)
    asked = await complete(cache_salt="\u00fc" * MAX_SALT, x_estafet={})
    assert (asked.generation.cache_salt, ticket_of(asked.generation).cache) == ("\u00fc" * MAX_SALT, False)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"cache_salt": "x" * (MAX_SALT + 1)}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"x_estafet": {"cache": 1}}, "x_estafet.cache"),
        ({"x_estafet": {"cash": True}}, "x_estafet.cash"),
        ({"x_estafet": True}, "x_estafet"),
    ],
)
async def test_what_cannot_be_said_of_the_cache_is_refused_by_name(
    parameters: dict[str, object], param: str
) -> None:
    for ask in (chat, complete):
        with pytest.raises(ApiError) as refusal:
            await ask(**parameters)
        assert (refusal.value.status, refusal.value.body.error.param) == (400, param)


async def test_key_and_user_say_who_asks() -> None:
    assert (await chat(user="me")).generation.client == "user:me"
    assert (await chat(safety_identifier="us")).generation.client == "user:us"
    assert (await chat(user="", safety_identifier="us")).generation.client == "user:us"
    assert (await chat(user="me", safety_identifier="us")).generation.client == "user:me"
    assert (await chat(user=" \x1b[2J\r\n\u202e ")).generation.client == "user:[2J"
    assert (await chat(user=" \n")).generation.client == ""
    assert (await chat(user="\u00fc" * 100)).generation.client == "user:" + "\u00fc" * 64
    assert (await chat(client="key:1")).generation.client == "key:1"
    assert (await chat(client="key:1", user="me")).generation.client == "key:1/user:me"


def test_a_key_is_told_by_its_digest_only() -> None:
    name = client_of_key(b"Bearer sk-secret")
    assert name == client_of_key(b"bearer   sk-secret ")
    assert name != client_of_key(b"Bearer sk-secret2")
    kind, digest = name.split(":")
    assert (kind, len(digest)) == ("key", 16)
    assert int(digest, 16) >= 0
    assert "secret" not in name
    for nothing in (None, b"", b"Bearer", b"Bearer ", b"Basic abc", b"sk-secret"):
        assert client_of_key(nothing) == ""
    assert client_of_key(b"Bearer \xff\xfe").startswith("key:")


async def test_the_ticket_answers_the_request_again() -> None:
    sessions = ScriptedSessions()
    intake = Intake(sessions)
    body_ = json.dumps(body(stream=True, stream_options={"include_usage": True})).encode()
    asked = await intake.chat(body_, name="mine", resumable=True)
    assert (asked.generation.resumable, asked.name) == (True, "mine")
    ticket = ticket_of(asked.generation)
    assert (ticket.kind, ticket.name, ticket.include_usage, ticket.echo) == ("chat", "mine", True, None)
    assert len(asked.generation.ticket) < 64
    assert b'"id":"chatcmpl-mine"' in answer_for(asked.generation, "r7", MODEL, sessions.text).head()
    asked = await intake.chat(json.dumps(body(request_id="theirs")).encode(), name="mine")
    assert asked.name == ticket_of(asked.generation).name == "theirs"


@pytest.mark.parametrize(
    ("parameters", "shown"),
    [
        ({}, "hi"),
        ({"prompt": [104, 105]}, "hi"),
        ({"add_special_tokens": False}, "hi"),
        ({"prompt": ""}, ""),
        ({"prompt": "ü"}, "ü"),
    ],
)
async def test_an_echo_is_what_the_client_wrote(parameters: dict[str, object], shown: str) -> None:
    generation = (await complete(echo=True, **parameters)).generation
    head = answer_for(generation, "r7", MODEL, ScriptedSessions().text).head()
    assert head == b"" if shown == "" else f'"text":"{shown}"'.encode() in head


async def test_scores_of_completions_and_resuming_exclude_each_other() -> None:
    with pytest.raises(ApiError) as refusal:
        await complete(logprobs=1, resumable=True)
    assert refusal.value.body.error.param == "logprobs"
    assert (await complete(resumable=True)).generation.resumable


async def test_how_a_conversation_ends_reaches_the_template() -> None:
    sessions = ScriptedSessions()
    intake = Intake(sessions)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for parameters, expected in [
        ({}, {}),
        ({"add_generation_prompt": True, "continue_final_message": False}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        (
            {
                "continue_final_message": True,
                "add_generation_prompt": False,
                "chat_template_kwargs": {"a": 1},
            },
            {"continue_final_message": True, "a": 1},
        ),
    ]:
        await chat(intake, messages=turns, **parameters)
        assert sessions.text.variables == expected
        await intake.tokenize(json.dumps({"messages": turns} | parameters).encode())
        assert sessions.text.variables == expected


async def test_refusals_of_the_gateway_have_a_status() -> None:
    sessions = ScriptedSessions()
    intake = Intake(sessions)
    generation = (await chat(intake)).generation
    assert intake.open(generation).generation is generation
    for refusal, status, retry in [(QueueFull("x"), 429, 1), (Draining(), 503, None), (Refused(), 503, None)]:
        sessions.refusal = refusal
        with pytest.raises(ApiError) as error:
            intake.open(generation)
        assert (error.value.status, error.value.retry_after_s) == (status, retry)


async def test_a_long_text_waits_for_the_thread_and_a_short_one_for_nobody() -> None:
    sessions = ScriptedSessions()
    intake = Intake(sessions)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(refused, intake, "x" * 20_000)
            await chat(intake)
    assert sorted(sessions.text.threads) == [False, True, True, True]


async def refused(intake: Intake, content: str) -> None:
    with pytest.raises(ApiError, match="context holds"):
        await chat(intake, messages=[{"role": "user", "content": content}])
