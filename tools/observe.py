"""What a running system looks like from outside: its processes, their memory, what its actors publish.

Everything is read from /proc, the run directory and GET /statistics; nothing in the system helps. The
soak run and the system tests judge by it.
"""

from __future__ import annotations

import http.client
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Figures = dict[str, dict[str, float]]
"""What every actor last published, by its name."""


class Usage(NamedTuple):
    """What a process holds."""

    private_kib: int
    """Memory of its own (RssAnon): shared pools and mapped weights are not in it."""
    descriptors: int
    threads: int


class Life(NamedTuple):
    """One incarnation of an actor, as its log tells it."""

    epoch: int
    pid: int


def usage(pid: int) -> Usage | None:
    """What a process holds now; None when it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as stream:
            status = dict(line.split(":", 1) for line in stream)
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    if "RssAnon" not in status:  # a zombie has no memory any more
        return None
    return Usage(int(status["RssAnon"].split()[0]), descriptors, int(status["Threads"]))


def tagged(variable: str) -> set[int]:
    """The living processes whose environment has `variable` ("NAME=value"), which children inherit."""
    wanted = variable.encode()
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as stream:
                    if wanted in stream.read().split(b"\0"):
                        found.add(int(name))
            except OSError:
                continue  # it ended just now, or is not ours to look at
    return found


def shared_memory(pid: int) -> set[int]:
    """The inodes of the memfds that a process holds open or mapped."""
    found = set()
    for folder in ("fd", "map_files"):
        try:
            entries = os.listdir(f"/proc/{pid}/{folder}")
        except OSError:
            continue
        for entry in entries:
            path = f"/proc/{pid}/{folder}/{entry}"
            try:
                if os.readlink(path).startswith("/memfd:"):
                    found.add(os.stat(path).st_ino)
            except OSError:
                continue
    return found


def log_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one log; ValueError when a whole line is not one."""
    with path.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):  # the last one may be half written
                yield json.loads(line)


def lives(run_dir: Path) -> dict[str, list[Life]]:
    """All incarnations that said they started, by actor, in order."""
    found = {}
    for path in sorted((run_dir / "logs").glob("*.jsonl")):
        if path.stem != "launcher":
            found[path.stem] = [
                Life(line["epoch"], line["pid"])
                for line in log_lines(path)
                if line["event"] == "actor_started"
            ]
    return found


def statistics(url: str, timeout_s: float = 5.0) -> Figures:
    """GET /statistics; OSError or http.client.HTTPException when the door does not answer."""
    split = urlsplit(url)
    connection = http.client.HTTPConnection(split.hostname or "", split.port, timeout=timeout_s)
    try:
        connection.request("GET", "/statistics")
        figures: Figures = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return figures


def held(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What a system without requests should not hold but does, one phrase each; empty when all is well."""
    found = []
    for name, of_actor in figures.items():
        found += [
            f"{name} holds {key} = {of_actor[key]:g}"
            for key in ("requests", "sequences", "pages_leased", "pages_used", "fences_waiting")
            if of_actor.get(key)
        ]
        if "pages_total" in of_actor:
            lost = of_actor["pages_total"] - of_actor["pages_free"] - of_actor["pages_cached"]
            if lost:
                found.append(f"{name} misses {lost:g} of {of_actor['pages_total']:g} pages")
    return found
