"""Mistral: a list of JSON objects, or, since their eleventh tokenizer, name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

import attrs

from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.lark import (
    LarkRules,
    arguments_schema,
    call_object,
    json_expr,
    one_of,
    quoted,
)
from llamad_trio.chat.tools.literal import JSON, Malformed, Scan, literal, skip_space
from llamad_trio.chat.tools.scan import CallSink, expect, json_call
from llamad_trio.chat.tools.writing import json_text
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
        yield from _list(sink) if char == "[" else _named(char, sink)

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        if self.style == "list":
            objects = (
                f'{{"name": {json.dumps(call.name)}, "arguments": {json_text(call.arguments)}, '
                f'"id": {json_text(call.id)}}}'
                for call in calls
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
            rules.rule("object", one_of(call_object(tool, "arguments") for tool in tools))
            rules.rule("call", r'object ", \"id\": \"" ID "\"}"')
            more = ' (", " call)*' if parallel else ""
            # SentencePiece vocabularies begin every text with a space.
            return f'/ ?\\[/ call{more} "]"'
        id_ = f"{rules.marker(_ID)} ID " if self.style == "args with id" else ""
        return one_of(
            f"{quoted(tool.name)} {id_}{rules.marker(_ARGS)} {json_expr(arguments_schema(tool))}"
            for tool in tools
        )


def _list(sink: CallSink) -> Scan[None]:
    while True:
        yield from json_call((yield from skip_space()), sink, late_id=True)
        char = yield from skip_space()
        if char == "]":
            return
        if char != ",":
            raise Malformed


def _named(char: str, sink: CallSink) -> Scan[None]:
    sink.begin()
    name: list[str] = []
    while _NAME_CHARS.fullmatch(char) and len(name) < _MAX_NAME_CHARS:
        name.append(char)
        char = yield
    if char != "[":
        raise Malformed
    char = yield
    if char == _ID[1]:
        yield from expect(_ID[2:])
        digits: list[str] = []
        while (char := (yield)).isalnum() and len(digits) < _MAX_NAME_CHARS:
            digits.append(char)
        sink.id = "".join(digits)
        if char != "[":
            raise Malformed
        char = yield
    if char != _ARGS[1]:
        raise Malformed
    yield from expect(_ARGS[2:])
    char = yield from skip_space()
    if char != "{":
        raise Malformed
    sink.set_name("".join(name))
    yield from literal(JSON, char, sink.write)
    sink.end()
