"""English that ships with Python: the prose of the language reference, for measurements that need a text."""

from __future__ import annotations

import hashlib
import importlib
import platform
import re
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "pydoc_data.topics"
_UNDERLINE = re.compile(r"\n([*=~^+-])\1+$")


class Prose(NamedTuple):
    """A text, and what a reader needs to know to have the same one."""

    text: str
    source: str
    sha256: str
    """Of the UTF-8 bytes of `text`, as hexadecimal digits."""


def read_prose(path: Path | None) -> Prose:
    """A UTF-8 file as it is, by default `python_prose()`; UsageError when it cannot be read."""
    if path is None:
        text, source = python_prose(), f"{MODULE} of Python {platform.python_version()}"
    else:
        try:
            text, source = path.read_text(encoding="utf-8"), path.name
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise UsageError(f"--text {path}: {reason}; name a file of UTF-8 text") from None
    return Prose(text, source, hashlib.sha256(text.encode()).hexdigest())


def python_prose() -> str:
    """The paragraphs of `help()`'s topics, a line each, in the order of the topics' names.

    Headings, lists, grammar and examples are left out, and so is what stood in an earlier topic already: a
    text that repeats itself measures memory, not language. Of another Python version it is another text.
    """
    try:
        topics: dict[str, str] = importlib.import_module(MODULE).topics
    except ModuleNotFoundError:
        raise UsageError(f"this Python was installed without {MODULE}; name a text with --text") from None
    paragraphs = (
        paragraph for name in sorted(topics) for paragraph in re.split(r"\n\s*\n", topics[name].strip("\n"))
    )
    return "\n".join(dict.fromkeys(" ".join(p.split()) for p in paragraphs if _is_prose(p)))


def _is_prose(paragraph: str) -> bool:
    """Whether it is sentences: not indented, not underlined, and it ends as sentences do."""
    return (
        paragraph[:1].isalnum()
        and not _UNDERLINE.search(paragraph)
        and paragraph.rstrip()[-1:] in (".", ":", "?", "!")
    )
