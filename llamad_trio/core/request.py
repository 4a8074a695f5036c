"""What a caller asks for.  Decides what a valid request is; knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict, TypeVar, cast

import attrs

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.fields import (
    Convert,
    apply_converters,
    boolean,
    checked,
    number,
    optional,
    text,
    typed_init,
    whole_number,
)
from llamad_trio.core.tools import JsonObject, Tool, ToolCall, ToolChoice, json_object

T = TypeVar("T")

ROLES = frozenset({"system", "user", "assistant", "tool"})

MAX_INT = 2**31 - 1
"""llama.cpp counts tokens in 32-bit signed integers."""

MAX_STOP_CHARS = 64 * 1024
"""Matching costs time in proportion to the stop strings' length, once per request."""

MAX_LOGPROBS = 20
"""As OpenAI's API has it: nobody looks at more, and each costs a string."""

CONSTRAINTS = ("json_schema", "regex", "lark", "grammar")
"""The fields that say what the text must be."""

MAX_STOPS = 256
"""Each generated character is matched against every stop string."""


def _role(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"{name} must be text, not {type(value).__name__}")
    if value not in ROLES:
        raise ProtocolError(f"unknown role {value!r}; known are {', '.join(sorted(ROLES))}")
    return value


def _items(value: object, name: str, of: str = "") -> tuple[object, ...]:
    """What a list holds; what is a list to Python, and yet none, is refused."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ProtocolError(f"{name} must be a list{of}, not {type(value).__name__}")
    return tuple(value)


def _many(kind: type[T]) -> Convert[tuple[T, ...]]:
    def convert(value: object, name: str) -> tuple[T, ...]:
        items = _items(value, name)
        for item in items:
            if not isinstance(item, kind):
                raise ProtocolError(f"{name} must hold {kind.__name__}, not {type(item).__name__}")
        return cast("tuple[T, ...]", items)

    return convert


_ROLES_OF = {
    "tool_calls": ("assistant",),
    "reasoning": ("assistant",),
    "tool_call_id": ("tool",),
    "name": ("tool",),
}
"""The fields that only some roles have."""


@typed_init
@attrs.frozen(field_transformer=apply_converters)
class Message:
    """One turn of a conversation.

    Args:
        role: `"system"`, `"user"`, `"assistant"`, or `"tool"` for the result of a call.
        content: the text of the turn.
        tool_calls: what the assistant called in this turn.
        tool_call_id: the call this is the result of; role `"tool"` only.
        name: the tool this is the result of; role `"tool"` only.
        reasoning: what the assistant thought before this turn, for templates that show it.

    Raises:
        ProtocolError: unknown role, wrong type, NUL byte or lone surrogate, or a field
            that the role cannot have.
    """

    role: str = attrs.field(metadata=checked(_role))
    content: str = attrs.field(default="", metadata=checked(text))
    tool_calls: Sequence[ToolCall] = attrs.field(
        default=(), kw_only=True, metadata=checked(_many(ToolCall))
    )
    tool_call_id: str | None = attrs.field(
        default=None, kw_only=True, metadata=checked(optional(text))
    )
    name: str | None = attrs.field(default=None, kw_only=True, metadata=checked(optional(text)))
    reasoning: str | None = attrs.field(
        default=None, kw_only=True, metadata=checked(optional(text))
    )

    def __attrs_post_init__(self) -> None:
        for field, roles in _ROLES_OF.items():
            if getattr(self, field) and self.role not in roles:
                raise ProtocolError(f"a message of role {self.role!r} has no {field}")

    @property
    def n_chars(self) -> int:
        """How much text there is to work on."""
        calls = sum(len(call.id) + len(str(call.arguments)) for call in self.tool_calls)
        texts = (self.content, self.reasoning, self.tool_call_id, self.name)
        return sum(len(text or "") for text in texts) + calls


def _prompt(value: object, name: str) -> str | tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return text(value, name)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray | memoryview):
        raise ProtocolError(f"{name} must be text or token ids, not {type(value).__name__}")
    if any(isinstance(token, bool) or not isinstance(token, int) for token in value):
        raise ProtocolError(f"{name} as a list must hold token ids (integers) only")
    return tuple(value)


def _tools(value: object, name: str) -> tuple[Tool | Callable[..., object], ...]:
    tools = _items(value, name)
    for tool in tools:
        if not isinstance(tool, Tool) and not callable(tool):
            raise ProtocolError(f"a tool must be a function or a Tool, not {type(tool).__name__}")
    return cast("tuple[Tool | Callable[..., object], ...]", tools)


def _stop(value: object, name: str) -> tuple[str, ...]:
    stops = tuple(s for s in (text(item, name) for item in _items(value, name, " of texts")) if s)
    if len(stops) > MAX_STOPS:
        raise ProtocolError(f"{len(stops)} stop strings, at most {MAX_STOPS} are allowed")
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise ProtocolError(f"stop strings exceed {MAX_STOP_CHARS} characters in all")
    return stops


@typed_init
@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Request:
    """One completion to compute.  Frozen; vary it with `attrs.evolve`.

    Numbers out of range are clamped, NaN falls back to the default; a wrong type
    raises `ProtocolError`.

    Args:
        prompt: the user's text, or token ids (then no template is applied); `None` answers
            the history, which ends with the user's turn or the result of a tool.
        system: a system message put before the history.
        history: earlier turns, oldest first.
        max_tokens: most tokens to generate, >= 1; further capped by what fits.
        temperature: 0-2; 0 is greedy and ignores every other sampling field.
        top_k: keep the k likeliest tokens; 0 is off.
        top_p: keep the smallest set of tokens with this probability, 0-1; 1 is off.
        min_p: drop tokens less likely than this share of the likeliest, 0-1; 0 is off.
        repeat_penalty: 0-2; 1 is off.
        repeat_last_n: tokens the penalties look back on; -1 the whole context, 0 off.
        presence_penalty, frequency_penalty: -2 to 2; 0 is off.
        seed: any 32-bit unsigned integer; `None` draws a fresh one per request.
        stop: texts that end the generation and are not part of the result.
        json_schema: the text will be JSON of this schema; `Completion.value` has it.
        regex: the whole text will match this regular expression (of Rust's `regex`,
            without look-around).
        lark: the text will be of this grammar, in llguidance's dialect of Lark.
        grammar, grammar_root: the text will be of this GBNF grammar, from its start rule.
            Of these four a request can have one.  Where the prompt leaves a reasoning
            block open, the text after that is meant.
        tools: what the model may call: typed functions, or `Tool`s.
        tool_choice: `"auto"` (call or answer), `"none"`, `"required"`, or the name of the
            tool to call.
        parallel_tool_calls: whether one reply may hold several calls.
        tool_format: the name of the syntax to use with a template that has none for tools:
            `"hermes"`, `"llama3"`, `"mistral"` or `"lfm2"`.
        template_vars: what else the chat template reads, such as `enable_thinking`.
        logprobs: tell the probability of each generated token, and of this many of the
            likeliest in its place, 0-20; `None` tells none.
        session: a name; the prefixes of requests that have one are kept in preference to
            those of requests that have none, when the pool is tight.
        raw: use the prompt as it is, without the model's chat template.
    """

    prompt: str | Sequence[int] | None = attrs.field(metadata=checked(_prompt), kw_only=False)
    system: str | None = attrs.field(default=None, metadata=checked(optional(text)))
    history: Sequence[Message] = attrs.field(default=(), metadata=checked(_many(Message)))
    max_tokens: int = attrs.field(default=256, metadata=checked(whole_number(1, MAX_INT)))
    temperature: float = attrs.field(default=0.1, metadata=checked(number(0.1, 0.0, 2.0)))
    top_k: int = attrs.field(default=50, metadata=checked(whole_number(0, MAX_INT)))
    top_p: float = attrs.field(default=0.95, metadata=checked(number(0.95, 0.0, 1.0)))
    min_p: float = attrs.field(default=0.0, metadata=checked(number(0.0, 0.0, 1.0)))
    repeat_penalty: float = attrs.field(default=1.05, metadata=checked(number(1.05, 0.0, 2.0)))
    repeat_last_n: int = attrs.field(default=-1, metadata=checked(whole_number(-1, MAX_INT)))
    presence_penalty: float = attrs.field(default=0.0, metadata=checked(number(0.0, -2.0, 2.0)))
    frequency_penalty: float = attrs.field(default=0.0, metadata=checked(number(0.0, -2.0, 2.0)))
    seed: int | None = attrs.field(
        default=None, metadata=checked(optional(whole_number(0, 2**32 - 1)))
    )
    stop: Sequence[str] = attrs.field(default=(), metadata=checked(_stop))
    json_schema: JsonObject | None = attrs.field(
        default=None, hash=False, metadata=checked(optional(json_object))
    )
    regex: str | None = attrs.field(default=None, metadata=checked(optional(text)))
    lark: str | None = attrs.field(default=None, metadata=checked(optional(text)))
    grammar: str | None = attrs.field(default=None, metadata=checked(optional(text)))
    grammar_root: str = attrs.field(default="root", metadata=checked(text))
    tools: Sequence[Tool | Callable[..., object]] = attrs.field(
        default=(), metadata=checked(_tools)
    )
    tool_choice: ToolChoice = attrs.field(default="auto", metadata=checked(text))
    parallel_tool_calls: bool = attrs.field(default=True, metadata=checked(boolean))
    tool_format: str | None = attrs.field(default=None, metadata=checked(optional(text)))
    template_vars: JsonObject = attrs.field(factory=dict, hash=False, metadata=checked(json_object))
    logprobs: int | None = attrs.field(
        default=None, metadata=checked(optional(whole_number(0, MAX_LOGPROBS)))
    )
    session: str | None = attrs.field(default=None, metadata=checked(optional(text)))
    raw: bool = attrs.field(default=False, metadata=checked(boolean))

    def __attrs_post_init__(self) -> None:
        if not self.uses_template and (self.system or self.history or self.template_vars):
            raise ProtocolError(
                "system, history and template_vars need the chat template, "
                "which a raw or token prompt skips"
            )
        if not self.uses_template and self.tools:
            raise ProtocolError("tools need the chat template, which a raw or token prompt skips")
        if not self.tools and self.tool_choice not in {"auto", "none"}:
            raise ProtocolError(f"tool_choice is {self.tool_choice!r}, but there are no tools")
        if self.prompt is None and (self.raw or not self.history):
            raise ProtocolError("without a prompt there must be a history to answer")
        if len(self._constraints) > 1:
            raise ProtocolError(f"only one of {' and '.join(self._constraints)} can be given")

    @property
    def uses_template(self) -> bool:
        """Whether the chat template makes the prompt."""
        return not self.raw and (self.prompt is None or isinstance(self.prompt, str))

    @property
    def is_constrained(self) -> bool:
        """Whether the text must be of some form, which takes time to compile."""
        return bool(self._constraints)

    @property
    def _constraints(self) -> list[str]:
        """The fields that say what the text must be, of those that are given."""
        given: list[str] = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if self.tools and self.tool_choice != "none":
            given.append("tools")
        return given

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation; a prompt is the user's last turn."""
        if not (self.prompt is None or isinstance(self.prompt, str)):
            raise ProtocolError("a prompt of token ids has no messages")
        first = () if self.system is None else (Message("system", self.system),)
        last = () if self.prompt is None else (Message("user", self.prompt),)
        return (*first, *self.history, *last)

    @property
    def n_chars(self) -> int:
        """How much text (or how many tokens) there is to work on."""
        history = sum(message.n_chars for message in self.history)
        constraint = sum(len(getattr(self, name) or "") for name in ("regex", "lark", "grammar"))
        variables = len(str(self.template_vars)) if self.template_vars else 0
        tools = sum(tool.n_chars for tool in self.tools if isinstance(tool, Tool))
        prompt = len(self.prompt or "") + len(self.system or "")
        return prompt + history + constraint + variables + tools


class RequestFields(TypedDict, total=False):
    """The fields of a `Request` that can be given beside its prompt, for type checkers.

    Of `max_token=3` or `temperature="hot"` they say that it is wrong, and editors complete.
    """

    system: str | None
    history: Sequence[Message]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: Sequence[str]
    json_schema: JsonObject | None
    regex: str | None
    lark: str | None
    grammar: str | None
    grammar_root: str
    tools: Sequence[Tool | Callable[..., object]]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    tool_format: str | None
    template_vars: JsonObject
    logprobs: int | None
    session: str | None
    raw: bool
