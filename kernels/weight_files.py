"""The files that hold a prepared folder's weights: `weights.safetensors`, or several `weights-*.safetensors`.

Preparing writes one; or it links to files of the model's own that can be mapped where they lie.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine.errors import ModelError
from engine.model import WEIGHTS
from kernels.safetensors_file import SafetensorsFile, read_safetensors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

REMEDY = "delete the folder and prepare it again"


def link_weights(folder: Path, files: Sequence[tuple[Path, int]]) -> None:
    """Make files that can be mapped as they are the weights of a prepared folder, by links.

    files: (path, modification time in ns). A link has the time of what it was made for: a file that was
    changed since is not mapped under the old `weights_id`. OSError when the folder does not take links.
    """
    for number, (path, changed_ns) in enumerate(files, 1):
        name = WEIGHTS if len(files) == 1 else f"weights-{number:05}-of-{len(files):05}.safetensors"
        link = folder / name
        link.symlink_to(path.resolve())
        os.utime(link, ns=(changed_ns, changed_ns), follow_symlinks=False)


def read_weight_files(folder: Path) -> list[SafetensorsFile]:
    """The headers of a prepared folder's weights; ModelError when one is absent, damaged or has changed."""
    paths = sorted(folder.glob("weights*.safetensors")) or [folder / WEIGHTS]
    files = [read_safetensors(path, REMEDY) for path in paths]
    for file in files:
        if file.path.is_symlink() and file.path.lstat().st_mtime_ns != file.changed_ns:
            raise ModelError(f"{file.path.resolve()}: changed since it was prepared as {folder}; {REMEDY}")
    return files
