"""A vocabulary of bytes and control tokens, to which llguidance compiles grammars."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import llguidance

from llamad_trio.chat.tools.formats import TOOL_FORMATS
from llamad_trio.chat.tools.mistral import Mistral

__all__ = ["ByteVocabulary", "accepted", "allows"]

FORMATS = (*TOOL_FORMATS.values(), Mistral("args with id"))
MARKERS = {marker for tool_format in FORMATS for marker in tool_format.markers}
CONTROL = ("<eos>", "<think>", "</think>", "<other>", *sorted(MARKERS))


class _Tokens:
    """What llguidance asks of a tokenizer."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), *(text.encode() for text in CONTROL))
    special_token_ids = tuple(range(256, 256 + len(CONTROL)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens()))


class ByteVocabulary:
    """A model's vocabulary, as a compiler of constraints wants to know it.

    Args:
        control: the markers it has control tokens for; the others are spelt out.
    """

    def __init__(self, control: Sequence[str] = ()) -> None:
        self.control_tokens = {text: 256 + CONTROL.index(text) for text in control}

    def pieces(self) -> Sequence[bytes]:
        return ()

    def tokenizer(self, pieces: Sequence[bytes]) -> llguidance.LLTokenizer:
        return TOKENIZER

    def control_token(self, text: str) -> int | None:
        return self.control_tokens.get(text)

    def marker(self, text: str) -> str:
        """A marker as a Lark expression."""
        token = self.control_token(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def tokens(self, text: str) -> list[int]:
        """A reply's tokens, its markers by their control tokens."""
        tokens: list[int] = []
        while text:
            found = next((m for m in self.control_tokens if text.startswith(m)), None)
            tokens += text[0].encode() if found is None else [self.control_tokens[found]]
            text = text[1:] if found is None else text.removeprefix(found)
        return tokens


@functools.cache
def _compiled(grammar: str) -> llguidance.LLMatcher:
    assert llguidance.LLMatcher.validate_grammar(grammar, TOKENIZER) == ""
    return llguidance.LLMatcher(TOKENIZER, grammar)


def accepted(grammar: str, tokens: Sequence[int]) -> tuple[int, bool]:
    """How many tokens the grammar allows, and whether the reply may end behind them."""
    matcher = _compiled(grammar).deep_copy()
    n_tokens = matcher.validate_tokens(list(tokens))
    matcher.consume_tokens(list(tokens[:n_tokens]))
    return n_tokens, matcher.is_accepting()


def allows(grammar: str, tokens: Sequence[int]) -> bool:
    """Whether a reply may be these tokens."""
    return accepted(grammar, tokens) == (len(tokens), True)
