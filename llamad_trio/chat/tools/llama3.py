"""Llama 3.1 to 3.3: the reply itself is the call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import attrs

from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.lark import LarkRules, call_expr, one_of
from llamad_trio.chat.tools.literal import Malformed, Scan, skip_space
from llamad_trio.chat.tools.scan import CallSink, json_call
from llamad_trio.chat.tools.writing import call_object
from llamad_trio.core.request import Message
from llamad_trio.core.tools import Tool, ToolCall

_IN_TEMPLATE = re.compile(
    r"""\{"name": (?:function name|" ?' ?\+).{0,80}?"parameters": """, re.DOTALL
)


@attrs.frozen
class Llama3(ToolFormat):
    """`{"name": "f", "parameters": {"x": 1}}`, more than one with `; ` between them.

    An answer that begins with a brace is a call, and so is what the token
    `<|python_tag|>` comes before; all else is text.  Meta's templates write at
    most one call per turn.
    """

    name = "llama3"
    markers = ("<|python_tag|>",)
    opener = "<|python_tag|>"
    bare_opener = "{"

    @classmethod
    def detect(cls, template_source: str) -> ToolFormat | None:
        return cls() if _IN_TEMPLATE.search(template_source) else None

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
