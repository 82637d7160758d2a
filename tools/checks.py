"""Runs every check of the repository: format, lint, types, layers, native kernels, tests.

All of them run, also after one has failed; the exit code is 0 only when all passed. The first run
makes .venv with everything that is needed and fetches the default model for the tests that use it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from tools import interrupts, sanitize
from tools.install import ROOT, Installer, InstallError, Machine, Options, add_options, say


@dataclass(frozen=True, slots=True)
class Check:
    """One program that passes or fails."""

    name: str
    command: tuple[str, ...]


def checks(*, fast: bool) -> list[Check]:
    """What to run, in order; the tests last, so that their closing lines stand at the end.

    Where there is no C++ compiler the sanitizers are left out, as the native kernels are.
    """
    model = [] if fast else [Check("default model", ("python", "-m", "tools.fetch"))]
    sanitizers = [] if sanitize.unable() else [Check("sanitizers", ("python", "-m", "tools.sanitize"))]
    return [
        Check("format", ("ruff", "format", "--check", ".")),
        Check("lint", ("ruff", "check", ".")),
        Check("types", ("mypy",)),
        Check("layers", ("lint-imports",)),
        Check("native kernels", ("python", "-m", "tools.native")),
        *sanitizers,
        *model,
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
    """Run them one after the other with the environment's programs first on the path; 1 if any failed."""
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
    lines: list[str] = []
    failed = 0
    for check in todo:
        print(f"== {check.name}: {' '.join(check.command)}", flush=True)
        start = time.monotonic()
        program = [f"{programs}{os.sep}{check.command[0]}", *check.command[1:]]
        code = subprocess.run(program, cwd=ROOT, env=environment, check=False).returncode
        failed += code != 0
        verdict = "passed" if code == 0 else f"FAILED ({code})"
        lines.append(f"   {check.name:15}{verdict:13}{time.monotonic() - start:6.1f} s")
    print("== summary", *lines, sep="\n", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(interrupts.guarded(lambda: main(sys.argv[1:])))
