"""Structured logs: JSON lines, one file an actor, bound with `actor`, `epoch` and `request_id`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import msgspec
import structlog

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class LossyStream:
    """Appends to a file, and goes on without it: logging never decides whether an actor lives.

    A full disk or a lost folder costs lines, and they are counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.lost = 0

    def write(self, data: bytes) -> int:
        """One write a line, so that a crash keeps what was logged before it."""
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            self._file.write(data)
        except OSError:
            self.lost += 1
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Let go of the file; the next line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class _Handler(logging.Handler):
    """Takes what libraries log through the standard library."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, "library_logged", logger=record.name, text=record.getMessage()
        )


def open_log(path: Path, level: str) -> LossyStream:
    """Send all logs of this process to a file of JSON lines; each line is one write, kept on a crash."""
    stream = LossyStream(path)
    encoder = msgspec.json.Encoder(enc_hook=repr)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(serializer=lambda event, **_: encoder.encode(event)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.BytesLoggerFactory(file=cast("BinaryIO", stream)),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_Handler()], force=True)
    return stream
