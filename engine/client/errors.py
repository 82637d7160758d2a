"""What can become of a request but an answer: one small type each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.stream_protocol import StreamError


class ClientError(Exception):
    """Base of all: catch it to catch every one."""


class Refused(ClientError):
    """The gateway did not accept the request; the same request is refused again unless `retry_after_s`."""

    def __init__(self, error: StreamError) -> None:
        super().__init__(error.message)
        self.status = error.status
        """As HTTP has it."""
        self.code = error.code
        self.param = error.param
        """The parameter that is wrong."""
        self.retry_after_s = error.retry_after_s


class GenerationFailed(ClientError):
    """The request was accepted and could not be completed."""


class Diverged(ClientError):
    """The gateway's text is not the one that was received before: nothing can follow."""


class DeadlineExceeded(ClientError):
    """The answer was not complete in time; it was cancelled."""


class ConnectionLost(ClientError):
    """No gateway took the request, or took it up again, for as long as the client had patience."""


class ProtocolViolated(ClientError):
    """The gateway said what no gateway says: is that its endpoint?"""


class ClientClosed(ClientError):
    """The client was closed before the answer was complete."""


class NoEndpoint(ClientError):
    """It is not clear which system to talk to; the message says what to do."""
