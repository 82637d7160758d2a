"""Two hosts on one machine: network namespaces joined by a veth pair, made by `ip` (iproute2), as root.

    namespace NAME-a                        namespace NAME-b
      lo 127.0.0.1                            lo 127.0.0.1
      link0 10.77.0.1/24 ───── veth ─────── link0 10.77.0.2/24

What runs in one reaches the other by these addresses alone, and nothing else of the machine's network. Files
and processes are the machine's, as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

FOLDER = Path("/run/netns")
DEVICE = "link0"
HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2"}
PREFIX = 24
CLONE_NEWNET = 0x4000_0000


class TwoHosts:
    """A pair of namespaces from `up` to `down`, or as a context manager."""

    def __init__(self, name: str = "estafet") -> None:
        self.name = name
        self.namespaces = {host: f"{name}-{host}" for host in HOSTS}

    def __enter__(self) -> TwoHosts:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Make both and the link between them; StartError says why that cannot be."""
        if (why := cannot()) is not None:
            raise StartError(why)
        if busy := self.processes():
            raise StartError(
                f"processes {', '.join(map(str, busy))} still run in {self.name}-*; end them first"
            )
        self.down()
        try:
            for namespace in self.namespaces.values():
                _ip("netns", "add", namespace)
            a, b = self.namespaces.values()
            _ip("-n", a, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", b)
            for host, namespace in self.namespaces.items():
                _ip("-n", namespace, "address", "add", f"{HOSTS[host]}/{PREFIX}", "dev", DEVICE)
                _ip("-n", namespace, "link", "set", "lo", "up")
                _ip("-n", namespace, "link", "set", DEVICE, "up")
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Remove what is there of both. Processes that are still inside keep a network without the link."""
        for namespace in self.namespaces.values():
            if (FOLDER / namespace).exists():
                with contextlib.suppress(StartError):  # the other end takes it along
                    _ip("-n", namespace, "link", "delete", DEVICE)
                _ip("netns", "delete", namespace)

    @property
    def is_up(self) -> bool:
        """Whether both namespaces are there."""
        return all((FOLDER / namespace).exists() for namespace in self.namespaces.values())

    def processes(self) -> list[int]:
        """Who runs in either of them."""
        found: list[int] = []
        for namespace in self.namespaces.values():
            if (FOLDER / namespace).exists():
                found += map(int, _ip("netns", "pids", namespace).split())
        return found

    def cut(self) -> None:
        """Take the link down at one end: nothing passes, and nobody is told."""
        _ip("-n", self.namespaces["b"], "link", "set", DEVICE, "down")

    def heal(self) -> None:
        """Bring the link up again."""
        _ip("-n", self.namespaces["b"], "link", "set", DEVICE, "up")

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Have this thread, the sockets it opens and the programs it starts live in a namespace."""
        outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            within = os.open(FOLDER / self.namespaces[host], os.O_RDONLY | os.O_CLOEXEC)
            try:
                _set_namespace(within)
            finally:
                os.close(within)
            try:
                yield
            finally:
                _set_namespace(outside)
        finally:
            os.close(outside)


def cannot() -> str | None:
    """Why no namespace can be made here, or None."""
    if shutil.which("ip") is None:
        return "network namespaces are made by `ip`, which is not installed (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces can only be made by root; run it as root, or try two addresses of loopback"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    if probe.returncode:
        return f"this machine makes no network namespaces: {probe.stderr.decode(errors='replace').strip()}"
    return None


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        error = ctypes.get_errno()
        raise StartError(f"cannot enter a network namespace: {os.strerror(error)}")
