"""The tool-call syntaxes there are, one for each family of models, and which a template uses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import attrs
import jinja2

from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.lark import (
    LarkRules,
    arguments_schema,
    call_expr,
    call_object,
    json_expr,
    json_text,
    one_of,
    python_text,
    quoted,
)
from llamad_trio.chat.tools.literal import JSON, PYTHON, Malformed, Scan, literal, skip_space
from llamad_trio.chat.tools.python_schema import PythonSchema
from llamad_trio.chat.tools.scan import (
    CallSink,
    expect,
    expect_after_space,
    json_call,
    listed,
    take_while,
)
from llamad_trio.core.errors import UnsupportedFeature
from llamad_trio.core.request import Message
from llamad_trio.core.tools import Tool, ToolCall


@attrs.frozen
class Hermes(ToolFormat):
    """Hermes 2 and 3, Qwen 2.5 and 3, and many after them: one JSON object per tagged block.

    `<tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>`.
    """

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    opener = "<tool_call>"
    # Other families put XML or YAML between the same tags.  What stands between tag and brace is
    # the template's own quoting.
    _in_template = re.compile(r"""<tool_call>(?:\\n|[\s"'{}+~-])*\{\\?"name\\?":""")
    _between = quoted("\n")

    def scan(self, opener: str, sink: CallSink) -> Scan[None]:
        yield from json_call((yield from skip_space()), sink)
        yield from expect_after_space("</tool_call>")

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(
            f"<tool_call>\n{call_object(call, 'arguments')}}}\n</tool_call>" for call in calls
        )

    def write_result(self, message: Message) -> str:
        return f"<tool_response>\n{message.content}\n</tool_response>"

    def _calls(self, rules: LarkRules, tools: Sequence[Tool], *, parallel: bool) -> str:
        rules.rule("object", one_of(call_expr(tool, "arguments") for tool in tools))
        closed = quoted("}\n")
        return f'"\\n" object {closed} {rules.marker("</tool_call>")}'


@attrs.frozen
class Llama3(ToolFormat):
    """Llama 3.1 to 3.3, where the reply itself is the call.

    `{"name": "f", "parameters": {"x": 1}}`, more than one with `; ` between them.  An answer that begins with a brace is a call, and so is what the token
    `<|python_tag|>` comes before; all else is text.  Meta's templates write at
    most one call per turn.
    """

    name = "llama3"
    markers = ("<|python_tag|>",)
    opener = "<|python_tag|>"
    bare_opener = "{"
    _in_template = re.compile(
        r"""\{"name": (?:function name|" ?' ?\+).{0,80}?"parameters": """, re.DOTALL
    )

    def scan(self, opener: str, sink: CallSink) -> Scan[None]:
        yield from json_call(opener if opener == "{" else (yield from skip_space()), sink)
        while True:
            if (yield from skip_space()) != ";":
                raise Malformed
            yield from json_call((yield from skip_space()), sink)

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(call_object(call, "parameters") + "}" for call in calls)

    def write_result(self, message: Message) -> str:
        return json.dumps({"output": message.content}, ensure_ascii=False)

    def _only_calls(self, rules: LarkRules, *, parallel: bool) -> str:
        return f"{rules.marker(self.opener)}? calls"

    def _text_or_calls(self, rules: LarkRules, *, parallel: bool, free: Sequence[str]) -> str:
        # Text begins with no brace.  Behind a marker inside it, it may.
        rules.rule("BEGUN", r"/[ \t\r\n]*([^ \t\r\n{](.|\n)*)?/")
        marked = rules.text_up_to(self.opener, "marked", "BEGUN")
        thought = f"({' | '.join(f'BEGUN {symbol}' for symbol in free)})* " if free else ""
        return f"{thought}(BEGUN | calls | {marked} calls)"

    def _calls(self, rules: LarkRules, tools: Sequence[Tool], *, parallel: bool) -> str:
        rules.rule("object", one_of(call_expr(tool, "parameters") for tool in tools))
        return 'object "}" ("; " object "}")*' if parallel else 'object "}"'


_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_TOOL_NAME_CHAR = re.compile(r"[A-Za-z0-9_.-]")
_MAX_TOOL_NAME_CHARS = 64

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
    """Follow a call that has a name, and perhaps an id, before its arguments."""
    sink.begin()
    name, char = yield from take_while(_TOOL_NAME_CHAR.fullmatch, char, _MAX_TOOL_NAME_CHARS)
    char = yield from _scan_bracket(char)
    if char == _ID[1]:
        yield from expect(_ID[2:])
        sink.id, char = yield from take_while(str.isalnum, (yield), _MAX_TOOL_NAME_CHARS)
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


_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"

_MAX_PYTHON_NAME_CHARS = 256


@attrs.frozen
class Lfm2(ToolFormat):
    """Liquid's LFM2: a Python list of function calls with keyword arguments.

    `<|tool_call_start|>[f(x=1, y="a"), g()]<|tool_call_end|>`.  Values are Python literals of JSON data.  No other expression is understood, and
    nothing is evaluated.
    """

    name = "lfm2"
    markers = (_START, _END)
    opener = _START
    # Liquid's templates differ in what they mark; the newest name no marker of a call.
    _in_template = re.compile(r'<\|tool_(call|list)_start\|>|"List of tools: \["')

    def scan(self, opener: str, sink: CallSink) -> Scan[None]:
        if (yield from skip_space()) != "[":
            raise Malformed
        yield from listed(partial(_scan_python_call, sink=sink))
        yield from expect_after_space(_END)

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        return f"{_START}[{', '.join(map(_write_python_call, calls))}]{_END}"

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


def _write_python_call(call: ToolCall) -> str:
    for name in call.arguments:
        if not name.isidentifier() or len(name) > _MAX_PYTHON_NAME_CHARS:
            raise UnsupportedFeature(
                f"argument {name!r} of tool {call.name!r}", "it is no Python name"
            )
    arguments = (f"{name}={python_text(value)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def _scan_python_call(char: str, sink: CallSink) -> Scan[None]:
    sink.begin()
    name, char = yield from take_while(
        lambda char: _is_of_python_name(char) or char in ".-", char, _MAX_PYTHON_NAME_CHARS
    )
    if char != "(":
        raise Malformed
    sink.set_name(name)
    sink.write("{")
    seen: set[str] = set()
    char = yield from skip_space()
    while char != ")":
        name, char = yield from take_while(_is_of_python_name, char, _MAX_PYTHON_NAME_CHARS)
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


def _is_of_python_name(char: str) -> bool:
    return f"x{char}".isidentifier()


_CLASSES = (Hermes, Llama3, Mistral, Lfm2)

TOOL_FORMATS: Mapping[str, ToolFormat] = {cls.name: cls() for cls in _CLASSES}
"""Every format by its name, for a request that names one."""


def detect_tool_format(template_source: str) -> ToolFormat | None:
    """Return the syntax in which a template's model calls tools.

    `None` if the template takes no `tools`, or has a syntax that is not known here.
    """
    try:
        tokens = list(jinja2.Environment().lex(template_source))
    except jinja2.TemplateError:
        return None
    # As a name in the template, not only as a word that it writes.
    if not any(kind == "name" and value == "tools" for _, kind, value in tokens):
        return None
    found = (cls.detect(template_source) for cls in _CLASSES)
    return next((tool_format for tool_format in found if tool_format is not None), None)
