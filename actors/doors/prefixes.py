"""Prefixes that clients keep in the cache: /v1/prefixes, over whatever stands behind `Sessions`.

    POST   /v1/prefixes        keep one: answered when all its pages are there and pinned
    GET    /v1/prefixes        what is kept for this API key
    GET    /v1/prefixes/ID     one of them
    DELETE /v1/prefixes/ID     keep it no longer

Whoever comes with another key sees and deletes none of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from actors.doors.intake import RETRY_AFTER_S
from actors.doors.openai_error import ApiError
from actors.doors.openai_response import DeletedPrefix, PrefixList, PrefixObject
from actors.sessions import (
    Draining,
    NotKept,
    PrefixRefused,
    PrefixTooShort,
    PrefixUnfilled,
    QueueFull,
    Refused,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from actors.doors.intake import Intake
    from actors.sessions import KeptPrefix, Sessions

PATH = "/v1/prefixes"


class PrefixDoor:
    """Answers what is asked at /v1/prefixes; all it refuses is an ApiError."""

    def __init__(self, sessions: Sessions, intake: Intake) -> None:
        self._prefixes = sessions.prefixes
        self._intake = intake

    async def keep(
        self, body: bytes, gone: Callable[[], Awaitable[None]], *, client: str = ""
    ) -> PrefixObject | None:
        """Keep what a body says. `client`: the API key that asks.

        When `gone` returns before all is there nobody is to be told, and nothing is kept: None.
        """
        prefix = await self._intake.prefix(body, client=client)
        kept: KeptPrefix | Refused | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await gone()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                kept = await self._prefixes.keep(prefix)
            except Refused as refusal:
                kept = refusal
            nursery.cancel_scope.cancel()
        if isinstance(kept, Refused):
            raise _as_error(kept)
        return None if kept is None else _object(kept)

    def kept(self, *, client: str = "") -> PrefixList:
        """All that is kept for a client, the oldest first."""
        return PrefixList([_object(kept) for kept in self._prefixes.kept(client)])

    def find(self, name: str, *, client: str = "") -> PrefixObject:
        """One of them."""
        try:
            return _object(self._prefixes.find(client, name))
        except NotKept as refusal:
            raise _as_error(refusal) from None

    def forget(self, name: str, *, client: str = "") -> DeletedPrefix:
        """Keep it no longer."""
        try:
            return DeletedPrefix(self._prefixes.forget(client, name).name)
        except NotKept as refusal:
            raise _as_error(refusal) from None


def _object(kept: KeptPrefix) -> PrefixObject:
    return PrefixObject(
        kept.name,
        kept.created,
        kept.expires_at,
        kept.tokens,
        kept.cached_tokens,
        kept.pinned_tokens,
        kept.pinned_pages,
    )


def _as_error(refusal: Refused) -> ApiError:
    """What HTTP answers to a refusal of the gateway."""
    match refusal:
        case NotKept():
            return ApiError(404, f"No such prefix is kept: {refusal}.", code="prefix_not_kept")
        case PrefixTooShort():
            said = f"Prefixes are kept by whole pages: {refusal}."
            return ApiError(400, said, code="prefix_too_short")
        case PrefixRefused():
            return ApiError(409, f"The prefix cannot be kept: {refusal}.", code="prefix_refused")
        case QueueFull():
            return ApiError(
                429,
                f"Too many prefixes are kept: {refusal}; delete one, or wait until one expires.",
                kind="rate_limit_error",
                code="too_many_prefixes",
                retry_after_s=RETRY_AFTER_S,
            )
        case Draining():
            return ApiError(503, "The server is shutting down.", kind="server_error", code="draining")
        case PrefixUnfilled():
            return ApiError(
                503,
                f"The prefix could not be filled: {refusal}; what was computed is cached, so try again.",
                kind="server_error",
                code="prefix_not_filled",
                retry_after_s=RETRY_AFTER_S,
            )
        case _:
            return ApiError(503, f"The prefix was refused: {refusal}.", kind="server_error")
