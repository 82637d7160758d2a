"""Streams one answer: python -m tools.examples.stream_chat "Why is the sky blue?" """

from __future__ import annotations

import sys

import trio

from engine.client import Client, Piece


async def main(question: str) -> None:
    """Print the answer as it comes, and why it ended."""
    async with Client() as client, client.chat(question, temperature=0, max_tokens=60) as stream:
        async for event in stream:
            if isinstance(event, Piece):
                print(event.text, end="", flush=True)
            else:
                print(f"\n[{event.reason}: {event.completion_tokens} tokens by {stream.model}]")


if __name__ == "__main__":
    trio.run(main, " ".join(sys.argv[1:]) or "What is the capital of France?")
