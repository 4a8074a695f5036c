"""A vocabulary of bytes and control tokens, and what grammars allow of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from llamad_trio.chat.tools.formats import TOOL_FORMATS, Mistral
from llamad_trio.constraints.compiler import Compiler, Matcher
from llamad_trio.constraints.constraint import Constraint
from tests import matching

__all__ = ["ByteVocabulary", "accepted", "allows"]

FORMATS = (*TOOL_FORMATS.values(), Mistral("args with id"))
MARKERS = {marker for tool_format in FORMATS for marker in tool_format.markers}
CONTROL = ("<think>", "</think>", "<other>", *sorted(MARKERS))


class ByteVocabulary(matching.Bytes):
    """A model's vocabulary, as a compiler of constraints wants to know it.

    Args:
        control: the markers it has control tokens for; the others are spelt out.
    """

    special_token_ids = tuple(range(matching.END, matching.END + 1 + len(CONTROL)))
    tokens = (*matching.Bytes.tokens, *(text.encode() for text in CONTROL))

    def __init__(self, control: Sequence[str] = ()) -> None:
        self.control_tokens = {text: matching.END + 1 + CONTROL.index(text) for text in control}

    def control_token(self, text: str) -> int | None:
        return self.control_tokens.get(text)

    def marker(self, text: str) -> str:
        """A marker as a Lark expression."""
        token = self.control_token(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def encode(self, text: str) -> list[int]:
        """A reply's tokens, its markers by their control tokens."""
        tokens: list[int] = []
        while text:
            found = next((m for m in self.control_tokens if text.startswith(m)), None)
            tokens += text[0].encode() if found is None else [self.control_tokens[found]]
            text = text[1:] if found is None else text.removeprefix(found)
        return tokens


COMPILER = Compiler(ByteVocabulary(CONTROL))


@functools.cache
def compiled(grammar: str) -> Matcher:
    return COMPILER.compile(Constraint("lark", grammar))


def accepted(grammar: str, tokens: Sequence[int]) -> tuple[int, bool]:
    """How many tokens the grammar allows, and whether the reply may end behind them."""
    return matching.accepted(compiled(grammar), tokens)


def allows(grammar: str, tokens: Sequence[int]) -> bool:
    """Whether a reply may be these tokens."""
    return accepted(grammar, tokens) == (len(tokens), True)
