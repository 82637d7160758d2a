"""Kills the gateway in the middle of an answer and shows that nothing is lost.

python -m tools.examples.survive_a_kill

The system must run on this machine, with an endpoint in its run directory, and have nothing more
important to do.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import trio

from engine.client import Client, NoEndpoint, Piece
from tools.observe import lives

QUESTION = "What is the capital of France? Tell me its history."
TOKENS = 20
KILL_AFTER = 5


async def main() -> int:
    """0 when the answer that was disturbed is the one that was not."""
    async with Client() as client:
        undisturbed = await client.chat(QUESTION, temperature=0, max_tokens=TOKENS).text()
        text = ""
        pieces = 0
        async with client.chat(QUESTION, temperature=0, max_tokens=TOKENS) as stream:
            async for event in stream:
                if not isinstance(event, Piece):
                    continue
                print(event.text, end="", flush=True)
                text += event.text
                pieces += 1
                if pieces == KILL_AFTER:
                    print(f" [killing process {kill_gateway(client.endpoint)}]", end="", flush=True)
        connections = client.statistics()["connections"]
    same = text == undisturbed
    print(f"\nover {connections} connections, and {'nothing was lost' if same else 'NOT the same text'}")
    return 0 if same else 1


def kill_gateway(endpoint: str) -> int:
    """SIGKILL to the gateway behind ipc://RUN_DIR/s/GATEWAY.zmq; its process id."""
    path = Path(endpoint.removeprefix("ipc://"))
    pid = lives(path.parents[1])[path.stem][-1].pid
    os.kill(pid, signal.SIGKILL)
    return pid


if __name__ == "__main__":
    try:
        sys.exit(trio.run(main))
    except NoEndpoint as error:
        sys.exit(str(error))
