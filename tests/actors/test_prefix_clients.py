"""The prefix cache as clients see it, through the whole system: what was found, and what is kept for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import trio

from actors.prefixes import KEEP_S
from actors.sessions import (
    Delta,
    Draining,
    End,
    Generation,
    KeptPrefix,
    NotKept,
    PrefixRefused,
    PrefixTooShort,
    PrefixUnfilled,
    QueueFull,
)
from engine.messages import Cached, PinWanted
from engine.pins import MOST_PINS, Prefix
from engine.sampling import GREEDY
from engine.testing import KillAt

if TYPE_CHECKING:
    from trio.testing import MockClock

    from actors.allocator import AllocatorActor
    from engine.ids import Incarnation
    from engine.messages import Message
    from engine.testing import System
    from engine.testing.fixtures import StartSystem

SHARED = "a relay race is run by a team, and what is passed on from one runner to the next is the baton. "
assert len(SHARED) // 16 == 5
WHOLE = 5 * 16
TOPOLOGIES = ["local", "unified", "two-decode"]


async def found(system: System, text: str, **more: object) -> Cached | None:
    answer, end = await system.complete(text, max_tokens=3, **more)  # type: ignore[arg-type]
    assert answer == system.expected(text, max_tokens=3)
    assert end.prompt_tokens == len(text)
    return end.cached


def prefix(system: System, text: str = SHARED, *, ttl_s: int = 1000, **more: str) -> Prefix:
    return Prefix(system.encode(text), ttl_s, created=5000, **more)


async def keep(system: System, text: str = SHARED, **more: object) -> KeptPrefix:
    return await system.gateways()[0].prefixes.keep(prefix(system, text, **more))  # type: ignore[arg-type]


def pinned(system: System) -> tuple[int, int]:
    """(pins, pages) as the allocator has them."""
    figures = system.actor("allocator").statistics()
    return int(figures["prefixes_pinned"]), int(figures["pages_kept"])


async def press(system: System, requests: int = 12) -> None:
    """Have so many other prompts computed that everything else has left the pool that may."""
    for number in range(requests):
        await system.complete(f"{number:02}" * 50, max_tokens=2)


# ── what was found ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_what_was_found_is_told_and_a_salt_keeps_apart(
    topology: str, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system(topology)
    with trio.fail_after(600):
        assert await found(system, SHARED + "first") == Cached()
        again = await found(system, SHARED + "second")
        assert again is not None
        assert again.tokens == again.memory + again.worker == WHOLE
        assert await found(system, SHARED + "third", cache_salt="tenant") == Cached()
        own = await found(system, SHARED + "fourth", cache_salt="tenant")
        assert own is not None
        assert own.tokens == WHOLE
        assert await found(system, SHARED + "fifth", cache_salt="another") == Cached()
        # The last token is always computed, so of whole pages the last one is too.
        whole = await found(system, SHARED[:WHOLE])
        assert whole is not None
        assert whole.tokens == WHOLE - 16
        await system.settle()


async def test_the_first_choice_speaks_for_all(start_system: StartSystem, autojump_clock: MockClock) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        for expected in (0, WHOLE):
            session = system.gateways()[0].open(
                Generation(system.encode(SHARED + str(expected)), 3, GREEDY, n=3)
            )
            ends = {event.choice: event async for event in session.events() if isinstance(event, End)}
            assert ends[0].cached is not None
            assert ends[0].cached.tokens == expected
            assert ends[1].cached is None
            assert ends[2].cached is None
        await system.settle()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_what_it_filled_itself_before_a_death_is_no_hit(
    victim: str, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        await found(system, SHARED + "x")
        session = system.gateways()[0].open(Generation(system.encode(SHARED * 2), 20, GREEDY))
        text, count = "", 0
        async for event in session.events():
            if isinstance(event, Delta):
                text, count = text + event.text, count + 1
                if count == 5:
                    system.kill_actor(victim)
            else:
                assert event.cached is not None
                assert event.cached.tokens == WHOLE
        assert text == system.expected(SHARED * 2, max_tokens=20)
        await system.settle()


@pytest.mark.parametrize("victim", ["allocator", "prefill"])
async def test_killed_at_any_message_no_more_is_told_than_was_there_before(
    victim: str, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    k, killed = 0, True
    while killed:
        kill = KillAt(victim, k)
        system = await start_system("local", on_message=kill)
        with trio.fail_after(600):
            kill.arm(system)
            cached = await found(system, SHARED)
            killed = kill.killed
            kill.killed = True
            assert cached in (None, Cached()), f"message {k}"
            await system.settle()
            await system.stop()
        k += 1
    assert k > 10, "a request takes more messages than that"


async def test_after_the_gateways_death_nobody_knows(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        await found(system, SHARED, cache_salt="tenant")
        generation = Generation(system.encode(SHARED), 20, GREEDY, resumable=True, cache_salt="tenant")
        session = system.gateways()[0].open(generation)
        assert isinstance(await anext(session.events()), Delta)
        system.kill_actor("front")
        await system.until(lambda: any(gateway.not_ready() is None for gateway in system.gateways()))
        session = system.gateways()[0].resume(session.resume_id, None)
        assert session.generation.cache_salt == "tenant"
        events = [event async for event in session.events()]
        assert isinstance(events[-1], End)
        assert (events[-1].reason, events[-1].cached) == ("length", None)
        await system.settle()


# ── what is kept ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_a_kept_prefix_survives_pressure(
    topology: str, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system(topology, settings=["kv.pages=32", "allocator.eviction=lru"])
    prefixes = system.gateways()[0].prefixes
    with trio.fail_after(600):
        kept = await keep(system)
        assert (kept.tokens, kept.cached_tokens) == (len(SHARED), 0)
        assert (kept.pinned_tokens, kept.pinned_pages) == (WHOLE, 5)
        assert (kept.created, kept.expires_at) == (5000, 6000)
        assert prefixes.find("", kept.name) == kept
        assert prefixes.kept("") == (kept,)
        assert pinned(system) == (1, 5)
        other = SHARED.upper()
        await found(system, other)
        await press(system)
        assert await found(system, other) == Cached(), "what is not kept has gone"
        cached = await found(system, SHARED + "now")
        assert cached is not None
        assert cached.tokens == WHOLE
        assert prefixes.forget("", kept.name) == kept
        await press(system)
        assert pinned(system) == (0, 0)
        assert await found(system, SHARED) == Cached()
        with pytest.raises(NotKept):
            prefixes.find("", kept.name)
        await system.settle()


async def test_what_is_there_already_is_not_computed_again(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        await found(system, SHARED[:40])
        first = await keep(system)
        assert (first.cached_tokens, first.pinned_tokens) == (32, WHOLE)
        second = await keep(system)
        assert (second.cached_tokens, second.pinned_tokens) == (WHOLE, WHOLE)
        assert second.name != first.name
        assert system.gateways()[0].statistics()["prefix_fills"] == 1
        assert pinned(system) == (2, 5), "pages of two pins are counted once"
        # Nobody sees the request that filled it.
        figures = system.gateways()[0].render_metrics().decode()
        assert "estafet:prompt_tokens_total 40.0" in figures
        assert "estafet:num_prefixes_kept 2.0" in figures
        assert f"estafet:prefix_tokens_kept {2 * WHOLE}.0" in figures


async def test_salts_and_owners_keep_apart(start_system: StartSystem, autojump_clock: MockClock) -> None:
    system = await start_system("local")
    prefixes = system.gateways()[0].prefixes
    with trio.fail_after(600):
        kept = await keep(system, salt="tenant", owner="key:1")
        assert await found(system, SHARED + "x") == Cached()
        cached = await found(system, SHARED + "x", cache_salt="tenant")
        assert cached is not None
        assert cached.tokens == WHOLE
        assert prefixes.kept("") == prefixes.kept("key:2") == ()
        for act in (prefixes.find, prefixes.forget):
            with pytest.raises(NotKept, match="its time is over"):
                act("key:2", kept.name)
        assert prefixes.kept("key:1") == (kept,)


@pytest.mark.parametrize("victim", ["allocator", "decode"])
async def test_killed_at_any_message_it_is_kept_nevertheless(
    victim: str, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    k, killed = 0, True
    while killed:
        kill = KillAt(victim, k)
        system = await start_system("local", on_message=kill)
        with trio.fail_after(600):
            kill.arm(system)
            kept = await keep(system)
            killed = kill.killed
            kill.killed = True
            assert kept.pinned_tokens == WHOLE, f"message {k}"
            await until_there(system)
            cached = await found(system, SHARED)
            assert cached is None or cached.tokens == WHOLE
            await system.stop()
        k += 1
    assert k > 10, "to keep a prefix takes more messages than that"


async def until_there(system: System) -> None:
    """Until an allocator has one pin with all its pages."""

    def there() -> bool:
        try:
            return system.actor("allocator").serving and pinned(system) == (1, 5)
        except KeyError:
            return False

    await system.until(there)


async def test_a_new_allocator_is_told_and_what_has_gone_is_filled_again(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    gateway = system.gateways()[0]
    with trio.fail_after(600):
        kept = await keep(system)
        system.kill_actor("allocator")
        await until_there(system)
        fills = gateway.statistics()["prefix_fills"]
        # Its pages have gone with the table, as they can while nobody pins them.
        allocator = cast("AllocatorActor", system.actor("allocator")).core
        system.kill_actor("allocator")
        for page in range(allocator.table.pages):
            if allocator.table.state(page):
                allocator.table.free(page)
        await until_there(system)
        assert gateway.statistics()["prefix_fills"] > fills
        assert gateway.prefixes.find("", kept.name).pinned_tokens == WHOLE
        gateway.check()


async def test_what_does_not_fit_is_refused(start_system: StartSystem, autojump_clock: MockClock) -> None:
    system = await start_system("local", settings=["kv.pages=16"])
    gateway = system.gateways()[0]
    with trio.fail_after(600):
        await keep(system)
        with pytest.raises(PrefixRefused, match="pages are pinned"):
            await keep(system, SHARED.upper())
        with pytest.raises(PrefixTooShort, match="15 tokens are no page of 16"):
            await keep(system, SHARED[:15])
        assert pinned(system) == (1, 5)
        assert len(gateway.prefixes.kept("")) == 1
        gateway.check()


async def test_there_are_so_many(start_system: StartSystem, autojump_clock: MockClock) -> None:
    system = await start_system("local")
    gateway = system.gateways()[0]
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            for _ in range(MOST_PINS):
                nursery.start_soon(keep, system)
        with pytest.raises(QueueFull, match=f"{MOST_PINS} prefixes"):
            await keep(system)
        gateway.prefixes.forget("", gateway.prefixes.kept("")[0].name)
        await keep(system)


async def test_its_time_ends_it(start_system: StartSystem, autojump_clock: MockClock) -> None:
    system = await start_system("local")
    prefixes = system.gateways()[0].prefixes
    with trio.fail_after(600):
        short = await keep(system, ttl_s=5)
        long = await keep(system, SHARED.upper(), ttl_s=50)
        await trio.sleep(5)
        assert prefixes.kept("") == (long,)
        with pytest.raises(NotKept):
            prefixes.find("", short.name)
        await system.until(lambda: pinned(system) == (1, 5))
        await trio.sleep(45)
        assert prefixes.kept("") == ()
        await system.until(lambda: pinned(system) == (0, 0))
        await system.settle()


def deafen(system: System) -> None:
    """Have the allocator hear of no pin."""
    allocator = cast("AllocatorActor", system.actor("allocator"))
    handle = allocator.handle

    def hear(source: Incarnation, message: Message, now: float) -> None:
        if not isinstance(message, PinWanted):
            handle(source, message, now)

    allocator.handle = hear  # type: ignore[method-assign]


async def test_who_waits_too_long_is_told(start_system: StartSystem, autojump_clock: MockClock) -> None:
    system = await start_system("local")
    gateway = system.gateways()[0]
    deafen(system)
    with trio.fail_after(600):
        with pytest.raises(PrefixUnfilled, match=f"within {KEEP_S:g} s"):
            await keep(system)
        with pytest.raises(PrefixUnfilled, match="its time was over"):
            await keep(system, ttl_s=5)
        assert gateway.prefixes.core.pins == ()
        gateway.check()


@pytest.mark.parametrize("after_s", [0.0, 0.011])
async def test_who_goes_away_keeps_nothing(
    after_s: float, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    """Before anything has happened, and while the prefix is filled."""
    system = await start_system("local")
    gateway = system.gateways()[0]
    with trio.fail_after(600):
        with trio.move_on_after(after_s) as scope:
            await keep(system, SHARED * 2)
        assert scope.cancelled_caught
        assert gateway.prefixes.core.pins == ()
        assert gateway.core.open_requests == 0
        gateway.check()
        await system.settle()
        assert pinned(system) == (0, 0)


async def test_a_drain_waits_for_no_prefix(start_system: StartSystem, autojump_clock: MockClock) -> None:
    system = await start_system("local")
    gateway = system.gateways()[0]
    refused: list[str] = []

    async def ask() -> None:
        try:
            await keep(system, SHARED * 2)
        except Draining:
            refused.append("while it was filled")

    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.015)
            assert gateway.prefixes.filling
            system.launcher.stop()
        assert refused
        with pytest.raises(Draining):
            await gateway.prefixes.keep(prefix(system))
        await system.stop()


async def test_another_gateways_prefix_is_said_to_be(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("two-gateways")
    with trio.fail_after(600):
        await system.until(lambda: len(system.gateways()) == 2)
        front, back = sorted(system.gateways(), key=lambda gateway: gateway.me.name, reverse=True)
        kept = await front.prefixes.keep(prefix(system))
        with pytest.raises(NotKept, match=f"belongs to the gateway '{front.me.name}'"):
            back.prefixes.find("", kept.name)
        system.kill_actor(front.me.name)
        await system.until(lambda: pinned(system) == (0, 0))
        await system.until(lambda: len(system.gateways()) == 2)
        again = next(gateway for gateway in system.gateways() if gateway.me.name == front.me.name)
        with pytest.raises(NotKept, match="started again"):
            again.prefixes.find("", kept.name)


@pytest.mark.parametrize("victim", [None, "both-a", "allocator-a"])
async def test_of_several_hosts_it_is_kept_at_the_gateways(
    victim: str | None, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    """Wherever there is more room to compute it, or another host has it already."""
    system = await start_system("two-hosts")
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(found, system, f"{number:02} and " + SHARED)
            nursery.start_soon(found, system, SHARED)
            if victim is not None:
                system.kill_actor(victim)
            kept = await keep(system)
            assert kept.pinned_tokens == WHOLE

        def there() -> bool:
            figures = {name: system.actor(name).statistics() for name in ("allocator-a", "allocator-b")}
            kept_at = {name: (told["prefixes_pinned"], told["pages_kept"]) for name, told in figures.items()}
            return kept_at == {"allocator-a": (1, 5), "allocator-b": (0, 0)}

        await system.until(there)
