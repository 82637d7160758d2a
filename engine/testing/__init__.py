"""What people need to test extensions of the engine: a whole system in one trio run.

`System` runs real actors (their real messages encoded to bytes) over memory links, on virtual time
when the test uses `autojump_clock`, with a small random model on the float64 reference backend. Links
can be made to drop, delay, duplicate and reorder, and any actor can be killed at any message.

    pytest_plugins = ["engine.testing.fixtures"]

    async def test_it(start_system, autojump_clock):
        system = await start_system("unified")
        assert await system.complete("hello", max_tokens=5) == await system.expected("hello", max_tokens=5)
"""

from engine.testing.kills import KillAt
from engine.testing.models import write_byte_model
from engine.testing.system import System

__all__ = ["KillAt", "System", "write_byte_model"]
