"""Sets up this machine and runs the default system, with nothing needed but Python 3.11.

The first run makes a virtual environment in .venv, installs the package and fetches the default
model (98 MB; kept in $ESTAFET_CACHE or ~/.cache/estafet). Later runs start in seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tools.install import ROOT, Installer, InstallError, Machine, Options, add_options, say

EPILOG = """\
examples:
  tools/up                                     serve until Ctrl-C
  tools/up --set gateway.front.port=8080       the same on another port
  tools/up --ask "Why is the sky blue?"        print one answer and stop

Everything that is not known here goes to the launcher: `python -m engine.launch --help`.
With --ask the answer alone goes to stdout. Exit codes: 0 clean, 1 the question got no answer,
2 bad usage or topology, 3 the system could not be set up or started, 130 interrupted.
"""
TOPOLOGY = ROOT / "engine" / "topologies" / "local.toml"


def main(arguments: list[str]) -> int:
    """Install, fetch, and become the launcher (or the asker); returns only when that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="tools/up",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ask", metavar="QUESTION", help="answer one question through the system and stop")
    add_options(parser)
    options, rest = parser.parse_known_args(arguments)
    install = Options(torch_index=options.torch_index, cuda=options.cuda)
    try:
        python = str(Installer(ROOT, install, Machine.here()).ensure())
        # It prints the file's path, which is not what our stdout is for.
        fetch = [python, "-m", "tools.fetch"]
        if subprocess.run(fetch, stdout=sys.stderr, cwd=ROOT, check=False).returncode:
            say("the default model could not be fetched")
            return 3
    except InstallError as error:
        say(str(error))
        return 3
    except KeyboardInterrupt:
        return 130
    command = [python, "-m", "engine.launch", str(TOPOLOGY), *rest]
    if options.ask is not None:
        command = [python, "-m", "tools.ask", "--topology", str(TOPOLOGY), options.ask, "--", *rest]
    return os.execv(python, command)
