"""Log lines of all actors as one stream of records, in order of time, from files that may still grow.

    ACTOR.jsonl ──▶ LogFile ──▶ records ─┐
    ACTOR.jsonl ──▶ LogFile ──▶ records ─┼─ merge ──▶ what is there now ──▶ follow ──▶ what comes
    ACTOR.jsonl ──▶ LogFile ──▶ records ─┘

Nothing is held but a piece of each file and one record of each, however long the files are.
"""

from __future__ import annotations

import heapq
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
BOUND = frozenset({"timestamp", "level", "event", "actor", "epoch", "request_id"})
"""Keys with a place of their own in a Record; all others are its fields."""

CHUNK = 1 << 16
LONGEST_LINE = 1 << 20
"""What is longer than this is no log line, and is not kept in memory to find out."""
LAST_TIME = float(1 << 34)
"""Whatever claims to be later (the year is 2514) cannot be shown in every time zone."""
SALVAGES = 16
"""How many beginnings of a record are tried in a broken line."""

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Record(NamedTuple):
    """One log line."""

    at: float
    """Seconds since 1970."""
    actor: str
    epoch: int | None
    level: str
    event: str
    request_id: str | None
    fields: dict[str, Any]

    @property
    def who(self) -> str:
        """The incarnation that wrote it; the launcher has but one."""
        return self.actor if self.epoch is None else f"{self.actor}@{self.epoch}"

    @property
    def severity(self) -> int:
        """The level as a number; an unknown one counts as info."""
        return LEVELS.get(self.level, LEVELS["info"])

    def whole(self, name: str) -> int | None:
        """A field that is a whole number; None when it is not, whatever else is there."""
        value = self.fields.get(name)
        return value if isinstance(value, int) else None

    def seconds(self, otherwise: float) -> float:
        """The duration that it tells, which its writer measured better than time stamps do."""
        value = self.fields.get("seconds")
        return float(value) if isinstance(value, int | float) else otherwise

    def concerns(self, request_id: str) -> bool:
        """Whether it says something of a request: alone, or among others of one step."""
        if self.request_id is not None:
            return self.request_id == request_id
        several = self.fields.get("request_ids")
        return isinstance(several, list) and request_id in several

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON shows it, with its actor also where the line did not name it."""
        named = {"timestamp": iso(self.at), "actor": self.actor, "epoch": self.epoch, "level": self.level}
        request = {} if self.request_id is None else {"request_id": self.request_id}
        return {**named, "event": self.event, **request, **self.fields}


def iso(at: float) -> str:
    """A time as the logs write it."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse(line: bytes, actor: str) -> Record | None:
    """The record of a line from the file of an actor; None when it is not one."""
    try:
        values = _decode(line)
        moment = datetime.fromisoformat(values["timestamp"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        return None
    event, epoch, request = values.get("event"), values.get("epoch"), values.get("request_id")
    at = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not isinstance(event, str) or not 0 <= at < LAST_TIME:
        return None
    return Record(
        at,
        str(values.get("actor", actor)),
        epoch if isinstance(epoch, int) else None,
        str(values.get("level", "info")),
        event,
        None if request is None else str(request),
        {key: value for key, value in values.items() if key not in BOUND},
    )


def salvage(line: bytes, actor: str) -> Record | None:
    """The record at the end of a broken line.

    A process that died in the middle of a line leaves its torn beginning in front of the first line
    of the next incarnation, which is too good to lose.
    """
    start = 0
    for _ in range(SALVAGES):
        start = line.find(b'{"', start + 1)
        if start < 0:
            return None
        if (record := parse(line[start:], actor)) is not None:
            return record
    return None


class LogFile:
    """One actor's file, read on from where it was left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.actor = path.stem
        self.garbage = 0
        """Lines that are not records, in whole or in part."""
        self._stream = path.open("rb")
        self._rest = b""
        self._skipping = False
        """In the middle of a line that is too long to be one."""

    @property
    def torn(self) -> bool:
        """Whether it ends in the middle of a line, so far."""
        return self._skipping or bool(self._rest)

    def close(self) -> None:
        """Give the descriptor back."""
        self._stream.close()

    def lines(self) -> Iterator[bytes]:
        """Whole lines that were not read yet, up to the present end; a piece of a line waits for the rest."""
        while chunk := self._stream.read(CHUNK):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            for line in whole:
                if not self._skipping:
                    yield line
                self._skipping = False
            if len(self._rest) > LONGEST_LINE:
                self.garbage += not self._skipping
                self._rest, self._skipping = b"", True

    def records(self) -> Iterator[Record]:
        """The records of the lines that were not read yet."""
        for line in self.lines():
            if not line.strip():
                continue
            record = parse(line, self.actor)
            if record is None:
                self.garbage += 1
                record = salvage(line, self.actor)
            if record is not None:
                yield record


class LogFolder:
    """The log files of one launch, also those that appear later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[Path, LogFile] = {}
        self.look()

    def look(self) -> None:
        """Open the files that were not there before."""
        for path in sorted(self.path.glob("*.jsonl")):
            if path not in self.files:
                self.files[path] = LogFile(path)

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()

    def complaints(self) -> list[str]:
        """What was wrong with the files, one line each."""
        garbage = {file.path.name: file.garbage for file in self.files.values() if file.garbage}
        torn = [file.path.name for file in self.files.values() if file.torn]
        said = []
        if garbage:
            count = sum(garbage.values())
            where = ", ".join(f"{name}: {number}" for name, number in garbage.items())
            said.append(f"{count} line{'s' * (count != 1)} could not be read as a record ({where})")
        if torn:
            said.append(f"the last line is incomplete in {', '.join(torn)}")
        return said

    def records(self) -> Iterator[Record]:
        """What is there now and was not read yet, in order of time."""
        return merge(file.records() for file in self.files.values())

    def follow(self, wait: Callable[[], bool]) -> Iterator[Record]:
        """What comes from now on, in order of time; ends when `wait`, called between looks, says False.

        Files are read one after the other, so one look may find a record and miss an older one in a
        file that it had read already. What is newer than everything of the look before is
        therefore held until the next look, which is certain to see such an older one.
        """
        held: list[Record] = []
        while True:
            horizon = held[-1].at if held else 0.0
            self.look()
            fresh = [record for file in self.files.values() for record in file.records()]
            found = sorted([*held, *fresh], key=lambda record: record.at)
            held = [record for record in found if record.at > horizon] if fresh else []
            yield from found[: len(found) - len(held)]
            if not wait():
                yield from held
                return


def merge(streams: Iterable[Iterator[Record]]) -> Iterator[Record]:
    """Several streams, each in order of time, as one."""
    return heapq.merge(*streams, key=lambda record: record.at)


def find_requests(path: Path, wanted: str, most: int = 4) -> list[str]:
    """The ids in a folder of logs that a whole id, a beginning or an end of one may mean.

    A whole id means itself alone. One more than `most` says that there are more than so many.
    """
    folder = LogFolder(path)
    found: set[str] = set()
    needle = wanted.encode()
    try:
        for file in folder.files.values():
            for line in file.lines():
                # Most lines are seen through without decoding them.
                record = parse(line, file.actor) if needle in line else None
                if record is None or record.request_id is None:
                    continue
                name = record.request_id
                if name == wanted:
                    return [name]
                if name.endswith(wanted) or name.startswith((wanted, f"req-{wanted}")):
                    found.add(name)
                if len(found) > most:
                    return sorted(found)
    finally:
        folder.close()
    return sorted(found)
