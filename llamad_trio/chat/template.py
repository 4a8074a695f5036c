"""Chat templates: a conversation in, the prompt's text out.

A model brings its template as Jinja source written for Hugging Face's
transformers, so the environment here offers what transformers offers.  The
source came with a downloaded file and is not trusted: it runs in a sandbox, on
copies of the caller's data, and what it writes is bounded.  How long it may run
is not decided here.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, NoReturn, cast

import attrs
import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamad_trio.core.errors import ProtocolError, UnsupportedFeature

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Context

__all__ = ["ChatTemplate"]

# A KV pool holds at most 1,048,576 tokens; at 16 characters a token, far above what any
# vocabulary averages on real text, a longer prompt could not fit.
_MAX_OUTPUT_CHARS = 16 * 1024 * 1024

# `**` and `*` run inside one C call, which nothing can interrupt, so their result is bounded
# before they start.  Templates count messages: 64 bits would do.
_MAX_INT_BITS = 1024

# A template may quote the whole conversation in its error message.
_MAX_REASON_CHARS = 1000


class _Refusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what the model wrote: renders its body.

    The body keeps a scope of its own, as in transformers: what it sets does not leak out.
    """

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, which also refuses to multiply small values into huge ones."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        match operator, left, right:
            case "*", Sized(), int():
                fits = len(left) * right <= _MAX_OUTPUT_CHARS
            case "*", int(), Sized():
                fits = left * len(right) <= _MAX_OUTPUT_CHARS
            case "*", int(), int():
                fits = left.bit_length() + right.bit_length() <= _MAX_INT_BITS
            case "**", int(), int():
                fits = left.bit_length() * right <= _MAX_INT_BITS
            case _:
                fits = True
        if not fits:
            raise OverflowError(f"the result of {operator!r} is too large")
        result: object = super().call_binop(context, operator, left, right)
        return result


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(fmt: str) -> str:
    return dt.datetime.now().strftime(fmt)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML, which a model has never seen.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _build_environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    return environment


# Shared by all templates and threads: Jinja's environments are safe to share once they are set up.
_ENVIRONMENT = _build_environment()
_GLOBALS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


@attrs.frozen
class ChatTemplate:
    """A model's chat template, compiled once.

    `bos_token` and `eos_token` are the texts of the model's special tokens.  A
    template that wants the first one in the prompt writes it itself, so a
    rendered prompt that begins with it must not be given another.

    Raises `UnsupportedFeature` when the source does not compile.
    """

    source: str = attrs.field(repr=False)
    bos_token: str = attrs.field(kw_only=True)
    eos_token: str = attrs.field(kw_only=True)
    _compiled: jinja2.Template = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        try:
            compiled = _ENVIRONMENT.from_string(self.source, globals=_GLOBALS)
        except Exception as error:
            raise UnsupportedFeature("chat template", _describe(error)) from error
        object.__setattr__(self, "_compiled", compiled)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Return the prompt for `messages`.

        With `add_generation_prompt` the prompt ends where the assistant's
        answer begins.  `variables` are what else this template reads
        (`tools`, `documents`, `enable_thinking`, …); messages and variables
        are data as JSON has it, and the template sees copies.

        Synchronous and free of shared state: any number of threads may render
        at the same time.

        Raises `ProtocolError` when the template refuses the messages (a role
        it does not know, roles that do not alternate), with the template's own
        words; when it fails on them; and when the prompt grows beyond 16 Mi
        characters.
        """
        try:
            context = {
                # Templates written for transformers count on these two being there, if only as
                # none: `tools is not none` is true of an undefined name.
                "tools": None,
                "documents": None,
                "bos_token": self.bos_token,
                "eos_token": self.eos_token,
                **{name: _plain(value, name) for name, value in variables.items()},
                "messages": _plain(messages, "messages"),
                "add_generation_prompt": add_generation_prompt,
            }
            return _join_bounded(self._compiled.generate(context))
        except ProtocolError:
            raise
        except _Refusal as refusal:
            raise ProtocolError(
                f"the chat template refused the messages: {_describe(refusal)}"
            ) from refusal
        except Exception as error:
            raise ProtocolError(f"the chat template failed: {_describe(error)}") from error


def _join_bounded(chunks: Iterable[str]) -> str:
    """Join what a template writes, and stop it when that is too much."""
    written: list[str] = []
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > _MAX_OUTPUT_CHARS:
            raise ProtocolError(f"the chat template wrote more than {_MAX_OUTPUT_CHARS} characters")
        written.append(chunk)
    return "".join(written)


def _plain(value: object, where: str) -> object:
    """Copy `value` into the built-in types of JSON; `where` names it in an error.

    The sandbox forbids `messages.append`, not `dict.update(messages[0], …)`:
    only a copy keeps the caller's data safe.  It also hides whatever else the
    caller's own types would let a template call.
    """
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            # The text of a subclass, whatever its own __str__ makes of it (enums, Markup).
            return str.__str__(value)
        case Mapping():
            mapping = cast("Mapping[object, object]", value)
            return {_plain_key(k, where): _plain(v, f"{where}.{k}") for k, v in mapping.items()}
        case Sequence() if not isinstance(value, bytes | bytearray | memoryview):
            sequence = cast("Sequence[object]", value)
            return [_plain(item, f"{where}[{index}]") for index, item in enumerate(sequence)]
        case _:
            raise ProtocolError(f"{where} is {type(value).__name__}, which is not JSON data")


def _plain_key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise ProtocolError(f"{where} has a key that is {type(key).__name__}, not text")
    return str.__str__(key)


def _describe(error: Exception) -> str:
    """A short text about `error`, with its type where the message alone would not explain."""
    message = str(error)
    if not isinstance(error, jinja2.TemplateError):
        message = f"{type(error).__name__}: {message}"
    if isinstance(error, jinja2.TemplateSyntaxError):
        message = f"line {error.lineno}: {error.message}"
    return message if len(message) <= _MAX_REASON_CHARS else f"{message[:_MAX_REASON_CHARS]}…"
