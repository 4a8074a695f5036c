"""What a tool-call syntax has to offer."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from llamad_trio.chat.template import ReasoningTags
from llamad_trio.chat.tools.lark import TEXT, LarkRules, Marker, tool_dict, tools_of_choice
from llamad_trio.chat.tools.literal import Scan
from llamad_trio.chat.tools.scan import CallSink
from llamad_trio.core.request import Message
from llamad_trio.core.tools import Tool, ToolCall

_EXAMPLE = ToolCall("a1b2c3d4e", "tool_name", {"argument_name": "value"})


class ToolFormat(ABC):
    """How a family of models writes tool calls, in both directions.  Holds no state.

    Attributes:
        name: its name in `TOOL_FORMATS`.
        markers: the texts that may be control tokens of the vocabulary.  A
            parser sees them as text, so they must be part of the reply's text.
        opener: the marker that a call, or a list of calls, begins with.
        bare_opener: what a reply may begin with instead; `""` if nothing.
    """

    name: str
    markers: tuple[str, ...]
    opener: str
    bare_opener: str = ""

    _in_template: re.Pattern[str]
    """What a template has in it that writes such calls."""

    _between: str | None = None
    """What comes between calls that each have their marker; `None` if all are behind one."""

    @classmethod
    def detect(cls, template_source: str) -> ToolFormat | None:
        """Return this format, as the template has it, if its calls are in it."""
        return cls() if cls._in_template.search(template_source) else None

    @abstractmethod
    def scan(self, opener: str, sink: CallSink) -> Scan[None]:
        """Follow the calls after `opener`, which is one of the two openers.

        Ends where they end; what comes then is text again.  Raises
        `Malformed` at the first character that does not fit.
        """

    @abstractmethod
    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        """Return the text by which an assistant makes `calls`."""

    @abstractmethod
    def write_result(self, message: Message) -> str:
        """Return a tool's result as text, for a template that has no such role."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Return what a model is told that was given no `tools` by its template."""
        listed = "\n".join(json.dumps(tool_dict(tool), ensure_ascii=False) for tool in tools)
        return (
            "You can call tools. These are the tools, each described by a JSON object:\n"
            f"{listed}\n\n"
            "To call a tool, write its name and its arguments exactly in this form:\n"
            f"{self.write_calls([_EXAMPLE])}\n\n"
            "You will then be given the result. Call a tool only if you need it; "
            "otherwise answer in plain text."
        )

    def grammar(
        self,
        tools: Sequence[Tool],
        *,
        choice: str,
        parallel: bool,
        marker: Marker,
        reasoning: ReasoningTags | None = None,
        free: Sequence[str] = (),
    ) -> str:
        """Return a complete grammar of the replies that llguidance shall allow.

        Args:
            choice: `"required"`, or a tool's name, for calls and nothing else; `"auto"` for
                free text up to the opening marker, and from there on a call.
            parallel: whether there may be more than one call.  A single call ends the reply.
            marker: gives a marker's text as a Lark expression.
            reasoning: the tags of reasoning that may come before calls, where there
                is no free text to have it in.
            free: Lark expressions of control tokens allowed within free text.

        Raises:
            ProtocolError: no such tool, or a schema that is not of an object.
            UnsupportedFeature: a schema that this format cannot express.
        """
        rules = LarkRules(marker)
        calls = self._calls(rules, tools_of_choice(tools, choice), parallel=parallel)
        rules.rule("calls", calls)
        if choice == "auto":
            start = self._text_or_calls(rules, parallel=parallel, free=free)
        else:
            start = self._only_calls(rules, parallel=parallel)
            if reasoning is not None:
                thought = rules.text_up_to(reasoning.close, "thought")
                rules.rule("SPACE", r"/[ \t\r\n]{1,4}/")  # small models never stop writing it
                start = f"({rules.marker(reasoning.open)} {thought} SPACE?)? {start}"
        return rules.source(start)

    def _only_calls(self, rules: LarkRules, *, parallel: bool) -> str:
        """Return the expression of a reply that is calls."""
        calls = f"{rules.marker(self.opener)} calls"
        if parallel and self._between is not None:
            return f"{calls} ({self._between} {calls})*"
        return calls

    def _text_or_calls(self, rules: LarkRules, *, parallel: bool, free: Sequence[str]) -> str:
        """Return the expression of a reply that may be text, calls, or both."""
        marked = rules.text_up_to(self.opener, "marked")
        extra = "".join(f" | {TEXT} {symbol}" for symbol in free)
        if parallel:
            rules.rule("part", f"{marked} calls{extra}")
            return f"part* {TEXT}"
        thought = f"({extra.removeprefix(' | ')})* " if free else ""
        return f"{thought}({TEXT} | {marked} calls)"

    @abstractmethod
    def _calls(self, rules: LarkRules, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the expression of what follows an opening marker."""
