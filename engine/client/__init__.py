"""The ZeroMQ client of a running system: `Client` for trio, `BlockingClient` for everybody else.

    async with Client() as client:
        async with client.chat("What is the capital of France?", temperature=0) as stream:
            async for event in stream:
                ...

    with BlockingClient() as client:
        print(client.chat("What is the capital of France?", temperature=0).text())

A door for people: it may import from anywhere, and nothing in the house imports it. What a stream does
in which case is decided in `core` and `exchange`, which know neither sockets nor a clock.
"""

from engine.client.blocking import BlockingClient, BlockingStream
from engine.client.client import Client
from engine.client.errors import (
    ClientClosed,
    ClientError,
    ConnectionLost,
    DeadlineExceeded,
    Diverged,
    GenerationFailed,
    NoEndpoint,
    ProtocolViolated,
    Refused,
)
from engine.client.events import Event, Finish, Piece
from engine.client.patience import Patience
from engine.client.stream import Stream
from engine.stream_protocol import CacheUse, ScoredToken

__all__ = [
    "BlockingClient",
    "BlockingStream",
    "CacheUse",
    "Client",
    "ClientClosed",
    "ClientError",
    "ConnectionLost",
    "DeadlineExceeded",
    "Diverged",
    "Event",
    "Finish",
    "GenerationFailed",
    "NoEndpoint",
    "Patience",
    "Piece",
    "ProtocolViolated",
    "Refused",
    "ScoredToken",
    "Stream",
]
