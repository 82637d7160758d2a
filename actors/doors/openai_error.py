"""What is wrong with a request, in OpenAI's shape: the body of every response that is not a success."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """A request that is answered with an OpenAI error body instead of what it asked for.

    Doors that are not HTTP say the same status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(Error(message, kind, param, code))
        self.retry_after_s = retry_after_s
        retry = () if retry_after_s is None else ((b"retry-after", b"%d" % retry_after_s),)
        self.headers = (*retry, *headers)


class Error(msgspec.Struct, frozen=True):
    """What is wrong, for a person (message) and for a program (type, param, code)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response that is not a success, and of an error inside a stream."""

    error: Error


def server_error(message: str, code: str | None = None) -> ErrorBody:
    """The body for a failure that is ours."""
    return ErrorBody(Error(message, "server_error", None, code))
