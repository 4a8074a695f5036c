"""Tools and calls as text, and grammars of such text for llguidance, in its dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from llamad_trio.constraints.constraint import JSON_STYLE
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.tools import JsonObject, Tool, ToolCall

TEXT = "TEXT"
"""The terminal of free text: anything but control tokens."""

Marker = Callable[[str], str]
"""Gives a marker's text as an expression.

That is a token reference (`<[151657]>`) for what is a control token of the vocabulary
(to llguidance, which decides it for itself), and else the text as a JSON string.
"""

_SHAPING = ("$ref", "allOf", "anyOf", "oneOf", "additionalProperties", "patternProperties")
"""Keywords by which an object may have properties that `properties` does not name."""


def json_text(value: object) -> str:
    """Return JSON in the style of `json.dumps`, with Unicode as it is."""
    # DEL is legal in a JSON string, but llguidance wants it escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def python_text(value: object) -> str:
    """Return JSON data as a Python literal; strings, numbers and brackets are as in JSON."""
    match value:
        case None | bool():
            return str(value)
        case list():
            return f"[{', '.join(map(python_text, value))}]"
        case Mapping():
            items = (f"{json_text(key)}: {python_text(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        case _:
            return json_text(value)


def call_object(call: ToolCall, arguments_key: str) -> str:
    """Return a call as a JSON object of its name and arguments, without the last brace."""
    name = json.dumps(call.name)
    return f'{{"name": {name}, "{arguments_key}": {json_text(call.arguments)}'


def tool_dict(tool: Tool) -> dict[str, object]:
    """Return what a template gets for `tool`."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.schema},
    }


def quoted(text: str) -> str:
    """A string literal."""
    return json.dumps(text)


def json_expr(schema: JsonObject) -> str:
    """JSON of this schema, spaced as `json.dumps` does it."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"


def tools_of_choice(tools: Sequence[Tool], choice: str) -> Sequence[Tool]:
    """Return the tools that `choice` (`"auto"`, `"required"` or a name) leaves.

    Raises `ProtocolError` when there are none.
    """
    left = [tool for tool in tools if choice in ("auto", "required", tool.name)]
    if not left:
        wanted = "there are no tools" if not tools else f"there is no tool {choice!r}"
        raise ProtocolError(f"{wanted} to call")
    return left


def arguments_schema(tool: Tool) -> JsonObject:
    """Return the schema of the tool's arguments as calls have to follow it.

    Arguments that the schema does not name are left out, unless it says what
    they are: JSON Schema allows any, but no function takes them.

    Raises `ProtocolError` when the schema is not of an object.
    """
    schema = {"type": "object", **tool.schema}
    if schema["type"] != "object":
        raise ProtocolError(f"the schema of tool {tool.name!r} is of {schema['type']!r}")
    if not any(keyword in schema for keyword in _SHAPING):
        schema = {"properties": {}, **schema, "additionalProperties": False}
    return schema


def call_expr(tool: Tool, arguments_key: str) -> str:
    """What `call_object` may write of calls of the tool."""
    name_first = f'{{"name": "{tool.name}", "{arguments_key}": '
    return f"{quoted(name_first)} {json_expr(arguments_schema(tool))}"


def one_of(options: Iterable[str]) -> str:
    """A rule's body: any of `options`."""
    return "\n    | ".join(options)


class LarkRules:
    """Rules, as they are found to be needed."""

    def __init__(self, marker: Marker) -> None:
        self.marker = marker
        self._rules: dict[str, str] = {}

    def rule(self, name: str, body: str, *, options: str = "") -> str:
        """Add a rule, or a terminal if `name` is in capitals; return its name."""
        self._rules[name] = f"{name}{options}: {body}"
        return name

    def text_up_to(self, text: str, name: str, before: str = TEXT) -> str:
        """Free text, by the terminal `before`, up to the first marker of this text.

        A model can also spell out what is a control token.  Who reads the reply
        cannot tell, so the grammar does not, either.  `name` is for the rules.
        """
        self.rule(TEXT, r"/(.|\n)*/")
        marker = self.marker(text)
        spelt = self.rule(f"{name}_spelt", f"{before} {quoted(text)}", options="[lazy]")
        if marker == quoted(text):
            return spelt
        return self.rule(name, f"{before} {marker} | {spelt}")

    def source(self, start: str) -> str:
        """The complete grammar, which begins with the expression `start`."""
        lines = ["%llguidance {}", f"start: {start}", *self._rules.values()]
        return "\n".join(lines) + "\n"
