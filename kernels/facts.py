"""What a model file says of itself, read with its type and range checked: every refusal names the key."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any, TypeVar

from engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Value = TypeVar("Value")

MAX_SHOWN = 80
MAX_LAYERS = 1 << 12
MAX_JSON_BYTES = 100_000_000
"""The largest tokenizer.json in use has 40 MB."""


def shown(value: object) -> str:
    """A name or value from a file as it may stand in a one-line message: quoted, and not too long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_SHOWN else repr(value[:MAX_SHOWN]) + "…"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def read_small_file(path: Path) -> bytes:
    """The bytes of a file that describes a model; ModelError when it is absent or absurdly long."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise ModelError(f"{path}: not a regular file; fetch it again")
        if facts.st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: {facts.st_size} bytes are too many; fetch it again")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}; fetch it again") from None


class Facts:
    """Keys and values of one file. A value of None counts as absent."""

    def __init__(self, path: Path, values: Mapping[str, Any], *, kind: str = "", prefix: str = "") -> None:
        """`kind` stands before keys in messages, `prefix` before keys that have no namespace of their own."""
        self.path = path
        self._values = values
        self._kind = kind
        self._prefix = prefix

    @classmethod
    def read_json(cls, path: Path) -> Facts:
        """Of a file that holds one JSON object; ModelError when it does not."""
        try:
            values = json.loads(read_small_file(path))
            json.dumps(values, ensure_ascii=False).encode()  # half a surrogate is no text to anybody else
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}: not JSON: {error}; fetch it again") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path}: not a JSON object; fetch it again")
        return cls(path, values)

    def wrong(self, reason: str) -> ModelError:
        """The error to raise for a model that is whole but cannot be served."""
        return ModelError(f"{self.path}: {reason}; take another model")

    def name(self, key: str) -> str:
        """The key as the file spells it."""
        return key if key.startswith(("general.", "tokenizer.")) else f"{self._prefix}{key}"

    def get(self, key: str) -> Any:
        """The value as it is, or None."""
        return self._values.get(self.name(key))

    def text(self, key: str, default: str | None = None) -> str:
        """A string; ModelError when it is another type, or absent without a default."""
        return self._typed(key, str, default)

    def table(self, key: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
        """A JSON object; ModelError when it is another type, or absent without a default."""
        return self._typed(key, dict, default)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value; ModelError when it is another type."""
        return self._typed(key, bool, default)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to 2³¹ − 1; ModelError when it is none, or absent without a default."""
        value = self._typed(key, int, default)
        if not 1 <= value < 1 << 31:
            raise self._refused(key, value)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A float32 above 0, given as either kind of number; ModelError when it is none, or absent."""
        whole = type(self.get(key)) is int
        value = self._typed(key, int) if whole else self._typed(key, float, default)
        if not 0 < value < 1e38:
            raise self._refused(key, value)
        return float(value)

    def token(self, key: str, vocab_size: int) -> int | None:
        """A token id, None when absent; ModelError when it lies outside the vocabulary."""
        return None if self.get(key) is None else self.one_token(key, self.get(key), vocab_size)

    def one_token(self, key: str, value: object, vocab_size: int) -> int:
        """`value`, found at `key`, as a token id; ModelError when it is none of the vocabulary's."""
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self.wrong(
                f"{self._kind}{self.name(key)} is {shown(value)}, outside the vocabulary of {vocab_size}"
            )
        return value

    def refuse_unless(self, key: str, neutral: tuple[object, ...]) -> None:
        """ModelError when the key has none of the `neutral` values: to ignore it would be wrong."""
        value = self.get(key)
        if value is not None and value not in neutral:
            raise self.wrong(
                f"{self._kind}{self.name(key)} is {shown(value)}: such models are not served yet"
            )

    def layers(self, key: str) -> int:
        """The number of layers; ModelError when it is no count, or absurd."""
        layers = self.count(key)
        if layers > MAX_LAYERS:
            raise self.wrong(f"{layers} layers")
        return layers

    def check_heads(self, heads: int, kv_heads: int, head_dim: int) -> None:
        """ModelError when these contradict each other."""
        if head_dim % 2 or heads % kv_heads:
            raise self.wrong(
                f"{heads} heads of {head_dim}, {kv_heads} for keys and values, do not go together"
            )

    def _refused(self, key: str, value: object) -> ModelError:
        return self.wrong(f"{self._kind}{self.name(key)} is {shown(value)}")

    def _typed(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.wrong(f"{self._kind}{self.name(key)} is missing")
        if type(value) is not kind:
            raise self.wrong(f"{self._kind}{self.name(key)} is {shown(value)}, not {kind.__name__}")
        return value
