"""A look at the pages: what is read of a shared table, how it is drawn, and the command on a fake launch."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rundir import LOCK, LOGS, READY
from engine.chain import Chain, chain_root
from engine.eviction import LRU
from engine.ids import request_name
from engine.layout import Owner, PageTable, Seal, Vitals
from engine.lifecycle import PageState
from engine.pages import Pages
from tools import pages as command
from tools.logreader.render import Paint
from tools.page_map import GLYPHS, clip, frame, grid, map_lines, numbers, painted, table
from tools.page_pool import (
    CACHED,
    FREE,
    HELD,
    KINDS,
    OPEN,
    QUARANTINED,
    Look,
    NoPool,
    Pool,
    open_pool,
    tokens_of_page,
)
from transport.segments import create_segment, map_segment

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
ACTORS, PAGES, PAGE_TOKENS = 6, 40, 8
ALLOCATOR, WORKER = 1, 5
NAMES = ("health", "allocator", "scheduler", "replicator", "front", "both")
PLAIN = Paint(False)


class Segments:
    """The two segments of a host as its actors write them."""

    def __init__(self, table: memoryview, vitals: memoryview, pages: int = PAGES) -> None:
        self.raw = (table, vitals)
        self.table = PageTable(table, pages, PAGE_TOKENS, ACTORS)
        self.vitals = Vitals(vitals, ACTORS)
        for ordinal in range(ACTORS):
            self.vitals.next_epoch(ordinal)
        self.publish(pages_total=pages)

    @classmethod
    def in_memory(cls, pages: int = PAGES) -> Segments:
        size = PageTable.size(pages, PAGE_TOKENS, ACTORS)
        return cls(memoryview(bytearray(size)), memoryview(bytearray(ACTORS * Vitals.BYTES)), pages)

    def publish(self, **figures: int) -> None:
        self.vitals.publish(ALLOCATOR, {"epoch": 1, **figures})

    def pool(self) -> Pool:
        return Pool(*(view.toreadonly() for view in self.raw), NAMES)

    def fill(self, page: int, owner: Owner, request: int, block: int, valid: int, choice: int = 0) -> None:
        """An open page, or a sealed one if all its slots are valid."""
        self.table.lease(page, owner)
        self.table.open(page, request, choice, 1, block)
        self.table.fill(page, valid)
        if valid == PAGE_TOKENS:
            tokens = struct.pack(f"<{PAGE_TOKENS}I", *range(PAGE_TOKENS))
            chain = Chain(chain_root(f"{request} {block}"), PAGE_TOKENS)
            self.table.seal(page, Seal(chain.append(tokens), chain_root(""), tokens, None))


# ── what is read ──────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(
        st.tuples(st.sampled_from(PageState), st.booleans(), st.integers(1, 4), st.booleans()),
        min_size=PAGES,
        max_size=PAGES,
    )
)
def test_every_page_is_one_kind_and_they_are_those_of_the_allocator(
    drawn: list[tuple[PageState, bool, int, bool]],
) -> None:
    """`drawn`: the state of each page, whether it is held, its request, whether its owner is dead."""
    segments = Segments.in_memory()
    dead, alive = Owner(WORKER, 1), Owner(WORKER, 2)
    segments.vitals.next_epoch(WORKER)
    rows = {owner: segments.table.claim(owner) for owner in (dead, alive)}
    for page, (state, held, request, by_dead) in enumerate(drawn):
        owner = dead if by_dead else alive
        if state is PageState.LEASED:
            segments.table.lease(page, owner)
        elif state in (PageState.OPEN, PageState.SEALED):
            segments.fill(page, owner, request, page, 3 if state is PageState.OPEN else PAGE_TOKENS)
            rows[owner][page] = held
    look = segments.pool().look()
    pages = Pages(segments.table, LRU())
    census = pages.census({dead})
    assert look.census == dict(census)
    assert sum(look.census.values()) == PAGES
    assert sum(share.pages for share in look.shares) == census["held"] + census["open"]
    assert sum(share.open for share in look.shares) == census["open"]
    slots = PAGE_TOKENS * census["held"] + 3 * census["open"]
    assert sum(share.slots for share in look.shares) == slots


def test_requests_are_told_with_who_fills_them() -> None:
    segments = Segments.in_memory()
    owner = Owner(WORKER, 1)
    row = segments.table.claim(owner)
    for block, page in enumerate((7, 9, 3)):
        by, valid = (Owner(4, 1), PAGE_TOKENS) if block < 2 else (owner, 5)
        segments.fill(page, by, 0x0400000100000002, block, valid)
        row[page] = 1
    segments.fill(20, owner, 0x0400000100000003, 0, 2, choice=1)
    segments.publish(pages_total=PAGES, pages_in_file=4, pages_pinned=2, steps=9)
    look = segments.pool().look()
    first, second = look.shares
    assert first == (request_name(0x0400000100000002), 0, "both@1", 3, 1, 21)
    assert second == (request_name(0x0400000100000003), 1, "both@1", 1, 1, 2)
    assert look.said == {"in_file": 4, "pinned": 2}
    told = look.as_dict()
    assert told["pages"] == {
        **{"total": 40, "free": 36, "cached": 0, "leased": 0, "open": 2, "held": 2, "quarantined": 0},
        "used": 4,
    }
    assert json.loads(json.dumps(told)) == told


def test_names_that_do_not_fit_the_actors_are_not_guessed() -> None:
    segments = Segments.in_memory()
    pool = Pool(*segments.raw, NAMES[:-1])
    assert pool.name(Owner(WORKER, 3)) == "actor-5@3"


def test_a_table_of_another_shape_is_refused() -> None:
    assert tokens_of_page(PageTable.size(1000, 16, 7), 1000, 7) == 16
    for wrong in (PageTable.size(1000, 16, 7) + 1, PageTable.size(1000, 0, 7), 10):
        with pytest.raises(NoPool, match=f"{wrong} bytes"):
            tokens_of_page(wrong, 1000, 7)
    fresh = memoryview(bytearray(ACTORS * Vitals.BYTES))
    with pytest.raises(NoPool, match="has not said yet"):
        Pool(memoryview(bytearray(100)), fresh)


# ── how it is drawn ───────────────────────────────────────────────────────────────────────────


def look_of(*kinds: int) -> Look:
    return Look(np.array(kinds, np.uint8), [], {}, PAGE_TOKENS)


def test_a_cell_is_a_page_where_there_is_room() -> None:
    lines = painted(map_lines(grid(look_of(FREE, HELD, HELD, OPEN, CACHED).kinds, 3, 5)), PLAIN)
    assert lines == ["·██", "▓░"]


def test_a_cell_for_several_pages_is_drawn_as_most_of_them() -> None:
    kinds = look_of(*[FREE] * 3, HELD, *[HELD] * 2, *[FREE] * 2, *[CACHED] * 3, QUARANTINED, HELD).kinds
    shown = grid(kinds, 2, 2)
    assert shown.pages_per_cell == 4
    assert painted(map_lines(shown), PLAIN) == ["·█", "!█"]


@given(st.integers(1, 100_000), st.integers(-3, 300), st.integers(-3, 100))
def test_any_pool_fits_any_terminal(pages: int, width: int, height: int) -> None:
    shown = grid(np.zeros(pages, np.uint8), width, height)
    assert (len(shown.cells) - 1) * shown.pages_per_cell < pages <= len(shown.cells) * shown.pages_per_cell
    lines = frame("launch", Look(np.zeros(pages, np.uint8), [], {}, 16), width, height)
    assert len(lines) <= max(1, height - 1)
    assert all(sum(len(text) for text, _ in line) <= max(0, width) for line in lines)


def test_the_sums_are_below_the_map_and_requests_below_them() -> None:
    segments = Segments.in_memory()
    for number in range(9):
        segments.fill(number, Owner(WORKER, 1), number + 1, 0, 4)
    look = segments.pool().look()
    lines = painted(frame("launch", look, 100, 24), PLAIN)
    assert lines[0] == "launch   40 pages of 8 tokens; a cell is a page"
    assert lines[1] == GLYPHS[OPEN] * 9 + GLYPHS[FREE] * 31
    assert lines[2].endswith("▓ open 9   █ held 0   ! quarantined 0   of 40")
    assert lines[3].startswith("pinned 0")
    assert lines[4] == "so far: found 0, evicted 0, taken back from the dead 0", "nothing is cut off"
    assert lines[6].startswith("request")
    assert lines[7].split() == [request_name(1), "1", "4", "4", "both@1"]
    assert lines[-1] == "3 more with 3 pages"
    assert len(table("launch", look)) == 10 + 1 + 9
    assert numbers(look).startswith("total 40 free 31 cached 0 leased 0 open 9 held 0 quarantined 0")


def test_lines_are_clipped_by_what_is_seen() -> None:
    assert clip([("abc", "red"), ("def", None), ("g", None)], 5) == [("abc", "red"), ("de", None)]
    assert painted([[("abc", "red")]], Paint(True)) == ["\x1b[31mabc\x1b[0m"]


# ── the command ───────────────────────────────────────────────────────────────────────────────


class FakeLaunch:
    """A run directory whose launcher is this process, and its segments."""

    def __init__(self, base: Path) -> None:
        self.path = base / "local-1-ab"
        (self.path / LOGS).mkdir(parents=True)
        spawned = [{"event": "process_spawned", "process": f"{name}@1"} for name in NAMES]
        lines = "".join(json.dumps(line) + "\n" for line in [*spawned, spawned[-1]])
        (self.path / LOGS / "launcher.jsonl").write_text(lines)
        (self.path / READY).write_text(json.dumps({"pid": os.getpid()}))
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        sizes = (PageTable.size(PAGES, PAGE_TOKENS, ACTORS), ACTORS * Vitals.BYTES)
        self._descriptors = [
            create_segment(name, size) for name, size in zip(("page-table", "vitals"), sizes, strict=True)
        ]
        self.segments = Segments(*(map_segment(fd).view for fd in self._descriptors))

    def end(self) -> None:
        for descriptor in (self._lock, *self._descriptors):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[FakeLaunch]:
    made = FakeLaunch(tmp_path)
    yield made
    made.end()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tools.pages", *arguments]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_another_process_sees_the_pool_and_changes_nothing(launch: FakeLaunch) -> None:
    launch.segments.fill(5, Owner(WORKER, 1), 7, 0, 6)
    before = [bytes(view) for view in launch.segments.raw]
    done = run(str(launch.path.parent), "--once", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["pages"]["open"], told["pages"]["free"]) == (1, 39)
    assert told["requests"] == [
        {"request": request_name(7), "choice": 0, "worker": "both@1", "pages": 1, "open": 1, "slots": 6}
    ]
    plain = run(str(launch.path), "--once")
    assert "open               1" in plain.stdout
    assert [bytes(view) for view in launch.segments.raw] == before
    with pytest.raises(TypeError, match="read-only"):
        open_pool(launch.path).table.fill(5, 7)


def test_a_launch_that_ends_ends_the_watch(launch: FakeLaunch, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    screen = command.Screen(out, "launch", as_json=True, paint=PLAIN)
    pool = open_pool(launch.path)
    shown = threading.Event()

    class Watched(Pool):
        def look(self) -> Look:
            shown.set()
            return pool.look()

    def end() -> None:
        assert shown.wait(30)
        launch.end()

    ender = threading.Thread(target=end)
    ender.start()
    command.watch(Watched(*launch.segments.raw), screen, launch.path, 0.05)
    ender.join()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines
    assert all(line["pages"]["total"] == PAGES and line["at"] > 0 for line in lines)
    assert command.main([str(launch.path)]) == 3
    assert "has ended" in capsys.readouterr().err


def test_on_a_terminal_it_draws_in_the_size_that_there_is_and_leaves_it_as_it_was(launch: FakeLaunch) -> None:
    theirs, ours = pty.openpty()
    termios.tcsetwinsize(ours, (12, 50))
    words = [sys.executable, "-m", "tools.pages", str(launch.path), "--every", "0.05"]
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    seen = b""

    def read_until(text: str) -> None:
        nonlocal seen
        while text.encode() not in seen:
            readable, _, _ = select.select([theirs], [], [], 30)
            assert readable, f"{text!r} never came: {seen[-300:]!r}"
            seen += os.read(theirs, 4096)

    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=ours, stderr=subprocess.PIPE, text=True) as child:
        os.close(ours)
        try:
            read_until(command.ENTER + command.HOME)
            read_until(f"\x1b[2m{'·' * 40}\x1b[0m")
            termios.tcsetwinsize(theirs, (12, 20))
            read_until(f"\r\n\x1b[2m{'·' * 20}\x1b[0m{command.END_OF_LINE}\r\n\x1b[2m{'·' * 20}\x1b[0m")
            launch.end()
            read_until(command.LEAVE)
            assert child.stderr is not None
            assert "the launch has ended" in child.stderr.read()
            assert child.wait(30) == 0
        finally:
            child.kill()
            os.close(theirs)


def test_what_is_no_launch_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "absent")]) == 2
    (tmp_path / LOGS).mkdir()
    assert command.main([str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert "no such directory" in said
    assert "has ended" in said
    for wrong in (["--every", "0"], ["--every", "x"]):
        with pytest.raises(SystemExit) as ended:
            command.main([*wrong, str(tmp_path)])
        assert ended.value.code == 2


def test_a_launch_that_is_not_ready_says_so(launch: FakeLaunch) -> None:
    (launch.path / READY).unlink()
    with pytest.raises(NoPool, match="not ready yet"):
        open_pool(launch.path)
    (launch.path / READY).write_text(json.dumps({"pid": os.getppid()}))
    with pytest.raises(NoPool, match=r"segment page-table|another user"):
        open_pool(launch.path)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"{glyph} {kind}" in said for glyph, kind in zip(GLYPHS, KINDS, strict=True))
