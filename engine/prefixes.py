"""What workers are told of the prompts that they are to fill: what is there, and what to wait for.

    PrefixWanted ──▶ granted what is cached ──▶ the next page is being filled or fetched: wait
                          ▲                     nobody has it: fill
                          └── pages announced, a filler ends ──┘

What was granted is pinned until the worker has said that it holds it. `engine.filling` knows who fills what.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.chain import Chain
from engine.core import Send, Statistics
from engine.filling import Filling, Fillings
from engine.messages import Cached, PrefixFact, PrefixGranted, PrefixWanted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine.fetching import Fetches
    from engine.filling import FillingName
    from engine.ids import Incarnation
    from engine.messages import PagesSealed
    from engine.pages import Pages


class Prefixes:
    """All prompts that are being filled on one host."""

    def __init__(self, pages: Pages, fetches: Fetches, ordinals: Mapping[str, int]) -> None:
        self.fillings = Fillings()
        self._pages = pages
        self._fetches = fetches
        self._ordinals = ordinals
        self._page_bytes = 4 * pages.table.page_tokens
        self.hits = 0
        self.waits = 0

    def want(self, source: Incarnation, message: PrefixWanted, now: float) -> list[Send]:
        """A worker is to fill a log."""
        name = (source, message.key, message.term)
        # Said again, it replaces what was said before.
        sends = self.end(name, now)
        chain = Chain.resume(
            message.root, self._pages.table.page_tokens, message.tokens[: message.have * self._page_bytes]
        )
        filling = Filling(name, message.tokens, chain, message.seeks, since=now)
        filling.elsewhere, filling.elsewhere_pages = message.elsewhere, message.elsewhere_pages
        if not message.seeks:
            self.fillings.put(filling)
            return sends
        count = len(message.tokens) // self._page_bytes
        found = self._pages.cache.find(message.root, message.tokens, count, now)[message.have :]
        filling.go_to(message.have + len(found))
        self.fillings.put(filling)
        return [*sends, *self._answer(filling, found, now)]

    def _answer(self, filling: Filling, found: list[int], now: float) -> list[Send]:
        """Grant what was found, and say whether to wait for more or to fill the next page."""
        fetches: list[Send] = []
        # Before anything is fetched: to make room for that these could be evicted.
        self._pages.cache.pin(found)
        if filling.next_page and not self.fillings.filled_by_another(filling):
            fetches = self._fetches.start(filling, self.fillings)
        filling.waits = self.fillings.filled_by_another(filling)
        filling.since = now
        self.hits += len(found)
        self.waits += filling.waits
        filling.granted += len(found)
        filling.pinned += found
        refs = tuple(self._pages.table.ref(page) for page in found)
        source, key, term = filling.name
        grant = PrefixGranted(key, term, refs, self._where_from(filling, found), filling.waits)
        return [Send(source, grant), *fetches]

    def _where_from(self, filling: Filling, pages: Iterable[int]) -> Cached:
        """Tokens of the pages by where they were when this one asked."""
        table = self._pages.table
        mine = {self._ordinals[filling.source.name], self._fetches.ordinal}
        count: Counter[str] = Counter()
        for page in pages:
            here = "memory" if table.origin(page).ordinal in mine else "worker"
            count[self._fetches.landed.get(page, here)] += table.page_tokens
        return Cached(count["memory"], count["worker"], count["host"], count["file"])

    def sealed(self, source: Incarnation, message: PagesSealed, now: float) -> list[Send]:
        """Pages of a log are full: they can be found, and whoever waits for them goes on."""
        table, last = self._pages.table, -1
        for ref in message.pages:
            if table.is_current(ref):
                self._pages.cache.add(ref.index, now)
                last = table.block(ref.index)
        filling = self.fillings.get((source, message.key, message.term))
        if filling is None or filling.waits:
            return []
        before = filling.chain.pages
        pages = min(last + 1, len(filling.tokens) // self._page_bytes)
        self._fetches.costs.fill.saw(pages - before, now - filling.since)
        filling.since = now
        return self._wake(self.fillings.advance(filling, pages), now)

    def fact(self, source: Incarnation, message: PrefixFact, now: float) -> list[Send]:
        """How far a worker is with what it was granted."""
        name = (source, message.key, message.term)
        filling = self.fillings.get(name)
        if filling is None:
            return []
        taken = max(0, min(message.taken, filling.granted) - filling.taken)
        filling.taken += taken
        held, filling.pinned = filling.pinned[:taken], filling.pinned[taken:]
        self._pages.unpin(held)
        return [] if message.filling else self.end(name, now)

    def end(self, name: FillingName, now: float) -> list[Send]:
        """A log is filled no more, whatever the reason: whoever waited for it looks again."""
        filling, waiters = self.fillings.end(name)
        if filling is not None:
            self._pages.unpin(filling.pinned)
        return self._wake(waiters, now)

    def lose(self, source: Incarnation, now: float) -> list[Send]:
        """A worker or the replicator is dead."""
        return [send for name in self.fillings.of(source) for send in self.end(name, now)]

    def _wake(self, waiters: Iterable[Filling], now: float) -> list[Send]:
        """Those who waited look again; the first that finds nobody who goes on does so itself."""
        sends: list[Send] = []
        for filling in waiters:
            if self.fillings.get(filling.name) is not filling:
                continue
            found = self._next_found(filling, now)
            if found or not self.fillings.filled_by_another(filling):
                self.fillings.advance(filling, filling.chain.pages + len(found))
                sends += self._answer(filling, found, now)
        return sends

    def _next_found(self, filling: Filling, now: float) -> list[int]:
        """Cached pages from where a filling stands, one after the other."""
        index = self._pages.cache.index
        found: list[int] = []
        for key, parent, tokens, _ in filling.ahead():
            page = index.find(key)
            if page is None or index.tokens_of(page) != tokens or index.parent_of(page) != parent:
                break
            found.append(page)
        if found:
            self._pages.cache.policy.hit(found, now)
        return found

    def check(self) -> None:
        self.fillings.check()

    def statistics(self) -> Statistics:
        return {
            "prefixes_filling": len(self.fillings),
            "pages_hit": self.hits,
            "prefixes_awaited": self.waits,
        }
