"""What a serving benchmark sends: prompts of an exact length, and the requests of a trace."""

from __future__ import annotations

import argparse
import gzip
import json
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
    from pathlib import Path

WORDS = (  # noqa: SIM905 - a list of them would be a column of sixty lines
    "water house river light time people world school family night music book road door "
    "garden bread stone paper money horse winter summer morning island mountain forest ocean city "
    "window table market village letter king story teacher doctor friend mother father child "
    "bird fish tree flower green white black small large long high old new good early late"
).split()
LEAD = "Tell a very long story in which all of these words appear:"


class BenchFailed(Exception):
    """Nothing could be measured; one line for a person."""


# ── traces ────────────────────────────────────────────────────────────────────────────────────


class Arrival(NamedTuple):
    """One request of a trace."""

    at_s: float
    """Since the first one."""
    input: int
    output: int


def read_trace(path: Path) -> list[Arrival]:
    """The requests of a trace in order of their times: Mooncake's JSON lines or Azure's CSV, perhaps gzipped.

    BenchFailed when it is neither.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as stream:
            parse = parse_azure if path.name.removesuffix(".gz").endswith(".csv") else parse_mooncake
            arrivals = sorted(parse(stream))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BenchFailed(f"{path}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchFailed(f"{path}: not a trace in Mooncake's or Azure's format ({error})") from error
    if not arrivals:
        raise BenchFailed(f"{path}: no requests")
    first = arrivals[0].at_s
    return [arrival._replace(at_s=arrival.at_s - first) for arrival in arrivals]


def parse_mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    """Lines of {"timestamp": milliseconds, "input_length": tokens, "output_length": tokens}."""
    for line in lines:
        if line.strip():
            row = json.loads(line)
            yield Arrival(row["timestamp"] / 1e3, row["input_length"], row["output_length"])


def parse_azure(lines: Iterable[str]) -> Iterator[Arrival]:
    """Rows of TIMESTAMP,ContextTokens,GeneratedTokens, with seven digits of a second or none."""
    rows = iter(lines)
    if next(rows, "").strip() != "TIMESTAMP,ContextTokens,GeneratedTokens":
        raise ValueError("the first line does not name Azure's columns")
    for line in rows:
        if line.strip():
            stamp, context, generated = line.strip().split(",")
            seconds, _, fraction = stamp.partition(".")
            at = datetime.fromisoformat(seconds).replace(tzinfo=UTC).timestamp()
            yield Arrival(at + float(f"0.{fraction or 0}"), int(context), int(generated))


class Scale(NamedTuple):
    """How a trace is made to fit a machine: by one stated factor for lengths, one for times."""

    lengths: float = 1.0
    times: float = 1.0

    def __call__(self, arrival: Arrival, least_input: int) -> Arrival:
        """Shorter and later; not shorter than a prompt can be, and at least one token of answer."""
        return Arrival(
            arrival.at_s * self.times,
            max(least_input, round(arrival.input / self.lengths)),
            max(1, round(arrival.output / self.lengths)),
        )


def scale_of(text: str) -> Scale:
    """LENGTHS or LENGTHS:TIMES."""
    try:
        values = [float(part) for part in text.split(":")]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 2 or not all(0 < value < math.inf for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not LENGTHS:TIMES, such as 64:100")
    return Scale(*values)


# ── prompts ───────────────────────────────────────────────────────────────────────────────────


async def single_token_words(
    words: Sequence[str], count: Callable[[Sequence[str]], Awaitable[int]]
) -> list[str]:
    """Those words that are one token each, where `count` tells how many tokens several are together."""
    if await count(words) == len(words):
        return list(words)
    if len(words) == 1:
        return []
    half = len(words) // 2
    return await single_token_words(words[:half], count) + await single_token_words(words[half:], count)


class Prompts:
    """Makes prompts of an exact length."""

    def __init__(self, words: Sequence[str], overhead: int) -> None:
        """`overhead` tokens has a prompt without any word: the template's, and those of LEAD."""
        self.words = words
        self.overhead = overhead

    def make(self, tokens: int, draw: random.Random) -> str:
        """A prompt that has so many tokens, the template's included; ValueError when it has more anyway."""
        if tokens < self.overhead:
            raise ValueError(f"a prompt has at least {self.overhead} tokens, not {tokens}")
        return " ".join([LEAD, *draw.choices(self.words, k=tokens - self.overhead)])


class Request(NamedTuple):
    """What is sent, and when at the earliest."""

    at_s: float
    prompt: str
    input: int
    output: int
