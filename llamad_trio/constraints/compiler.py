"""Constraints through llguidance: from a grammar to the tokens that may come next.

Knows llguidance, and of llama.cpp only the vocabulary it is given.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Protocol

import attrs
import llguidance
import numpy as np
from numpy.typing import NDArray

from llamad_trio.constraints.constraint import JSON_STYLE, Constraint, check_constraint
from llamad_trio.core.errors import ProtocolError

LIMITS = llguidance.LLParserLimits(
    # An ambiguous grammar of single characters (see `gbnf_lark`) compares the items of
    # a row with each other: with this limit it ends after 50 ms, with a million after 500.
    # The grammars that llama.cpp ships need less than 50,000 on 262,144 tokens.
    step_max_items=200_000,
    verbose_errors=False,
)
"""All else as llguidance has it: a million units of fuel to build a lexer, and 200,000 a step,
which is about 14 ms."""

MAX_REASON_CHARS = 500
"""llguidance quotes the grammar in its messages."""

_SLASH = re.compile(r"\\.|/", re.DOTALL)
"""A slash, which ends a regular expression in Lark, or an escape that may be of one."""

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDENDS = np.where(_BITS == 1, 0.0, -np.inf).astype(np.float32)
"""What each of eight bits adds to a logit, by their byte."""


class Vocabulary(Protocol):
    """What a compiler needs to know of a vocabulary."""

    def pieces(self) -> Sequence[bytes]:
        """The bytes of each token; those of control tokens after a byte 0xFF."""
        ...

    def tokenizer(self, pieces: Sequence[bytes]) -> llguidance.LLTokenizer:
        """llguidance's view of it, without slices."""
        ...

    def control_token(self, text: str) -> int | None:
        """The control token that is written so, if one is."""
        ...


class Matcher:
    """A text that is on its way, and the constraint it is under.  For one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._bits = np.zeros((n_vocab + 31) // 32, dtype=np.uint32)
        self._addends = np.empty((self._bits.nbytes, 8), dtype=np.float32)

    @property
    def error(self) -> str | None:
        """Why it cannot go on, if it cannot."""
        if not self._matcher.is_error():
            return None
        return self._matcher.get_error()[:MAX_REASON_CHARS]

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow, or it cannot go on."""
        return self._matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting()

    def allows(self, token: int) -> bool:
        """Whether `token` may come next.  Cheaper than a mask."""
        return self._matcher.validate_tokens([token]) == 1

    def may_go_on(self) -> bool:
        """Whether any token may come next.  Computes the mask."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        return not self._matcher.is_error() and bool(self._bits.any())

    def apply(self, logits: NDArray[np.float32]) -> bool:
        """Make the logits, shape (n_vocab,), of what may not come next minus infinity, in place.

        Returns whether anything may come next.
        """
        if not self.may_go_on():
            return False
        # Looked up by the byte and added: boolean indexing takes up to thirty times as long.
        np.take(_ADDENDS, self._bits.view(np.uint8), axis=0, out=self._addends, mode="clip")
        logits += self._addends.reshape(-1)[: self._n_vocab]
        return True

    def forced_tokens(self) -> list[int]:
        """The tokens that come next, where there is no choice."""
        return self._matcher.compute_ff_tokens()

    def accept(self, tokens: Sequence[int]) -> bool:
        """Take tokens as the next; false when they may not be: then it cannot go on."""
        return self._matcher.consume_tokens(list(tokens))


@attrs.define
class Compiler:
    """Compiles constraints for one vocabulary.  From any thread.

    llguidance's tokenizer is made on the first call: a tenth of a second for 49,000 tokens,
    a second and more for 262,000, during which it holds Python's lock.
    """

    vocabulary: Vocabulary
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _made: llguidance.LLTokenizer | None = attrs.field(default=None, init=False)

    def compile(self, constraint: Constraint) -> Matcher:
        """Compile a constraint, and find what may come first.

        Raises `ProtocolError` if it does not compile, is unsafe, or no text satisfies it.
        """
        check_constraint(constraint)
        if constraint.after is not None:
            # By itself first: what comes before it can always be satisfied.
            self.compile(attrs.evolve(constraint, after=None))
        tokenizer = self._tokenizer()
        grammar = self._grammar(constraint)
        inner = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        matcher = Matcher(inner, tokenizer.vocab_size)
        # Now, and not on the lane: the first mask may take as long as all the rest.
        satisfiable = matcher.error is None and matcher.may_go_on()
        if matcher.error is not None:
            raise ProtocolError(f"{constraint.kind} does not compile: {matcher.error}")
        if not satisfiable:
            raise ProtocolError(f"{constraint.kind}: no text satisfies it")
        return matcher

    def _tokenizer(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._made is None:
                # In two parts, because each holds Python's lock.
                tokenizer = self.vocabulary.tokenizer(self.vocabulary.pieces())
                self._made = tokenizer.with_slices(llguidance.LLTokenizer.general_slices())
            return self._made

    def close(self) -> None:
        """Forget the tokenizer, which is tens of megabytes, whoever still knows the compiler."""
        self._made = None

    def _grammar(self, constraint: Constraint) -> str:
        body = _body(constraint)
        if constraint.after is None:
            return json.dumps({"grammars": [body]})
        # Any text up to and with `after`, then white space, then the body.
        token = self.vocabulary.control_token(constraint.after)
        end = (
            f"[lazy]: ANY {json.dumps(constraint.after)}" if token is None else f": ANY <[{token}]>"
        )
        lead = f"start: lead SPACE? @body\nlead{end}\nANY: /(.|\\n)*/\nSPACE: /[ \\n]{{1,4}}/\n"
        return json.dumps({"grammars": [{"lark_grammar": lead}, {**body, "name": "body"}]})


def _body(constraint: Constraint) -> dict[str, object]:
    source = constraint.source
    if not isinstance(source, str):
        return {"json_schema": {**source, "x-guidance": JSON_STYLE}}
    if constraint.kind == "lark":
        return {"lark_grammar": source}
    regex = _SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], source)
    return {"lark_grammar": f"start: /{regex}/"}
