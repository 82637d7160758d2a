"""A prefix that is kept: through a real door, and through the death of those who keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from launches import Launch, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.model]

RULES = {
    "role": "system",
    "content": "You answer in one word. " + "Never say more than you were asked for. " * 12,
}


def found(launch: Launch, question: str) -> int:
    """Prompt tokens that were found in the cache when a question was asked behind the rules."""
    messages = [RULES, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0, "x_estafet": {"cache": True}}
    answer: dict[str, Any] = launch.client.post("/v1/chat/completions", json=body, timeout=60).json()
    cached = int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    use = answer["x_estafet"]["cache"]
    assert sum(use.values()) == answer["usage"]["prompt_tokens"]
    assert use["computed"] == answer["usage"]["prompt_tokens"] - cached
    return cached


def test_a_prefix_is_there_for_the_first_request_and_after_any_death(
    tmp_path: Path, model_folder: Path
) -> None:
    with Launch(tmp_path) as launch:
        launch.wait_ready()
        response = launch.client.post("/v1/prefixes", json={"messages": [RULES]}, timeout=60)
        kept = response.json()
        assert response.status_code == 200, kept
        assert kept["cached_tokens"] == 0
        assert kept["tokens"] - 16 < kept["pinned_tokens"] <= kept["tokens"]
        assert found(launch, "What is the capital of France?") == kept["pinned_tokens"]

        for victim in ("allocator", "prefill", "decode"):
            before = launch.kill(victim)
            launch.wait_restarted(before, victim)

            def pinned() -> bool:
                figures = launch.statistics()["allocator"]
                return figures.get("pages_kept") == kept["pinned_pages"]

            wait_until(pinned, 10, "the prefix is pinned")
            assert found(launch, f"Has the {victim} died?") >= kept["pinned_tokens"]
            assert launch.client.get(f"/v1/prefixes/{kept['id']}").json() == kept

        assert launch.client.delete(f"/v1/prefixes/{kept['id']}").json()["deleted"] is True
        wait_until(lambda: launch.statistics()["allocator"]["pages_kept"] == 0, 10, "it is let go of")
        launch.wait_quiet()
