"""Time to the first token when somebody else has filled the prompt: another worker, or another host.

    the prompts here    [system: 2,048 tokens and a few][user: a short question]
                         cached as whole pages           at most 16 new tokens

Everything goes through the HTTP door, streamed, one request at a time, with nothing else to do for the
system. Answers say where the tokens of their prompts came from; from elsewhere than it should be is an error.
"""

from __future__ import annotations

import argparse
import itertools
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from tools.bench_client import Client
from tools.bench_load import BenchFailed
from tools.bench_pinned import with_system
from tools.bench_serve import get_ready, settled
from tools.bench_system import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tools.bench_client import Outcome
    from tools.system import Running

CACHED = 2048
NEW = 16
"""Tokens that are computed for each question."""
OUTPUT = 4
COLD = 6
PAUSE_S = (0.02, 0.1)
"""Between two requests, at random: no rhythm is met by chance, and the system has heard of the end."""
OCCUPIED_S = 30.0
PAGES = 2048
FIRST, SECOND = "first", "second"
"""The workers of two-workers, in the order in which an idle system takes them."""


class Plan(NamedTuple):
    """How the systems are started, and how much is asked."""

    settings: Sequence[str]
    """KEY=VALUE for `--set` of the launcher."""
    threads: int
    seed: int
    asks: int

    @property
    def computes(self) -> tuple[tuple[str, object], ...]:
        """Keys and values of every worker."""
        return ("backend", "native"), ("threads", self.threads)

    def launcher(self, *more: str) -> list[str]:
        """What a launcher is told beside the topology."""
        settings = [f"kv.pages={PAGES}", *more, *self.settings]
        return [word for setting in settings for word in ("--set", setting)]

    def options(self, *, topology: str | None = None, url: str | None = None) -> argparse.Namespace:
        """As `run_with_system` wants them; a topology is that of the two workers."""
        workers = [f"worker.{name}.{key}={value}" for name in (FIRST, SECOND) for key, value in self.computes]
        return argparse.Namespace(
            command="pages",
            command_line="",
            topology=topology,
            url=url,
            json=None,
            seed=self.seed,
            for_launcher=self.launcher(*workers),
        )


class Questions:
    """Prompts with a system part of words at random, and questions of two different words each."""

    def __init__(self, client: Client, words: Sequence[str], seed: int) -> None:
        self._client = client
        self._words = list(words)
        self._options = client.options
        self._draw = random.Random(f"{seed} prefixes")
        self._overhead = 0
        pairs = list(itertools.permutations(self._words, 2))
        self._draw.shuffle(pairs)
        self._pairs = itertools.cycle(pairs)

    async def prepare(self) -> None:
        """Find out how many tokens the template and the question have."""
        outcome = await self.ask("Words:")
        self._overhead = outcome.prompt_tokens

    def system(self) -> str:
        """A new one, with which every question has CACHED + NEW tokens."""
        number = CACHED + NEW - self._overhead
        return " ".join(["Words:", *self._draw.choices(self._words, k=number)])

    async def ask(self, system: str) -> Outcome:
        """One more question behind a system part; BenchFailed when it is not answered."""
        user = "Say {} {}".format(*next(self._pairs))
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        # What options say of a body comes last.
        self._client.options = {**self._options, "messages": messages, "x_estafet": {"cache": True}}
        outcome = await self._client.ask("", OUTPUT)
        if outcome.error:
            raise BenchFailed(outcome.error)
        if self._overhead and outcome.prompt_tokens != CACHED + NEW:
            raise BenchFailed(f"a prompt has {outcome.prompt_tokens} tokens, not {CACHED + NEW}")
        if outcome.cache is None:
            raise BenchFailed("nobody knows where the tokens of a prompt came from")
        if not outcome.pieces:
            raise BenchFailed("an answer had no text")
        return outcome

    async def pause(self) -> None:
        """Let the system become idle."""
        await trio.sleep(self._draw.uniform(*PAUSE_S))


async def questions_for(system: Running, seed: int) -> Questions:
    """Prompts for a system that is ready; warms it up."""
    client = Client(system.url)
    prompts = await get_ready(client)
    questions = Questions(client, prompts.words, seed)
    await questions.prepare()
    return questions


def ttft(outcome: Outcome) -> float:
    """Seconds to the first piece of text."""
    return outcome.pieces[0] - outcome.sent


def p50_ms(seconds: Sequence[float]) -> float:
    """The median in milliseconds."""
    return 1e3 * percentile(seconds, 0.5)


async def cold(questions: Questions) -> float:
    """TTFT of a prompt that nobody has."""
    outcome = await questions.ask(questions.system())
    found = sum(tokens for where, tokens in (outcome.cache or {}).items() if where != "computed")
    if found > NEW:
        raise BenchFailed(f"{found} tokens of a prompt were found that nobody had sent before")
    return ttft(outcome)


# ── another worker ────────────────────────────────────────────────────────────────────────────


async def filled_by_the_second(system: Running, questions: Questions, seed: int) -> str:
    """A system part that the second worker has filled: the first was busy with another prompt meanwhile."""
    other = await questions_for(system, seed + 1)
    client, ours = Client(system.url), questions.system()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cold, other)
        with trio.move_on_after(OCCUPIED_S) as patience:
            while not (await client.get("/statistics"))[FIRST].get("sequences_prefill"):  # noqa: ASYNC110
                await trio.sleep(0.05)
        if patience.cancelled_caught:
            raise BenchFailed(f"worker {FIRST} never began with a prompt")
        await questions.ask(ours)
    await settled(client)
    return ours


async def measure_workers(system: Running, plan: Plan, took: Callable[[], object]) -> dict[str, Any]:
    """TTFTs of cached and cold prompts of one length."""
    questions = await questions_for(system, plan.seed)
    ours = await filled_by_the_second(system, questions, plan.seed)
    cached: list[float] = []
    colds: list[float] = []
    # Half of the cold ones before and half behind, lest the machine has changed.
    for number in range(plan.asks + COLD):
        await questions.pause()
        if number < COLD // 2 or number >= plan.asks + COLD // 2:
            colds.append(await cold(questions))
        else:
            outcome = await questions.ask(ours)
            if (outcome.cache or {}).get("worker") != CACHED:
                raise BenchFailed(
                    f"{CACHED} tokens should come from the other worker, not {outcome.cache}: is nobody else "
                    "using the system?"
                )
            cached.append(ttft(outcome))
        took()
    return {
        "cached_ttft_p50_ms": p50_ms(cached),
        "cached_ttft_p99_ms": 1e3 * percentile(cached, 0.99),
        "cold_ttft_p50_ms": p50_ms(colds),
        "cached_ttfts_s": cached,
        "cold_ttfts_s": colds,
    }


def between_workers(plan: Plan, took: Callable[[], object]) -> dict[str, Any]:
    """The second worker's pages, found by the first."""
    return with_system(
        plan.options(topology="two-workers"), lambda system: measure_workers(system, plan, took)
    )
