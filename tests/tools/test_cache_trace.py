"""The cache simulator: known hits of traces made by hand, its curves, its plot, its complaints."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from engine.eviction import LRU, CostAware
from tools import cache_trace
from tools.cache_plot import draw
from tools.cache_trace import COST, BadTrace, Trace, clairvoyant, curves, read_trace, simulate

if TYPE_CHECKING:
    from pathlib import Path

HAND: Trace = [(1, 2), (3,), (1, 2), (4, 5), (1, 2, 6)]


def shared_prompts(requests: int = 800) -> Trace:
    """Four system prompts of 12 blocks, each before many short questions that never come back."""
    prompts = [tuple(range(100 * number, 100 * number + 12)) for number in range(4)]
    return [(*prompts[turn * turn % 7 % 4], 1000 + turn) for turn in range(requests)]


def long_chats(chats: int = 60, turns: int = 12) -> Trace:
    """Chats that grow by three blocks a turn, thirty at a time, beside prompts that come once."""
    trace: Trace = []
    for start in range(0, chats, 30):
        for turn in range(1, turns + 1):
            for chat in range(start, start + 30):
                trace.append(tuple(10_000 + 100 * chat + block for block in range(3 * turn)))
                once = 1_000_000 + 10 * len(trace)
                trace.append(tuple(range(once, once + 6)))
    return trace


@pytest.mark.parametrize(
    ("capacity", "lru", "best"),
    [
        (6, 4, 4),  # room for all: 1 2, then 1 2
        (4, 4, 4),
        (3, 3, 4),  # LRU: 4 5 push out 3 and the leaf 2; a clairvoyant cache keeps 2
        (1, 0, 2),
    ],
)
def test_hits_known_by_hand(capacity: int, lru: int, best: int) -> None:
    assert simulate(HAND, capacity, LRU(), COST).hits == lru
    assert clairvoyant(HAND, capacity, COST).hits == best


def test_what_is_saved_is_weighted_with_its_cost() -> None:
    kept = simulate([(1, 2), (1, 2)], 2, LRU(), COST)
    assert kept.hits == 2
    assert kept.cost_saved == pytest.approx(0.5)
    first, second = COST.relative(0), COST.relative(1)
    kept = simulate([(1, 2), (1, 3)], 3, LRU(), COST)
    assert kept.cost_saved == pytest.approx(first / (2 * (first + second)))


@pytest.mark.parametrize("trace", [shared_prompts(), long_chats()])
def test_no_policy_beats_the_clairvoyant_one_and_cost_aware_is_not_much_worse_than_lru(trace: Trace) -> None:
    figures = curves(trace, (0.02, 0.1, 0.3, 1.0))
    rates = figures["hit_rate"]
    for lru, ours, best, infinite in zip(*(rates[name] for name in rates), strict=True):
        assert max(lru, ours) <= best + 1e-12 <= infinite + 2e-12
        assert ours >= 0.97 * lru
    assert rates["LRU"][-1] == rates["cost-aware"][-1] == rates["infinite"][-1]


def test_long_chats_are_kept_where_lru_loses_them() -> None:
    trace = long_chats()
    capacity = 500
    ours = simulate(trace, capacity, CostAware(capacity, COST), COST).hits
    assert ours > simulate(trace, capacity, LRU(), COST).hits


def test_a_trace_is_read_and_its_figures_are_the_same_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"timestamp": 0, "hash_ids": request}) + "\n" for request in HAND)
    assert read_trace(path) == HAND
    outputs = []
    for name in ("a", "b"):
        figures, plot = tmp_path / f"{name}.json", tmp_path / f"{name}.svg"
        arguments = ["--trace", str(path), "--json", str(figures), "--plot", str(plot)]
        assert cache_trace.main(arguments) == 0
        outputs.append((figures.read_bytes(), plot.read_bytes()))
    assert outputs[0] == outputs[1]
    figures = json.loads(outputs[0][0])
    assert (figures["blocks"], figures["distinct_blocks"]) == (10, 6)
    assert figures["hit_rate"]["infinite"] == [0.4] * len(figures["fractions"])
    assert "| 100% | 0.4000 | 0.4000 | 0.4000 | 0.4000 |" in capsys.readouterr().out


def test_the_plot_has_a_line_for_each_curve() -> None:
    figures = curves(HAND, (0.5, 1.0))
    root = ElementTree.fromstring(draw(figures, "a < b"))
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"a < b", "50 %", "100 %", *figures["hit_rate"]} <= set(words)
    thick = [element for element in root.iter() if element.get("stroke-width") == "2"]
    assert len(thick) == 2 * len(figures["hit_rate"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no block"),
        ("{", "malformed|truncated"),
        ('{"hash_ids": ["a"]}', "int"),
        ('{"hash_ids": [1, 2]}\n{"hash_ids": [2]}', ":2: block 2 follows another"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BadTrace, match=complaint):
        read_trace(path)
    assert cache_trace.main(["--trace", str(path)]) == 2


def test_shares_beyond_all_are_refused() -> None:
    with pytest.raises(ValueError, match="shares"):
        curves(HAND, (0.0, 1.0))
