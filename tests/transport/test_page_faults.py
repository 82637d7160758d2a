"""Page transfers over connections that go wrong at any byte: right in the end, or a plain no, never a lie.

All of it in virtual time over memory streams; pages are small, so that every byte of a connection can be
the one where it happens.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, get_args

import pytest
import trio
import trio.testing
from faulty_streams import Fault, FaultyPath, Way
from hypothesis import example, given, settings
from hypothesis import strategies as st
from page_contract import PageWorld

from transport.errors import ProtocolError, TransferCut, TransportError
from transport.page_fetch import PageFetcher
from transport.page_push import PageSender
from transport.page_server import PageServer
from transport.page_settings import TransferSettings
from transport.page_wire import framed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transport.page_jobs import Flight
    from transport.pages import PageCopy, PageFetch

PAGE = 20
PAGES = 5
SETTINGS = TransferSettings(run_bytes=2 * PAGE, window_bytes=4 * PAGE, give_up_s=60.0)
PREAMBLE_BYTES = 10
"""The preamble: damage to it makes another protocol of it."""


class Transfer:
    """One transfer of all pages of a world, by pull or push, over a faulty path."""

    def __init__(
        self, kind: str, faults: Sequence[tuple[Way, Fault, int]], piece: int = 1 << 20, pages: int = PAGES
    ) -> None:
        self.kind = kind
        self.faults = faults
        self.piece = piece
        self.world = PageWorld(PAGE, pages)
        self.path: FaultyPath
        self.answers: list[bool] = []
        self.error: TransportError | None = None
        self.took_s = 0.0
        self.times_given: Counter[int] = Counter()

    def run(self) -> list[bool]:
        """The answers; raises what the client raises."""
        trio.run(self._run, clock=trio.testing.MockClock(autojump_threshold=0))
        if self.error is not None:
            raise self.error
        return self.answers

    async def _run(self) -> None:
        world = self.world
        copies = world.copies(*range(world.pages))
        async with trio.open_nursery() as nursery:
            if self.kind == "pull":
                self.server = PageServer(world.here, world.mains, giver=world)
            else:
                self.server = PageServer(world.there, world.standbys, taker=world)
            self.path = FaultyPath(self.server.handle, nursery, self.faults, self.piece)
            self.client = self._client()
            self._watch_asks(self.client)
            await nursery.start(self.client.run)
            try:
                with trio.fail_after(600):
                    if isinstance(self.client, PageFetcher):
                        self.answers = await self.client.fetch(world.fetches(copies))
                    else:
                        self.answers = await self.client.push(copies)
                world.check_answers(copies, self.answers)
            except TransportError as error:
                self.error = error
            self.took_s = trio.current_time()
            self.client.check()
            self.server.check()
            nursery.cancel_scope.cancel()
        world.check()
        self.server.check()
        assert self.server.statistics().open == self.server.statistics().greeting == 0

    def _client(self) -> PageFetcher | PageSender:
        world, connect = self.world, self.path.connect
        if self.kind == "pull":
            return PageFetcher(connect, world.there, world.standbys, SETTINGS)
        return PageSender(
            *(connect, world.here, world.mains, world.still_valid, SETTINGS), checksum_of=world.checksum_of
        )

    def _watch_asks(self, client: PageFetcher | PageSender) -> None:
        """What is settled must not go out again."""
        take_off = client._line.take_off

        def watched() -> Flight[PageFetch] | Flight[PageCopy] | None:
            flight = take_off()
            client.check()
            if flight is not None:
                assert not any(flight.job.answers[position] for position in flight.positions)
                self.times_given.update(flight.positions)
            return flight

        client._line.take_off = watched  # type: ignore


def clean_bytes(kind: str) -> dict[Way, int]:
    """How many bytes a transfer without faults sends each way."""
    transfer = Transfer(kind, [])
    assert transfer.run() == [True] * PAGES
    assert transfer.path.connections == 1
    return transfer.path.bytes_sent()


KINDS = ["pull", "push"]
WAYS = get_args(Way)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_cut_at_any_byte_is_resumed(kind: str, way: Way) -> None:
    size = clean_bytes(kind)[way]
    assert size > 100
    for at in range(size):
        transfer = Transfer(kind, [(way, "cut", at)])
        assert transfer.run() == [True] * PAGES, at
        assert transfer.path.connections == 2
        # At most the window of the first connection went out again.
        assert sum(transfer.times_given.values()) <= PAGES + 4
        if kind == "push":
            assert sorted(transfer.world.stored_targets) == sorted(
                copy.target for copy in transfer.world.copies(*range(PAGES))
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_damage_to_any_byte_is_never_a_page(kind: str, way: Way) -> None:
    damaged_pages = 0
    for at in range(0, clean_bytes(kind)[way], 3):
        transfer = Transfer(kind, [(way, "damage", at)])
        if at < PREAMBLE_BYTES:
            with pytest.raises(ProtocolError, match=r"version|does not transfer pages|refused"):
                transfer.run()
            continue
        answers = transfer.run()
        # Damage to a page is a no for that page; to a header, a connection that is made again.
        assert sum(answers) >= PAGES - 1
        assert all(answers) == (transfer.path.connections == 2)
        damaged_pages += not all(answers)
    gives = "to client" if kind == "pull" else "to server"
    runs = 3
    assert abs(damaged_pages - (PAGES * PAGE / 3 if way == gives else 0)) <= runs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_silence_from_any_byte_on_is_noticed_and_resumed(kind: str, way: Way) -> None:
    for at in range(0, clean_bytes(kind)[way], 7):
        transfer = Transfer(kind, [(way, "silence", at)])
        assert transfer.run() == [True] * PAGES, at
        assert transfer.path.connections == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["cut", "silence"])
def test_a_path_that_never_brings_a_page_is_given_up_in_time(kind: str, fault: Fault) -> None:
    transfer = Transfer(kind, [])
    transfer.run()
    # In the header of what comes after the greeting.
    at = PREAMBLE_BYTES + len(framed(transfer.server._hello)) + 3
    transfer = Transfer(kind, [("to client", fault, at)] * 1000)
    with pytest.raises(TransferCut, match=r"no page for 60\.0 s: the (connection|stream|peer)"):
        transfer.run()
    assert 60 <= transfer.took_s <= 62
    # 20 ms, 40 ms, … 640 ms, then a second each; what is silent for two seconds costs those too.
    assert (60 if fault == "cut" else 20) < transfer.path.connections < 70
    assert transfer.client.statistics().given_up == 1
    assert transfer.client.statistics().pages == 0


def test_a_path_that_brings_pages_between_cuts_is_not_waited_for_longer_and_longer() -> None:
    transfer = Transfer("pull", [("to client", "cut", 260)] * 8, pages=40)
    assert transfer.run() == [True] * 40
    assert transfer.path.connections == 9
    assert transfer.took_s < 8 * 0.02 + 0.1  # 5.1 s if every wait were twice the last one


faults = st.lists(
    st.tuples(st.sampled_from(WAYS), st.sampled_from(["cut", "silence"]), st.integers(PREAMBLE_BYTES, 600)),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), faults, st.sampled_from([1, 7, 20, 1000]), st.integers(1, 20))
@example("push", [("to client", "cut", 110)] * 3, 7, 20)
def test_a_path_cut_again_and_again_brings_every_page_once(
    kind: str, faults: list[tuple[Way, Fault, int]], piece: int, pages: int
) -> None:
    transfer = Transfer(kind, faults, piece, pages)
    assert transfer.run() == [True] * pages
    assert transfer.path.connections <= len(faults) + 1
    assert set(transfer.times_given) == set(range(pages))
    if kind == "push":
        assert len(transfer.world.stored_targets) == pages
    assert transfer.client.statistics().pages == pages
    assert transfer.client.statistics().mismatched == 0


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(
        st.tuples(
            st.sampled_from(WAYS),
            st.sampled_from(["cut", "silence", "damage"]),
            st.integers(PREAMBLE_BYTES, 600),
        ),
        max_size=6,
    ),
    st.sets(st.integers(0, PAGES - 1)),
    st.sets(st.integers(0, PAGES - 1)),
    st.booleans(),
)
def test_nothing_that_goes_wrong_makes_a_wrong_page_right(
    kind: str,
    faults: list[tuple[Way, Fault, int]],
    reused: set[int],
    refused: set[int],
    sealed: bool,
) -> None:
    transfer = Transfer(kind, faults)
    transfer.world.reused = set(reused)
    transfer.world.refused = set(refused) if kind == "push" else set()
    transfer.world.sealed = sealed
    answers = transfer.run()  # which checks that what is called whole is whole
    assert not any(answers[index] for index in reused)
    if kind == "push":
        assert not any(answers[PAGES - 1 - target] for target in refused)
    damages = sum(fault == "damage" for _, fault, _ in faults)
    assert answers.count(False) <= len(reused) + len(refused) + damages
