"""A post office between strangers: what somebody says of himself is not believed unseen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import trio

from actors.post import PostOffice
from engine.core import Send
from engine.ids import Incarnation
from engine.messages import Hello, Ready
from transport.channel import Channel
from transport.zeromq import ZeroMQNetwork

if TYPE_CHECKING:
    from pathlib import Path

LAUNCHER, FORGER, FRONT = Incarnation("launcher", 1), Incarnation("back", 2), Incarnation("front", 1)


async def test_a_hello_with_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    """It ended the launcher, and with it everybody."""
    network = ZeroMQNetwork(tmp_path, kind="ipc", high_water_mark=100)
    office = PostOffice(LAUNCHER, "launcher", network, introduces=lambda _: True)
    front = PostOffice(FRONT, "gateway", network)
    front.connect(LAUNCHER, office.inbox.endpoint)
    hello = Hello("gateway", 0, 1, "nonsense")
    with trio.fail_after(10):
        forged = Channel(FORGER, LAUNCHER).send(msgspec.msgpack.encode(hello), 0.0)
        await network.connect(office.inbox.endpoint).send(forged)
        front.post([Send(LAUNCHER, Hello("gateway", 0, 1, front.inbox.endpoint)), Send(LAUNCHER, Ready())])
        assert await office.receive() == (FRONT, Hello("gateway", 0, 1, front.inbox.endpoint))
        assert await office.receive() == (FRONT, Ready())
    assert not office.knows(FORGER)
    assert office.counts["protocol_errors"] == 1
    front.close()
    office.close()
    network.close()
