"""Killing an actor at a certain message, to be tried for every one of a short request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.testing.system import System


class KillAt:
    """Kills an actor when the k-th message after `arm` is sent: a System's `on_message`."""

    def __init__(self, victim: str, k: int) -> None:
        self.victim = victim
        self.k = k
        self.seen: int | None = None
        self.system: System | None = None
        self.killed = False
        """It has, or shall not any more."""

    def arm(self, system: System) -> None:
        """Count from now on."""
        self.system, self.seen = system, 0

    def __call__(self, number: int, source: str, destination: str) -> None:
        if self.seen is None or self.system is None:
            return
        if self.seen == self.k and not self.killed:
            self.killed = True
            self.system.kill_actor(self.victim)
        self.seen += 1
