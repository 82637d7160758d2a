"""TTFT of a prompt that only the other host has, on two hosts that are network namespaces of this machine.

    both-b is held   prompts are filled on host a
    both-a is held   they are asked for again: host b fetches their pages from a over the link, and computes
                     prompts of the same length that nobody has, in turn

A worker is held by stopping its process (SIGSTOP) in the middle of a prompt: it lives and has no prefill slot
free, so that requests go to the other host, and it takes nothing of the processor. A prompt counts as fetched
when its answer says so.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from engine.errors import EstafetError
from tools import children, observe
from tools.bench_client import Client
from tools.bench_load import BenchFailed
from tools.bench_pinned import with_system
from tools.bench_prefixes import CACHED, cold, p50_ms, questions_for, ttft
from tools.bench_serve import settled
from tools.install import ROOT
from tools.namespaces import HOSTS, TwoHosts, cannot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from typing import IO

    from tools.bench_prefixes import Plan, Questions
    from tools.system import Running

TOPOLOGY = "two-hosts"
WORKERS = {"a": "both-a", "b": "both-b"}
PROMPTS = 8
FEW = 3
"""Of fewer prompts that were fetched a median says nothing."""
PATIENT_S = 600
"""How long a worker may stand still before it is killed."""
HELD_S = 60.0


def prompts_of(asks: int) -> int:
    """How many prompts are fetched, and as many computed, where so many questions are asked at most."""
    return max(FEW, min(PROMPTS, asks))


NEVER_S = 3600
LOST_S = 10.0


class Ready(msgspec.Struct):
    """What a launcher says when it is ready."""

    url: str
    run_dir: str


@contextlib.contextmanager
def both_hosts(plan: Plan) -> Iterator[dict[str, Ready]]:
    """Both hosts of the topology, ready; this thread is in the namespace of host a meanwhile."""
    computes = (*plan.computes, ("prefill_slots", 1))
    settings = plan.launcher(
        "gateway.front.port=0",
        f"health.deadline_s={PATIENT_S}",
        "scheduler.reserve=0",  # else nobody has both slots at once
        *(f"worker.{name}.{key}={value}" for name in WORKERS.values() for key, value in computes),
    )
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(TwoHosts("estafet-bench"))
        launchers: list[subprocess.Popen[bytes]] = []
        stack.callback(_stop, launchers)
        waiting: dict[str, IO[str]] = {}
        for host in HOSTS:
            reading, writing = os.pipe()
            waiting[host] = stack.enter_context(os.fdopen(reading))
            command = [sys.executable, "-m", "engine.launch", TOPOLOGY, "--host", host, *settings]
            try:
                with pair.inside(host):
                    launchers.append(
                        children.start(
                            [*command, "--ready-fd", str(writing)], stdout=2, pass_fds=(writing,), cwd=ROOT
                        )
                    )
            finally:
                os.close(writing)
        lines = {host: stream.readline() for host, stream in waiting.items()}
        if not all(lines.values()):
            raise BenchFailed("the two hosts could not be started")
        stack.enter_context(pair.inside("a"))
        yield {host: msgspec.json.decode(line, type=Ready) for host, line in lines.items()}


def _stop(launchers: list[subprocess.Popen[bytes]]) -> None:
    for launcher in launchers:
        launcher.send_signal(signal.SIGTERM)
    for launcher in launchers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(2 * children.PATIENCE_S)
        launcher.kill()
        launcher.wait()


@contextlib.asynccontextmanager
async def held(host: str, pid: int, client: Client, questions: Questions) -> AsyncIterator[None]:
    """A host whose only prefill slot is taken by a prompt that goes on when the block is left."""

    async def until(prefilling: int, what: str) -> None:
        """So many prompts are being filled, and nothing else goes on: the scheduler knows of both hosts."""
        with trio.move_on_after(HELD_S) as patience:
            while True:
                figures = (await client.get("/statistics"))["scheduler"]
                if (figures["requests"], figures["requests_prefilling"]) == (prefilling, prefilling):
                    break
                await trio.sleep(0.05)
        if patience.cancelled_caught:
            raise BenchFailed(what)

    async with trio.open_nursery() as nursery:
        for _ in WORKERS:  # as many as there are slots: each host has one
            nursery.start_soon(questions.ask, questions.system())
        await until(len(WORKERS), "the hosts never filled a prompt each")
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(1, f"only {WORKERS[host]} should have something to do")
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


async def measure_hosts(
    system: Running, pids: dict[str, int], plan: Plan, took: Callable[[], object]
) -> dict[str, Any]:
    """TTFTs of prompts that are fetched, and of those that are computed, on host b."""
    questions = await questions_for(system, plan.seed)
    client = Client(system.url)
    ours = [questions.system() for _ in range(prompts_of(plan.asks))]
    fetched: list[float] = []
    computed: list[float] = []
    others: list[str] = []
    async with held("b", pids["b"], client, questions):
        for prompt in ours:
            await questions.pause()
            await questions.ask(prompt)
            took()
    await settled(client)
    async with held("a", pids["a"], client, questions):
        # The order is drawn, lest one kind always comes first.
        todo: list[str | None] = [*ours, *[None] * len(ours)]
        random.Random(f"{plan.seed} hosts").shuffle(todo)
        for again in todo:
            await questions.pause()
            if again is None:
                computed.append(await cold(questions))
            else:
                outcome = await questions.ask(again)
                if (outcome.cache or {}).get("host") == CACHED:
                    fetched.append(ttft(outcome))
                else:
                    others.append(f"one was {outcome.cache}")
            took()
    if len(fetched) < FEW:
        raise BenchFailed("; ".join((f"only {len(fetched)} of {len(ours)} prompts were fetched", *others)))
    return {
        "remote_ttft_p50_ms": p50_ms(fetched),
        "computed_ttft_p50_ms": p50_ms(computed),
        "remote_ttfts_s": fetched,
        "computed_ttfts_s": computed,
        "not_fetched": others,
    }


def between_hosts(plan: Plan, took: Callable[[], object]) -> dict[str, Any]:
    """Start both hosts, measure, stop them; BenchFailed says why that cannot be."""
    if (why := cannot()) is not None:
        raise BenchFailed(why)
    try:
        with both_hosts(plan) as ready:
            pids = {host: observe.lives(Path(ready[host].run_dir))[WORKERS[host]][-1].pid for host in HOSTS}
            return with_system(
                plan.options(url=ready["a"].url),
                lambda system: measure_hosts(system, pids, plan, took),
            )
    except EstafetError as error:
        raise BenchFailed(str(error)) from error
