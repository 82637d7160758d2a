"""Our OpenAPI document: what `GET /openapi.json` answers, made of the structs that requests are decoded by.

So it cannot say what the server does not do. (The WebSocket and the ZeroMQ door are described where their
messages are, in `engine.stream_protocol`: OpenAPI has no words for them.) Version 3.2, the first that can
describe the events of a stream; its schemas are those of JSON Schema 2020-12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from actors.doors.event_id import HEADER, RESUMABLE
from actors.doors.openai_error import ErrorBody
from actors.doors.openai_request import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Name,
    PrefixRequest,
    TokenizeRequest,
)
from actors.doors.openai_response import (
    Chunk,
    Completion,
    DeletedPrefix,
    Detokenized,
    Model,
    ModelList,
    PrefixList,
    PrefixObject,
    TextCompletion,
    Tokens,
)

if TYPE_CHECKING:
    from engine.model import ModelConfig

Json = dict[str, Any]

_STRUCTS = (
    ChatRequest,
    CompletionRequest,
    PrefixRequest,
    TokenizeRequest,
    DetokenizeRequest,
    Completion,
    Chunk,
    TextCompletion,
    PrefixObject,
    PrefixList,
    DeletedPrefix,
    Tokens,
    Detokenized,
    Model,
    ModelList,
    ErrorBody,
)
_REF = "#/components/schemas/{name}"
_BODY_ERRORS = {
    400: "The body is not such a request; `param` names what is wrong.",
    404: "Another model is served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body has another type than application/json.",
}
_GENERATION_ERRORS = {
    404: "Another model is served here, or the stream to resume is not kept.",
    409: "The stream to resume was another one up to that event.",
    429: "Too many requests are open; `Retry-After` says when to try again.",
    500: "The request failed inside the server.",
    503: "The server is shutting down, or gave the request up.",
}
_PREFIX_ERRORS = {
    409: "Too much of the pool is pinned already.",
    429: "Too many prefixes are kept.",
    503: "The prefix could not be filled, or not in time, or the server is shutting down.",
}
_NOT_KEPT = {404: "Nothing of this id is kept for this API key by this gateway."}
_RESUMING = (
    f"Whether a stream can be resumed; its events have ids then, and the same request with the last of them "
    f"as `{HEADER}` goes on behind it"
)
_GOING_ON = "The last id that came: what follows it is answered, and the body is not looked at"
_METHOD_ERROR = {405: "Another method is asked for; `Allow` names those that there are."}


def openapi_document(model: ModelConfig, version: str) -> Json:
    """The document of a server of this model, as JSON values."""
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    _bind(schemas, model)
    return {
        "openapi": "3.2.0",
        "info": {
            "title": "Estafet",
            "version": version,
            "summary": "OpenAI's API for one served model",
            "description": (
                "Parameters that are not listed are refused by name; null is the same as leaving one out. "
                "Any API key is accepted: it says whose fair share a request counts against."
            ),
        },
        "paths": {
            "/v1/chat/completions": {"post": _chat()},
            "/v1/completions": {"post": _completion()},
            "/v1/prefixes": {
                "get": _get("listPrefixes", PrefixList.__doc__ or "", _json_of(_ref(PrefixList))),
                "post": _keeping(),
            },
            "/v1/prefixes/{prefix}": {
                "get": _get("getPrefix", "One of them", _json_of(_ref(PrefixObject)), _NOT_KEPT),
                "delete": _get("deletePrefix", "Keep it no longer", _json_of(_ref(DeletedPrefix)), _NOT_KEPT),
                "parameters": [
                    _parameter("prefix", "path", {"type": "string", "minLength": 1}, required=True)
                ],
            },
            "/tokenize": {
                "post": _post(
                    "tokenize", "What a prompt or a conversation is to the model", TokenizeRequest, Tokens
                )
            },
            "/detokenize": {
                "post": _post("detokenize", "The text of tokens", DetokenizeRequest, Detokenized)
            },
            "/v1/models": {"get": _get("listModels", "The served model", _json_of(_ref(ModelList)))},
            "/v1/models/{model}": {
                "get": _get(
                    "getModel", "The served model", _json_of(_ref(Model)), {404: "It is not served here."}
                )
                | {
                    "parameters": [
                        _parameter("model", "path", {"type": "string", "minLength": 1}, required=True)
                    ]
                }
            },
            "/health/live": {"get": _get("live", "The process answers", _json_of(_status("live")))},
            "/health/ready": {"get": _ready()},
            "/statistics": {
                "get": _get("statistics", "What every actor last published of itself", _json_of(_STATISTICS))
            },
            "/metrics": {
                "get": _get("metrics", "For Prometheus", {"text/plain": {"schema": {"type": "string"}}})
            },
            "/openapi.json": {"get": _get("openapi", "This document", _json_of({"type": "object"}))},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_STATISTICS: Json = {
    "type": "object",
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "number"}},
}


def _bind(schemas: dict[str, Json], model: ModelConfig) -> None:
    """Say of the served model what the structs cannot know."""
    last = model.vocab_size - 1
    for name in ("ChatRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        fields["model"] |= {"enum": [model.name, None]}
        fields["max_tokens"]["anyOf"][0] |= {"maximum": model.context_length - 1}
        fields["stop_token_ids"]["anyOf"][0]["items"] |= {"maximum": last}
    schemas["PrefixRequest"]["oneOf"] = [
        _only_with("prompt", "string", "array", not_with=("messages", "chat_template_kwargs")),
        _only_with("messages", "array", not_with=("prompt", "add_special_tokens")),
    ]
    schemas["TokenizeRequest"]["oneOf"] = [
        _only_with("prompt", "string", not_with=("messages", *_OF_MESSAGES)),
        _only_with("messages", "array", not_with=("prompt", "add_special_tokens")),
    ]
    for name in ("PrefixRequest", "TokenizeRequest", "DetokenizeRequest"):
        schemas[name]["properties"]["model"] |= {"enum": [model.name, None]}
    schemas["DetokenizeRequest"]["properties"]["tokens"]["items"] |= {"maximum": last}
    for name in ("CompletionRequest", "PrefixRequest"):
        for form in schemas[name]["properties"]["prompt"]["anyOf"]:
            if form["type"] == "array":
                form["items"] |= {"maximum": last}


def _only_with(name: str, *kinds: str, not_with: tuple[str, ...]) -> Json:
    properties: Json = {name: {"type": [*kinds]}} | {other: {"type": "null"} for other in not_with}
    return {"required": [name], "properties": properties}


def _chat() -> Json:
    return _generating(
        "createChatCompletion", "The next turn of a conversation", ChatRequest, Completion, Chunk
    )


def _completion() -> Json:
    return _generating(
        "createCompletion", "What follows a prompt", CompletionRequest, TextCompletion, TextCompletion
    )


def _keeping() -> Json:
    operation = _post("createPrefix", "Keep a prefix in the cache", PrefixRequest, PrefixObject)
    operation["responses"] |= _errors(_PREFIX_ERRORS)
    for status in ("429", "503"):
        operation["responses"][status]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return operation


def _generating(name: str, summary: str, body: type, whole: type, event: type) -> Json:
    operation = _post(name, summary, body, whole)
    answer = operation["responses"]["200"]
    answer["content"]["text/event-stream"] = {"itemSchema": _event(event)}
    answer["headers"] = {"X-Request-Id": {"schema": {"type": "string"}}}
    operation["parameters"] = [
        _parameter("X-Request-Id", "header", msgspec.json.schema(Name)),
        _parameter(
            RESUMABLE,
            "header",
            {"type": "string", "enum": ["true", "1", "false", "0"], "description": _RESUMING},
        ),
        _parameter(HEADER, "header", {"type": "string", "description": _GOING_ON}),
    ]
    operation["responses"] |= _errors(_GENERATION_ERRORS)
    operation["responses"]["429"]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return operation


def _event(struct: type) -> Json:
    """What a server-sent event holds: a chunk, an error that ends the stream, or its closing mark."""
    content = {"anyOf": [_ref(struct), _ref(ErrorBody)]}
    return {
        "description": "With `stream`; the last event is `[DONE]`, or an error",
        "type": "object",
        "required": ["data"],
        "properties": {
            "data": {
                "type": "string",
                "if": {"const": "[DONE]"},
                "else": {"contentMediaType": "application/json", "contentSchema": content},
            }
        },
    }


def _post(name: str, summary: str, body: type, answer: type) -> Json:
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": _json_of(_ref(body))},
        "responses": {
            "200": {"description": answer.__doc__, "content": _json_of(_ref(answer))},
            **_errors(_BODY_ERRORS | _METHOD_ERROR),
        },
    }


def _get(name: str, summary: str, content: Json, errors: dict[int, str] | None = None) -> Json:
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": content},
            **_errors((errors or {}) | _METHOD_ERROR),
        },
    }


def _ready() -> Json:
    operation = _get("ready", "A token could be produced now", _json_of(_status("ready")))
    no = _status("not ready", reason={"type": "string"})
    operation["responses"]["503"] = {
        "description": "It could not; `reason` says why",
        "content": _json_of(no),
    }
    return operation


def _status(status: str, **others: Json) -> Json:
    properties = {"status": {"const": status}} | others
    return {"type": "object", "properties": properties, "required": [*properties]}


def _errors(errors: dict[int, str]) -> Json:
    return {
        str(status): {"description": what, "content": _json_of(_ref(ErrorBody))}
        for status, what in errors.items()
    }


def _parameter(name: str, where: str, schema: Json, *, required: bool = False) -> Json:
    return {"name": name, "in": where, "required": required, "schema": schema}


def _json_of(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _ref(struct: type) -> Json:
    return {"$ref": _REF.format(name=struct.__name__)}
