"""What a command line means: which launch, which request, which lines."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from actors.rundir import LOCK, LOGS, default_base, is_alive
from tools.logreader.records import LEVELS, find_requests

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tools.logreader.records import LogFolder, Record

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class CannotRead(Exception):
    """There is nothing to read, or it is not clear what; the text says why in one line."""


def find_logs(given: Path | None) -> tuple[Path, Path]:
    """A run directory and its folder of logs: the one that is given, or the newest in it, or of all."""
    base = default_base() if given is None else given
    if (base / LOGS).is_dir():
        return base, base / LOGS
    if not base.is_dir() and given is not None:
        raise CannotRead(f"{given}: no such directory")
    launches = [path.parent for path in base.glob(f"*/{LOGS}")]
    if launches:
        # The lock is made with the directory and never written: its age is that of the launch.
        newest = max(launches, key=_age)
        return newest, newest / LOGS
    if given is not None and any(given.glob("*.jsonl")):
        return given.parent, given
    raise CannotRead(f"{base}: has no logs of a launch; name a run directory")


def neighbours(run_dir: Path) -> list[Path]:
    """Other launches that run: of a topology of several hosts each has its own run directory."""
    return sorted(path for path in run_dir.parent.glob("*") if path != run_dir and is_alive(path))


def _age(run_dir: Path) -> float:
    lock = run_dir / LOCK
    return (lock if lock.exists() else run_dir).stat().st_mtime


def parse_since(text: str, now: float) -> float:
    """A time from how long ago it was (30s, 5m, 1.5h) or in ISO form; ValueError when it is neither."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text):
        return now - float(match[1]) * UNITS[match[2]]
    return datetime.fromisoformat(text).timestamp()


class Filter:
    """Which lines --level, --actor and --since let through."""

    def __init__(self, level: str, actors: Iterable[str], since: float) -> None:
        self._severity = LEVELS[level]
        self._actors = frozenset(actors)
        self._since = since

    def __call__(self, record: Record) -> bool:
        return (
            record.severity >= self._severity
            and record.at >= self._since
            and (not self._actors or not self._actors.isdisjoint((record.actor, record.who)))
        )


def choose_request(logs: Path, wanted: str) -> str:
    """The one request that is meant."""
    wanted = wanted.strip().removeprefix("chatcmpl-")
    if not wanted:
        raise CannotRead("--request needs an id, or the beginning or end of one")
    found = find_requests(logs, wanted)
    if not found:
        raise CannotRead(f"no request {wanted} in {logs}; without --request all are listed")
    if len(found) > 1:
        raise CannotRead(f"{wanted} may be any of {', '.join(found[:4])}{', …' if len(found) > 4 else ''}")
    return found[0]


def check_actors(folder: LogFolder, actors: Iterable[str]) -> None:
    """CannotRead when an actor has no file."""
    known = [file.actor for file in folder.files.values()]
    for actor in actors:
        if actor.partition("@")[0] not in known:
            raise CannotRead(f"no actor {actor} in {folder.path}; there are {', '.join(known) or 'none'}")
