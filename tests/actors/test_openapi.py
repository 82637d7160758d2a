"""Our OpenAPI document: that it is one, that it is complete, and that the door does what it says.

schemathesis runs in processes of its own: it changes hypothesis for its purposes (failing examples
are not shown any more), so neither the package nor its pytest plugin may be loaded here.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from scripted_sessions import KEPT, MODEL, ScriptedSession, ScriptedSessions, served

from actors.doors.http import serve_http
from actors.doors.openapi import openapi_document
from actors.sessions import Delta, DeltaToken
from engine.sampling import TokenLogprobs

if TYPE_CHECKING:
    from actors.sessions import Generation

DOCUMENT = openapi_document(MODEL, "0.1.0")
README = Path(__file__).parents[2] / "actors" / "doors" / "README.md"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "missing_required_header",
)
"""All that make sense here. Not: that what the schemas allow is accepted, for they cannot say that a
prompt fits the context, or that one parameter needs another."""


VALIDATE = "import json, sys, schemathesis; schemathesis.openapi.from_dict(json.load(sys.stdin)).validate()"


def test_it_is_an_openapi_document() -> None:
    def validate(document: dict[str, Any]) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-c", VALIDATE]
        return subprocess.run(command, input=json.dumps(document).encode(), capture_output=True, check=False)

    result = validate(DOCUMENT)
    assert result.returncode == 0, result.stderr.decode()
    result = validate(DOCUMENT | {"paths": {"/x": {"get": {"responsez": {}}}}})
    assert result.returncode != 0
    assert b"responsez" in result.stderr
    assert "schemathesis" not in sys.modules


def test_all_references_lead_somewhere() -> None:
    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    schemas = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert references(DOCUMENT) == schemas


@pytest.mark.parametrize(
    "name", ["ChatRequest", "CompletionRequest", "PrefixRequest", "TokenizeRequest", "DetokenizeRequest"]
)
def test_every_parameter_is_in_the_readme(name: str) -> None:
    text = README.read_text(encoding="utf-8")
    section = text[text.index("## What a request may say") : text.index("## Event streams")]
    written = {word for code in re.findall(r"`([^`]+)`", section) for word in re.findall(r"[a-z_]+", code)}
    schema = DOCUMENT["components"]["schemas"][name]
    neutral = {field for field, form in schema["properties"].items() if "enum" in form and field != "model"}
    assert schema["properties"].keys() - neutral <= written
    assert schema["additionalProperties"] is False


async def test_every_route_is_served_as_described() -> None:
    async with served(ScriptedSessions(("x",))) as door:
        response = await door.client.get("/openapi.json")
        assert response.headers["content-type"] == "application/json"
        paths = response.json()["paths"]
        assert paths.keys() == DOCUMENT["paths"].keys()
        for path, item in paths.items():
            for method in {"get", "post", "put", "delete", "options"}:
                there = path.replace("{model}", MODEL.name).replace("{prefix}", KEPT.name)
                response = await door.client.request(method, there)
                if method in item:
                    assert str(response.status_code) in item[method]["responses"], path
                    assert response.status_code != 404
                else:
                    assert response.status_code == 405, path
                    assert {
                        allowed.lower() for allowed in response.headers["allow"].split(", ")
                    } >= item.keys() - {"parameters"}


class TellingSessions(ScriptedSessions):
    """Every request is answered, with tokens and logprobs where they were asked for."""

    def open(self, generation: Generation) -> ScriptedSession:
        session = ScriptedSession(f"r{len(self.opened)}", generation)
        self.opened.append(session)
        scores = None if generation.logprobs is None else TokenLogprobs(-0.5, ((200, -0.1), (65, -0.5)))
        tells = generation.token_ids or scores is not None
        tokens = (DeltaToken(0xC3, scores), DeltaToken(0xBC, scores)) if tells else ()
        for choice in range(generation.n):
            session.put(Delta("ü", tokens, choice, 2))
            session.end("length", choice=choice)
        return session


@pytest.mark.system
async def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """Requests made from the document, right and wrong ones, against the door on a socket."""
    with trio.fail_after(120), socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        shutdown = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(serve_http, TellingSessions(), listener_fd=listener.fileno(), shutdown=shutdown)
            )
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/openapi.json"
            command = [sys.executable, "-m", "schemathesis.cli", "run", url, f"--checks={','.join(CHECKS)}"]
            command += [
                "--generation-deterministic",
                "--max-examples=15",
                "--continue-on-failure",
                "--no-color",
            ]
            result = await trio.run_process(
                command, cwd=tmp_path, check=False, capture_stdout=True, stderr=subprocess.STDOUT
            )
            shutdown.set()
    told = result.stdout.decode()
    assert result.returncode == 0, told
    assert int(re.search(r"(\d+) generated", told)[1]) > 500, told
