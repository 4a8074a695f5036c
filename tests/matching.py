"""Compiled constraints over a vocabulary of the 256 bytes and an end, and what they allow."""

from __future__ import annotations

from collections.abc import Sequence

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
    special_token_ids = (END,)
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


def takes(matcher: Matcher, text: str) -> bool:
    """Whether the whole text may be generated; the matcher is not to be used again."""
    return all(matcher.accept([byte]) for byte in text.encode()) and matcher.may_end
