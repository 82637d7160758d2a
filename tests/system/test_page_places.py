"""Pages that come from below and beside, through real launches: a file, another host; and what is damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from launches import Launch, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.model]

SIGHTS = ("a lighthouse", "a harbour", "an old mill", "a night train", "a garden")
LENGTH = 40
"""Sentences about a sight: 400 to 500 tokens, so that five of them do not fit the pool."""


def ask(launch: Launch, sight: str) -> tuple[str, dict[str, int]]:
    """The answer to a prompt of its own for each sight, and where its tokens were."""
    told = " ".join(f"There was {sight} that nobody had seen for {years} years." for years in range(LENGTH))
    messages = [{"role": "system", "content": told}, {"role": "user", "content": "What was there?"}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "x_estafet": {"cache": True}}
    answer: dict[str, Any] = launch.client.post("/v1/chat/completions", json=body, timeout=120).json()
    return answer["choices"][0]["message"]["content"], answer["x_estafet"]["cache"]


def test_a_file_keeps_pages(tmp_path: Path, model_folder: Path) -> None:
    """The same words from memory, from the file, after the death of who reads it, and where it is damaged."""
    file = tmp_path / "pages.file"
    settings = ("kv.pages=100", "allocator.file_bytes=100000000", f"allocator.file={file}")
    with Launch(tmp_path / "1", "unified", *settings) as launch:
        launch.wait_ready()
        told = {}
        for sight in SIGHTS:
            told[sight], where = ask(launch, sight)
            assert where["file"] == 0
        wait_until(
            lambda: launch.statistics()["allocator"]["pages_in_file"] > 40, 10, "pages are in the file"
        )
        text, where = ask(launch, SIGHTS[0])
        assert text == told[SIGHTS[0]]
        assert where["file"] > 300, where
        _, again = ask(launch, SIGHTS[0])
        assert (again["memory"], again["worker"]) == (where["file"] + where["memory"], 0), again

        launch.wait_restarted(launch.kill("replicator"), "replicator")
        wait_until(
            lambda: launch.statistics()["allocator"]["pages_in_file"] > 40, 10, "the file is read again"
        )
        text, where = ask(launch, SIGHTS[1])
        assert text == told[SIGHTS[1]]
        assert where["file"] > 0, where
        launch.wait_quiet()

    with Launch(tmp_path / "2", "unified", *settings) as launch:
        launch.wait_ready()
        text, where = ask(launch, SIGHTS[0])
        assert text == told[SIGHTS[0]]
        assert where["file"] > 300, where

    damaged = bytearray(file.read_bytes())
    for at in range(10_000, len(damaged), 50_000):
        damaged[at] ^= 0x10
    file.write_bytes(damaged)
    with Launch(tmp_path / "3", "unified", *settings) as launch:
        launch.wait_ready()
        for sight in SIGHTS[:3]:
            text, where = ask(launch, sight)
            assert text == told[sight], "what is damaged is computed, and never served"
            assert where["file"] == 0, where
        wait_until(lambda: launch.statistics()["replicator"]["file_corrupt"] > 0, 5, "it is counted")


def test_one_host_fills_and_one_decodes(tmp_path: Path, model_folder: Path) -> None:
    """The decode worker fetches the full pages, and the words are those of one host alone."""
    apart = ("worker.both-a.role=prefill", "worker.both-b.role=decode")
    hosts = ("host.a.address=127.0.7.1", "host.b.address=127.0.7.2", *apart)
    with (
        Launch(tmp_path / "a", "two-hosts", *hosts, host="a") as first,
        Launch(tmp_path / "b", "two-hosts", *hosts, host="b"),
    ):
        first.wait_ready()
        text, where = ask(first, SIGHTS[0])
        again, found = ask(first, SIGHTS[0])
        assert again == text
        assert found["computed"] < 16 < 300 < where["computed"]
        wait_until(
            lambda: first.statistics()["replicator-a"]["pages_given"] * 16 > where["computed"] - 32,
            5,
            "nearly all of the prompt went over the wire",
        )
        figures = first.statistics()
        assert figures["replicator-a"]["pages_given"] * 16 <= where["computed"] + found["computed"], "once"
        assert figures["both-a"]["tokens_out"] == 0
        first.stop()
    with Launch(tmp_path / "c", "unified", "allocator.prefix_cache=false") as launch:
        launch.wait_ready()
        assert ask(launch, SIGHTS[0])[0] == text
