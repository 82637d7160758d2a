"""The sockets of the doors: known before anything starts, told in a form that can be used."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from actors.listeners import address_of, bind_client_paths, bind_client_ports, bind_doors, check_address
from engine.errors import StartError
from engine.launch import describe
from engine.topology_file import parse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.topology import Topology


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def topology(*settings: str) -> Topology:
    return parse('[gateway.a]\nport = 0\n[gateway.b]\nport = 0\n[worker.w]\nrole = "both"', "", settings)


def test_a_gateway_has_a_path_always_and_a_port_when_asked_for(stack: ExitStack, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    ports = bind_client_ports(topology("gateway.b.zmq_port=0"), stack)
    clients = bind_client_paths(ports, tmp_path, stack)
    assert list(clients["a"]) == [f"ipc://{tmp_path}/s/a.zmq"]
    path, port = clients["b"]
    assert (path, port) == (f"ipc://{tmp_path}/s/b.zmq", f"tcp://{address_of(clients['b'][port])}")
    for doors in clients.values():
        for listener in doors.values():
            assert not listener.getblocking()
            assert not os.get_inheritable(listener.fileno())
            with socket.socket(listener.family) as knocking:
                knocking.connect(listener.getsockname())


@pytest.mark.parametrize("key", ["port", "zmq_port"])
def test_a_port_in_use_is_named_with_its_key(stack: ExitStack, key: str) -> None:
    taken = stack.enter_context(socket.socket())
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    number = taken.getsockname()[1]
    asked = topology(f"gateway.b.{key}={number}")
    bind = {"port": bind_doors, "zmq_port": bind_client_ports}[key]
    with pytest.raises(StartError, match=rf"gateway.b: cannot listen on .*:{number}: .*gateway.b.{key}=0"):
        bind(asked, stack)


def test_a_path_that_no_socket_can_have(stack: ExitStack, tmp_path: Path) -> None:
    ports = bind_client_ports(topology(), stack)
    with pytest.raises(StartError, match="choose a shorter run directory"):
        bind_client_paths(ports, tmp_path / ("x" * 100), stack)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_an_ipv6_address_is_told_in_brackets(stack: ExitStack) -> None:
    asked = topology('gateway.a.host="::1"', "gateway.a.zmq_port=0")
    try:
        (endpoint,) = bind_client_ports(asked, stack)["a"]
    except StartError:
        pytest.skip("this machine has no IPv6 on loopback")
    assert endpoint.startswith("tcp://[::1]:")


HOSTS = """
[host.x]
address = "127.0.0.2"
[host.y]
address = "127.0.0.3"
[gateway.a]
on = "x"
[gateway.b]
on = "y"
zmq_port = 0
[worker.w]
on = "y"
role = "both"
"""


def test_only_the_doors_of_this_host_are_bound(stack: ExitStack) -> None:
    asked = parse(HOSTS, "", ["gateway.a.port=0", "gateway.b.port=0"])
    assert list(bind_doors(asked, stack, "x")) == ["a"]
    assert list(bind_doors(asked, stack, "y")) == ["b"]
    assert list(bind_client_ports(asked, stack, "x")["a"]) == []
    assert len(bind_client_ports(asked, stack, "y")["b"]) == 1


def test_a_host_is_where_its_address_is(stack: ExitStack) -> None:
    taken = stack.enter_context(socket.create_server(("127.0.0.2", 0)))
    port = taken.getsockname()[1]
    asked = parse(HOSTS, "", [f"host.x.control_port={port}", f"host.y.control_port={port}"])
    with pytest.raises(StartError, match=rf"^host.x.control_port = {port}: is in use at 127.0.0.2"):
        check_address(asked, "x")
    check_address(asked, "y")  # its own is not used
    taken.close()
    check_address(asked, "x")
    for elsewhere in ("192.0.2.1", "2001:db8::1"):
        asked = parse(HOSTS, "", [f"host.y.address={elsewhere}"])
        with pytest.raises(StartError, match=rf"^host.y.address = '{elsewhere}': cannot listen there: "):
            check_address(asked, "y")


def test_a_resolved_topology_of_hosts_is_one_to_start_from() -> None:
    resolved = parse(HOSTS, "")
    assert parse(describe(resolved), "") == resolved
    assert describe(resolved).splitlines()[1].startswith("# actors of host y: allocator-y (allocator)")


@pytest.mark.parametrize("setting", ["gateway.a.zmq_port=7", "kv.pages=9"])
def test_a_resolved_topology_is_one_to_start_from(setting: str) -> None:
    """Also a key that is not set, for which TOML has no value."""
    resolved = topology(setting)
    assert parse(describe(resolved), "") == resolved
