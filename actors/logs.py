"""Structured logs: JSON lines, one file an actor, bound with `actor`, `epoch` and `request_id`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import structlog

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class _Handler(logging.Handler):
    """Takes what libraries log through the standard library."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, "library_logged", logger=record.name, text=record.getMessage()
        )


def open_log(path: Path, level: str) -> BinaryIO:
    """Send all logs of this process to a file of JSON lines; each line is one write, kept on a crash."""
    stream = path.open("ab", buffering=0)
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
        logger_factory=structlog.BytesLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_Handler()], force=True)
    return stream
