"""From the bytes of a body to what it says, or to an error that names the parameter that is wrong."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, TypeVar, get_args

import msgspec

from actors.doors.openai_error import ApiError
from actors.doors.openai_request import Role

if TYPE_CHECKING:
    from collections.abc import Callable

_Sent = TypeVar("_Sent")
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<field>.*)`$", re.DOTALL)


def decode_body(decode: Callable[[bytes], _Sent], body: bytes) -> _Sent:
    """Decode a body by msgspec; ApiError when it is none."""
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except RecursionError:
        raise _unreadable("nested too deeply") from None
    except msgspec.DecodeError as error:
        raise _unreadable(_why(body, str(error))) from None


def _unreadable(what: str) -> ApiError:
    return ApiError(400, f"The body is not a JSON object that could be read: {what}.")


def _why(body: bytes, what: str) -> str:
    """What is wrong with a body, where msgspec calls it truncated and it is not."""
    if not body.strip():
        return "it is empty"
    if "truncated" in what:
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(body)
            return "an escape from \\ud800 to \\udfff, half of a surrogate pair, lacks the other half"
    return what


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """Turn msgspec's message, which ends in a JSON path, into an error that names the parameter."""
    found = _WHERE.match(str(error))
    what, path = (found["what"], found["path"] or "") if found else (str(error), "")
    code = None
    if field := _FIELD.match(what):
        path = f"{path}.{field['field']}" if path else field["field"]
        if "unknown" in what:
            code, what = "unknown_parameter", "this parameter is not known here"
        else:
            code, what = "missing_required_parameter", "it is required"
    if what.startswith("Invalid enum value"):
        # The two fields that have such: a message's role, and the type of a piece of its content.
        names = get_args(Role) if path.endswith("role") else ("text",)
        what = f"{what.removeprefix('Invalid enum value ')} is none of {', '.join(names)}"
    what = what if len(what) <= 300 else f"{what[:300]}…"
    # The values of a map have no better path than [...].
    param = path.removesuffix("[...]")[:200]
    if not param:
        return ApiError(400, f"The body is not such a request: {what}.")
    return ApiError(400, f"{param!r} is not valid: {what}.", param=param, code=code)
