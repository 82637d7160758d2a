"""Which system a client means that names none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from actors.rundir import READY, default_base, is_alive
from engine.client.errors import NoEndpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VARIABLE = "ESTAFET_ENDPOINT"


class _Ready(msgspec.Struct):
    """As much of ready.json as a client needs."""

    run_dir: str
    endpoints: dict[str, list[str]]


def find_endpoint(environment: Mapping[str, str] = os.environ, base: Path | None = None) -> str:
    """The environment's endpoint, else that of the first gateway of the one launch that is ready.

    NoEndpoint says what to do when that is none or several.
    """
    if given := environment.get(VARIABLE):
        return given
    base = default_base(environment) if base is None else base
    found = _running(base)
    if not found:
        raise NoEndpoint(
            f"no launch is ready in {base}: start one (`tools/up`), or name an endpoint, "
            f"by Client(…) or {VARIABLE}"
        )
    if len(found) > 1:
        every = [endpoints[0] for ready in found for endpoints in ready.endpoints.values() if endpoints]
        listed = "".join(f"\n  {endpoint}" for endpoint in every)
        raise NoEndpoint(f"{len(found)} launches are ready: name one, by Client(…) or {VARIABLE}:{listed}")
    return _first(found[0])


def _running(base: Path) -> list[_Ready]:
    found = []
    for path in sorted(base.glob(f"*/{READY}")):
        if is_alive(path.parent):
            try:
                ready = msgspec.json.decode(path.read_bytes(), type=_Ready)
            except (OSError, msgspec.MsgspecError):
                continue  # it ended just now, or is another version's
            if any(ready.endpoints.values()):
                found.append(ready)
    return found


def _first(ready: _Ready) -> str:
    return next(endpoints[0] for endpoints in ready.endpoints.values() if endpoints)
