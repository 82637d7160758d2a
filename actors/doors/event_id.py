"""How far the client of a resumable event stream got: what stands in the `id:` lines of its events.

    RESUME_ID/SEQUENCE-TAIL/SEQUENCE-TAIL!          one place a choice; `!` when its end was sent, too

Opaque to clients: they send the last one back as `Last-Event-ID`, as an EventSource does of itself.
Source of the mechanism: the HTML standard, "Server-sent events".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from actors.doors.openai_error import ApiError
from actors.sessions import Delta
from engine.transcript import Position, tail_hash

if TYPE_CHECKING:
    from actors.sessions import End, Session

HEADER = "Last-Event-ID"
RESUMABLE = "X-Estafet-Resumable"
"""With this header a streamed answer outlives its connection."""
_PLACE = re.compile(r"([0-9]{1,9})-([0-9a-f]{16})(!?)")


class EventId:
    """The place in one stream, choice by choice."""

    def __init__(self, resume_id: str, positions: list[Position], ended: set[int]) -> None:
        self.resume_id = resume_id
        self.positions = positions
        self.ended = ended
        """Choices whose end was sent."""

    @classmethod
    def beginning(cls, session: Session) -> EventId:
        """Before the first event."""
        return cls(session.resume_id, [Position(0, tail_hash(""))] * session.generation.n, set())

    @classmethod
    def parse(cls, header: bytes) -> EventId:
        """What a client sent back; an ApiError when it is none of ours."""
        resume_id, *places = header.decode("latin-1").strip().split("/")
        found = [_PLACE.fullmatch(place) for place in places]
        positions = [Position(int(place[1]), place[2]) for place in found if place is not None]
        if not positions or len(positions) < len(found):
            raise ApiError(
                400, f"{HEADER!r} is not an id that an event of ours had.", param=HEADER, code="bad_event_id"
            )
        ended = {choice for choice, place in enumerate(found) if place is not None and place[3]}
        return cls(resume_id, positions, ended)

    def took(self, event: Delta | End) -> None:
        """The client is sent one more event."""
        if isinstance(event, Delta):
            self.positions[event.choice] = Position(event.sequence, event.tail)
        else:
            self.ended.add(event.choice)

    def line(self) -> bytes:
        """The line of an event behind which the stream can be gone on with."""
        places = (
            f"{position.sequence}-{position.tail}{'!' if choice in self.ended else ''}"
            for choice, position in enumerate(self.positions)
        )
        return f"id: {'/'.join((self.resume_id, *places))}\n".encode()
