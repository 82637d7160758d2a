"""Copying KV pages from one pool to another: what every way of doing it has in common, and the nearest.

A page that is copied is not owned by the copier: at any moment its slot may be given to another use.
So a transport copies first and then asks whether the page it read is still the one it was asked for
(`still_valid`, which compares generations in shared memory). Only then does it say True.

    SharedMemoryPages    between two pools mapped on this host
    PageSender           to another host, `transport.page_push`
    PageFetcher          from another host, `transport.page_fetch`: the one who wants pages asks for them

Others (RDMA by NIXL, CUDA peer copies) fit the same protocol: register the pools when they are made,
post one transfer a call, wait for its completion, check generations, answer page by page. README.md
says how they join the contract suite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import trio

from engine.shapes import PageRef

StillValid = Callable[[PageRef], bool]
"""Whether a slot still holds this generation of its page. Called right after reading the slot."""

CHECKPOINT_BYTES = 1 << 20
"""Copying holds up the other tasks of the actor for about as long as this takes: 0.1–0.2 ms."""


class PageCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One page to copy, and the slot, leased by the caller, where it goes."""

    source: PageRef
    target: PageRef


class PageFetch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One page that another host has, and the slot, leased by the caller, where it goes."""

    source: PageRef
    key: bytes
    """The page's chain key, 16 bytes: a page that has another one by now is not the one that is meant."""
    target: PageRef


class PageTransport(Protocol):
    """Copies pages of one pool to one other place."""

    async def copy(self, copies: Sequence[PageCopy]) -> list[bool]:
        """Copy pages; True where the whole page, of the generation asked for, is at its target.

        False: its slot has another use by now, or the other side no longer wants it; what the target
        slot holds is undefined and must not be used. Cancelled, nothing is known about any of them.
        Raises TransferCut when the other side is gone and ProtocolError when it talks nonsense; then
        too nothing is known, and copying again is right.
        """
        ...


class PagePool:
    """The memory of one pool, cut into pages of equal size."""

    def __init__(self, number: int, memory: memoryview, page_bytes: int) -> None:
        """`memory`: whole pages, nothing between; what is left over at its end is not used."""
        if page_bytes < 1:
            raise ValueError(f"pages must have bytes, not {page_bytes}")
        self.number = number
        self.page_bytes = page_bytes
        self.pages = len(memory) // page_bytes
        self._memory = memory

    def slot(self, page: PageRef) -> memoryview:
        """The bytes of the slot of a page; raises IndexError when this pool has no such slot."""
        if page.pool != self.number or not 0 <= page.index < self.pages:
            raise IndexError(f"pool {self.number} of {self.pages} pages has no {page}")
        start = page.index * self.page_bytes
        return self._memory[start : start + self.page_bytes]


class PagePools:
    """The pools of a host that a transport reads or fills, by number; all have pages of one size."""

    def __init__(self, *pools: PagePool) -> None:
        self._pools = {pool.number: pool for pool in pools}
        sizes = {pool.page_bytes for pool in pools}
        if len(sizes) != 1 or len(self._pools) != len(pools):
            raise ValueError(f"pools need one page size and a number each, not {sizes}, {[*self._pools]}")
        [self.page_bytes] = sizes

    def sizes(self) -> dict[int, int]:
        """Pages of each pool, by its number."""
        return {number: pool.pages for number, pool in self._pools.items()}

    def slot(self, page: PageRef) -> memoryview:
        """The bytes of the slot of a page; raises IndexError when there is no such pool or slot."""
        pool = self._pools.get(page.pool)
        if pool is None:
            raise IndexError(f"there is no pool {page.pool}, only {sorted(self._pools)}")
        return pool.slot(page)


class SharedMemoryPages:
    """PageTransport between two pools that this process has mapped, as a main and a standby pool."""

    def __init__(self, source: PagePool, target: PagePool, still_valid: StillValid) -> None:
        if source.page_bytes != target.page_bytes:
            raise ValueError(f"pages of {source.page_bytes} bytes do not fit slots of {target.page_bytes}")
        self._source = source
        self._target = target
        self._still_valid = still_valid

    async def copy(self, copies: Sequence[PageCopy]) -> list[bool]:
        """Copy pages; see `PageTransport.copy`. Raises IndexError for a slot outside its pool."""
        slots = [(self._source.slot(copy.source), self._target.slot(copy.target)) for copy in copies]
        await trio.lowlevel.checkpoint()
        whole = []
        copied = 0
        for copy, (source, target) in zip(copies, slots, strict=True):
            if copied >= CHECKPOINT_BYTES:
                copied = 0
                await trio.lowlevel.checkpoint()
            valid = self._still_valid(copy.source)
            if valid:
                target[:] = source
                copied += self._source.page_bytes
                valid = self._still_valid(copy.source)
            whole.append(valid)
        return whole
