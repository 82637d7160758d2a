"""Two front doors over the same workers: what happens to one is nothing to the clients of the other."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import httpx
import pytest
from launches import STORY, Launch

from tools.resuming import ResumingStream

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.model]

TOKENS = 20
CALM_S = 5.0
"""Longer than a step, shorter than waiting for a gateway that starts again would be noticed as."""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with Launch(tmp_path_factory.mktemp("two"), "two-gateways", "gateway.back.port=0") as launch:
        yield launch.wait_ready()


@pytest.fixture
def urls(launch: Launch) -> dict[str, str]:
    """Where the gateways listen."""
    found: dict[str, str] = json.loads((launch.run_dir / "ready.json").read_text())["urls"]
    assert list(found) == ["front", "back"]
    return found


def test_both_answer_the_same(launch: Launch, urls: dict[str, str]) -> None:
    body = launch.body(STORY, max_tokens=8)
    texts = {ResumingStream(url, body).read() for url in urls.values()}
    assert len(texts) == 1
    launch.wait_quiet()


def test_the_death_of_one_is_nothing_to_the_other(launch: Launch, urls: dict[str, str]) -> None:
    body = launch.body(STORY, max_tokens=TOKENS)
    whole = ResumingStream(urls["back"], body).read()
    gaps, text, last = [], "", ""
    with httpx.stream(
        "POST", f"{urls['back']}/v1/chat/completions", json={**body, "stream": True}, timeout=60
    ) as response:
        before = time.monotonic()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            last = data or last
            if not data or data == "[DONE]":
                continue
            text += json.loads(data)["choices"][0]["delta"].get("content") or ""
            now = time.monotonic()
            gaps.append(now - before)
            before = now
            if len(gaps) == 8:
                killed = launch.kill("front")
    assert last == "[DONE]"
    assert text == whole
    assert max(gaps[8:]) < CALM_S, gaps
    launch.wait_restarted(killed, "front")
    launch.wait_quiet()


def test_a_stream_of_one_is_not_the_others(launch: Launch, urls: dict[str, str]) -> None:
    """Only the gateway that has the log of a request can go on with it; the other one says which that is."""
    head = {"x-estafet-resumable": "true"}
    body = {**launch.body(STORY, max_tokens=4), "stream": True}
    with httpx.stream(
        "POST", f"{urls['front']}/v1/chat/completions", json=body, headers=head, timeout=60
    ) as response:
        lines = response.read().decode().splitlines()
    last = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")][-1]
    head["last-event-id"] = last
    refused = httpx.post(f"{urls['back']}/v1/chat/completions", json=body, headers=head, timeout=60)
    assert refused.status_code == 404
    assert "'front'" in refused.json()["error"]["message"]
    again = httpx.post(f"{urls['front']}/v1/chat/completions", json=body, headers=head, timeout=60)
    assert again.status_code == 200
    assert again.text.rstrip().endswith("data: [DONE]")
