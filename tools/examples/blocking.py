"""Asks one question without an event loop, in five lines: python -m tools.examples.blocking"""

from engine.client import BlockingClient

if __name__ == "__main__":
    with BlockingClient() as client:
        print(client.chat("What is the capital of France?", temperature=0, max_tokens=20).text())
