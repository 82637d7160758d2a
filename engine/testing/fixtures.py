"""pytest fixtures over `engine.testing`; load them with `pytest_plugins = ["engine.testing.fixtures"]`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest
import trio

from engine.testing.models import write_byte_model
from engine.testing.system import System

if TYPE_CHECKING:
    from pathlib import Path

StartSystem = Callable[..., Awaitable[System]]

PATIENCE_S = 600.0
"""Virtual seconds that a system may take for anything that a fixture waits for."""


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a tiny random model, one token a byte."""
    folder = tmp_path_factory.mktemp("byte-model")
    write_byte_model(folder)
    return folder


@pytest.fixture
async def start_system(byte_model: Path, nursery: trio.Nursery) -> AsyncIterator[StartSystem]:
    """`await start_system(topology, **options)` gives a running `System`; all are stopped at the end.

    The end is part of the test: an actor that crashed without being killed fails it.
    """
    systems: list[System] = []

    async def start(topology: str = "local", **options: Any) -> System:
        system = System(nursery, topology, byte_model, **options)
        systems.append(system)
        with trio.fail_after(PATIENCE_S):
            await system.start()
        return system

    yield start
    with trio.fail_after(PATIENCE_S):
        for system in systems:
            if system.over is None:
                await system.stop()
