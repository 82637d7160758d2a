"""TTFT of a prompt that only the other host has, on two hosts that are network namespaces of this machine.

Host a fills prompts; then its worker is killed and not started again, so that the next one who asks for them
is served on host b, while the processor has nothing else to do: a's allocator and replicator still have the
pages, and b fetches them over the link. Between such requests come prompts of this length that nobody has.
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
    from collections.abc import Callable, Iterator
    from typing import IO

    from tools.bench_prefixes import Plan
    from tools.system import Running

TOPOLOGY, WORKER, OTHER = "two-hosts", "both-a", "both-b"
PROMPTS = 8
FEW = 3
"""Of fewer prompts that were fetched a median says nothing."""


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
def both_hosts(plan: Plan) -> Iterator[Ready]:
    """Both hosts of the topology, ready; what is known of host a, whose namespace this thread is in."""
    settings = plan.launcher(
        "gateway.front.port=0",
        f"launch.restart_first_s={NEVER_S}",
        f"launch.restart_most_s={NEVER_S}",
        *(f"worker.{name}.{key}={value}" for name in (WORKER, OTHER) for key, value in plan.computes),
    )
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(TwoHosts("estafet-bench"))
        launchers: list[subprocess.Popen[bytes]] = []
        stack.callback(_stop, launchers)
        waiting: list[IO[str]] = []
        for host in HOSTS:
            reading, writing = os.pipe()
            waiting.append(stack.enter_context(os.fdopen(reading)))
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
        lines = [stream.readline() for stream in waiting]
        if not all(lines):
            raise BenchFailed("the two hosts could not be started")
        stack.enter_context(pair.inside("a"))
        yield msgspec.json.decode(lines[0], type=Ready)


def _stop(launchers: list[subprocess.Popen[bytes]]) -> None:
    for launcher in launchers:
        launcher.send_signal(signal.SIGTERM)
    for launcher in launchers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(2 * children.PATIENCE_S)
        launcher.kill()
        launcher.wait()


async def measure_hosts(
    system: Running, run_dir: Path, plan: Plan, took: Callable[[], object]
) -> dict[str, Any]:
    """TTFTs of prompts that are fetched, and of those that are computed, on host b."""
    questions = await questions_for(system, plan.seed)
    client = Client(system.url)
    ours = [questions.system() for _ in range(prompts_of(plan.asks))]
    for system_part in ours:
        await questions.pause()
        await questions.ask(system_part)
        took()
    await settled(client)
    os.kill(observe.lives(run_dir)[WORKER][-1].pid, signal.SIGKILL)
    with trio.move_on_after(LOST_S) as patience:
        while (await client.get("/statistics"))["scheduler"]["workers"] > 1:  # noqa: ASYNC110
            await trio.sleep(0.1)
    if patience.cancelled_caught:
        raise BenchFailed(f"nobody noticed that {WORKER} was killed")
    # The order is drawn, lest what is first pays for all; the first request of all is not counted.
    todo: list[str | None] = [*ours, *[None] * len(ours)]
    random.Random(f"{plan.seed} hosts").shuffle(todo)
    await cold(questions)
    fetched: list[float] = []
    computed: list[float] = []
    for prompt in todo:
        await questions.pause()
        if prompt is None:
            computed.append(await cold(questions))
        else:
            outcome = await questions.ask(prompt)
            # What host b has filled itself, since it took a request before, is no fetch.
            if (outcome.cache or {}).get("host") == CACHED:
                fetched.append(ttft(outcome))
        took()
    if len(fetched) < FEW:
        raise BenchFailed(f"only {len(fetched)} of {len(ours)} prompts were fetched from the other host")
    return {
        "remote_ttft_p50_ms": p50_ms(fetched),
        "computed_ttft_p50_ms": p50_ms(computed),
        "remote_ttfts_s": fetched,
        "computed_ttfts_s": computed,
    }


def between_hosts(plan: Plan, took: Callable[[], object]) -> dict[str, Any]:
    """Start both hosts, measure, stop them; BenchFailed says why that cannot be."""
    if (why := cannot()) is not None:
        raise BenchFailed(why)
    try:
        with both_hosts(plan) as ready:
            return with_system(
                plan.options(url=ready.url),
                lambda system: measure_hosts(system, Path(ready.run_dir), plan, took),
            )
    except EstafetError as error:
        raise BenchFailed(str(error)) from error
