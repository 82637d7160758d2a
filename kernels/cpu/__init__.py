"""Llama in compiled kernels: one extension with several instruction sets, chosen when it is loaded."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from engine.errors import StartError

if TYPE_CHECKING:
    from types import ModuleType

NAME = "kernels.cpu._native"
PATH_VARIABLE = "ESTAFET_NATIVE_PATH"
"""Names a folder whose `_native` is taken instead of the installed one, as tools/sanitize.py does."""


@functools.cache
def native() -> ModuleType:
    """The extension `kernels.cpu._native`; StartError when there is none, or none that can be loaded."""
    folder = os.environ.get(PATH_VARIABLE)
    try:
        return _load_from(folder) if folder else importlib.import_module(NAME)
    except ModuleNotFoundError as error:
        if error.name != NAME:
            raise
        raise StartError(
            f"there is no `_native` in the folder that {PATH_VARIABLE} names: {folder}"
            if folder
            else "the native kernels are not installed; they are built where there is a C++ compiler: "
            "install g++ and run tools/up or `pip install` again"
        ) from error
    except ImportError as error:
        raise StartError(
            f"the native kernels cannot be loaded ({error}): install the package again"
        ) from error


def _load_from(folder: str) -> ModuleType:
    spec = importlib.machinery.PathFinder.find_spec(NAME, [folder])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(name=NAME)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module  # for those who import it by its name
    return module
