"""`engine.client` against whole systems: the same text as over HTTP, and nothing lost or left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from launches import CAPITAL, ROOT, STORY, Launch, wait_until

from engine.client import BlockingClient, Client, DeadlineExceeded, Finish, Piece, Refused
from tools.observe import usage

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.model]

TOKENS = 16
QUESTION = CAPITAL + " Tell me its history."
SETTINGS = (
    "gateway.front.zmq_port=0",
    "launch.restart_attempts=1000",
    "launch.restart_most_s=0.2",
)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """One system for all."""
    with Launch(tmp_path_factory.mktemp("client"), "local", *SETTINGS) as launch:
        yield launch.wait_ready()


@pytest.fixture(scope="module")
def endpoints(launch: Launch) -> dict[str, str]:
    """By transport."""
    ready = json.loads((launch.run_dir / "ready.json").read_text())
    return {endpoint.partition(":")[0]: endpoint for endpoint in ready["endpoints"]["front"]}


@pytest.fixture(scope="module")
def undisturbed(launch: Launch) -> str:
    """What HTTP says."""
    return launch.ask(QUESTION, max_tokens=TOKENS)


def run(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A Python program to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_launch_tells_its_endpoints(launch: Launch, endpoints: dict[str, str]) -> None:
    assert endpoints["ipc"] == f"ipc://{launch.run_dir}/s/front.zmq"
    assert f"estafet: ZeroMQ clients at {endpoints['tcp']}\n" in launch.said


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_stream_is_the_text_of_the_http_door(
    endpoints: dict[str, str], undisturbed: str, transport: str
) -> None:
    with trio.fail_after(60):
        async with Client(endpoints[transport]) as client:
            one, two = (client.chat(QUESTION, temperature=0, max_tokens=TOKENS) for _ in range(2))
            assert await one.text() == undisturbed
            assert await two.text() == undisturbed
            assert one.finishes[0].reason == "length"
            assert one.finishes[0].completion_tokens == TOKENS


async def test_a_sampled_stream_of_two_choices_with_tokens(launch: Launch, endpoints: dict[str, str]) -> None:
    sampled = {"temperature": 1, "seed": 7, "max_tokens": 8, "n": 2}
    body = launch.body(STORY, **sampled)
    choices = launch.client.post("/v1/chat/completions", json=body).json()["choices"]
    with trio.fail_after(60):
        async with Client(endpoints["ipc"]) as client:
            texts, tokens = ["", ""], [0, 0]
            async with client.chat(STORY, **sampled, logprobs=True, top_logprobs=1) as stream:
                async for event in stream:
                    if isinstance(event, Piece):
                        texts[event.choice] += event.text
                        tokens[event.choice] += len(event.tokens)
                        assert all(len(token.top) == 1 for token in event.tokens)
    assert texts == [choice["message"]["content"] for choice in choices]
    assert tokens == [8, 8]


async def test_a_cancel_frees_at_once(launch: Launch, endpoints: dict[str, str]) -> None:
    with trio.fail_after(60):
        async with Client(endpoints["ipc"]) as client:
            async with client.chat(STORY, temperature=0, max_tokens=400) as stream:
                await anext(stream)
            await trio.to_thread.run_sync(launch.wait_quiet)
            stream = client.chat(STORY, temperature=0, max_tokens=400)
            await anext(stream)
            stream.cancel()
            last = [event async for event in stream][-1]
            assert isinstance(last, Finish)
            assert last.reason == "cancelled"
            await trio.to_thread.run_sync(launch.wait_quiet)


async def test_a_deadline_frees_too(launch: Launch, endpoints: dict[str, str]) -> None:
    with trio.fail_after(60):
        async with Client(endpoints["ipc"]) as client:
            began = trio.current_time()
            with pytest.raises(DeadlineExceeded):
                await client.chat(STORY, temperature=0, max_tokens=400, deadline_s=1.0).text()
            assert trio.current_time() - began < 2.0
            await trio.to_thread.run_sync(launch.wait_quiet)


async def test_what_is_wrong_is_said_as_http_says_it(launch: Launch, endpoints: dict[str, str]) -> None:
    over = launch.client.post("/v1/chat/completions", json=launch.body(CAPITAL, top_p=7)).json()["error"]
    with trio.fail_after(60):
        async with Client(endpoints["tcp"]) as client:
            with pytest.raises(Refused) as refused:
                await client.chat(CAPITAL, temperature=0, top_p=7).text()
    assert (str(refused.value), refused.value.param) == (over["message"], "top_p")


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_stream_does_not_notice_the_gateways_death(
    launch: Launch, endpoints: dict[str, str], undisturbed: str, transport: str
) -> None:
    """SIGKILL in the middle of a stream, and once more behind that."""
    with trio.fail_after(60):
        async with Client(endpoints[transport]) as client:
            text, pieces = "", 0
            async with client.chat(QUESTION, temperature=0, max_tokens=TOKENS) as stream:
                async for event in stream:
                    if isinstance(event, Piece):
                        text += event.text
                        pieces += 1
                        if pieces in (3, 8):
                            killed = launch.kill("front")
            assert text == undisturbed
            assert stream.finishes[0] == Finish("length", stream.finishes[0].prompt_tokens, TOKENS)
            assert client.statistics()["connections"] == 3
    launch.wait_restarted(killed, "front")
    launch.wait_quiet()


async def test_a_frozen_gateway_is_replaced_under_a_stream(
    launch: Launch, endpoints: dict[str, str], undisturbed: str
) -> None:
    """SIGSTOP: no connection breaks, and the health monitor has to find out."""
    with trio.fail_after(60):
        async with Client(endpoints["ipc"]) as client:
            stream = client.chat(QUESTION, temperature=0, max_tokens=TOKENS)
            text = ""
            async for event in stream:
                if isinstance(event, Piece):
                    if not text:
                        frozen = launch.kill("front", signal.SIGSTOP)
                    text += event.text
            assert text == undisturbed
    launch.wait_restarted(frozen, "front")


def test_a_blocking_client_of_the_only_launch(launch: Launch, undisturbed: str) -> None:
    """It finds the endpoint by itself, in a process whose only base is this launch's."""
    code = (
        "from engine.client import BlockingClient\n"
        "with BlockingClient() as client:\n"
        f"    stream = client.chat({QUESTION!r}, temperature=0, max_tokens={TOKENS})\n"
        "    print(stream.text(), end='')\n"
    )
    base = launch.run_dir.parent
    link = base.parent / "estafet"
    link.symlink_to(base, target_is_directory=True)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(base.parent), "ESTAFET_ENDPOINT": ""}
    done = run("-c", code, environment=environment)
    assert (done.returncode, done.stdout) == (0, undisturbed), done.stderr


EXAMPLES = sorted(path.stem for path in (ROOT / "tools/examples").glob("[a-z]*.py"))
SAYS = {
    "stream_chat": ("Paris", "tokens by SmolLM2-135M-Instruct]"),
    "blocking": ("Paris",),
    "many_prompts": ("France: ", "Kenya: "),
    "survive_a_kill": ("killing process", "over 2 connections, and nothing was lost"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_runs(launch: Launch, endpoints: dict[str, str], name: str) -> None:
    environment = os.environ | {"ESTAFET_ENDPOINT": endpoints["ipc"]}
    done = run("-m", f"tools.examples.{name}", environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    for said in SAYS[name]:
        assert said in done.stdout


def test_nothing_is_left_of_clients(launch: Launch, endpoints: dict[str, str]) -> None:
    """Neither descriptors nor threads of the gateway's, nor the sockets of a launch that has ended."""
    wait_until(launch.is_ready, 10, "everybody is back")
    with BlockingClient(endpoints["ipc"]) as client:
        client.chat(CAPITAL, temperature=0, max_tokens=2).text()
    gateway = launch.life("front").pid
    before = usage(gateway)
    for _ in range(5):
        with (
            BlockingClient(endpoints["ipc"]) as client,
            client.chat(STORY, temperature=0, max_tokens=50) as it,
        ):
            next(it)
    launch.wait_quiet()

    def is_as_before() -> bool:
        now = usage(gateway)
        assert before is not None
        assert now is not None
        return now.descriptors <= before.descriptors and now.threads <= before.threads

    wait_until(is_as_before, 5, f"the gateway holds no more than {before}")
    assert Path(endpoints["ipc"].removeprefix("ipc://")).is_socket()
    assert launch.stop() == 0, launch.said
    launch.assert_gone()
