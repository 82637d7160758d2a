"""Pages over TCP: where a server listens and how a client gets there.

The work is done elsewhere: `page_server`, and `page_fetch` and `page_push` for the two ways to be a client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from engine.errors import StartError

if TYPE_CHECKING:
    from transport.page_client import Connect
    from transport.page_server import PageServer

BACKLOG = 64


def tcp_connector(host: str, port: int) -> Connect:
    """What opens connections to a server, for a PageFetcher or a PageSender."""

    async def connect() -> trio.abc.Stream:
        return await trio.open_tcp_stream(host, port)

    return connect


async def serve_tcp_pages(
    server: PageServer,
    host: str,
    port: int,
    *,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve at an address until cancelled; reports the port (the one chosen, where `port` is 0).

    `host` must name an interface of this machine: an address of the network between the hosts, for
    whoever can connect is answered. Raises StartError when the address cannot be had.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    except OSError as error:
        raise StartError(f"cannot listen for pages at {host}:{port}: {error.strerror}") from None
    task_status.started(listeners[0].socket.getsockname()[1])
    await trio.serve_listeners(server.handle, listeners)
