"""Fixtures that tests of several packages share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernels.prepare import cache_dir, prepare
from tools.fetch import default_model

pytest_plugins = ["engine.testing.fixtures"]

# So that tests elsewhere can write GGUF files too: `from gguf_files import write_tiny_gguf`.
sys.path.append(str(Path(__file__).parent / "kernels"))


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The default model's GGUF file, fetched into the cache when it is not there."""
    return default_model(cache_dir(), progress=False)


@pytest.fixture(scope="session")
def model_folder(model_file: Path) -> Path:
    """The default model's prepared folder, made in the cache when it is not there."""
    return prepare(model_file, cache_dir(), progress=False)
