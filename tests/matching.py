"""Compiled constraints over a vocabulary of the 256 bytes and an end, and what they allow."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import llguidance
import numpy as np
from numpy.typing import NDArray

from llamad_trio.constraints.compiler import Compiler, Matcher
from llamad_trio.constraints.constraint import Constraint, ConstraintKind
from llamad_trio.core.tools import JsonObject

END = 256


class Bytes:
    bos_token_id = None
    eos_token_id = END
    special_token_ids: tuple[int, ...] = (END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def pieces(self) -> Sequence[bytes]:
        return self.tokens

    def tokenizer(self, pieces: Sequence[bytes]) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))

    def control_token(self, text: str) -> int | None:
        return None


COMPILER = Compiler(Bytes())


def compiled(source: str | JsonObject, kind: ConstraintKind = "json_schema") -> Matcher:
    return COMPILER.compile(Constraint(kind, source))


def allowed(matcher: Matcher, n_vocab: int = END + 1) -> NDArray[np.bool_]:
    """Which tokens may come next; none at all when it cannot go on."""
    logits = np.zeros(n_vocab, dtype=np.float32)
    may_go_on = matcher.apply(logits)
    return np.isfinite(logits) & may_go_on


def accepted(matcher: Matcher, tokens: Sequence[int]) -> tuple[int, bool]:
    """How many of the tokens may be generated, and whether the text may end behind them."""
    matcher._matcher.reset()
    for n, token in enumerate(tokens):
        if not matcher.allows(token):
            return n, matcher.may_end
        matcher.accept([token])
    return len(tokens), matcher.may_end


def takes(matcher: Matcher, text: str) -> bool:
    """Whether the text may be generated."""
    tokens = text.encode()
    return accepted(matcher, tokens) == (len(tokens), True)


def likings(*groups: tuple[str, float]) -> np.typing.NDArray[np.float64]:
    weights = np.full(256, 0.05)
    for characters, weight in groups:
        weights[list(characters.encode())] = weight
    return weights


LIKINGS = (
    likings(('"]}', 20), ("abcx012", 1)),
    likings(('"]}', 15)),
    likings(('"]}', 6), ("\\", 6), ('u0nrt"fbd', 2)),
    likings(('"]}', 3), ("0123456789", 3), ("-.eE+", 3)),
    likings(('"]}', 10), ("{[,", 5), (":t", 1), ("a", 5)),
    np.where(np.arange(256) > 127, 1.0, 0.3),
)


def walks(matcher: Matcher, chance: random.Random, n: int) -> Iterator[bytes]:
    """Texts of `n` walks, fewer if some would become long."""
    for _ in range(n):
        matcher._matcher.reset()
        liking, patience = chance.choice(LIKINGS), chance.choice([0.1, 0.4, 0.8])
        text = bytearray()
        while not (matcher.is_complete or (matcher.may_end and chance.random() > patience)):
            totals = (allowed(matcher)[:END] * liking).cumsum()
            if totals[-1] == 0 and matcher.may_end:
                break
            assert totals[-1] > 0, f"nothing may follow {bytes(text)!r}: {matcher.error}"
            token = int(totals.searchsorted(chance.random() * totals[-1], side="right"))
            matcher.accept([token])
            text.append(token)
            if len(text) > 300:
                break
        else:
            yield bytes(text)
