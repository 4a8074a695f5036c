"""LFM2: a Python list of function calls with keyword arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import attrs

from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.lark import LarkRules, arguments_schema, one_of, quoted
from llamad_trio.chat.tools.literal import PYTHON, Malformed, Scan, literal, skip_space
from llamad_trio.chat.tools.python_schema import PythonSchema
from llamad_trio.chat.tools.scan import CallSink, expect_after_space, listed, take_while
from llamad_trio.chat.tools.writing import python_text
from llamad_trio.core.errors import UnsupportedFeature
from llamad_trio.core.request import Message
from llamad_trio.core.tools import Tool, ToolCall

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"

# Liquid's templates differ in what they mark; the newest name no marker of a call.
_IN_TEMPLATE = (_START, "<|tool_list_start|>", '"List of tools: ["')

_MAX_NAME_CHARS = 256


@attrs.frozen
class Lfm2(ToolFormat):
    """`<|tool_call_start|>[f(x=1, y="a"), g()]<|tool_call_end|>`.

    Values are Python literals of JSON data.  No other expression is understood, and
    nothing is evaluated.
    """

    name = "lfm2"
    markers = (_START, _END)
    opener = _START

    @classmethod
    def detect(cls, template_source: str) -> ToolFormat | None:
        return cls() if any(text in template_source for text in _IN_TEMPLATE) else None

    def scan(self, opener: str, sink: CallSink) -> Scan[None]:
        if (yield from skip_space()) != "[":
            raise Malformed
        yield from listed(partial(_scan_call, sink=sink))
        yield from expect_after_space(_END)

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        return f"{_START}[{', '.join(map(_write_call, calls))}]{_END}"

    def write_result(self, message: Message) -> str:
        return f"<|tool_response_start|>{message.content}<|tool_response_end|>"

    def _calls(self, rules: LarkRules, tools: Sequence[Tool], *, parallel: bool) -> str:
        objects: list[str] = []
        for index, tool in enumerate(tools):
            schema = PythonSchema(rules, f"tool{index}", tool.name, arguments_schema(tool))
            objects.append(f'{quoted(tool.name + "(")} {schema.arguments()} ")"')
        rules.rule("call", one_of(objects))
        more = ' (", " call)*' if parallel else ""
        return f'"[" call{more} "]" {rules.marker(_END)}'


def _write_call(call: ToolCall) -> str:
    for name in call.arguments:
        if not name.isidentifier() or len(name) > _MAX_NAME_CHARS:
            raise UnsupportedFeature(
                f"argument {name!r} of tool {call.name!r}", "it is no Python name"
            )
    arguments = (f"{name}={python_text(value)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def _scan_call(char: str, sink: CallSink) -> Scan[None]:
    sink.begin()
    name, char = yield from take_while(_is_of_function_name, char, _MAX_NAME_CHARS)
    if char != "(":
        raise Malformed
    sink.set_name(name)
    sink.write("{")
    seen: set[str] = set()
    char = yield from skip_space()
    while char != ")":
        name, char = yield from take_while(_is_of_name, char, _MAX_NAME_CHARS)
        if (yield from skip_space(char)) != "=" or not name.isidentifier() or name in seen:
            raise Malformed
        sink.write(f"{', ' if seen else ''}{json.dumps(name, ensure_ascii=False)}: ")
        seen.add(name)
        char = yield from literal(PYTHON, (yield from skip_space()), sink.write)
        char = yield from skip_space(char)
        if char == ",":
            char = yield from skip_space()
        elif char != ")":
            raise Malformed
    sink.write("}")
    sink.end()


def _is_of_name(char: str) -> bool:
    return f"x{char}".isidentifier()


def _is_of_function_name(char: str) -> bool:
    return _is_of_name(char) or char in ".-"
