"""The worker: holds sequences and their pages, fills and decodes them, hands them on.

One core for all roles: a worker with prefill slots fills prompts, one with decode slots samples,
one with both does the two in one batch. The life of a sequence here:

    StartPrefill ─▶ PREFILL ──▶ OFFERED ── HandOverAccepted ──▶ gone, the pages are the other's
                        │          └────── HandOverRefused ───▶ gone, pages released
                        └▶ DECODE (when it decodes what it filled) ─▶ finished, pages released
    HandOver ─────────────▶ DECODE
    StartPrefill, and a sibling of its request decodes here ──▶ DECODE, on the sibling's full pages

A prompt with whole pages first asks the allocator which of them are there (`PrefixWanted`): nothing of it
is computed until the answer says that nobody else has them, or is about to.

Every page that a sequence here holds is marked in the worker's row of holders, and released exactly once:
when the last sequence here that holds it ends, whatever ended it (`engine.sharing` counts them). While a
step runs, its pages are not released: a cancelled sequence is doomed and dropped when the step returns.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, assert_never

from engine.batching import (
    BatchLimits,
    Lease,
    Plan,
    Sequence,
    adopt,
    advance_sequence,
    begin,
    chain_of,
    plan_step,
)
from engine.chain import chain_root, token_bytes
from engine.core import Send, Statistics
from engine.layout import Owner, PageTable
from engine.lifecycle import PageState, SequenceEvent, SequenceState
from engine.messages import (
    Cached,
    Cancel,
    Drain,
    FencePassed,
    FenceWanted,
    Finish,
    HandOver,
    HandOverAccepted,
    HandOverRefused,
    LeaseGranted,
    LeaseRecall,
    LeaseReturned,
    LeaseWanted,
    PagesDoubted,
    PagesHeld,
    PagesReleased,
    PagesSealed,
    PrefixFact,
    PrefixGranted,
    PrefixWanted,
    Roster,
    SequenceLost,
    StartPrefill,
    StepTokens,
    Stop,
    TermAccepted,
    TokenRow,
    WorkerFact,
)
from engine.sharing import SharedPages, sibling_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Sequence as Many

    from engine.chain import Chain
    from engine.ids import Incarnation, SequenceKey
    from engine.messages import Member, SequenceSpec, ToWorker
    from engine.sampling import TokenLogprobs
    from engine.shapes import PageRef


class WorkerLimits(NamedTuple):
    """What a worker may hold and how it batches."""

    prefill_slots: int
    decode_slots: int
    step_tokens: int
    page_tokens: int
    lease_ahead: int
    prefix_cache: bool = True
    """Ask for the pages of prompts that are there already."""


class Worker:
    """The sequences of one worker and the pages under them."""

    def __init__(
        self,
        me: Incarnation,
        ordinal: int,
        table: PageTable,
        limits: WorkerLimits,
        *,
        allocator: str = "allocator",
        replicator: str = "replicator",
        host: str = "",
    ) -> None:
        """`allocator`, `replicator`: the names of those of this worker's host."""
        self.me = me
        self.table = table
        self.limits = limits
        self.identity = ""
        """What keys and values depend on beside the tokens; set before the first sequence comes."""
        self.lease = Lease()
        self._host = host
        self._allocator = allocator
        self._replicator = replicator
        self._owner = Owner(ordinal, me.epoch)
        self._holds = table.claim(self._owner)
        self._batch = BatchLimits(limits.page_tokens, limits.decode_slots, limits.step_tokens)
        self._sequences: dict[tuple[SequenceKey, int], Sequence] = {}
        self._alive: set[Incarnation] = set()
        self._fenced: set[Incarnation] = set()
        self._lease_said: tuple[int, int, int] | None = None
        self._missing = 0
        self._running: Plan | None = None
        self._shared = SharedPages()
        self._endings: list[Send] = []
        self.steps = 0
        self.tokens_out = 0
        self.tokens_filled = 0
        self.pages_refused = 0
        self.positions_shared = 0
        self.pages_forked = 0

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def peers(self, up: Many[Member], down: Many[Incarnation], now: float) -> list[Send]:
        sends: list[Send] = []
        self._alive |= {member.incarnation for member in up}
        self._alive.difference_update(down)
        self._fenced.difference_update(down)
        for dead in down:
            sends += self._peer_lost(dead)
        for member in up:
            if member.kind == "scheduler":
                fact = WorkerFact(self.limits.prefill_slots, self.limits.decode_slots, self.identity)
                sends.append(Send(member.incarnation, fact))
            elif member.name == self._allocator:
                sends += self._introduce(member.incarnation)
        return sends

    def handle(self, source: Incarnation, message: ToWorker, now: float) -> list[Send]:
        """Take one message."""
        match message:
            case StartPrefill():
                return self._start(source, message)
            case Cancel():
                return self._cancel(message)
            case HandOver():
                return self._take_over(source, message)
            case HandOverAccepted():
                return self._passed_on(source, message)
            case HandOverRefused():
                return self._refused(source, message)
            case LeaseGranted():
                self.lease.add(message.pages)
                return []
            case LeaseRecall():
                self._lease_said = None
                ahead = self.limits.lease_ahead + self._missing
                return [self._return_leases(source, ahead, keep=self._missing)]
            case PagesDoubted():
                held = {*self.lease.held(), *self._used()}
                return self._released([page for page in message.pages if page not in held])
            case PrefixGranted():
                return self._take_prefix(message)
            case FenceWanted():
                if message.dead in self._alive:
                    self._fenced.add(message.dead)
                return [*self._peer_lost(message.dead), Send(source, FencePassed(message.dead))]
            case Roster() | Drain() | Stop():
                return []
            case _:
                assert_never(message)

    # ── steps ─────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> tuple[Plan | None, list[Send]]:
        """The next step, or None when there is nothing to compute; and the leases to ask for."""
        assert self._running is None, "a step is running"
        if not self._sequences:
            return None, self._go_idle()
        oldest_first = sorted(self._sequences.values(), key=lambda s: (s.spec.arrival, s.key))
        plan = plan_step(oldest_first, self.lease, self.table, self._batch, self._holds)
        self._missing = plan.missing
        sends = self._want_leases(plan.missing)
        if not plan.slices:
            return None, sends
        for piece in plan.slices:
            piece.sequence.running = True
        for fork in plan.forks:
            # Its page is read by the step.
            fork.sibling.running = True
        self.pages_forked += len(plan.forks)
        self._running = plan
        return plan, sends

    def complete(
        self,
        plan: Plan,
        tokens: Iterable[int],
        now: float,
        logprobs: Iterable[TokenLogprobs | None] = (),
        checksums: Mapping[int, int] | None = None,
    ) -> list[Send]:
        """Take the step's tokens, one for each slice that samples, in order; −1 is a row at fault.

        `logprobs` are empty or as many, for the sequences that ask for them. `checksums` are of the bytes of
        the pages that are full now, by their indexes.
        """
        assert plan is self._running, "not the step that is running"
        self._running = None
        self.steps += 1
        sampled = zip_longest(tokens, logprobs)
        sends: list[Send] = []
        rows: dict[Incarnation, list[TokenRow]] = {}
        released: list[PageRef] = []
        for piece in plan.slices:
            sequence = piece.sequence
            sequence.running = False
            token, scored = next(sampled) if piece.samples else (None, None)
            sealed = advance_sequence(piece, self.table, checksums or {})
            self.tokens_filled += piece.length
            if sealed:
                # Also of what is dropped now: somebody may wait for these, or come for them later.
                news = PagesSealed(sequence.key, sequence.term, tuple(sealed))
                sends += [Send(self._allocator, news), Send(self._replicator, news)]
            if sequence.doomed:
                released += self._drop(sequence)
                continue
            if token is not None:
                row = self._commit(sequence, token, scored)
                if row is None:
                    released += self._drop(sequence)
                    detail = "the model gave no finite logit that is allowed"
                    lost = SequenceLost(sequence.key, sequence.term, "fault", detail)
                    sends.append(Send(sequence.spec.gateway, lost))
                    continue
                rows.setdefault(sequence.spec.gateway, []).append(row)
                if row.finish is not None:
                    released += self._drop(sequence)
            elif sequence.state is SequenceState.PREFILL and sequence.computed == sequence.end:
                sends += self._offer(sequence)
        for sibling in (fork.sibling for fork in plan.forks if fork.sibling.running):
            sibling.running = False
            if sibling.doomed:
                released += self._drop(sibling)
        sends += [Send(gateway, StepTokens(tuple(batch))) for gateway, batch in rows.items()]
        return sends + self._released(released)

    def _commit(self, sequence: Sequence, token: int, scored: TokenLogprobs | None) -> TokenRow | None:
        if token < 0:
            return None
        sequence.log.append(token)
        self.tokens_out += 1
        finish: Finish | None = None
        if token in sequence.spec.stop_tokens:
            finish = "stop"
        elif len(sequence.log) >= sequence.spec.limit:
            finish = "length"
        return TokenRow(sequence.key, sequence.term, len(sequence.log) - 1, token, finish, scored)

    # ── sequences come and go ─────────────────────────────────────────────────────────────────

    def _start(self, source: Incarnation, message: StartPrefill) -> list[Send]:
        spec = message.spec
        if any(known.term >= message.term for known in self._terms_of(spec.key)):
            return []
        sends = self._give_up_older(spec.key, message.term)
        shared = None
        if message.decode == self.me:
            shared = sibling_pages(spec, self._sequences.values(), self.limits.page_tokens)
        if shared is None and self.limits.prefill_slots == 0:
            detail = f"{self.me} has no prefill slots"
            return [*sends, Send(source, SequenceLost(spec.key, message.term, "refused", detail))]
        pages = shared or ()
        filled = len(pages) * self.limits.page_tokens
        chain = self._chain(spec, filled)
        sequence = begin(spec, message.term, message.decode, chain, filled, pages)
        self._sequences[spec.key, message.term] = sequence
        sequence.forks = shared is not None
        self._hold(pages)
        self.positions_shared += filled
        if self.limits.prefix_cache and shared is None and self._whole_pages(sequence):
            sequence.seeks = True
            return [*sends, self._want_prefix(sequence, message.elsewhere, message.elsewhere_pages)]
        return [*sends, *self._offer_if_short(sequence, shares=shared is not None)]

    def _offer_if_short(self, sequence: Sequence, *, shares: bool) -> list[Send]:
        """What shared pages leave to fill goes with the first sampled row, if it is less than a page.

        Where it is more it is filled in its turn like a prompt.
        """
        at_once = self.limits.page_tokens if shares else 1
        return self._offer(sequence) if sequence.behind < at_once else []

    def _root(self, spec: SequenceSpec) -> bytes:
        return chain_root(self.identity, spec.cache_salt)

    def _chain(self, spec: SequenceSpec, filled: int) -> Chain:
        """Of the full pages of a log, of which so many positions are filled."""
        return chain_of(self._root(spec), spec.log, filled, self.limits.page_tokens)

    def _whole_pages(self, sequence: Sequence) -> int:
        """Full pages of a log that others could have: its last token is always computed."""
        return (len(sequence.spec.log) - 1) // self.limits.page_tokens

    def _want_prefix(
        self, sequence: Sequence, elsewhere: str = "", elsewhere_pages: tuple[PageRef, ...] = ()
    ) -> Send:
        """Ask for its pages, or, when it does not seek, say that it fills them."""
        sequence.known, sequence.taken = True, 0
        tokens = token_bytes(sequence.spec.log[: self._whole_pages(sequence) * self.limits.page_tokens])
        have = sequence.computed // self.limits.page_tokens
        wanted = PrefixWanted(
            sequence.key,
            sequence.term,
            self._root(sequence.spec),
            tokens,
            have,
            sequence.seeks,
            elsewhere,
            elsewhere_pages,
        )
        return Send(self._allocator, wanted)

    def _take_prefix(self, message: PrefixGranted) -> list[Send]:
        sequence = self._sequences.get((message.key, message.term))
        if sequence is None or not sequence.seeks:
            # It was dropped meanwhile, and the allocator will hear of it.
            return []
        if not all(map(self.table.is_current, message.pages)):
            # Whoever granted them thinks by now that we are dead, or is dead: it fills all itself.
            message = PrefixGranted(message.key, message.term, (), Cached(), False)
        self._hold(message.pages)
        sequence.pages += message.pages
        sequence.computed = len(sequence.pages) * self.limits.page_tokens
        sequence.taken += len(message.pages)
        if sequence.state is SequenceState.PREFILL:
            # What was handed over is not found: it was filled for this very request.
            sequence.cached = sequence.cached.plus(message.cached)
        sequence.seeks = message.more
        taken = Send(self._allocator, PrefixFact(sequence.key, sequence.term, sequence.taken, True))
        if sequence.seeks:
            return [taken]
        sequence.chain = self._chain(sequence.spec, sequence.computed)
        if sequence.state is SequenceState.DECODE:
            return [taken, *self._end_filling(sequence)]
        return [taken, *self._offer_if_short(sequence, shares=bool(sequence.pages))]

    def _end_filling(self, sequence: Sequence) -> list[Send]:
        """It fills nothing any more: who waits for it shall not."""
        if not sequence.known:
            return []
        sequence.known = sequence.seeks = False
        return [Send(self._allocator, PrefixFact(sequence.key, sequence.term, sequence.taken, False))]

    def _offer(self, sequence: Sequence) -> list[Send]:
        """The prefill is done: decode it here, or offer it to the worker that will."""
        ended = self._end_filling(sequence)
        return [*ended, *self._hand_over(sequence)]

    def _hand_over(self, sequence: Sequence) -> list[Send]:
        if sequence.decode == self.me:
            sequence.move(SequenceEvent.ADOPT)
            del self._sequences[sequence.key, sequence.term]
            sequence.term += 1
            self._sequences[sequence.key, sequence.term] = sequence
            accepted = TermAccepted(sequence.key, sequence.term, sequence.cached)
            return [Send(sequence.spec.gateway, accepted)]
        if sequence.decode not in self._alive or sequence.decode in self._fenced:
            # Dead, or too new for this worker's roster: only the gateway can tell.
            detail = f"{sequence.decode} is not known here"
            lost = SequenceLost(sequence.key, sequence.term, "refused", detail)
            return [*self._give_up(sequence), Send(sequence.spec.gateway, lost)]
        sequence.move(SequenceEvent.OFFER)
        message = HandOver(
            sequence.term + 1,
            sequence.spec,
            sequence.computed,
            tuple(sequence.pages),
            sequence.cached,
            self._host,
        )
        return [Send(sequence.decode, message)]

    def _take_over(self, source: Incarnation, message: HandOver) -> list[Send]:
        spec = message.spec
        if source in self._fenced or source not in self._alive:
            return []
        reason = self._why_not(source, message)
        if reason is not None:
            self.pages_refused += 1
            return [Send(source, HandOverRefused(spec.key, message.term, reason))]
        sends = self._give_up_older(spec.key, message.term)
        accepted = [
            Send(source, HandOverAccepted(spec.key, message.term)),
            Send(spec.gateway, TermAccepted(spec.key, message.term, message.cached)),
        ]
        if message.host != self._host:
            return [*sends, *accepted, *self._take_copies(message)]
        # Held before the other side lets go; what is sealed needs no owner.
        self._hold(message.pages)
        for page in message.pages:
            if self.table.state(page.index) is PageState.OPEN:
                self.table.adopt(page.index, self._owner, message.term)
        chain = self._chain(spec, message.filled)
        sequence = adopt(spec, message.term, self.me, chain, message.filled, message.pages)
        sequence.cached = message.cached
        self._sequences[spec.key, message.term] = sequence
        return [*sends, *accepted]

    def _take_copies(self, message: HandOver) -> list[Send]:
        """Take over what was filled on another host: full pages are fetched, like a prefix that is there.

        What is not fetched is computed: less than a page, or all of it when that host is gone.
        """
        spec = message.spec
        sequence = adopt(spec, message.term, self.me, self._chain(spec, 0), 0, ())
        sequence.cached = message.cached
        self._sequences[spec.key, message.term] = sequence
        if not self._whole_pages(sequence):
            return []
        sequence.seeks = True
        full = message.pages[: message.filled // self.limits.page_tokens]
        return [self._want_prefix(sequence, message.host, full)]

    def _why_not(self, source: Incarnation, message: HandOver) -> str | None:
        spec = message.spec
        if spec.gateway not in self._alive:
            return f"its gateway {spec.gateway} is gone"
        if any(known.term >= message.term for known in self._terms_of(spec.key)):
            return f"term {message.term} of it, or a later one, is here already"
        if self.limits.decode_slots == 0:
            return f"{self.me} has no decode slots"
        if len(message.pages) != -(-message.filled // self.limits.page_tokens):
            return f"{len(message.pages)} pages for {message.filled} positions"
        for page in message.pages if message.host == self._host else ():
            stale = not self.table.is_current(page)
            if stale or self.table.state(page.index) not in (PageState.OPEN, PageState.SEALED):
                return f"page {page.index} is not in generation {page.generation} any more"
        return None

    def _passed_on(self, source: Incarnation, message: HandOverAccepted) -> list[Send]:
        sequence = self._offered_to(source, message.key, message.term)
        if sequence is None:
            return []
        sequence.move(SequenceEvent.PASS_ON)
        del self._sequences[sequence.key, sequence.term]
        # The tail is the other's to release. But it was marked here too: let go of meanwhile, it
        # was still held. So it is told of, even if it was freed and filled anew, and is another page.
        pages = self._let_go(sequence.pages)
        sealed = [page.index for page in pages if self.table.state(page.index) is PageState.SEALED]
        return self._released([*map(self.table.ref, sealed), *filter(self._may_write, pages)])

    def _may_write(self, page: PageRef) -> bool:
        """It is open and ours, as is a tail that was handed over to another host: nobody adopts it there."""
        opened = self.table.is_current(page) and self.table.state(page.index) is PageState.OPEN
        return opened and self.table.owner(page.index) == self._owner

    def _refused(self, source: Incarnation, message: HandOverRefused) -> list[Send]:
        sequence = self._offered_to(source, message.key, message.term)
        if sequence is None:
            return []
        return [
            *self._released(self._drop(sequence)),
            Send(sequence.spec.gateway, SequenceLost(message.key, sequence.term, "refused", message.reason)),
        ]

    def _offered_to(self, source: Incarnation, key: SequenceKey, term: int) -> Sequence | None:
        sequence = self._sequences.get((key, term - 1))
        if sequence is None or sequence.state is not SequenceState.OFFERED or sequence.decode != source:
            return None
        return sequence

    def _cancel(self, message: Cancel) -> list[Send]:
        return self._give_up_older(message.key, message.term + 1)

    def _terms_of(self, key: SequenceKey) -> list[Sequence]:
        """What is here of one choice: its present term, and older ones that are not rid of yet."""
        return [sequence for sequence in self._sequences.values() if sequence.key == key]

    def _give_up_older(self, key: SequenceKey, term: int) -> list[Send]:
        """Give up whatever is here of a choice in a term below the given one."""
        return [send for known in self._terms_of(key) if known.term < term for send in self._give_up(known)]

    def _peer_lost(self, dead: Incarnation) -> list[Send]:
        """Drop what a dead gateway owned and what was offered to a dead decode worker."""
        sends: list[Send] = []
        for sequence in list(self._sequences.values()):
            if sequence.spec.gateway == dead:
                sends += self._give_up(sequence)
            elif sequence.state is SequenceState.OFFERED and sequence.decode == dead:
                sends += self._released(self._drop(sequence))
        return sends

    def _give_up(self, sequence: Sequence) -> list[Send]:
        """Drop a sequence now, or, while its pages are in use, as soon as they are not.

        An offered sequence stays until the other side has answered, since the other side may
        have taken the pages already; if it has, the gateway cancels it there.
        """
        if sequence.state is SequenceState.OFFERED and sequence.decode in self._alive:
            return []
        if sequence.running:
            sequence.doomed = True
            return []
        return self._released(self._drop(sequence))

    def _drop(self, sequence: Sequence) -> list[PageRef]:
        """End a sequence here; returns its pages that no sibling holds."""
        sequence.move(SequenceEvent.DROP)
        del self._sequences[sequence.key, sequence.term]
        self._endings += self._end_filling(sequence)
        pages, sequence.pages = sequence.pages, []
        unheld = self._let_go(pages)
        if not unheld:
            # The allocator may wait for what this one gives back: it hears that it was nothing.
            self._lease_said = None
        return unheld

    # ── pages ─────────────────────────────────────────────────────────────────────────────────

    def _used(self) -> tuple[PageRef, ...]:
        """Every page under a sequence, once."""
        return tuple({page: None for sequence in self._sequences.values() for page in sequence.pages})

    def _hold(self, pages: Iterable[PageRef]) -> None:
        """One more sequence here has these in its block table."""
        for page in pages:
            if self._holds[page.index]:
                self._shared.share([page])
            else:
                self._holds[page.index] = 1

    def _let_go(self, pages: Iterable[PageRef]) -> list[PageRef]:
        """A sequence here has these no more; returns those that none has now."""
        unheld = self._shared.let_go(pages)
        for page in unheld:
            self._holds[page.index] = 0
        return unheld

    def _released(self, pages: list[PageRef]) -> list[Send]:
        """What the allocator hears of dropped sequences: they are not filled, nor their pages held."""
        endings, self._endings = self._endings, []
        return [*endings, Send(self._allocator, PagesReleased(tuple(pages)))] if pages else endings

    def _introduce(self, allocator: Incarnation) -> list[Send]:
        self._lease_said = None
        held = PagesHeld(self.lease.held(), self._used(), self.lease.consumed, self.identity)
        return [
            Send(allocator, held),
            *(self._want_prefix(sequence) for sequence in self._sequences.values() if sequence.known),
            *(self._want_leases(self._missing) if self._sequences else ()),
        ]

    def _go_idle(self) -> list[Send]:
        """Hold no page and want none while there is nothing to do."""
        self._missing = 0
        said, sends = self._lease_said, []
        if len(self.lease):
            sends = [self._return_leases(self._allocator, 0, keep=0)]
        elif said != (self.lease.consumed, 0, 0):
            sends = [Send(self._allocator, LeaseWanted(self.lease.consumed, 0, 0))]
        self._lease_said = (self.lease.consumed, 0, 0)
        return sends

    def _return_leases(self, allocator: str | Incarnation, ahead: int, keep: int) -> Send:
        pages = self.lease.give_back(keep)
        return Send(allocator, LeaseReturned(pages, self.lease.consumed, ahead))

    def _want_leases(self, missing: int) -> list[Send]:
        said = (self.lease.consumed, self.limits.lease_ahead + missing, missing)
        if said == self._lease_said:
            return []
        self._lease_said = said
        return [Send(self._allocator, LeaseWanted(*said))]

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    @property
    def sequences(self) -> Many[Sequence]:
        """What the worker holds now."""
        return tuple(self._sequences.values())

    def check(self) -> None:
        self._shared.check([sequence.pages for sequence in self._sequences.values()], self.table)
        held = [*self._used(), *self.lease.held()]
        assert len(held) == len(set(held)), "a lease is in use"
        marked = {page for page, holds in enumerate(self._holds) if holds}
        assert marked == {page.index for page in self._used()}, "the row of holders is not what is held"
        assert not self._endings
        for (key, term), sequence in self._sequences.items():
            assert (key, term) == (sequence.key, sequence.term)
            assert not sequence.seeks or sequence.known
            assert not sequence.known or sequence.seeks or sequence.state is SequenceState.PREFILL
            assert sequence.seeks or sequence.chain.pages == sequence.computed // self.limits.page_tokens
            assert sequence.state is not SequenceState.GONE
            assert 0 <= sequence.computed <= len(sequence.log)
            assert sequence.running or len(sequence.pages) * self.limits.page_tokens >= sequence.computed
            assert not sequence.doomed or sequence.running
            for page in sequence.pages:
                # What is offered may have been taken, and even freed, before we hear of it.
                offered = sequence.state is SequenceState.OFFERED
                assert offered or self.table.is_current(page), f"{key} holds a stale page {page}"

    def statistics(self) -> Statistics:
        states = [sequence.state for sequence in self._sequences.values()]
        return {
            "sequences": len(states),
            "sequences_prefill": states.count(SequenceState.PREFILL),
            "sequences_offered": states.count(SequenceState.OFFERED),
            "sequences_decode": states.count(SequenceState.DECODE),
            "pages_leased": len(self.lease),
            "pages_used": len(self._used()),
            "pages_shared": len(self._shared),
            "steps": self.steps,
            "tokens_filled": self.tokens_filled,
            "positions_shared": self.positions_shared,
            "pages_forked": self.pages_forked,
            "tokens_out": self.tokens_out,
            "hand_overs_refused": self.pages_refused,
        }
