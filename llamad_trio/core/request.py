"""What a caller asks for.  Decides what a valid request is; knows nothing of models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.fields import (
    CONVERT,
    apply_converters,
    boolean,
    number,
    optional,
    text,
    whole_number,
)

__all__ = ["ROLES", "Message", "Request"]

ROLES = frozenset({"system", "user", "assistant"})

MAX_INT = 2**31 - 1
"""llama.cpp counts tokens in 32-bit signed integers."""

MAX_STOP_CHARS = 64 * 1024
"""Matching costs time in proportion to the stop strings' length, once per request."""

MAX_STOPS = 256
"""Each generated character is matched against every stop string."""


def _role(value: object) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"role must be text, not {type(value).__name__}")
    if value not in ROLES:
        raise ProtocolError(f"unknown role {value!r}; known are {', '.join(sorted(ROLES))}")
    return value


@attrs.frozen(field_transformer=apply_converters)
class Message:
    """One turn of a conversation.

    Args:
        role: `"system"`, `"user"` or `"assistant"`.
        content: the text of the turn.

    Raises:
        ProtocolError: unknown role, wrong type, NUL byte or lone surrogate.
    """

    role: str = attrs.field(metadata={CONVERT: _role})
    content: str = attrs.field(metadata={CONVERT: text("content")})


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return text("prompt")(value)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray | memoryview):
        raise ProtocolError(f"prompt must be text or token ids, not {type(value).__name__}")
    if any(isinstance(token, bool) or not isinstance(token, int) for token in value):
        raise ProtocolError("prompt as a list must hold token ids (integers) only")
    return tuple(value)


def _history(value: object) -> tuple[Message, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ProtocolError(f"history must be messages, not {type(value).__name__}")
    messages = tuple(value)
    for message in messages:
        if not isinstance(message, Message):
            raise ProtocolError(f"history must hold Message, not {type(message).__name__}")
    return messages


def _stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ProtocolError(f"stop must be a list of texts, not {type(value).__name__}")
    convert = text("stop")
    stops = tuple(s for s in (convert(item) for item in value) if s)
    if len(stops) > MAX_STOPS:
        raise ProtocolError(f"{len(stops)} stop strings, at most {MAX_STOPS} are allowed")
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise ProtocolError(f"stop strings exceed {MAX_STOP_CHARS} characters in all")
    return stops


@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Request:
    """One completion to compute.  Frozen; vary it with `attrs.evolve`.

    Numbers out of range are clamped, NaN falls back to the default; a wrong type
    raises `ProtocolError`.

    Args:
        prompt: the user's text, or token ids (then no template is applied).
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
        grammar, grammar_root: a GBNF grammar and its start rule.
        session: a name; the prefixes of requests that have one are kept in preference to
            those of requests that have none, when the pool is tight.
        raw: use the prompt as it is, without the model's chat template.
    """

    prompt: str | Sequence[int] = attrs.field(metadata={CONVERT: _prompt}, kw_only=False)
    system: str | None = attrs.field(default=None, metadata={CONVERT: optional(text("system"))})
    history: Sequence[Message] = attrs.field(default=(), metadata={CONVERT: _history})
    max_tokens: int = attrs.field(
        default=256, metadata={CONVERT: whole_number("max_tokens", 1, MAX_INT)}
    )
    temperature: float = attrs.field(
        default=0.1, metadata={CONVERT: number("temperature", 0.1, 0.0, 2.0)}
    )
    top_k: int = attrs.field(default=50, metadata={CONVERT: whole_number("top_k", 0, MAX_INT)})
    top_p: float = attrs.field(default=0.95, metadata={CONVERT: number("top_p", 0.95, 0.0, 1.0)})
    min_p: float = attrs.field(default=0.0, metadata={CONVERT: number("min_p", 0.0, 0.0, 1.0)})
    repeat_penalty: float = attrs.field(
        default=1.05, metadata={CONVERT: number("repeat_penalty", 1.05, 0.0, 2.0)}
    )
    repeat_last_n: int = attrs.field(
        default=-1, metadata={CONVERT: whole_number("repeat_last_n", -1, MAX_INT)}
    )
    presence_penalty: float = attrs.field(
        default=0.0, metadata={CONVERT: number("presence_penalty", 0.0, -2.0, 2.0)}
    )
    frequency_penalty: float = attrs.field(
        default=0.0, metadata={CONVERT: number("frequency_penalty", 0.0, -2.0, 2.0)}
    )
    seed: int | None = attrs.field(
        default=None, metadata={CONVERT: optional(whole_number("seed", 0, 2**32 - 1))}
    )
    stop: Sequence[str] = attrs.field(default=(), metadata={CONVERT: _stop})
    grammar: str | None = attrs.field(default=None, metadata={CONVERT: optional(text("grammar"))})
    grammar_root: str = attrs.field(default="root", metadata={CONVERT: text("grammar_root")})
    session: str | None = attrs.field(default=None, metadata={CONVERT: optional(text("session"))})
    raw: bool = attrs.field(default=False, metadata={CONVERT: boolean("raw")})

    def __attrs_post_init__(self) -> None:
        if (self.raw or not isinstance(self.prompt, str)) and (self.system or self.history):
            raise ProtocolError(
                "system and history need the chat template, which a raw or token prompt skips"
            )

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation, ending with the prompt as the user's turn."""
        if not isinstance(self.prompt, str):
            raise ProtocolError("a prompt of token ids has no messages")
        first = () if self.system is None else (Message("system", self.system),)
        return (*first, *self.history, Message("user", self.prompt))

    @property
    def n_chars(self) -> int:
        """How much text (or how many tokens) there is to work on."""
        history = sum(len(message.content) for message in self.history)
        return len(self.prompt) + len(self.system or "") + history
