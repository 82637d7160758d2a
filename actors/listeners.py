"""The sockets at which clients knock: the launcher's, so that they outlive every gateway.

Clients are queued, not refused, while a gateway starts again, and a port in use is known before
anything is started.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from actors.rundir import SOCKETS
from engine.errors import StartError
from transport.zeromq import IPC_PATH_LIMIT

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from engine.topology import Topology

BACKLOG = 512
"""Clients that may wait at a door while its gateway starts again."""


def bind_doors(topology: Topology, stack: ExitStack, host: str = "") -> dict[str, socket.socket]:
    """Bind the HTTP port of every gateway of a host."""
    return {
        name: listen(f"gateway.{name}", "port", table.host, table.port, stack)
        for name, table in topology.gateways_on(host).items()
    }


def bind_client_ports(
    topology: Topology, stack: ExitStack, host: str = ""
) -> dict[str, dict[str, socket.socket]]:
    """The same for the ports of ZeroMQ clients, where there are any."""
    clients: dict[str, dict[str, socket.socket]] = {}
    for name, table in topology.gateways_on(host).items():
        clients[name] = {}
        if table.zmq_port is not None:
            door = listen(f"gateway.{name}", "zmq_port", table.host, table.zmq_port, stack)
            clients[name][f"tcp://{address_of(door)}"] = door
    return clients


def bind_client_paths(
    clients: dict[str, dict[str, socket.socket]], run_dir: Path, stack: ExitStack
) -> dict[str, dict[str, socket.socket]]:
    """Add every gateway's unix socket in the run directory, which goes with it."""
    bound = {}
    for name, doors in clients.items():
        path = run_dir / SOCKETS / f"{name}.zmq"
        if len(os.fsencode(path)) > IPC_PATH_LIMIT:
            raise StartError(f"socket path {path} is too long: choose a shorter run directory")
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        door.bind(str(path))
        door.listen(BACKLOG)
        bound[name] = {f"ipc://{path}": door, **doors}
        for each in bound[name].values():
            # libzmq's thread must not wait for a client that was there when it looked.
            each.setblocking(False)
    return bound


def listen(whose: str, key: str, host: str, port: int, stack: ExitStack) -> socket.socket:
    """A listening socket; StartError says why there can be none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = stack.enter_context(socket.socket(family, kind, protocol))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        advice = ""
        if error.errno == errno.EADDRINUSE:
            advice = f"; stop what listens there or use --set {whose}.{key}=0 for a free port"
        raise StartError(f"{whose}: cannot listen on {host}:{port}: {error.strerror}{advice}") from None
    return listener


def address_of(listener: socket.socket) -> str:
    """HOST:PORT of a bound TCP socket."""
    host, port = listener.getsockname()[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def check_address(topology: Topology, host: str) -> None:
    """StartError unless this machine has the address of a host, and the port there that others look for."""
    table = topology.host[host]
    port = table.control_port if host == topology.hosts()[0] else 0
    family = socket.AF_INET6 if ":" in table.address else socket.AF_INET
    try:
        socket.create_server((table.address, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            said = f"host.{host}.control_port = {port}: is in use at {table.address}; does host {host} run?"
        else:
            reason = os.strerror(error.errno or 0)
            said = f"host.{host}.address = {table.address!r}: cannot listen there: {reason}"
            if error.errno == errno.EADDRNOTAVAIL:
                said += f"; is this host {host}? Other addresses: --set host.{host}.address=…, on all hosts"
        raise StartError(said) from None
