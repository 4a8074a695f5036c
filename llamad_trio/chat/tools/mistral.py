"""Mistral: a list of JSON objects, or, since their eleventh tokenizer, name and arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Literal

import attrs

from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.lark import (
    LarkRules,
    arguments_schema,
    call_expr,
    json_expr,
    one_of,
    quoted,
)
from llamad_trio.chat.tools.literal import JSON, Malformed, Scan, literal, skip_space
from llamad_trio.chat.tools.scan import CallSink, expect, json_call, listed, take_while
from llamad_trio.chat.tools.writing import call_object, json_text
from llamad_trio.core.request import Message
from llamad_trio.core.tools import Tool, ToolCall

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_NAME_CHARS = re.compile(r"[A-Za-z0-9_.-]")
_MAX_NAME_CHARS = 64

Style = Literal["list", "args", "args with id"]

_MARKERS: dict[Style, tuple[str, ...]] = {
    "list": (_CALLS,),
    "args": (_CALLS, _ARGS),
    "args with id": (_CALLS, _ID, _ARGS),
}


@attrs.frozen
class Mistral(ToolFormat):
    """What Mistral's models write after the token `[TOOL_CALLS]`.

    Every style is understood; `style` is the one that is written, and asked
    for by the grammar: `"list"` (`[{"name": "f", "arguments": {"x": 1}, "id":
    "abc123def"}]`), `"args"` (`f[ARGS]{"x": 1}`, every call with the marker
    before it), or `"args with id"` (`f[CALL_ID]abc123def[ARGS]{"x": 1}`).
    Ids have nine letters and digits.  A list's calls are told only when they
    are complete, because the id comes last.
    """

    style: Style = "list"
    markers: tuple[str, ...] = attrs.field(init=False, repr=False, eq=False)
    _between: str | None = attrs.field(init=False, repr=False, eq=False)

    name = "mistral"
    opener = _CALLS

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "markers", _MARKERS[self.style])
        object.__setattr__(self, "_between", None if self.style == "list" else "")

    @classmethod
    def detect(cls, template_source: str) -> ToolFormat | None:
        if _CALLS not in template_source:
            return None
        if _ARGS not in template_source:
            return cls("list")
        return cls("args with id" if _ID in template_source else "args")

    def scan(self, opener: str, sink: CallSink) -> Scan[None]:
        char = yield from skip_space()
        if char == "[":
            yield from listed(partial(json_call, sink=sink, late_id=True))
        else:
            yield from _scan_named_call(char, sink)

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        if self.style == "list":
            objects = (
                f'{call_object(call, "arguments")}, "id": {json_text(call.id)}}}' for call in calls
            )
            return f"{_CALLS}[{', '.join(objects)}]"
        return "".join(
            f"{_CALLS}{call.name}{_ID + call.id if self.style == 'args with id' else ''}"
            f"{_ARGS}{json_text(call.arguments)}"
            for call in calls
        )

    def write_result(self, message: Message) -> str:
        return f"[TOOL_RESULTS]{message.content}[/TOOL_RESULTS]"

    def _calls(self, rules: LarkRules, tools: Sequence[Tool], *, parallel: bool) -> str:
        rules.rule("ID", "/[A-Za-z0-9]{9}/")
        if self.style == "list":
            rules.rule("object", one_of(call_expr(tool, "arguments") for tool in tools))
            rules.rule("call", r'object ", \"id\": \"" ID "\"}"')
            more = ' (", " call)*' if parallel else ""
            # SentencePiece vocabularies begin every text with a space.
            return f'/ ?\\[/ call{more} "]"'
        id_ = f"{rules.marker(_ID)} ID " if self.style == "args with id" else ""
        return one_of(
            f"{quoted(tool.name)} {id_}{rules.marker(_ARGS)} {json_expr(arguments_schema(tool))}"
            for tool in tools
        )


def _scan_named_call(char: str, sink: CallSink) -> Scan[None]:
    sink.begin()
    name, char = yield from take_while(_is_of_name, char, _MAX_NAME_CHARS)
    char = yield from _scan_bracket(char)
    if char == _ID[1]:
        yield from expect(_ID[2:])
        sink.id, char = yield from take_while(str.isalnum, (yield), _MAX_NAME_CHARS)
        char = yield from _scan_bracket(char)
    if char != _ARGS[1]:
        raise Malformed
    yield from expect(_ARGS[2:])
    char = yield from skip_space()
    if char != "{":
        raise Malformed
    sink.set_name(name)
    yield from literal(JSON, char, sink.write)
    sink.end()


def _scan_bracket(char: str) -> Scan[str]:
    """Follow `char`, which must open a marker; return the character after it."""
    if char != "[":
        raise Malformed
    return (yield)


def _is_of_name(char: str) -> bool:
    return _NAME_CHARS.fullmatch(char) is not None
