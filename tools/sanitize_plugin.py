"""pytest's plugin in the sanitizers' run: it fails when what was tested is not what was built for it.

The tests may run in several processes (pytest-xdist), each of which tells what it used.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.install import say

_TELLS = "estafet_sanitize"
_TOLD = pytest.StashKey[list[tuple[str | None, bool]]]()
"""Of each process: the file of the extension that it used, if any, and whether it imported torch."""


def pytest_configure(config: pytest.Config) -> None:
    """Nobody has told anything."""
    config.stash[_TOLD] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a process tells; one that a sanitizer has ended tells nothing, and its test has failed."""
    if told := getattr(node, "workeroutput", {}).get(_TELLS):
        node.config.stash[_TOLD].append(told)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell what this process used, or judge what all did."""
    module = sys.modules.get("kernels.cpu._native")
    here = (str(module.__file__) if module is not None else None, "torch" in sys.modules)
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[_TELLS] = here
    elif not session.config.option.collectonly:
        for why in _complaints(session.config.stash[_TOLD] or [here]):
            say(why)
            session.exitstatus = 1


def _complaints(told: list[tuple[str | None, bool]]) -> list[str]:
    folder = Path(os.environ["ESTAFET_NATIVE_PATH"])
    files = {file for file, _ in told if file is not None} or {"none"}
    instead = f"instead of the extension in {folder}: see kernels.cpu.native"
    found = [f"the tests used {file} {instead}" for file in sorted(files) if Path(file).parent != folder]
    if any(torch for _, torch in told):
        found.append("these tests must not import torch, which takes minutes under AddressSanitizer")
    return found
