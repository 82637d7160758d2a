"""From tokens to text, one token at a time: never half a character, never a stop string."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Detokenizer:
    """A fold over tokens into text; O(1) amortised a token, at most three bytes held back.

    The pieces joined equal the UTF-8 decoding of the joined bytes of all tokens, where each
    maximal invalid run is one U+FFFD (Unicode 16, section 3.9, as `bytes.decode` does it).
    """

    def __init__(self, bytes_of: Callable[[int], bytes], *, drop_first_space: bool = False) -> None:
        """`bytes_of` gives a token's bytes, none for a token that is not to be shown.

        `drop_first_space`: the tokeniser put a space before the text that is not part of it.
        """
        self._bytes_of = bytes_of
        self._drop_first_space = drop_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token made certain; often one word, sometimes nothing."""
        return self._decoder.decode(self._shown(token))

    def finish(self) -> str:
        """What was held back: an incomplete character, as U+FFFD. The fold ends here."""
        return self._decoder.decode(b"", final=True)

    def _shown(self, token: int) -> bytes:
        data = self._bytes_of(token)
        if data and self._drop_first_space:
            self._drop_first_space = False
            return data.removeprefix(b" ")
        return data


class StopFilter:
    """A fold over pieces of text that ends before the first stop string, or behind it.

    The first is the one that is complete first; of several complete at the same character, the
    longest. So the outcome does not depend on how the text is cut into pieces, and the fold knows
    it as early as possible. Held back is only what may still become a stop string: fewer
    characters than the longest of them has.
    """

    def __init__(self, stops: tuple[str, ...] = (), *, show: bool = False) -> None:
        """`show`: the stop string that ends the text is part of it.

        ValueError for an empty stop string: it would end every text before it begins.
        """
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._stops = stops
        self._show = show
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._hit = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain to be shown, whether a stop string was hit now or earlier)."""
        if self._hit:
            return "", True
        text = self._held + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self._hit, self._held = True, ""
            end, start = min(ends)
            return text[: end if self._show else start], True
        certain = self._certain(text)
        self._held = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _certain(self, text: str) -> int:
        """Where the longest end of the text begins that is the beginning of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(stop.startswith(end) for stop in self._stops):
                return start
        return len(text)
