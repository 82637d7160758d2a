"""Connections that come and go while libzmq's thread has something to tell of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
import zmq

from engine.client.connection import Connection

if TYPE_CHECKING:
    from pathlib import Path


async def test_closing_never_waits_for_the_monitor(tmp_path: Path) -> None:
    """Closed the other way round, one in some hundred closings stood still for ever."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateways: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = f"ipc://{tmp_path}/door"
    router = gateways.socket(zmq.ROUTER)
    router.bind(endpoint)
    with trio.fail_after(30):
        for number in range(2000):
            with Connection(context, endpoint) as connection:
                if number % 3:
                    await connection.wait_up()
                if number % 7 == 0:
                    router.close(linger=0)
                    router = gateways.socket(zmq.ROUTER)
                    router.bind(endpoint)
    router.close(linger=0)
    context.term()
    gateways.term()


async def test_a_loss_is_noticed(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/door")
    with trio.fail_after(10), Connection(context, f"ipc://{tmp_path}/door") as connection:
        await connection.wait_up()
        router.close(linger=0)
        await connection.wait_down()
    context.term()
