"""The HTTP door: what a well-behaved client sees, and how wrong requests are refused."""

from __future__ import annotations

import json
import time
from functools import partial

import openai
import pytest
import trio
from scripted_sessions import MODEL, ScriptedSessions, body, served

from actors.doors.openai_request import NEUTRAL
from actors.doors.wishes import MESSAGE_CHARS, parse_chat
from actors.sessions import DeltaToken, Draining, QueueFull, Refused
from engine.sampling import SamplingParams, TokenLogprobs


def events(text: str) -> list[object]:
    """The data of server-sent events, decoded but for the closing mark."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


async def test_whole_response_is_what_openai_documents() -> None:
    async with served(ScriptedSessions(("Hel", "lo"))) as door:
        response = await door.chat()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == "r0"
    value = response.json()
    assert isinstance(value.pop("created"), int)
    assert value == {
        "id": "chatcmpl-r0",
        "object": "chat.completion",
        "model": "Scripted-1M",
        "system_fingerprint": "fp_0123456789abcdef",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10},
    }
    assert door.sessions.opened[0].cancels == []


@pytest.mark.parametrize("include_usage", [False, True])
async def test_stream_is_role_deltas_reason_usage_done(include_usage: bool) -> None:
    async with served(ScriptedSessions(("Hel", "lo\n\n€"))) as door:
        options = {"stream_options": {"include_usage": True}} if include_usage else {}
        response = await door.chat(stream=True, **options)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-r0"}
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo\n\n€"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert door.sessions.opened[0].cancels == []


async def test_parameters_reach_the_generation() -> None:
    async with served(ScriptedSessions(("x",))) as door:
        await door.chat(
            temperature=0.5, top_p=0.9, seed=-1, stop=["a", "b"], max_completion_tokens=5, user="me", n=1
        )
        await door.chat(stop="a", max_tokens=4, max_completion_tokens=4)
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        await door.chat(messages=[{"role": "system", "content": parts}], seed=None)
    first, second, third = (session.generation for session in door.sessions.opened)
    assert first.sampling.temperature == 0.5
    assert first.sampling.top_p == 0.9
    assert first.sampling.seed == 2**64 - 1
    assert (first.stop, first.max_tokens) == (("a", "b"), 5)
    assert (second.stop, second.max_tokens) == (("a",), 4)
    assert (second.sampling.temperature, second.sampling.top_p, second.sampling.seed) == (1.0, 1.0, 4711)
    assert first.sampling == SamplingParams(temperature=0.5, top_p=0.9, seed=2**64 - 1)
    assert third.prompt == (1, *b"hi")
    assert third.max_tokens == MODEL.context_length - 3


async def test_sampling_and_stopping_parameters_reach_the_generation() -> None:
    async with served(ScriptedSessions(("x",))) as door:
        response = await door.chat(
            temperature=0.5,
            top_k=40,
            min_p=0.1,
            presence_penalty=-2,
            frequency_penalty=1.5,
            repetition_penalty=1.1,
            logit_bias={"9": -100, "7": 0.5},
            min_tokens=3,
            ignore_eos=True,
            stop_token_ids=[255, 4],
            include_stop_str_in_output=True,
            seed=1,
        )
        assert response.is_success, response.text
        nothing = ["top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
        nothing += ["logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"]
        await door.chat(**dict.fromkeys(nothing), seed=1)
        await door.chat(top_k=-1, logit_bias={}, stop_token_ids=[], repetition_penalty=1, seed=1)
    full, *empty = (session.generation for session in door.sessions.opened)
    assert full.sampling == SamplingParams(
        temperature=0.5,
        top_k=40,
        min_p=0.1,
        seed=1,
        presence_penalty=-2.0,
        frequency_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias=((7, 0.5), (9, -100.0)),
    )
    assert (full.min_tokens, full.ignore_eos, full.stop_tokens, full.show_stop) == (3, True, (255, 4), True)
    for generation in empty:
        assert generation.sampling == SamplingParams(temperature=1.0, seed=1)
        assert (generation.min_tokens, generation.ignore_eos) == (0, False)
        assert (generation.stop_tokens, generation.show_stop) == ((), False)


FIRST = DeltaToken(0xC3, TokenLogprobs(-0.5, ((0xC3, -0.5), (65, -2.0))))
SECOND = DeltaToken(0xBC, TokenLogprobs(-0.25, ()))
LAST = DeltaToken(0, None)
LOGPROBS = [
    {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]},
            {"token": "A", "logprob": -2.0, "bytes": [65]},
        ],
    },
    {"token": "\ufffd", "logprob": -0.25, "bytes": [0xBC], "top_logprobs": []},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wanted", ["logprobs", "token_ids", "both"])
async def test_logprobs_and_tokens_in_openais_shapes(stream: bool, wanted: str) -> None:
    scores, ids = wanted != "token_ids", wanted != "logprobs"
    parameters = {"logprobs": True, "top_logprobs": 2} if scores else {}
    async with served(ScriptedSessions()) as door, trio.open_nursery() as nursery:

        async def play() -> None:
            session = await door.sessions.next()
            assert session.generation.logprobs == (2 if scores else None)
            assert session.generation.token_ids == ids
            tokens = [FIRST, SECOND, LAST] if scores else [DeltaToken(t.token, None) for t in (FIRST, SECOND)]
            session.tell("", tokens[0])
            session.tell("ü", tokens[1])
            if scores:
                session.tell("", tokens[2])
            session.end()

        nursery.start_soon(play)
        response = await door.chat(stream=stream, return_token_ids=ids, **parameters)
    if stream:
        values = events(response.text)[:-1]
    else:
        values = [response.json()]
        assert values[0]["choices"][0]["message"]["content"] == "ü"
    choices = [value["choices"][0] for value in values]
    found = [entry for c in choices for entry in (c["logprobs"] or {"content": []})["content"]]
    assert found == (LOGPROBS if scores else [])
    tokens = [token for choice in choices for token in choice.get("token_ids", ())]
    assert tokens == ([0xC3, 0xBC, 0] if scores and ids else [0xC3, 0xBC] if ids else [])
    prompts = [value["prompt_token_ids"] for value in values if "prompt_token_ids" in value]
    assert prompts == ([[1, *b"hi"]] if ids else [])


REFUSALS = [
    ({"model": 3}, "model", None),
    ({"messages": []}, "messages", None),
    ({"messages": "hi"}, "messages", None),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
        "messages[1].role",
        None,
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", None),
    ({"messages": [{"role": "user", "content": "a", "name": 3}]}, "messages[0].name", None),
    ({"messages": [{"role": "user", "content": "a", "who": "b"}]}, "messages[0].who", "unknown_parameter"),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        None,
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].type",
        None,
    ),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", None),
    ({"max_tokens": 0}, "max_tokens", None),
    ({"max_tokens": 1.5}, "max_tokens", None),
    ({"max_tokens": True}, "max_tokens", None),
    ({"max_tokens": "9"}, "max_tokens", None),
    ({"max_tokens": 10**30}, "max_tokens", None),
    ({"max_completion_tokens": -1}, "max_completion_tokens", None),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", None),
    ({"temperature": 2.1}, "temperature", None),
    ({"temperature": -0.1}, "temperature", None),
    ({"top_p": 0}, "top_p", None),
    ({"top_p": 1.01}, "top_p", None),
    ({"top_k": -2}, "top_k", None),
    ({"top_k": 0.5}, "top_k", None),
    ({"min_p": 1.1}, "min_p", None),
    ({"presence_penalty": 2.1}, "presence_penalty", None),
    ({"frequency_penalty": -2.1}, "frequency_penalty", None),
    ({"repetition_penalty": 0}, "repetition_penalty", None),
    ({"repetition_penalty": -1}, "repetition_penalty", None),
    ({"repetition_penalty": 101}, "repetition_penalty", None),
    ({"logit_bias": {"1": 101}}, "logit_bias", None),
    ({"logit_bias": {"a": 1}}, "logit_bias", None),
    ({"logit_bias": {"-1": 1}}, "logit_bias", None),
    ({"logit_bias": {"256": 1}}, "logit_bias", None),
    ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias", None),
    ({"logit_bias": [1]}, "logit_bias", None),
    ({"min_tokens": -1}, "min_tokens", None),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", None),
    ({"min_tokens": 998}, "min_tokens", None),
    ({"ignore_eos": 1}, "ignore_eos", None),
    ({"stop_token_ids": [256]}, "stop_token_ids", None),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", None),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", None),
    ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output", None),
    ({"logprobs": 1}, "logprobs", None),
    ({"top_logprobs": 3}, "top_logprobs", None),
    ({"logprobs": False, "top_logprobs": 0}, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
    ({"return_token_ids": "yes"}, "return_token_ids", None),
    ({"request_id": "a b"}, "request_id", None),
    ({"request_id": "x" * 129}, "request_id", None),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", None),
    ({"chat_template_kwargs": {"now": 1}}, "chat_template_kwargs.now", None),
    ({"echo": True}, "echo", "unknown_parameter"),
    ({"seed": 2**63}, "seed", None),
    ({"seed": 0.5}, "seed", None),
    ({"stop": ""}, "stop", None),
    ({"stop": ["a", ""]}, "stop[1]", None),
    ({"stop": list("abcde")}, "stop", None),
    ({"n": 0}, "n", None),
    ({"n": 17}, "n", None),
    ({"n": True}, "n", None),
    ({"priority": 101}, "priority", None),
    ({"priority": 0.5}, "priority", None),
    ({"user": 3}, "user", None),
    ({"continue_final_message": True}, "continue_final_message", None),
    (
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
        None,
    ),
    ({"add_generation_prompt": 1}, "add_generation_prompt", None),
    (
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs.add_generation_prompt",
        None,
    ),
    ({"stream": "yes"}, "stream", None),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_value"),
    ({"tool_choice": "auto"}, "tool_choice", "unsupported_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
    ({"store": 0}, "store", "unsupported_value"),
    ({"audio": {}}, "audio", "unsupported_value"),
    ({"best_of": 1}, "best_of", "unknown_parameter"),
    ({"messages": [{"role": "user", "content": "x" * 1200}]}, "messages", "context_length_exceeded"),
    ({"max_tokens": 998}, "max_tokens", "context_length_exceeded"),
]


async def test_wrong_parameters_are_refused_by_name() -> None:
    async with served(ScriptedSessions()) as door:
        for change, param, code in REFUSALS:
            response = await door.chat(**change)
            assert response.status_code == 400, change
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (param, code), error
            assert error["type"] == "invalid_request_error"
            assert param in error["message"] or code == "context_length_exceeded"
        assert door.sessions.opened == []


async def test_standard_parameters_pass_at_neutral_values() -> None:
    async with served(ScriptedSessions(("x",))) as door:
        for name, only in NEUTRAL.items():
            for value in (*only.values, None):
                assert (await door.chat(**{name: value})).status_code == 200, (name, value)
            response = await door.chat(**{name: "anything else"})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name)
            assert only.because in error["message"]
        assert (await door.chat(metadata={"a": "b"}, safety_identifier="s", prompt_cache_key="k")).is_success
        answer = (await door.chat()).json()["choices"][0]["message"]
        turn = {"role": "developer", "content": "d", "name": "n"}
        assert (await door.chat(messages=[turn, answer])).is_success
    assert door.sessions.text.messages == [
        {"role": "system", "content": "d", "name": "n"},
        {"role": "assistant", "content": "x"},
    ]


async def test_a_request_may_bring_its_own_name() -> None:
    async with served(ScriptedSessions(("x",))) as door:
        response = await door.chat(request_id="mine-1")
        assert (response.json()["id"], response.headers["x-request-id"]) == ("chatcmpl-mine-1", "mine-1")
        post = partial(door.client.post, "/v1/chat/completions", json=body(stream=True))
        response = await post(headers={"x-request-id": "theirs"})
        assert response.headers["x-request-id"] == "theirs"
        assert events(response.text)[0]["id"] == "chatcmpl-theirs"
        response = await post(headers={"x-request-id": "a b"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Request-Id")
        assert len(door.sessions.opened) == 2


async def test_choices_have_their_index_and_count_the_prompt_once() -> None:
    async with served(ScriptedSessions(("Hel", "lo"))) as door:
        whole = (await door.chat(n=3)).json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in whole["choices"]} == {"Hello"}
        assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 21, "total_tokens": 24}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, done = events((await door.chat(n=3, **options)).text)
        assert (done, last["choices"], last["usage"]["total_tokens"]) == ("[DONE]", [], 24)
        for index in range(3):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(piece["delta"].get("content", "") for piece in own) == "Hello"
            assert [piece["finish_reason"] for piece in own] == [None, None, None, "stop"]
        request = {"model": MODEL.name, "prompt": "hi", "n": 2, "best_of": 2, "echo": True}
        response = await door.client.post("/v1/completions", json=request)
        assert [choice["text"] for choice in response.json()["choices"]] == ["hiHello", "hiHello"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["error", "cancelled"])
async def test_when_one_choice_fails_the_others_are_given_up(stream: bool, reason: str) -> None:
    async with served(ScriptedSessions()) as door, trio.open_nursery() as nursery:

        async def ask() -> None:
            response = await door.chat(n=3, stream=stream)
            if stream:
                *_, last = events(response.text)
                assert "[DONE]" not in response.text
            else:
                assert response.status_code == (500 if reason == "error" else 503)
                last = response.json()
            assert last["error"]["type"] == "server_error"

        nursery.start_soon(ask)
        session = await door.sessions.next()
        session.say("a", choice=0)
        session.end(choice=0)
        session.end(reason, "no pages", choice=1)
        await session.cancelled.wait()
        session.say("never shown", choice=2)
        session.end(choice=2)
    assert session.cancels == ["failed_choice"]


async def test_an_api_key_says_who_asks_and_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    async with served(ScriptedSessions(("x",))) as door:
        post = partial(door.client.post, "/v1/chat/completions")
        for user in ("a", "b"):
            await post(json=body(user=user), headers={"authorization": "Bearer sk-secret"})
        await post(json=body(user="a"))
        await post(json=body(temperature=9), headers={"authorization": "Bearer sk-secret"})
    one, two, three = (session.generation.client for session in door.sessions.opened)
    assert one.startswith("key:")
    assert one.removesuffix("/user:a") == two.removesuffix("/user:b")
    assert three == "user:a"
    assert "secret" not in capsys.readouterr().out


async def test_template_variables_reach_the_template() -> None:
    async with served(ScriptedSessions(("x",))) as door:
        assert (await door.chat(chat_template_kwargs={"enable_thinking": False})).is_success
        assert door.sessions.text.variables == {"enable_thinking": False}


async def test_completions_whole() -> None:
    async with served(ScriptedSessions(("Hel", "lo"))) as door:
        post = partial(door.client.post, "/v1/completions")
        response = await post(json={"model": MODEL.name, "prompt": "hi"})
        value = response.json()
        assert isinstance(value.pop("created"), int)
        assert value == {
            "id": "cmpl-r0",
            "object": "text_completion",
            "model": "Scripted-1M",
            "system_fingerprint": "fp_0123456789abcdef",
            "choices": [{"index": 0, "text": "Hello", "finish_reason": "stop", "logprobs": None}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10},
        }
        response = await post(json={"model": MODEL.name, "prompt": [104, 105], "echo": True, "max_tokens": 3})
        assert response.json()["choices"][0]["text"] == "hiHello"
        await post(json={"model": MODEL.name, "prompt": "x" * 990, "add_special_tokens": False, "seed": 3})
    first, second, third = (session.generation for session in door.sessions.opened)
    assert (first.prompt, first.max_tokens) == ((2, *b"hi"), 16)
    assert (second.prompt, second.max_tokens) == ((104, 105), 3)
    assert (third.prompt, third.max_tokens, third.sampling.seed) == (tuple(b"x" * 990), 10, 3)


@pytest.mark.parametrize("echo", [False, True])
async def test_completions_streamed(echo: bool) -> None:
    request = {"model": MODEL.name, "prompt": "hi", "stream": True, "echo": echo}
    request["stream_options"] = {"include_usage": True}
    async with served(ScriptedSessions(("Hel", "lo"))) as door:
        response = await door.client.post("/v1/completions", json=request)
    *chunks, last, done = events(response.text)
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 10)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts == [*(["hi"] if echo else []), "Hel", "lo", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_completions_are_refused_by_name() -> None:
    wrong = [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt[0]"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": "x" * 1000}, "prompt"),
        ({"max_tokens": 998}, "max_tokens"),
        ({"max_completion_tokens": 9}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"n": 17}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0, "echo": True}, "logprobs"),
        ({"echo": 1}, "echo"),
    ]
    async with served(ScriptedSessions()) as door:
        for change, param in wrong:
            request = {"model": MODEL.name, "prompt": "hi"} | change
            response = await door.client.post("/v1/completions", json=request)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), change
        response = await door.client.post("/v1/completions", json={"model": "x", "prompt": "hi"})
        assert response.status_code == 404
        assert door.sessions.opened == []


async def test_tokenize_and_detokenize() -> None:
    async with served(ScriptedSessions()) as door:

        async def ask(path: str, **request: object) -> tuple[int, dict[str, object]]:
            response = await door.client.post(path, json=request)
            return response.status_code, response.json()

        whole = {"count": 3, "max_model_len": 1000, "tokens": [2, *b"hi"]}
        assert await ask("/tokenize", prompt="hi") == (200, whole)
        assert (await ask("/tokenize", prompt="hi", add_special_tokens=False))[1]["tokens"] == [*b"hi"]
        assert (await ask("/tokenize", prompt="", add_special_tokens=False))[1]["count"] == 0
        messages = [{"role": "user", "content": "hi"}]
        status, value = await ask("/tokenize", model=MODEL.name, messages=messages)
        assert (status, value["tokens"]) == (200, [1, *b"hi"])
        assert await ask("/detokenize", tokens=[*b"hi"]) == (200, {"prompt": "hi"})
        for path, request, param in [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
            ("/tokenize", {"messages": messages, "add_special_tokens": True}, "add_special_tokens"),
            ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
            ("/tokenize", {"prompt": 3}, "prompt"),
            ("/detokenize", {"tokens": [256]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {}, "tokens"),
        ]:
            status, value = await ask(path, **request)
            assert (status, value["error"]["param"]) == (400, param), request
        assert (await ask("/detokenize", model="x", tokens=[]))[0] == 404
        assert (await door.client.get("/tokenize")).status_code == 405


async def test_context_errors_say_by_how_many_tokens() -> None:
    async with served(ScriptedSessions(("x",))) as door:
        response = await door.chat(messages=[{"role": "user", "content": "x" * 1009}])
        assert "1010 and at least 1 to generate, 11 too many" in response.json()["error"]["message"]
        response = await door.chat(max_tokens=1000)
        assert "3 and 1000 to generate, 3 too many" in response.json()["error"]["message"]
        response = await door.chat(messages=[{"role": "user", "content": "x" * 998}], max_tokens=1)
        assert response.status_code == 200


async def test_many_empty_messages_stop_nobody() -> None:
    """They are as long as a long text to a template, and cost a thread or nothing, never the event loop."""
    empty = {"role": "user", "content": ""}
    async with served(ScriptedSessions(("x",))) as door:
        began = time.process_time()
        response = await door.chat(messages=[empty] * 2_000)
        assert time.process_time() - began < 2
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "2000 messages are too many" in response.json()["error"]["message"]
        response = await door.chat(messages=[empty] * 900)
        assert response.status_code in (200, 400)
    conversation, _ = parse_chat(
        json.dumps(body(messages=[empty] * 100)).encode(), model="Scripted-1M", vocab_size=300
    )
    assert conversation.chars >= 100 * MESSAGE_CHARS


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"{", "truncated"),
        (b'{"model":"\\ud800"}', "half of a surrogate pair"),
        (b'{"model":NaN}', "invalid character"),
    ],
)
async def test_a_body_that_cannot_be_read_is_told_why(content: bytes, why: str) -> None:
    async with served(ScriptedSessions(("x",))) as door:
        headers = {"content-type": "application/json"}
        response = await door.client.post("/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == 400
        assert why in response.json()["error"]["message"]


async def test_bodies_that_are_no_request() -> None:
    headers = {"content-type": "application/json"}
    wrong = [b"", b"{", b"[]", b"null", b'{"model": "\xff"}', b"\x00", b"[" * 50_000, b'{"model":"\\ud800"}']
    wrong.append(b'{"model":"Scripted-1M","messages":' + b"[" * 50_000)
    wrong.append(b'{"model":"Scripted-1M","messages":[],"max_tokens":' + b"1" * 50_000 + b"}")
    async with served(ScriptedSessions(("x",))) as door:
        post = partial(door.client.post, "/v1/chat/completions")
        for content in wrong:
            response = await post(content=content, headers=headers)
            assert response.status_code == 400, content[:40]
            assert response.json()["error"]["type"] == "invalid_request_error"
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            response = await post(content=json.dumps(body()), headers={"content-type": kind})
            assert response.status_code == 415
        response = await post(content=b" " * 3_000_000, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")

        async def chunked() -> object:
            for _ in range(30):
                yield b" " * 10_000

        response = await post(content=chunked(), headers=headers)
        assert response.status_code == 413
        assert (await post(json={})).json()["error"]["param"] == "messages"
        response = await door.chat(model="gpt-4")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert (await door.chat()).status_code == 200


async def test_other_routes() -> None:
    async with served(ScriptedSessions()) as door:
        get = door.client.get
        models = (await get("/v1/models")).json()
        assert models["object"] == "list"
        (model,) = models["data"]
        assert (model["id"], model["object"], model["owned_by"]) == ("Scripted-1M", "model", "estafet")
        assert (await get("/v1/models/Scripted-1M")).json() == model
        assert (await get("/v1/models/a%2Fb")).json()["error"]["code"] == "model_not_found"
        assert (await get("/health/live")).json() == {"status": "live"}
        assert (await get("/health/ready")).status_code == 200
        door.sessions.reason = "no worker can decode"
        ready = await get("/health/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "no worker can decode")
        assert (await get("/")).json()["error"]["code"] == "unknown_url"
        for target, status in [("http://a.b:1/v1/models?x=1", 200), ("HTTPS://a/health/live", 200)]:
            request = door.client.build_request("GET", "/", extensions={"target": target.encode()})
            assert (await door.client.send(request)).status_code == status, target
        for target in ("http://a.b", "http://", "ftp://a/v1/models", "*", "http://a/v1%2Fmodelsx"):
            request = door.client.build_request("GET", "/", extensions={"target": target.encode()})
            assert (await door.client.send(request)).status_code == 404, target
        assert (await door.client.post("/v1/embeddings", content=b"x" * 200_000)).status_code == 404
        wrong = await get("/v1/chat/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert (await door.client.post("/health/live")).json()["error"]["code"] == "method_not_allowed"
        assert (await door.client.head("/v1/models")).content == b""


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_and_failures_before_the_first_token_have_a_status(stream: bool) -> None:
    async with served(ScriptedSessions()) as door, trio.open_nursery() as nursery:
        results: list[tuple[int, str]] = []

        async def ask() -> None:
            response = await door.chat(stream=stream)
            results.append((response.status_code, response.json()["error"]["message"]))

        door.sessions.refusal = QueueFull("64 of 64 open")
        response = await door.chat(stream=stream)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert response.json()["error"]["code"] == "queue_full"
        for refusal in (Draining("now"), Refused("no")):
            door.sessions.refusal = refusal
            assert (await door.chat(stream=stream)).status_code == 503
        door.sessions.refusal = None
        nursery.start_soon(ask)
        (await door.sessions.next()).end("error", "the pages are gone")
        nursery.start_soon(ask)
        (await door.sessions.next()).end("cancelled")
        nursery.start_soon(ask)
        broken = await door.sessions.next()
        broken.crash()
        await broken.cancelled.wait()
    assert sorted(results) == [
        (500, "The request failed inside the server."),
        (500, "the pages are gone"),
        (503, "The request was cancelled by the server."),
    ]
    assert broken.cancels == ["http_door"]


async def test_an_error_inside_a_stream_is_an_event_and_the_end() -> None:
    async with served(ScriptedSessions()) as door, trio.open_nursery() as nursery:

        async def ask() -> None:
            response = await door.chat(stream=True)
            last = events(response.text)[-1]
            assert last["error"]["message"] == "no pages"
            assert last["error"]["type"] == "server_error"

        nursery.start_soon(ask)
        session = await door.sessions.next()
        session.say("half")
        session.end("error", "no pages")


async def test_two_streams_run_at_once() -> None:
    async with served(ScriptedSessions()) as door, trio.open_nursery() as nursery:
        seen: dict[str, str] = {}

        async def ask() -> None:
            response = await door.chat(stream=True)
            chunks = events(response.text)[:-1]
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            seen[chunks[0]["id"]] = text

        nursery.start_soon(ask)
        nursery.start_soon(ask)
        one, two = await door.sessions.next(), await door.sessions.next()
        for letter in "abcdef":
            one.say(letter)
            two.say(letter.upper())
        two.end()
        one.end("length")
    assert seen == {f"chatcmpl-{one.request_id}": "abcdef", f"chatcmpl-{two.request_id}": "ABCDEF"}


async def test_large_prompts_are_tokenised_in_a_thread() -> None:
    async with served(ScriptedSessions()) as door:
        await door.chat(messages=[{"role": "user", "content": "x" * 20_000}])
        await door.chat(messages=[{"role": "user", "content": "x" * 10_000}])
    assert door.sessions.text.threads == [True, False]


async def test_the_official_client() -> None:
    async with served(ScriptedSessions(("Hel", "lo"))) as door:
        await trio.to_thread.run_sync(use_official_client, f"{door.url}/v1")


def use_official_client(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
        ask = partial(client.chat.completions.create, model="Scripted-1M")
        messages = [{"role": "user", "content": "hi"}]
        assert ask(messages=messages).choices[0].message.content == "Hello"
        with ask(messages=messages, stream=True, stream_options={"include_usage": True}) as stream:
            *chunks, last = stream
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
        assert last.usage.total_tokens == 10
        assert [model.id for model in client.models.list()] == ["Scripted-1M"]
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=messages)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            ask(messages=messages, temperature=3)
        assert wrong.value.param == "temperature"
