"""Answers: a stream, put together, says what the whole response says, whatever its pieces are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_sessions import MODEL, ByteText

from actors.doors.answers import answer_for
from actors.doors.ticket import Ticket, ticket_of
from actors.sessions import Delta, DeltaToken, End, Generation
from engine.messages import Cached
from engine.sampling import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable

TEXT = ByteText()
SCORES = st.builds(
    TokenLogprobs,
    st.floats(-9, 0),
    st.lists(st.tuples(st.integers(0, 255), st.floats(-9, 0)), max_size=3).map(tuple),
)
TOKENS = st.lists(st.builds(DeltaToken, st.integers(0, 255), st.none() | SCORES), max_size=3).map(tuple)
CACHED = st.sampled_from([Cached(), Cached(memory=1), Cached(worker=1, host=1), Cached(file=2)])
TEXTS = st.text(max_size=4)


@st.composite
def runs(draw: st.DrawFn, kind: str) -> tuple[Generation, list[Delta | End]]:
    """A request of some choices, and its events in an order in which a gateway may tell them."""
    n = draw(st.integers(1, 3))
    ids, scored = draw(st.booleans()), draw(st.booleans())
    ticket = Ticket(
        kind, draw(st.none() | st.just("mine")), 1234, draw(st.booleans()), cache=draw(st.booleans())
    )
    if kind == "completion" and not scored:
        ticket = msgspec.structs.replace(ticket, echo=draw(st.none() | st.integers(0, 2)))
    generation = Generation(
        (104, 105),
        9,
        SamplingParams(),
        n=n,
        token_ids=ids,
        logprobs=3 if scored else None,
        ticket=ticket.encode(),
    )
    events: list[Delta | End] = []
    for choice in draw(st.permutations(range(n))):
        pieces = draw(st.lists(st.tuples(TEXTS, TOKENS if ids or scored else st.just(())), max_size=3))
        places = sorted(
            draw(st.lists(st.integers(0, len(events)), min_size=len(pieces), max_size=len(pieces)))
        )
        told = [Delta(text, tokens, choice) for text, tokens in pieces]
        for shift, (place, event) in enumerate(zip(places, told, strict=True)):
            events.insert(place + shift, event)
        reason = draw(st.sampled_from(["stop", "length"]))
        cached = draw(st.none() | CACHED) if choice == 0 else None
        events.append(End(reason, 2, draw(st.integers(0, 9)), None, choice, cached))
    return generation, events


def streamed(generation: Generation, events: Iterable[Delta | End]) -> list[dict[str, object]]:
    answer = answer_for(generation, "r1", MODEL, TEXT)
    parts = [answer.head()]
    ends = [event for event in events if isinstance(event, End)]
    parts += [answer.delta(event) if isinstance(event, Delta) else answer.end(event) for event in events]
    parts.append(answer.tail(ends))
    return [json.loads(event.removeprefix("data: ")) for event in b"".join(parts).decode().split("\n\n")[:-1]]


def put_together(chunks: list[dict[str, object]]) -> dict[str, object]:
    """What a client that gathers a stream has in the end."""
    whole = {key: value for key, value in chunks[0].items() if key not in ("choices", "usage", "object")}
    choices: dict[int, dict[str, object]] = {}
    for chunk in chunks:
        for key in ("id", "created", "model", "system_fingerprint"):
            assert chunk[key] == whole[key]
        for key in ("usage", "x_estafet"):
            if chunk.get(key):
                assert chunk["choices"] == []
                whole[key] = chunk[key]
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"], "finish_reason": None})
            assert choice["finish_reason"] is None, "a choice goes on after its end"
            choice["finish_reason"] = piece["finish_reason"]
            delta = piece.get("delta", piece)
            for key in ("role", "content", "text"):
                choice[key] = choice.get(key, "") + delta.get(key, "")
            if "token_ids" in piece:
                choice["token_ids"] = choice.get("token_ids", []) + piece["token_ids"]
            if "prompt_token_ids" in piece:
                choice["prompt_token_ids"] = piece["prompt_token_ids"]
            for key, value in (piece["logprobs"] or {}).items():
                scores = choice.setdefault("logprobs", {})
                scores[key] = value if value is None else scores.get(key, []) + value
    whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole


@pytest.mark.parametrize("kind", ["chat", "completion"])
@given(data=st.data())
def test_a_stream_and_a_whole_response_say_the_same(kind: str, data: st.DataObject) -> None:
    generation, events = data.draw(runs(kind))
    chunks = streamed(generation, events)
    gathered = put_together(chunks)
    deltas = [event for event in events if isinstance(event, Delta)]
    ends = [event for event in events if isinstance(event, End)]
    whole = json.loads(msgspec.json.encode(answer_for(generation, "r1", MODEL, TEXT).whole(deltas, ends)))

    assert [choice["index"] for choice in whole["choices"]] == list(range(generation.n))
    assert whole["usage"]["completion_tokens"] == sum(end.completion_tokens for end in ends)
    assert whole["usage"]["prompt_tokens"] == 2
    assert gathered.get("usage", whole["usage"]) == whole["usage"]
    assert ("usage" in gathered) == ticket_of(generation).include_usage
    assert gathered.get("x_estafet") == whole.get("x_estafet")
    assert ("x_estafet" in gathered) == ticket_of(generation).cache
    cached = next(end.cached for end in ends if end.choice == 0)
    if cached is None:
        assert "prompt_tokens_details" not in whole["usage"]
        assert whole.get("x_estafet", {}).get("cache") is None
    else:
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": cached.tokens}
        use = whole.get("x_estafet", {}).get("cache") or {"computed": 2 - cached.tokens}
        assert sum(use.values()) == (2 if "x_estafet" in whole else use["computed"])
        assert use["computed"] == 2 - cached.tokens
        assert all(
            use.get(source, found) == found for source, found in msgspec.structs.asdict(cached).items()
        )
    assert gathered["created"] == whole["created"] == 1234
    assert gathered["id"] == whole["id"]
    assert gathered.get("prompt_token_ids") == whole.get("prompt_token_ids")
    for piece, choice in zip(gathered["choices"], whole["choices"], strict=True):
        assert piece["finish_reason"] == choice["finish_reason"]
        if kind == "chat":
            assert (piece["role"], piece["content"]) == ("assistant", choice["message"]["content"])
        else:
            assert piece["text"] == choice["text"]
            assert piece.get("prompt_token_ids") == choice.get("prompt_token_ids")
        assert piece.get("token_ids", []) == choice.get("token_ids", [])
        told = piece.get("logprobs", {})
        for key, value in (choice["logprobs"] or {}).items():
            assert (told.get(key) or []) == (value or [])


@given(data=st.data())
def test_an_answer_made_again_goes_on_alike(data: st.DataObject) -> None:
    """What a resumed stream says of the rest is what its first reader would have been told."""
    generation, events = data.draw(runs("chat"))
    first = answer_for(generation, "r1", MODEL, TEXT)
    for event in events:
        again = answer_for(generation, "r1", MODEL, TEXT)
        if isinstance(event, Delta):
            assert first.delta(event) == again.delta(event)
        else:
            assert first.end(event) == again.end(event)


def test_log_probabilities_of_a_completion_are_openais_older_form() -> None:
    ticket = Ticket("completion", None, 1).encode()
    generation = Generation((1,), 9, SamplingParams(), logprobs=2, ticket=ticket)
    tokens = [
        DeltaToken(65, TokenLogprobs(-0.5, ((65, -0.5), (66, -1.5)))),
        DeltaToken(0xC3, TokenLogprobs(-2.0, ((67, -1.0),))),
        DeltaToken(0xBC, TokenLogprobs(-0.25, ())),
        DeltaToken(66, TokenLogprobs(-0.125, ())),
        DeltaToken(0, None),
    ]
    deltas = [Delta("A", tuple(tokens[:2])), Delta("üB", tuple(tokens[2:]))]
    end = End("stop", 1, 5)
    expected = {
        "tokens": ["A", "bytes:\\xc3", "bytes:\\xbc", "B"],
        "token_logprobs": [-0.5, -2.0, -0.25, -0.125],
        "top_logprobs": [
            {"A": -0.5, "B": -1.5},
            {"C": -1.0, "bytes:\\xc3": -2.0},
            {"bytes:\\xbc": -0.25},
            {"B": -0.125},
        ],
        "text_offset": [0, 1, 1, 2],
    }
    whole = answer_for(generation, "r1", MODEL, TEXT).whole(deltas, [end])
    assert msgspec.to_builtins(whole)["choices"][0]["logprobs"] == expected
    gathered = put_together(streamed(generation, [*deltas, end]))
    assert gathered["choices"][0]["logprobs"] == expected
