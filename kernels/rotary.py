"""The tables of rotary positions, which the backends share.

Source: Su et al., "RoFormer" (2021), in the half-split form of Hugging Face Llama.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.model import ModelConfig


def rotary_tables(config: ModelConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin [context_length, head_dim / 2] of position * theta**(-2i / head_dim): float64, rounded
    once."""
    half = config.head_dim // 2
    angles = np.outer(np.arange(config.context_length), config.rope_theta ** (-np.arange(half) / half))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
