"""Pages that several choices of one request read, and what a new choice may share of a sibling.

    only full, SEALED pages are shared: nobody writes them again (begun ones are copied, `batching.fork_page`)
    holders of a page = sequences of this worker in whose block table it is
    a page is released once, by the last of them that lets it go

K and V of a position are a function of the tokens up to it, so a shared page holds to the bit what
the new choice would have computed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.lifecycle import PageState, SequenceState

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Many

    from engine.batching import Sequence
    from engine.layout import PageTable
    from engine.messages import SequenceSpec
    from engine.shapes import PageRef


class SharedPages:
    """How many sequences hold each page that has more than one holder."""

    def __init__(self) -> None:
        self._holders: dict[PageRef, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, page: PageRef) -> bool:
        return page in self._holders

    def share(self, pages: Iterable[PageRef]) -> None:
        """One more sequence holds these."""
        for page in pages:
            self._holders[page] = self._holders.get(page, 1) + 1

    def let_go(self, pages: Iterable[PageRef]) -> list[PageRef]:
        """A sequence holds these no more; returns those that nobody holds now."""
        unheld = []
        for page in pages:
            others = self._holders.pop(page, 1) - 1
            if others == 0:
                unheld.append(page)
            elif others > 1:
                self._holders[page] = others
        return unheld

    def check(self, block_tables: Iterable[Many[PageRef]], table: PageTable) -> None:
        """Against the block tables of all sequences of the worker."""
        holders: Counter[PageRef] = Counter()
        for pages in block_tables:
            assert len(pages) == len(set(pages)), "a page is twice in one block table"
            holders.update(pages)
        assert self._holders == {page: count for page, count in holders.items() if count > 1}
        for page in self._holders:
            assert table.is_current(page), f"{page} is shared and stale"
            state = table.state(page.index)
            assert state is PageState.SEALED, f"{page} is shared and {state.name}"


def sibling_pages(
    spec: SequenceSpec, sequences: Iterable[Sequence], page_tokens: int
) -> tuple[PageRef, ...] | None:
    """The pages that a choice may share of a sibling that decodes; None when there is no such sibling.

    They are the sibling's full pages as far as the logs are equal, up to position len(log) − 2. Where
    several siblings decode, it is the one with most of them.
    """
    most = (len(spec.log) - 1) // page_tokens
    best: tuple[PageRef, ...] | None = None
    for sequence in sequences:
        if not _is_sibling(spec, sequence):
            continue
        pages = _equal_pages(spec, sequence, page_tokens)
        if best is None or len(pages) > len(best):
            best = pages
        if len(best) == most:
            break
    return best


def _is_sibling(spec: SequenceSpec, sequence: Sequence) -> bool:
    prompt = slice(0, spec.prompt_length)
    return (
        sequence.key.request == spec.key.request
        and sequence.state is SequenceState.DECODE
        and sequence.spec.prompt_length == spec.prompt_length
        and sequence.spec.log[prompt] == spec.log[prompt]
    )


def _equal_pages(spec: SequenceSpec, sibling: Sequence, page_tokens: int) -> tuple[PageRef, ...]:
    blocks = min(sibling.computed, len(spec.log) - 1) // page_tokens
    for block in range(spec.prompt_length // page_tokens, blocks):
        tokens = slice(block * page_tokens, (block + 1) * page_tokens)
        if tuple(sibling.log[tokens]) != spec.log[tokens]:
            blocks = block
            break
    return tuple(sibling.pages[:blocks])
