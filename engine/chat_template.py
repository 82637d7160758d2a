"""A model's chat template: from messages to the text of a prompt.

Templates are Jinja programs that come with the model and are written for the environment that
Hugging Face's `apply_chat_template` gives them; this is that environment, sandboxed.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2.parser import Parser


class TemplateError(ValueError):
    """The messages do not fit the chat template, or the model has none: one line for the caller."""


class ChatTemplate:
    """A compiled chat template. Rendering is pure: the time comes in as an argument."""

    def __init__(self, source: str, variables: dict[str, object]) -> None:
        """`variables` are visible to the template, as `bos_token` is. TemplateError on bad syntax."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._variables = variables
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {_one_line(error)}") from None

    def render(self, messages: list[dict[str, object]], *, now: str | None, **kwargs: object) -> str:
        """The prompt's text.

        `now` is an ISO 8601 time, for templates that mention the date; `kwargs` are further
        variables (`tools`, `enable_thinking`, …). TemplateError when the template refuses.
        """
        variables: dict[str, object] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._variables,
            **kwargs,
            "messages": messages,
            "strftime_now": _clock(now),
        }
        try:
            return self._template.render(variables)
        except TemplateError:
            raise
        # A template is a program: it may also fail by adding a number to a text, or by recursion.
        except (
            JinjaError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
            AttributeError,
        ) as error:
            raise TemplateError(f"chat template: {_one_line(error)}") from None


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; to us it is its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it as an instance's)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _clock(now: str | None) -> Any:
    def strftime_now(form: str) -> str:
        if now is None:
            raise TemplateError("this chat template mentions the date, and no time was given")
        return datetime.fromisoformat(now).strftime(form)

    return strftime_now


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: Jinja's own filter would escape `<` and `'`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(_one_line(message))


def _one_line(message: object) -> str:
    return " ".join(str(message).split()) or "failed"
