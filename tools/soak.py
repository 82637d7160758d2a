"""Loads a system for some minutes with clients that go away and actors that are killed, then looks at it.

    python -m tools.soak --minutes 3
    python -m tools.soak --minutes 30 --topology two-decode -- --set kv.pages=128

Half of the clients are impatient and hang up. A quarter of them reads event streams that can be resumed:
these must be whole whoever dies, the gateway included, and say the same each time that they are asked
the same.

A tenth of the time warms up without kills. Then two tables tell, before and after, what each process
holds while the system is idle, and one line each for what went wrong. Exit codes: 0 all is well, 1 a
request failed that no death excuses, something stayed behind or grew, 2 bad usage or topology, 3 the
system could not be started, 70 it did not stop cleanly, 130 interrupted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tools import observe
from tools.install import say
from tools.resuming import ResumingStream, StreamLost
from tools.system import SystemFailed, launch_command, running_system

if TYPE_CHECKING:
    from collections.abc import Callable

CLIENTS = 16
RESUMING = 4
"""Of these clients, those whose streams go on behind a lost connection."""
RESUMED_TOKENS = 24
PATIENCE_S = 3.0
"""A client that goes away does so within this time."""
KILL_EVERY_S = (2.0, 8.0)
SETTLE_S = 30.0
"""After the load: for killed actors to come back and everything to be put away."""
GROWTH_KIB = 48 * 1024
"""Private memory that an actor may gain; a worker's depends on the largest step it has seen."""
GROWTH_DESCRIPTORS = 4
QUESTIONS = (
    "What is the capital of France?",
    "Tell me about the sea.",
    "Count to ten.",
    "Why is the sky blue?",
)


class Load:
    """Clients that ask, and every other time hang up before they are answered."""

    def __init__(self, url: str, seed: int) -> None:
        self._split = urlsplit(url)
        self._seed = seed
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.failures: Counter[tuple[str, str]] = Counter()
        """How and why requests went wrong; only "cut off" can be the fault of a dead gateway."""
        self._texts: dict[tuple[str, int], str] = {}
        """What was said to a question with a seed, by the streams that were resumed."""

    def run(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> None:
        """Load the system for so long; `meanwhile` is called again and again beside it."""
        self._over.clear()
        clients = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0:
                if meanwhile is None:
                    self._over.wait(min(left, 1.0))
                else:
                    meanwhile()
        finally:
            self._over.set()
            for client in clients:
                client.join()

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond the end of the load."""
        self._over.wait(seconds)

    def _client(self, number: int) -> None:
        draw = random.Random(f"{self._seed} {number}")
        while not self._over.is_set():
            if number < RESUMING:
                outcome, detail = self._resume(draw)
            else:
                patience_s = draw.uniform(0, PATIENCE_S) if draw.random() < 0.5 else None
                outcome, detail = self._ask(draw, patience_s)
            with self._lock:
                self.counts[outcome] += 1
                if detail:
                    self.failures[outcome, detail] += 1
            if detail:
                self._over.wait(0.1)

    def _ask(self, draw: random.Random, patience_s: float | None) -> tuple[str, str]:
        """One request: how it went, and why it failed."""
        timeout_s = 60.0 if patience_s is None else max(patience_s, 0.001)
        connection = http.client.HTTPConnection(
            self._split.hostname or "", self._split.port, timeout=timeout_s
        )
        body = {
            "messages": [{"role": "user", "content": draw.choice(QUESTIONS)}],
            "max_tokens": draw.randint(1, 16),
            "seed": draw.randrange(1 << 32),
            "stream": draw.random() < 0.5,
        }
        hang_up_at = None if patience_s is None else time.monotonic() + patience_s
        try:
            model = self._model(connection)
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body | {"model": model}),
                {"content-type": "application/json"},
            )
            response = connection.getresponse()
            text = b""
            while piece := response.read1():
                text += piece
                if hang_up_at is not None and time.monotonic() > hang_up_at:
                    return "hung up", ""
        except TimeoutError:
            return ("hung up", "") if patience_s is not None else ("failed", "no answer within 60 s")
        except (OSError, http.client.HTTPException) as error:
            return "cut off", f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        if response.status != 200:
            return "failed", f"HTTP {response.status}: {text[:120].decode(errors='replace')}"
        whole = text.rstrip().endswith(b"data: [DONE]") if body["stream"] else text.startswith(b"{")
        return ("answered", "") if whole else ("cut off", "the answer broke off")

    def _resume(self, draw: random.Random) -> tuple[str, str]:
        """One stream that nothing may break, and whether it says what it said before."""
        question, seed = draw.choice(QUESTIONS), draw.randrange(4)
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": RESUMED_TOKENS,
            "ignore_eos": True,
            "seed": seed,
        }
        stream = ResumingStream(self._split.geturl(), body)
        try:
            text = stream.read()
        except StreamLost as lost:
            return "lost", str(lost)
        with self._lock:
            first = self._texts.setdefault((question, seed), text)
            self.counts["resumed"] += stream.resumed
        return ("answered", "") if text == first else ("changed", f"{text!r} is not {first!r}")

    @staticmethod
    def _model(connection: http.client.HTTPConnection) -> str:
        connection.request("GET", "/v1/models")
        return str(json.loads(connection.getresponse().read())["data"][0]["id"])


class Killer:
    """Kills an actor now and then, and remembers whom."""

    def __init__(self, run_dir: Path, load: Load, seed: int) -> None:
        self._run_dir = run_dir
        self._load = load
        self._draw = random.Random(seed)
        self.killed: Counter[str] = Counter()

    def __call__(self) -> None:
        self._load.pause(self._draw.uniform(*KILL_EVERY_S))
        lives = observe.lives(self._run_dir)
        name = self._draw.choice(sorted(name for name in lives if lives[name]))
        with suppress(ProcessLookupError):  # it is being started again just now
            os.kill(lives[name][-1].pid, signal.SIGKILL)
            self.killed[name] += 1


def settle(url: str, run_dir: Path) -> tuple[dict[str, observe.Usage], list[str]]:
    """Wait until an idle system has put everything away: what its processes hold, and what is wrong."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        wrong = []
        try:
            wrong = observe.held(observe.statistics(url)) + not_ready(url)
        except (OSError, http.client.HTTPException, ValueError) as error:
            wrong = [f"the door does not answer: {error}"]
        usages = {name: observe.usage(of[-1].pid) for name, of in observe.lives(run_dir).items() if of}
        wrong += [f"{name} is not running" for name, usage in usages.items() if usage is None]
        if not wrong or time.monotonic() > deadline:
            return {name: usage for name, usage in usages.items() if usage is not None}, wrong
        time.sleep(0.2)


def not_ready(url: str) -> list[str]:
    """Why /health/ready does not say 200, as a list of at most one phrase."""
    split = urlsplit(url)
    connection = http.client.HTTPConnection(split.hostname or "", split.port, timeout=5)
    try:
        connection.request("GET", "/health/ready")
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
    finally:
        connection.close()
    return [] if response.status == 200 else [f"not ready: {body}"]


def grown(before: dict[str, observe.Usage], after: dict[str, observe.Usage]) -> list[str]:
    """What an actor holds more of than it should."""
    found = []
    for name, now in after.items():
        was = before[name]
        if now.private_kib > was.private_kib + GROWTH_KIB:
            found.append(f"{name} grew from {was.private_kib} to {now.private_kib} KiB")
        if now.descriptors > was.descriptors + GROWTH_DESCRIPTORS:
            found.append(f"{name} grew from {was.descriptors} to {now.descriptors} descriptors")
    return found


def soak(url: str, run_dir: Path, launcher: int, seconds: float, seed: int, *, kills: bool) -> list[str]:
    """Warm up, load, look; what went wrong."""
    load = Load(url, seed)
    killer = Killer(run_dir, load, seed)
    say(f"warming up for {seconds / 10:.0f} s")
    load.run(seconds / 10)
    warmed = dict(load.counts)
    before, wrong = settle(url, run_dir)
    before["launcher"] = observe.usage(launcher) or observe.Usage(0, 0, 0)
    shown("before", before)
    wrong += [f"{count} x {how} while warming up: {why}" for (how, why), count in load.failures.items()]
    load.failures.clear()

    say(f"loading for {seconds * 9 / 10:.0f} s")
    load.run(seconds * 9 / 10, killer if kills else None)
    after, stayed = settle(url, run_dir)
    after["launcher"] = observe.usage(launcher) or observe.Usage(0, 0, 0)
    shown("after", after)
    deaths = ", ".join(f"{name} {count}" for name, count in sorted(killer.killed.items())) or "none"
    print(f"requests: {dict(load.counts)}, of these while warming up {warmed}")
    print(f"killed: {deaths}")
    gateways = {name for name, of in observe.statistics(url).items() if "log_slots_free" in of}
    for (how, why), count in load.failures.most_common():
        print(f"{how} {count} x: {why}")
        # A client sees the death of the gateway that it talks to, and no other.
        if how != "cut off" or not gateways & set(killer.killed):
            wrong.append(f"{count} x {how}: {why}")
    return wrong + stayed + grown(before, after)


def shown(when: str, usages: dict[str, observe.Usage]) -> None:
    """Print one table."""
    print(f"{when:12} {'private KiB':>12} {'descriptors':>12} {'threads':>8}")
    for name, usage in usages.items():
        print(f"  {name:10} {usage.private_kib:12} {usage.descriptors:12} {usage.threads:8}")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=3.0, metavar="N", help="how long (default 3)")
    parser.add_argument("--topology", default="local", metavar="FILE", help="what to start (default local)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default 1)")
    parser.add_argument("--no-kills", action="store_true", help="clients go away, but nobody is killed")
    ours = list(sys.argv[1:] if arguments is None else arguments)
    split = ours.index("--") if "--" in ours else len(ours)
    options = parser.parse_args(ours[:split])
    patience = ("--set", "launch.restart_attempts=1000000", "--set", "launch.restart_most_s=0.5")
    command = launch_command(options.topology, [*patience, *ours[split + 1 :]])
    try:
        with running_system(command) as system:
            run_dir = Path(system.run_dir)
            wrong = soak(
                system.url,
                run_dir,
                system.pid,
                60 * options.minutes,
                options.seed,
                kills=not options.no_kills,
            )
    except SystemFailed as error:
        say(str(error))
        return error.code
    except KeyboardInterrupt:
        return 130
    leftovers = [path for path in run_dir.iterdir() if path.name not in ("logs", "lock")]
    wrong += [f"{path} stayed behind" for path in leftovers]
    print("wrong: " + "; ".join(wrong) if wrong else "all is well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
