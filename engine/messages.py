"""Every message between actors: one file, one closed union a receiver.

All are frozen, tagged and array-like. A message travels as the body of a `transport.channel`
frame, which carries the protocol version, the source and destination incarnations and a sequence
number: it arrives once, in order, and never from an incarnation that was declared dead. Messages
that change the state of a request carry (request, choice, term) beside that. Most state messages
are level-triggered: they say how things are, not what to add, so that saying it twice is harmless.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.ids import Incarnation, SequenceKey
from engine.sampling import SamplingParams, TokenLogprobs
from engine.shapes import PageRef

ActorKind = Literal["launcher", "gateway", "scheduler", "allocator", "worker", "replicator", "health"]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Base of all messages: the tag is the class name."""


# ── who is there ──────────────────────────────────────────────────────────────────────────────


class Member(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One incarnation that is alive, as the health monitor declares it."""

    name: str
    kind: ActorKind
    ordinal: int
    epoch: int
    endpoint: str
    ready: bool

    @property
    def incarnation(self) -> Incarnation:
        """Name and epoch."""
        return Incarnation(self.name, self.epoch)


class Roster(Message, frozen=True):
    """health → launcher → everybody: who is alive. An incarnation that is not listed is dead.

    The version is (epoch of the health monitor, count): a lower one is ignored.
    """

    version: tuple[int, int]
    members: tuple[Member, ...]
    dying: tuple[Incarnation, ...] = ()
    """Declared dead, but their processes are not known to be gone: a thread of theirs may still write."""


class Drain(Message, frozen=True):
    """launcher → everybody: accept nothing new; requests that are open may end."""


class Stop(Message, frozen=True):
    """launcher → everybody: end now, cleanly."""


class Hello(Message, frozen=True):
    """actor → launcher: my inbox is bound. The frame's version has been checked by then."""

    kind: ActorKind
    ordinal: int
    pid: int
    endpoint: str


class Ready(Message, frozen=True):
    """actor → launcher: I can serve."""


class Drained(Message, frozen=True):
    """gateway → launcher: no request of mine is open any more."""


class ProcessFact(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one incarnation is, as its launcher sees it."""

    name: str
    kind: ActorKind
    ordinal: int
    epoch: int
    endpoint: str
    ready: bool
    exited: bool
    heart: int | None = None
    """What its heart counted; None where the health monitor sees that itself."""


class ProcessFacts(Message, frozen=True):
    """launcher → health: every actor of all hosts, whole, whenever something changed.

    Where there are other hosts it is said each turn, with what the hearts there counted.
    """

    facts: tuple[ProcessFact, ...]


class Kill(Message, frozen=True):
    """health → launcher: end this incarnation, stopped or not."""

    target: Incarnation
    reason: str


class Suspicion(Message, frozen=True):
    """anybody → health: this peer does not take its messages."""

    target: Incarnation
    reason: str


# ── launchers of several hosts ────────────────────────────────────────────────────────────────


class Join(Message, frozen=True):
    """launcher → launcher of the first host: here is another host; its actors wait to be started."""

    host: str
    endpoint: str
    agreement: str
    """What both must have read alike (`engine.topology.Topology.agreement`)."""


class HostFacts(Message, frozen=True):
    """launcher → launcher of the first host: all of a host, each turn and whenever something changed."""

    facts: tuple[ProcessFact, ...]
    drained: bool
    """No gateway of the host has an open request."""
    over: bool
    """Every process of the host has ended, and none will be started."""


class HostOrder(Message, frozen=True):
    """launcher of the first host → launcher: what a host is to do; the answer to all that it says."""

    life: int
    """How often a launcher of this host has joined, this one included: epochs of its actors begin with it."""
    want: Literal["run", "drain", "stop", "leave"]
    """leave: that all is over there is known."""
    refused: str = ""
    """Why it may not join, else empty."""


# ── requests: gateway ↔ scheduler ─────────────────────────────────────────────────────────────

Stage = Literal["waiting", "prefilling", "decoding"]


class RequestFact(Message, frozen=True):
    """gateway → scheduler: how one choice of a request is now; replaces what was said before."""

    key: SequenceKey
    term: int
    stage: Stage
    arrival: float
    """Seconds of the host's monotonic clock when the request came in; older goes first."""
    length: int
    """Tokens in the log: what a prefill would have to fill, and one more."""
    limit: int
    """Tokens in the log at most."""
    prefill: Incarnation | None = None
    decode: Incarnation | None = None
    excluding: tuple[Incarnation, ...] = ()
    """Workers that the gateway does not know (yet, or any more): placing it there would be in vain."""
    client: str = ""
    """Who asks: requests of one client share its part of the system; empty is everybody without a name."""
    priority: int = 0
    """Of all requests of a client, those with the lowest number go first."""
    tokens: bytes = b""
    """The log, little-endian u32, where there are several hosts: it is placed by who has its pages."""
    salt: str = ""
    """Its `cache_salt`."""


class RequestEnded(Message, frozen=True):
    """gateway → scheduler: forget it; what it held is free."""

    key: SequenceKey
    term: int
    length: int | None = None
    """Tokens in the log at the end: its client gets back what it has paid for more."""


class Place(Message, frozen=True):
    """scheduler → gateway: a prefill slot and a decode slot are yours."""

    key: SequenceKey
    term: int
    """The term in which the request waits; the placement opens the next one."""
    prefill: Incarnation
    decode: Incarnation
    elsewhere: str = ""
    """Another host that has more of its pages,"""
    elsewhere_pages: tuple[PageRef, ...] = ()
    """and these, from the first on."""


class Preempt(Message, frozen=True):
    """scheduler → gateway: pages ran out; take this one back and let it wait."""

    key: SequenceKey
    term: int


# ── sequences: gateway ↔ worker, worker ↔ worker ──────────────────────────────────────────────


class SequenceSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker has to know of a sequence: its owner, its log and its immutable parameters."""

    key: SequenceKey
    gateway: Incarnation
    arrival: float
    log: tuple[int, ...]
    limit: int
    stop_tokens: tuple[int, ...]
    sampling: SamplingParams
    prompt_length: int
    """Tokens of the log from here on were generated, also those that an earlier term had generated."""
    min_tokens: int = 0
    """No stop token is sampled before so many tokens were generated."""
    logprobs: int | None = None
    """Tell the logprob of every token, and so many of the likeliest ids; None to tell none."""
    client: str = ""
    priority: int = 0
    cache_salt: str = ""
    """Pages are found again by requests of equal salt only."""


class StartPrefill(Message, frozen=True):
    """gateway → worker: fill positions 0 … len(log) − 2, then hand over to `decode`.

    The hand-over opens `term + 1`, which the gateway has granted with this message.
    """

    term: int
    spec: SequenceSpec
    decode: Incarnation
    elsewhere: str = ""
    """Another host that has more of its pages,"""
    elsewhere_pages: tuple[PageRef, ...] = ()
    """and these, from the first on, as far as the scheduler knows."""


class Cancel(Message, frozen=True):
    """gateway → worker: drop the sequence if its term is at most this one."""

    key: SequenceKey
    term: int


class Cached(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a log whose pages were found, by where they were."""

    memory: int = 0
    """Filled by the worker that takes them up, or by a life of it before, or brought for another request."""
    worker: int = 0
    """Filled by another worker of the host."""
    host: int = 0
    """Fetched from another host for this request."""
    file: int = 0
    """Read from the tier below memory for this request."""

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.memory + self.worker + self.host + self.file

    def plus(self, other: Cached) -> Cached:
        """Both together."""
        return Cached(
            self.memory + other.memory,
            self.worker + other.worker,
            self.host + other.host,
            self.file + other.file,
        )


class HandOver(Message, frozen=True):
    """prefill worker → decode worker: the block table of positions 0 … filled − 1."""

    term: int
    """The term that the decode worker opens by accepting."""
    spec: SequenceSpec
    filled: int
    pages: tuple[PageRef, ...]
    cached: Cached = Cached()
    host: str = ""
    """Whose pages these are: another host takes copies of the full ones, and fills the rest itself."""


class HandOverAccepted(Message, frozen=True):
    """decode worker → prefill worker: the pages are mine."""

    key: SequenceKey
    term: int


class HandOverRefused(Message, frozen=True):
    """decode worker → prefill worker: the pages stay yours."""

    key: SequenceKey
    term: int
    reason: str


class TermAccepted(Message, frozen=True):
    """decode worker → gateway: I hold the sequence in this term."""

    key: SequenceKey
    term: int
    cached: Cached = Cached()
    """What of its log was found."""


Finish = Literal["stop", "length"]


class TokenRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token of one sequence."""

    key: SequenceKey
    term: int
    position: int
    """Where in the log the token goes: a gateway commits in order and nothing else."""
    token: int
    finish: Finish | None
    logprobs: TokenLogprobs | None = None
    """Where the sequence's spec asks for them."""


class StepTokens(Message, frozen=True):
    """decode worker → gateway: all tokens of one step that are this gateway's."""

    rows: tuple[TokenRow, ...]


class SequenceLost(Message, frozen=True):
    """worker → gateway: I gave the sequence up and released its pages."""

    key: SequenceKey
    term: int
    reason: Literal["refused", "fault"]
    """A refused sequence is worth placing again; a fault is the sequence's own."""
    detail: str


# ── pages: worker ↔ allocator ─────────────────────────────────────────────────────────────────


class WorkerFact(Message, frozen=True):
    """worker → scheduler: what may be placed here: absolute slots, so that a crash leaks none."""

    prefill_slots: int
    decode_slots: int
    identity: str = ""
    """What its keys and values depend on beside the tokens: equal ones share pages."""


class LeaseWanted(Message, frozen=True):
    """worker → allocator: I have consumed so many pages of my leases and want this many ahead."""

    consumed: int
    """Leased pages used or returned so far, in this worker's life."""
    ahead: int
    need: int
    """Pages without which some sequence stands still now; 0 when none does."""


class LeaseGranted(Message, frozen=True):
    """allocator → worker: pages to use when tokens come."""

    pages: tuple[PageRef, ...]


class LeaseRecall(Message, frozen=True):
    """allocator → worker: somebody starves; return the leases you do not need for the next step."""


class LeaseReturned(Message, frozen=True):
    """worker → allocator: leases that are not needed; they count as consumed from now on.

    The answer to a recall, and what a worker does of itself when it has nothing to compute.
    """

    pages: tuple[PageRef, ...]
    consumed: int
    ahead: int


class PagesReleased(Message, frozen=True):
    """worker → allocator: I hold these no more. A name of an older generation is ignored."""

    pages: tuple[PageRef, ...]


class PageSource(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where pages may come from that are not in this host's memory."""

    kind: Literal["file", "host"]
    host: str = ""
    """The name of the other host."""


class PrefixWanted(Message, frozen=True):
    """worker → allocator: which full pages of this log are there, or are on their way?

    Said for every sequence that is to be filled, and again to a new allocator. The answer is
    PrefixGranted, once or several times; until `PrefixFact` ends it the sequence counts as one that fills
    the pages that it does not wait for, so that others with the same tokens may wait for them.
    """

    key: SequenceKey
    term: int
    root: bytes
    """Of the chain of its pages (`engine.chain`)."""
    tokens: bytes
    """Little-endian u32, whole pages only, without the last token of the log."""
    have: int
    """Pages that are filled already."""
    seeks: bool
    """Whether it waits for an answer; else it fills them, whatever is there."""
    elsewhere: str = ""
    """Another host that has some of them, as far as the scheduler knows,"""
    elsewhere_pages: tuple[PageRef, ...] = ()
    """and these, from the first on."""


class PrefixGranted(Message, frozen=True):
    """allocator → worker: these are the next pages of the log; hold them, then say so.

    They are not freed until `PrefixFact` has said that they are taken.
    """

    key: SequenceKey
    term: int
    pages: tuple[PageRef, ...]
    cached: Cached
    more: bool
    """Somebody fills the next one, or fetches it: wait. Else fill it."""


class PrefixFact(Message, frozen=True):
    """worker → allocator: how it stands with a prefix that was wanted."""

    key: SequenceKey
    term: int
    taken: int
    """Granted pages taken so far."""
    filling: bool
    """False: the sequence is filled, or dropped. Forget it."""


class PageWanted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A page to be fetched, and the leased page where it goes."""

    key: bytes
    parent: bytes
    tokens: bytes
    block: int
    target: PageRef
    source: PageRef | None = None
    """What it is there, if it comes from another host."""


class FetchWanted(Message, frozen=True):
    """allocator → replicator: bring these pages, in their order; they are one run of a chain.

    The targets are leased to the replicator, which publishes in the page table what arrived whole.
    """

    ticket: int
    source: PageSource
    pages: tuple[PageWanted, ...]


class FetchEnded(Message, frozen=True):
    """replicator → allocator: the first `landed` of them are there and sealed, the others not."""

    ticket: int
    landed: int
    seconds: float
    """It took from the wish to here."""


class SpillWanted(Message, frozen=True):
    """allocator → replicator: keep these in the file; they are pinned until you have said how it went."""

    pages: tuple[PageRef, ...]


class SpillEnded(Message, frozen=True):
    """replicator → allocator: these were written, or refused; either way they are not read any more."""

    pages: tuple[PageRef, ...]


class FileKeys(Message, frozen=True):
    """replicator → allocator: what the file holds. `whole`: this is all of it, else the difference."""

    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    whole: bool


class PinWanted(Message, frozen=True):
    """gateway → allocator: keep the pages of this prefix, whatever the pressure. Said again to a new one.

    An empty `tokens` lets go of the pin of that name.
    """

    name: str
    salt: str
    tokens: bytes
    until: float
    """Seconds of the host's monotonic clock; the pin is gone then."""


class PinFact(Message, frozen=True):
    """allocator → gateway: so many pages of the prefix are there and pinned.

    The answer to PinWanted; also of itself, when a pin had to give way.
    """

    name: str
    pages: int
    refused: str = ""
    """Why it is not pinned, else empty."""


class PagesHeld(Message, frozen=True):
    """worker → allocator: all I hold, said to every new incarnation of the allocator.

    replicator → allocator: `leased` are the targets of all fetches that are under way, whoever wanted them;
    said to every new one, and again when a fetch ends that a former one had wanted.
    """

    leased: tuple[PageRef, ...]
    used: tuple[PageRef, ...]
    consumed: int
    identity: str = ""
    """What its keys and values depend on beside the tokens: equal ones share pages."""


class PagesDoubted(Message, frozen=True):
    """allocator → worker: the table says that these are yours; release those that you do not hold."""

    pages: tuple[PageRef, ...]


class FenceWanted(Message, frozen=True):
    """allocator → worker: from now on adopt nothing from this dead incarnation."""

    dead: Incarnation


class FencePassed(Message, frozen=True):
    """worker → allocator: I will not."""

    dead: Incarnation


class PoolFact(Message, frozen=True):
    """allocator → scheduler: how full the pool is."""

    total: int
    free: int
    """Free, or cached and held by nobody: what can be leased."""
    page_fill_s: float = 0.0
    """Seconds in which a worker here fills a page; 0: not measured."""
    page_fetch_s: float = 0.0
    """Seconds a page from another host; 0: not measured."""


class PagesCached(Message, frozen=True):
    """allocator → scheduler, where there are several hosts: the pages that are found here, by their keys."""

    added: tuple[tuple[bytes, PageRef], ...]
    removed: tuple[bytes, ...]
    whole: bool
    """This is all of them, else the difference to what was said before."""


class PageSite(Message, frozen=True):
    """replicator → replicators of other hosts: where pages of this host are given."""

    host: str
    address: str
    port: int


class ReadWanted(Message, frozen=True):
    """replicator → allocator: another host wants to read these; pin those that are there under their keys.

    A pin runs out of itself if it is not given back.
    """

    ticket: int
    pages: tuple[PageRef, ...]
    keys: tuple[bytes, ...]


class ReadGranted(Message, frozen=True):
    """allocator → replicator: whether each of them is there, and pinned."""

    ticket: int
    there: tuple[bool, ...]


class ReadEnded(Message, frozen=True):
    """replicator → allocator: nothing of that `ReadWanted` is read any more."""

    ticket: int


class PoolExhausted(Message, frozen=True):
    """allocator → scheduler: a worker starves, no lease can be recalled: somebody must give way."""

    starving: Incarnation


class NobodyGivesWay(Message, frozen=True):
    """scheduler → allocator: whoever starves is alone; only what clients have pinned could be let go of."""


class PagesSealed(Message, frozen=True):
    """worker → allocator, replicator: these will not change any more; the page table says what they hold."""

    key: SequenceKey
    term: int
    pages: tuple[PageRef, ...]


# ── one union a receiver ──────────────────────────────────────────────────────────────────────

Control: TypeAlias = Roster | Drain | Stop

ToGateway: TypeAlias = Control | Place | Preempt | TermAccepted | StepTokens | SequenceLost | PinFact
ToScheduler: TypeAlias = (
    Control | RequestFact | RequestEnded | WorkerFact | PoolFact | PoolExhausted | PagesCached
)
ToWorker: TypeAlias = (
    Control
    | StartPrefill
    | Cancel
    | HandOver
    | HandOverAccepted
    | HandOverRefused
    | LeaseGranted
    | LeaseRecall
    | PagesDoubted
    | FenceWanted
    | PrefixGranted
)
ToAllocator: TypeAlias = (
    Control
    | LeaseWanted
    | LeaseReturned
    | PagesReleased
    | PagesHeld
    | PagesSealed
    | FencePassed
    | PrefixWanted
    | PrefixFact
    | FetchEnded
    | SpillEnded
    | FileKeys
    | PinWanted
    | ReadWanted
    | ReadEnded
    | NobodyGivesWay
)
ToReplicator: TypeAlias = Control | PagesSealed | FetchWanted | SpillWanted | ReadGranted | PageSite
ToHealth: TypeAlias = Control | ProcessFacts | Suspicion
ToLauncher: TypeAlias = Hello | Ready | Drained | Roster | Kill | Join | HostFacts | HostOrder

RECEIVES: dict[ActorKind, object] = {
    "gateway": ToGateway,
    "scheduler": ToScheduler,
    "worker": ToWorker,
    "allocator": ToAllocator,
    "replicator": ToReplicator,
    "health": ToHealth,
    "launcher": ToLauncher,
}
