"""A topology of two hosts on one machine, each host in a network namespace of its own. Needs root.

    python -m tools.two_hosts run                      both hosts of two-hosts.toml, until Ctrl-C
    python -m tools.two_hosts run -- --set kv.pages=64 the same with settings for both
    python -m tools.two_hosts up                       the namespaces alone, to start things by hand
    python -m tools.two_hosts exec a curl http://127.0.0.1:8000/health/ready
    python -m tools.two_hosts down                     remove them

What follows `--` is for both launchers. `run` makes the namespaces and removes them at its end, whatever that
is; after a SIGKILL the next `run`, `up` or `down` does.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tools import interrupts

    interrupts.at_once()

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EstafetError, StartError
from tools import children, interrupts
from tools.install import say
from tools.namespaces import HOSTS, TwoHosts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO

ROOT = Path(__file__).parents[1]


def start(pair: TwoHosts, host: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A program in a host's namespace whose lines on stderr begin with the host's name here."""
    with pair.inside(host):
        child = children.start(command, stderr=subprocess.PIPE, cwd=ROOT)
    assert child.stderr is not None
    threading.Thread(target=_relay, args=(child.stderr, host), daemon=True).start()
    return child


def _relay(lines: IO[bytes], host: str) -> None:
    for line in lines:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"[{host}] {line.decode(errors='replace')}")
            sys.stderr.flush()


def run(pair: TwoHosts, topology: str, arguments: Sequence[str]) -> int:
    """Both launchers until they have ended; the exit code of the first that failed, else 0.

    Ctrl-C is told to host a, which stops host b; what does not stop is killed.
    """
    launch = (sys.executable, "-m", "engine.launch", topology, *arguments)
    say(
        "each host has a loopback device of its own: reach what listens there by "
        f"`python -m tools.two_hosts exec {next(iter(HOSTS))} curl http://127.0.0.1:8000/…`"
    )
    running: list[subprocess.Popen[bytes]] = []
    try:
        # Last first: in whatever order, and whoever waits shows it.
        running = [start(pair, host, (*launch, "--host", host)) for host in reversed(HOSTS)]
        try:
            return max(abs(child.wait()) for child in running)
        except KeyboardInterrupt:
            running[-1].send_signal(signal.SIGINT)
            return max(abs(child.wait()) for child in reversed(running))
    finally:
        for child in running:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        for child in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(children.PATIENCE_S)
            child.kill()
            child.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.two_hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="up|run|exec|down")
    commands.add_parser("up", help="make the namespaces")
    commands.add_parser("down", help="remove them")
    runs = commands.add_parser("run", help="make them, run both hosts of a topology, remove them")
    runs.add_argument("topology", nargs="?", default="two-hosts", help="default two-hosts")
    execs = commands.add_parser("exec", help="run a command in one of them")
    execs.add_argument("host", choices=list(HOSTS))
    execs.add_argument("arguments", nargs=argparse.REMAINDER, metavar="COMMAND …")
    ours = list(sys.argv[1:] if arguments is None else arguments)
    theirs: list[str] = []
    if ours[:1] == ["run"] and "--" in ours:
        split = ours.index("--")
        ours, theirs = ours[:split], ours[split + 1 :]
    options = parser.parse_args(ours)
    pair = TwoHosts()
    try:
        match options.command:
            case "up":
                pair.up()
            case "down":
                if inside := pair.processes():
                    print(f"still running in there: {', '.join(map(str, inside))}", file=sys.stderr)
                pair.down()
            case "exec":
                if not options.arguments:
                    parser.error("exec: which command?")
                if not pair.is_up:
                    raise StartError("the namespaces are not there: `python -m tools.two_hosts up` first")
                with pair.inside(options.host):
                    os.execvp(options.arguments[0], options.arguments)
            case "run":
                with pair:
                    return run(pair, options.topology, theirs)
    except FileNotFoundError as error:
        print(f"estafet: {error.filename or options.arguments[0]}: no such command", file=sys.stderr)
        return 2
    except EstafetError as error:
        print(f"estafet: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(interrupts.guarded(main))
