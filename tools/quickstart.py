"""Sets up this machine and runs a system, with nothing needed but Python 3.11.

The first run makes a virtual environment in .venv, installs the package and fetches the default
model (98 MB; kept in $ESTAFET_CACHE or ~/.cache/estafet). Later runs start in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from tools.children import running
from tools.install import ROOT, Installer, InstallError, Machine, Options, add_options, say

if TYPE_CHECKING:
    from collections.abc import Sequence

EPILOG = """\
examples:
  tools/up                                     serve until Ctrl-C
  tools/up --set gateway.front.port=9000       the same on another port
  tools/up --topology two-decode               another topology, of those that ship or a file
  tools/up --ask "Why is the sky blue?"        print one answer and stop

With --ask the answer alone goes to stdout. Exit codes: 0 clean, and without --ask also after Ctrl-C;
1 the question got no answer, 2 bad usage or topology, 3 the system could not be set up or started,
70 it did not stop cleanly, 130 interrupted while setting up or asking.
"""
TOPOLOGIES = ROOT / "engine" / "topologies"


def main(arguments: list[str]) -> int:
    """Install, fetch, and become the launcher (or the asker); returns only when that cannot be done."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if complaint := _complaint(options, unknown):
        say(complaint)
        return 2
    install = Options(torch_index=options.torch_index, cuda=options.cuda)
    try:
        python = str(Installer(ROOT, install, Machine.here()).ensure())
    except InstallError as error:
        say(str(error))
        return 3
    if _takes_default_model(options.topology, options.settings):
        fetch = [python, "-m", "tools.fetch", "--step", "step 3 of 3: "]
        # The path that it prints is for scripts; SIGTERM, because that Ctrl-C was pressed we say ourselves.
        with running(fetch, stop=signal.SIGTERM, stdout=subprocess.DEVNULL, cwd=ROOT) as fetching:
            if code := fetching.wait():
                return code if code > 0 else 3
    topology = options.topology
    rest = [word for setting in options.settings for word in ("--set", setting)]
    if options.run_dir is not None:
        rest += ["--run-dir", options.run_dir]
    if options.check:
        rest.append("--check")
    command = [python, "-m", "engine.launch", topology, *rest]
    if options.ask is not None:
        command = [python, "-m", "tools.ask", "--topology", topology, options.ask, "--", *rest]
    return os.execv(python, command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/up",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ask", metavar="QUESTION", help="answer one question through the system and stop")
    parser.add_argument(
        "--topology", metavar="NAME_OR_FILE", default="local", help="what to run (default: %(default)s)"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a key of the topology, as in --set worker.decode.threads=2 (may be repeated)",
    )
    parser.add_argument("--check", action="store_true", help="print the resolved topology and stop")
    parser.add_argument("--run-dir", metavar="DIR", help="where run directories are made")
    add_options(parser)
    return parser


def _complaint(options: argparse.Namespace, unknown: Sequence[str]) -> str | None:
    """What is wrong with the command line, in one line, before anything is started."""
    if unknown:
        return f"tools/up does not know {unknown[0]!r}: {_hint(unknown)}"
    if options.ask is not None and not options.ask.strip():
        return "the question is empty: tools/up --ask 'Why is the sky blue?'"
    if options.ask is not None and options.check:
        return "--check starts nothing that could be asked: leave it or --ask out"
    if not _ships(options.topology) and not Path(options.topology).is_file():
        names = ", ".join(sorted(file.stem for file in TOPOLOGIES.glob("*.toml")))
        return f"{options.topology}: no such topology file; those that ship are: {names}"
    return None


def _takes_default_model(topology: str, settings: Sequence[str]) -> bool:
    """Whether the default model will be needed; what is wrong with the file the launcher will say."""
    if any(setting.startswith("model.path=") for setting in settings):
        return "model.path=default" in settings
    with contextlib.suppress(OSError, ValueError, AttributeError):
        table = tomllib.loads(Path(topology).read_text(encoding="utf-8"))
        return bool(table.get("model", {}).get("path", "default") == "default")
    return _ships(topology)


def _ships(topology: str) -> bool:
    return (TOPOLOGIES / f"{topology.removesuffix('.toml')}.toml").is_file()


def _hint(unknown: Sequence[str]) -> str:
    first, _, value = unknown[0].partition("=")
    if first in ("--port", "-p"):
        port = value or next(iter(unknown[1:]), "9000")
        return f"for a port, --set gateway.front.port={port}"
    if first.startswith("-"):
        return "tools/up --help shows what there is"
    if _ships(first) or first.endswith(".toml"):
        return f"for a topology, --topology {first}"
    return "for a question, --ask 'Why is the sky blue?'"
