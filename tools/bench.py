"""Measure the engine: its kernels alone, or a whole system through its HTTP door.

python -m tools.bench kernels [--weights fp8] [--json FILE]
python -m tools.bench serve --topology local --concurrency 1,4,16,32 [--json FILE]
python -m tools.bench fairness --topology local --flood 200 [--json FILE]
python -m tools.bench streams --topology local --streams 1000 [--json FILE]
python -m tools.bench pages [--only ttft,allocator] [--trace FILE] [--json FILE]
python -m tools.bench peers [--llama-bin DIR] [--openvino-python PYTHON] [--json FILE]
"""

from __future__ import annotations

from tools import interrupts

if __name__ == "__main__":
    interrupts.at_once()  # before the long imports begin

import argparse
import shlex
import sys

from tools import bench_fairness, bench_kernels, bench_pages, bench_peers, bench_serve, bench_streams


def main(arguments: list[str] | None = None) -> int:
    """Run a benchmark; figures as a table on stdout, progress on stderr, and as JSON when asked."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module, says in (
        ("kernels", bench_kernels, "a backend alone, beside what the machine can do at best"),
        ("serve", bench_serve, "latency and throughput of a system, as its clients see it"),
        ("fairness", bench_fairness, "what a flood of one client costs another one"),
        ("streams", bench_streams, "what very many open streams cost a gateway"),
        ("pages", bench_pages, "the page system: waste, room, cached prefixes, what a page costs"),
        ("peers", bench_peers, "our speed against other engines on this machine"),
    ):
        command = commands.add_parser(
            name,
            help=says,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split])
    options.for_launcher = given[split + 1 :]
    if options.for_launcher and not getattr(options, "topology", None):
        parser.error("what follows -- goes to a launcher, and only --topology has one")
    options.command_line = command_line(given)
    code: int = options.run(options)
    return code


def command_line(arguments: list[str]) -> str:
    """What a reader can type to measure the same; where the figures were written to is no part of it."""
    left = iter(arguments)
    kept = []
    for argument in left:
        if argument == "--json":
            next(left, None)
        elif not argument.startswith("--json="):
            kept.append(argument)
    return shlex.join(["python", "-m", "tools.bench", *kept])


if __name__ == "__main__":
    sys.exit(interrupts.guarded(main))
