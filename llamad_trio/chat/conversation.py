"""From a request to the prompt's text, and to how the reply is constrained and read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from llamad_trio.chat.guard import Guard
from llamad_trio.chat.messages import message_dict, plain_messages, reads_tool_calls
from llamad_trio.chat.meter import RenderLimits
from llamad_trio.chat.reply import ReplyParser
from llamad_trio.chat.template import ChatTemplate, ReasoningTags, detect_reasoning
from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.formats import TOOL_FORMATS, detect_tool_format
from llamad_trio.chat.tools.lark import quoted, tool_dict
from llamad_trio.constraints.constraint import Constraint
from llamad_trio.constraints.gbnf_lark import gbnf_to_lark
from llamad_trio.core.errors import LlamadError, ProtocolError, UnsupportedFeature
from llamad_trio.core.request import Message, Request
from llamad_trio.core.tools import Tool
from llamad_trio.scheduling.runtime import ModelFacts

RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "limits", "self"}
)
"""What a template gets from elsewhere, and what `ChatTemplate.render` names so."""


@attrs.frozen(kw_only=True)
class Turn:
    """What a request comes to: the prompt, what the reply must be, and how it is read."""

    prompt: str
    """With the sentinel in it where a token must not be."""
    constraint: Constraint | None = None
    visible: frozenset[int] = frozenset()
    """The control tokens that are part of the reply's text."""
    reasoning: ReasoningTags | None = None
    in_reasoning: bool = False
    tool_format: ToolFormat | None = None

    def parser(self, new_id: Callable[[], str]) -> ReplyParser:
        """A new parser for the reply, that names its calls by `new_id`."""
        return ReplyParser(self.reasoning, self.in_reasoning, self.tool_format, new_id)


class ChatFormat:
    """A model's way to converse: its template, or the error for requests that need one, and
    what the template tells of its syntax."""

    def __init__(self, facts: ModelFacts, template: ChatTemplate | LlamadError) -> None:
        source = "" if isinstance(template, LlamadError) else template.source
        self._control = facts.control_tokens
        self._template = template
        self._reasoning = detect_reasoning(source)
        self._tool_format = detect_tool_format(source)
        self._reads_calls = reads_tool_calls(source)
        added = (text for text in facts.added_tokens if text.strip() and text in source)
        self._guard = Guard(self._control, added)

    def turn(self, request: Request, sentinel: str, limits: RenderLimits) -> Turn:
        """What a request comes to; of a prompt of token ids there is no text.

        Its tools must be `Tool`s; the sentinel is a character that is not in it.

        Raises:
            ProtocolError, UnsupportedFeature: as `Engine.complete`.
            TemplateTimeout: it needed more.
        """
        if request.tool_format is not None and request.tool_format not in TOOL_FORMATS:
            known = ", ".join(TOOL_FORMATS)
            raise ProtocolError(f"unknown tool_format {request.tool_format!r}; known are {known}")
        if not request.uses_template:
            prompt = request.prompt if isinstance(request.prompt, str) else ""
            return Turn(prompt=prompt, constraint=_constraint(request, None))
        tools = [tool for tool in request.tools if isinstance(tool, Tool)]
        if request.tool_choice == "none":
            tools = []
        about_tools = tools or _are_about_tools(request.history)
        tool_format = self._format(request) if about_tools else None
        if taken := RESERVED & request.template_vars.keys():
            raise ProtocolError(f"template_vars cannot set {', '.join(sorted(taken))}")
        variables = dict(self._guard.data(request.template_vars, sentinel))
        prompt = self._render(request.messages, tools, tool_format, variables, sentinel, limits)
        return self._turn(request, prompt, tools, tool_format if tools else None)

    def _turn(
        self, request: Request, prompt: str, tools: Sequence[Tool], tool_format: ToolFormat | None
    ) -> Turn:
        """How the reply to a prompt is constrained and read."""
        reasoning = self._reasoning
        last_tag = None if reasoning is None else reasoning.end_of(prompt)
        after = reasoning.close if reasoning is not None and last_tag == reasoning.open else None
        tags = () if reasoning is None else (reasoning.open, reasoning.close)
        reasoning_tokens = [tag for tag in tags if tag in self._control]
        if tool_format is None:
            constraint = _constraint(request, after)
            if constraint is not None and after is None:
                reasoning = None  # what the text must be, it is as a whole
        else:
            grammar = tool_format.grammar(
                tools,
                choice=request.tool_choice,
                parallel=request.parallel_tool_calls,
                marker=self._marker,
                reasoning=reasoning if last_tag is None else None,
                free=[self._marker(tag) for tag in reasoning_tokens],
            )
            constraint = Constraint("lark", grammar, after)
        markers = (*reasoning_tokens, *(tool_format.markers if tool_format else ()))
        return Turn(
            prompt=prompt,
            constraint=constraint,
            visible=frozenset(self._control[m] for m in markers if m in self._control),
            reasoning=reasoning,
            in_reasoning=after is not None,
            tool_format=tool_format,
        )

    def render_messages(
        self,
        messages: Sequence[Message],
        sentinel: str,
        limits: RenderLimits,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """A conversation as text, ready for the assistant's turn or not.

        Raises:
            UnsupportedFeature: there are calls of tools, and the template has no syntax for them.
        """
        if self._tool_format is None and _are_about_tools(messages):
            raise _no_tools()
        variables = {"add_generation_prompt": add_generation_prompt}
        return self._render(messages, (), None, variables, sentinel, limits)

    def _render(
        self,
        messages: Iterable[Message],
        tools: Iterable[Tool],
        tool_format: ToolFormat | None,
        variables: dict[str, Any],
        sentinel: str,
        limits: RenderLimits,
    ) -> str:
        """The template's text, with the sentinel also where it wrote that as Python and JSON
        escape it."""
        messages = [self._guard.message(message, sentinel) for message in messages]
        tools = [self._guard.tool(tool, sentinel) for tool in tools]
        if tool_format is not None and tool_format is not self._tool_format:
            turns = plain_messages(messages, tools, tool_format)
        else:
            calls_as = None if self._reads_calls else self._tool_format
            turns = [message_dict(message, calls_as=calls_as) for message in messages]
            if tools:
                variables["tools"] = [tool_dict(tool) for tool in tools]
        if isinstance(self._template, LlamadError):
            raise copy.copy(self._template)
        text = self._template.render(turns, limits=limits, **variables)
        return text.replace(ascii(sentinel)[1:-1], sentinel)

    def _format(self, request: Request) -> ToolFormat:
        """The syntax the request names, else the template's own."""
        name = request.tool_format
        if name is not None and (self._tool_format is None or self._tool_format.name != name):
            return TOOL_FORMATS[name]
        if self._tool_format is None:
            raise _no_tools()
        return self._tool_format

    def _marker(self, text: str) -> str:
        """A marker as a Lark expression; see `chat.tools.lark.Marker`."""
        token = self._control.get(text)
        return quoted(text) if token is None else f"<[{token}]>"


def _are_about_tools(messages: Iterable[Message]) -> bool:
    return any(message.tool_calls or message.role == "tool" for message in messages)


def _no_tools() -> UnsupportedFeature:
    reason = "the model's chat template has none; tool_format can name a syntax"
    return UnsupportedFeature("tools", reason)


def _constraint(request: Request, after: str | None) -> Constraint | None:
    if request.json_schema is not None:
        return Constraint("json_schema", request.json_schema, after)
    if request.regex is not None:
        return Constraint("regex", request.regex, after)
    if request.lark is not None:
        return Constraint("lark", request.lark, after)
    if request.grammar is not None:
        return Constraint("lark", gbnf_to_lark(request.grammar, request.grammar_root), after)
    return None
