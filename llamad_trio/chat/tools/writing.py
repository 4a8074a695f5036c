"""Tools as templates read them, and arguments as text, spelt as the grammars want it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llamad_trio.core.tools import Tool, ToolCall


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
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.schema,
        },
    }
