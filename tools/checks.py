"""Runs every check of the repository: format, lint, types, layers, native kernels, tests.

All of them run, also after one has failed; the exit code is 0 only when all passed. The first run
makes .venv with everything that is needed and fetches the default model for the tests that use it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from tools import interrupts, sanitize
from tools.install import ROOT, Installer, InstallError, Machine, Options, add_options, say

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future


@dataclass(frozen=True, slots=True)
class Check:
    """One program that passes or fails."""

    name: str
    command: tuple[str, ...]
    beside: bool = False
    """Whether it runs beside those before it; what it says is held back until its turn."""


def checks(*, fast: bool) -> list[Check]:
    """What to run, in order; the tests last, so that their closing lines stand at the end.

    Where there is no C++ compiler the sanitizers are left out, as the native kernels are.
    """
    model = [] if fast else [Check("default model", ("python", "-m", "tools.fetch"))]
    sanitizers = [] if sanitize.unable() else [Check("sanitizers", ("python", "-m", "tools.sanitize"))]
    return [
        Check("format", ("ruff", "format", "--check", ".")),
        Check("lint", ("ruff", "check", ".")),
        Check("layers", ("lint-imports",)),
        Check("native kernels", ("python", "-m", "tools.native")),
        *sanitizers,
        *model,
        Check("types", ("mypy",), beside=True),  # without its cache a minute of one core
        *tests(fast=fast),
    ]


def tests(*, fast: bool) -> list[Check]:
    """Side by side those that measure no time; then, alone on the machine, those of whole systems."""
    pytest = ("python", "-m", "pytest", "-m")
    files = (*sanitize.SIDE_BY_SIDE, "loadfile")
    if fast:
        return [Check("tests", (*pytest, "not system and not model", *files))]
    return [
        Check("tests", (*pytest, "not system", *files)),
        Check("system tests", (*pytest, "system")),
    ]


def main(arguments: list[str]) -> int:
    """Install, run all checks and sum up; the exit code."""
    parser = argparse.ArgumentParser(
        prog="tools/check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--fast", action="store_true", help="leave out the tests marked system or model")
    add_options(parser)
    options = parser.parse_args(arguments)
    # Where there is no ninja, CMake takes make, which compiles one file after the other unless it is told.
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    install = Options(extras=("dev",), torch_index=options.torch_index, cuda=options.cuda)
    try:
        python = Installer(ROOT, install, Machine.here()).ensure()
        return run_checks(checks(fast=options.fast), str(python.parent))
    except InstallError as error:
        say(str(error))
        return 3


def run_checks(todo: list[Check], programs: str) -> int:
    """Run them in order with the environment's programs first on the path; 1 if any failed."""
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
    lines: list[str] = []
    failed = 0

    def words(check: Check) -> list[str]:
        return [f"{programs}{os.sep}{check.command[0]}", *check.command[1:]]

    with ThreadPoolExecutor() as threads, contextlib.ExitStack() as stack:
        kept: dict[str, tuple[IO[bytes], Future[tuple[int, float]]]] = {}
        for check in todo:
            if check.beside:
                output = stack.enter_context(tempfile.TemporaryFile())
                process = subprocess.Popen(
                    words(check), cwd=ROOT, env=environment, stdout=output, stderr=output
                )
                stack.callback(process.kill)  # does nothing to one that has ended
                kept[check.name] = output, threads.submit(_timed, process.wait)
        for check in todo:
            print(f"== {check.name}: {' '.join(check.command)}", flush=True)
            if check.name in kept:
                said, ended = kept[check.name]
                code, seconds = ended.result()
                said.seek(0)
                print(said.read().decode(errors="replace"), end="", flush=True)
            else:
                run = functools.partial(subprocess.call, words(check), cwd=ROOT, env=environment)
                code, seconds = _timed(run)
            failed += code != 0
            verdict = "passed" if code == 0 else f"FAILED ({code})"
            lines.append(f"   {check.name:15}{verdict:13}{seconds:6.1f} s")
    print("== summary", *lines, sep="\n", flush=True)
    return int(failed > 0)


def _timed(run: Callable[[], int]) -> tuple[int, float]:
    """What a program's exit code was, and the seconds until then."""
    began = time.monotonic()
    return run(), time.monotonic() - began


if __name__ == "__main__":
    sys.exit(interrupts.guarded(lambda: main(sys.argv[1:])))
