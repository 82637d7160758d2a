"""What figures were made on: every benchmark writes it beside them."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def cpu() -> str:
    """The name of the processor."""
    names = [
        line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def cores() -> int:
    """Cores that we may use."""
    return len(os.sched_getaffinity(0))


def memory_gib() -> float:
    """Memory of the machine in GiB; 0 where it does not say."""
    kib = [int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal:")]
    return round(kib[0] / 2**20, 1) if kib else 0.0


def commit() -> str | None:
    """The commit of the working tree, with a + when it has changes; None outside of a repository."""
    described = subprocess.run(
        ["git", "describe", "--always", "--exclude", "*", "--dirty=+"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return described.stdout.strip() or None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
