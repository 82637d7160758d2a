"""Asks many questions at once over one socket: python -m tools.examples.many_prompts"""

from __future__ import annotations

import trio

from engine.client import Client, Refused

COUNTRIES = ("France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Norway", "Kenya")
AT_ONCE = 64
"""Requests that are open at the same time; a gateway refuses what is too much for it."""


async def main() -> None:
    """Print each answer when it is complete."""
    places = trio.CapacityLimiter(AT_ONCE)

    async def ask(client: Client, country: str) -> None:
        question = f"What is the capital of {country}?"
        async with places:
            while True:
                try:
                    text = await client.chat(question, temperature=0, max_tokens=12, deadline_s=120).text()
                except Refused as refused:
                    if refused.retry_after_s is None:
                        raise
                    await trio.sleep(refused.retry_after_s)
                else:
                    print(f"{country}: {text.strip()}", flush=True)
                    return

    async with Client() as client, trio.open_nursery() as nursery:
        for country in COUNTRIES:
            nursery.start_soon(ask, client, country)


if __name__ == "__main__":
    trio.run(main)
