"""The compiled kernels of an installation: what they are made of, and whether they could be made.

Run as a program it is a check: it fails where the extension is missing although this machine can build it.
Standard library only, because the installer asks before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

VARIABLE = "ESTAFET_NATIVE"
"""Set to `off` it leaves the kernels out of an installation (pyproject.toml)."""
_COMPILERS = ("c++", "g++", "clang++")


def compiler() -> str | None:
    """The C++ compiler that CMake would take, or None."""
    if named := os.environ.get("CXX", "").split():
        return shutil.which(named[0])
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def lacking() -> str | None:
    """Why this machine cannot build the kernels and what to do about it, or None when it can."""
    if os.environ.get(VARIABLE, "").lower() in ("off", "0"):
        return f"{VARIABLE}=off leaves the native kernels out: the slow backend will be used"
    if compiler() is None:
        return (
            "no C++ compiler was found: the slow backend will be used; "
            "install g++ and run tools/up or tools/check again"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return (
            "a C++ compiler is here but the headers of Python are not: the slow backend will be used; "
            "install them (Debian, Ubuntu: apt install python3.11-dev) and run tools/up or tools/check again"
        )
    return None


def sources(root: Path) -> list[Path]:
    """The files that the extension is compiled from, in a fixed order."""
    folder = root / "kernels" / "cpu"
    return [folder / "CMakeLists.txt", *sorted(path for path in folder.glob("src/*") if path.is_file())]


def contents(root: Path) -> str:
    """A hash of the names and bytes of the project file and of `sources`."""
    digest = hashlib.sha256()
    for path in [root / "pyproject.toml", *sources(root)]:
        if path.exists():
            digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> int:
    """Load the extension and say where it lies; 1 when it is missing and could be there."""
    from engine.errors import StartError
    from kernels.cpu import native

    try:
        print(f"native kernels: {native().__file__}")
    except StartError as error:
        if why := lacking():
            print(f"native kernels: {why}")
            return 0
        print(f"{error}\nThere is a C++ compiler here: `.venv/bin/pip install --verbose --editable .` shows")
        print("why they were left out.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
