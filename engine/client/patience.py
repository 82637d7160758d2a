"""How long a client waits for what, and how often it tries."""

from __future__ import annotations

import msgspec


class Patience(msgspec.Struct, frozen=True):
    """How long a client waits for what. Seconds."""

    ping_s: float = 2.0
    """Between two signs of life, while requests are open."""
    silence_s: float = 6.0
    """A connection on which nothing came for so long is given up for another one."""
    answer_s: float = 10.0
    """A request to which nothing was said for so long is asked again."""
    stall_s: float = 20.0
    """An open request of which nothing came for so long is asked again: its last word may be lost."""
    retry_s: float = 0.5
    """Until a gateway that was busy is asked again."""
    lost_s: float = 30.0
    """No gateway has taken the request for so long: ConnectionLost."""
    recreations: int = 3
    """So often a request is asked anew when its gateway has forgotten it: it may be what kills gateways."""
    takeovers: int = 5
    """So often a request is taken back that another connection took over: what an earlier one of ours had
    said may be read late, but somebody else may have it too."""
