"""Siblings: the choices of one request, which share the pages of its prompt.

The first is computed like any request. Until it decodes the others are held back, then they are
placed where it decodes and take over the pages of the prompt there, so that the prompt is computed
once:

    any decoding              all that wait may be placed
    else any prefilling       none may
    else                      the first of those that wait may
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.ids import Incarnation, SequenceKey
    from engine.messages import RequestFact


class Siblings:
    """All requests by their choices."""

    def __init__(self) -> None:
        self._families: dict[int, dict[SequenceKey, RequestFact]] = {}
        self.sharing: set[int] = set()
        """Requests that have a choice that waits and one that decodes."""

    def put(self, fact: RequestFact) -> None:
        """How a choice is now."""
        request = fact.key.request
        family = self._families.setdefault(request, {})
        family[fact.key] = fact
        if len(family) > 1:
            self._share(request, family)

    def drop(self, key: SequenceKey) -> None:
        """A choice has ended."""
        family = self._families[key.request]
        del family[key]
        self._share(key.request, family)
        if not family:
            del self._families[key.request]

    def _share(self, request: int, family: dict[SequenceKey, RequestFact]) -> None:
        stages = {fact.stage for fact in family.values()}
        if {"waiting", "decoding"} <= stages:
            self.sharing.add(request)
        else:
            self.sharing.discard(request)

    def waiting(self, request: int) -> dict[SequenceKey, bool]:
        """The choices that wait, and whether each may be placed."""
        family = self._families.get(request, {})
        waiting = [key for key, fact in family.items() if fact.stage == "waiting"]
        if len(waiting) == len(family):
            first = min(waiting, default=None)
            return {key: key == first for key in waiting}
        return dict.fromkeys(waiting, request in self.sharing)

    def places(self, request: int) -> set[Incarnation]:
        """The workers on which a choice decodes."""
        family = self._families[request].values()
        return {fact.decode for fact in family if fact.stage == "decoding" and fact.decode is not None}

    def shortest(self, request: int) -> int:
        """Tokens of the shortest log: the prompt, and what all have generated at least."""
        return min(fact.length for fact in self._families[request].values())
