"""One choice of an open request, as its gateway follows it: what was committed, what is to be read."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import structlog
import trio

from actors.sessions import Delta, DeltaToken, Diverged, End
from engine.detokenizer import StopFilter
from engine.ids import request_name
from engine.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from actors.metrics import RequestMetrics
    from actors.sessions import FinishReason, Generation
    from engine.ids import SequenceKey
    from engine.messages import Cached
    from engine.model import ModelConfig
    from engine.sampling import TokenLogprobs
    from engine.text import TextCodec
    from engine.transcript import Position

log = structlog.get_logger()

GAP_S = 1.0
"""A pause between two tokens of a stream that is worth a line in the log."""


class Fold:
    """How the log of a request's choice becomes text: makes a new transcript whenever one is needed."""

    def __init__(self, generation: Generation, text: TextCodec, model: ModelConfig) -> None:
        self._generation = generation
        self._text = text
        eos = () if generation.ignore_eos else model.eos_tokens
        self._hidden = frozenset((*eos, *(() if generation.show_stop else generation.stop_tokens)))

    def begin(self) -> Transcript:
        """A transcript of nothing."""
        generation = self._generation
        return Transcript(
            self._text.detokenizer(),
            StopFilter(generation.stop, show=generation.show_stop),
            self._hidden,
            min_tokens=generation.min_tokens,
        )


class Choice:
    """Folds committed tokens into text, and holds what its reader has not taken yet.

    That is one string and one list of tokens, so a slow reader costs the length of its answer and no
    more. The tokens of a resumable request are kept, because a reader who comes back has its text
    folded again from the beginning.
    """

    def __init__(
        self,
        key: SequenceKey,
        generation: Generation,
        fold: Fold,
        metrics: RequestMetrics,
        wake: Callable[[], None],
        opened: float,
        *,
        logs_tokens: bool,
    ) -> None:
        """`wake` is called when there is something to read; `opened`: when the request was admitted."""
        self.key = key
        self.end: End | None = None
        self._generation = generation
        self._fold = fold
        self._transcript = fold.begin()
        self._wake = wake
        self._tells_tokens = generation.token_ids or generation.logprobs is not None
        self._tokens = array("I")
        self._logprobs: list[TokenLogprobs | None] = []
        self._text = ""
        self._told: list[DeltaToken] = []
        self._end_read = False
        self._flushed = False
        self._opened = opened
        self._last_token = trio.current_time()
        self._resuming = False
        self._strangers = ""
        self._placed = False
        self._cached: Cached | None = None
        self._metrics = metrics
        self._logs_tokens = logs_tokens
        self._bound = {"request_id": request_name(key.request)}
        if generation.n > 1:
            self._bound["choice"] = str(key.choice)

    # ── called by the gateway ─────────────────────────────────────────────────────────────────

    def placed(self) -> None:
        """It got a place; the first time ends the queueing that is measured."""
        if not self._placed:
            self._placed = True
            self._metrics.queue_time.observe(trio.current_time() - self._opened)

    def handed_over(self, cached: Cached | None) -> None:
        """A decode worker has it: if it had tokens before, the next one ends a pause worth telling.

        `cached`: what of its prompt was found, as its ledger has it.
        """
        self._resuming = self._transcript.tokens > 0
        self._cached = cached

    def placement_refused(self, strangers: str) -> None:
        """It was placed on workers that this gateway does not know: told once, though tried many times.

        Rosters reach the scheduler and the gateway one after the other, when a worker comes or dies.
        """
        if strangers != self._strangers:
            self._strangers = strangers
            log.info("placement_refused", **self._bound, strangers=strangers)

    def replay(self, tokens: Iterable[int]) -> bool:
        """Take the tokens that an earlier gateway committed; True when a stop string ended them."""
        for token in tokens:
            self._take(token, None)
            if self._transcript.hit:
                break
        return self._transcript.hit

    def push(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Take a committed token; True when a stop string was hit."""
        now = trio.current_time()
        if self._transcript.tokens == 0:
            seconds = now - self._opened
            # The prompt of a request is processed once, whatever the number of its choices.
            prompt = len(self._generation.prompt) if self.key.choice == 0 else 0
            self._metrics.first_token(seconds, prompt, self._cached)
            log.info("first_token_committed", **self._bound, seconds=round(seconds, 4))
        else:
            gap = now - self._last_token
            self._metrics.inter_token.observe(gap)
            if self._resuming or gap > GAP_S:
                event = "stream_resumed" if self._resuming else "token_gap_seen"
                log.info(event, **self._bound, after=self._transcript.tokens, seconds=round(gap, 4))
        self._resuming = False
        self._last_token = now
        self._take(token, logprobs)
        if self._logs_tokens:
            log.debug("token_committed", **self._bound, number=self._transcript.tokens)
        if self._text or self._told:
            self._wake()
        return self._transcript.hit

    def _take(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self._text += self._transcript.push(token)
        if self._tells_tokens:
            # A stop token comes once, as the last one.
            shown = None if self._transcript.hides(token) else logprobs
            self._told.append(DeltaToken(token, shown))
        if self._generation.resumable:
            self._tokens.append(token)
            if self._generation.logprobs is not None:
                self._logprobs.append(logprobs)

    def finish(self, reason: FinishReason, error: str | None = None, *, flush: bool = True) -> None:
        """The terminal event; `flush` shows what was held back in case it became a stop string."""
        if self.end is not None:
            return
        if flush:
            self._flushed = True
            self._text += self._transcript.flush()
        prompt, tokens = len(self._generation.prompt), self._transcript.tokens
        cached = self._cached if self.key.choice == 0 else None
        self.end = End(reason, prompt, tokens, error, self.key.choice, cached)
        self._wake()
        seconds = trio.current_time() - self._opened
        self._metrics.ended(reason, seconds)
        log.info(
            "request_ended",
            **self._bound,
            reason=reason,
            error=error,
            prompt_tokens=prompt,
            **({} if cached is None else {"cached_tokens": cached.tokens}),
            completion_tokens=tokens,
            seconds=round(seconds, 4),
        )

    # ── called by its reader ──────────────────────────────────────────────────────────────────

    def read(self) -> Delta | End | None:
        """What is new since the last time, the end once, or None."""
        if self._text or self._told:
            text, self._text = self._text, ""
            tokens, self._told = tuple(self._told), []
            tail = self._transcript.tail if self._generation.resumable else ""
            return Delta(text, tokens, self.key.choice, self._transcript.sequence, tail)
        if self.end is not None and not self._end_read:
            self._end_read = True
            return self.end
        return None

    def rewind(self, position: Position | None) -> Callable[[], None]:
        """What makes the next `read` go on behind a position (None: from the beginning), or Diverged."""
        again = self._fold.begin()
        sequence = 0 if position is None else position.sequence
        if sequence > self._transcript.sequence:
            raise Diverged(f"{sequence} is more than the {self._transcript.sequence} that there are")
        fresh: list[str] = []
        told: list[DeltaToken] = []
        place = again.tail if sequence == 0 else ""
        for number, token in enumerate(self._tokens, 1):
            text = again.push(token)
            if number == sequence:
                place = again.tail
            elif number > sequence:
                fresh.append(text)
                if self._tells_tokens:
                    scored = self._logprobs[number - 1] if self._logprobs else None
                    told.append(DeltaToken(token, None if again.hides(token) else scored))
        if self._flushed:
            text = again.flush()
            if again.sequence == sequence:
                place = again.tail
            else:
                fresh.append(text)
        if position is not None and position.tail != place:
            raise Diverged(f"the text up to {sequence} is another one")

        def take() -> None:
            self._text, self._told, self._end_read = "".join(fresh), told, False

        return take
