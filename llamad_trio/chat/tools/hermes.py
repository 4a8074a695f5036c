"""Hermes 2 and 3, Qwen 2.5 and 3, and many after them: one JSON object per tagged block."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.lark import LarkRules, call_expr, one_of, quoted
from llamad_trio.chat.tools.literal import Scan, skip_space
from llamad_trio.chat.tools.scan import CallSink, expect_after_space, json_call
from llamad_trio.chat.tools.writing import call_object
from llamad_trio.core.request import Message
from llamad_trio.core.tools import Tool, ToolCall

# Other families put XML or YAML between the same tags.  What stands between tag and brace is
# the template's own quoting.
_IN_TEMPLATE = re.compile(r"""<tool_call>(?:\\n|[\s"'{}+~-])*\{\\?"name\\?":""")


@attrs.frozen
class Hermes(ToolFormat):
    """`<tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>`."""

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    opener = "<tool_call>"
    _between = quoted("\n")

    @classmethod
    def detect(cls, template_source: str) -> ToolFormat | None:
        return cls() if _IN_TEMPLATE.search(template_source) else None

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
