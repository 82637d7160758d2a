"""Asks one question over HTTP and prints the answer as it comes.

    python -m tools.ask --url http://127.0.0.1:8000 "Why is the sky blue?"
    python -m tools.ask --topology engine/topologies/local.toml "Why is the sky blue?"

With --url it asks a system that runs already, with --topology it starts one, asks and stops it;
arguments behind a lone `--` then go to the launcher. The answer alone goes to stdout.
Exit codes: 0 answered, 1 no answer, 2 bad usage or topology, 3 the system could not be started,
70 it did not stop cleanly, 130 interrupted.
"""

from __future__ import annotations

from tools import interrupts

if __name__ == "__main__":
    interrupts.at_once()  # before the long imports begin

import argparse
import http.client
import json
import sys
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from tools.system import SystemFailed, launch_command, running_system
from tools.terminal import Screen

if TYPE_CHECKING:
    from collections.abc import Iterator


class NoAnswer(Exception):
    """The system refused the question or failed on it."""


class Out(Protocol):
    """What an answer is written to, piece by piece."""

    def write(self, text: str, /) -> object:
        """Write and flush a piece."""


def ask(url: str, question: str, out: Out, **parameters: object) -> None:
    """Stream the answer of the system at `url` to `out`; NoAnswer when there is none, or only a part.

    Further parameters are those of the chat API; temperature is 0 unless given, so that the same
    question gets the same answer.
    """
    split = urlsplit(url)
    connection = http.client.HTTPConnection(split.hostname or "", split.port)
    try:
        models = _json(connection, "GET", "/v1/models")
        chat = {
            "model": models["data"][0]["id"],
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "stream": True,
        } | parameters
        for text in _deltas(_request(connection, "POST", "/v1/chat/completions", chat)):
            out.write(text)
        out.write("\n")
    except ConnectionRefusedError as error:
        raise NoAnswer(f"{url}: nobody listens there; is it running? `tools/up` starts one") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{url}: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _request(
    connection: http.client.HTTPConnection, method: str, path: str, value: object = None
) -> http.client.HTTPResponse:
    body = None if value is None else json.dumps(value)
    connection.request(method, path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise NoAnswer(_message(response.read()) or f"{path}: HTTP status {response.status}")
    return response


def _json(connection: http.client.HTTPConnection, method: str, path: str) -> Any:
    return json.loads(_request(connection, method, path).read())


def _message(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return None


def _deltas(response: http.client.HTTPResponse) -> Iterator[str]:
    """The texts of a stream of server-sent events; NoAnswer when it breaks off."""
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise NoAnswer(event["error"]["message"])
        for choice in event["choices"]:
            yield choice["delta"].get("content", "")
    raise NoAnswer("the stream broke off before its end")


# ── the command line ──────────────────────────────────────────────────────────────────────────


def question_of(text: str) -> str:
    """A question; argparse's error when there is nothing in it."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the question is empty")
    return text


def _url(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    split = urlsplit(url)
    try:
        complete = split.scheme == "http" and split.hostname and split.port != 0
    except ValueError:
        complete = False
    if not complete:
        raise argparse.ArgumentTypeError(f"{text!r} is no address such as http://127.0.0.1:8000")
    return url


def _tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens from 1")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 2")
    return value


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.ask",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", type=_url, help="of a system that runs")
    where.add_argument("--topology", metavar="FILE", help="of a system to start for this question")
    parser.add_argument("--max-tokens", type=_tokens, metavar="N", help="end the answer after so many tokens")
    parser.add_argument("--temperature", type=_temperature, default=0.0, metavar="T", help="0 (default) to 2")
    parser.add_argument("--seed", type=int, help="with a temperature: the same seed, the same answer")
    parser.add_argument("question", type=question_of)
    ours = list(sys.argv[1:] if arguments is None else arguments)
    split = ours.index("--") if "--" in ours else len(ours)
    for_launcher = ours[split + 1 :]
    options = parser.parse_args(ours[:split])
    if options.url and for_launcher:
        parser.error("with --url there is no launcher to pass arguments to")
    given = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
    parameters = {name: value for name, value in given.items() if value is not None}
    screen = Screen(sys.stdout, sys.stderr)
    try:
        if options.url:
            ask(options.url, options.question, screen, **parameters)
        else:
            with running_system(launch_command(options.topology, for_launcher), screen) as system:
                ask(system.url, options.question, screen, **parameters)
    except NoAnswer as error:
        screen.say(f"no answer: {error}")
        return 1
    except SystemFailed as error:
        screen.say(str(error))
        return error.code
    except KeyboardInterrupt:
        screen.interrupted()
        return interrupts.INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(interrupts.guarded(main))
