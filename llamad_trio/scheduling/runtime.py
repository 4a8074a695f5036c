"""The seam between the actors and what computes; and a prompt's text as tokens, by it.

llama.cpp on a thread is one implementation; the scripted model of
`llamad_trio.testing` on Trio's clock is another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs

from llamad_trio.constraints.constraint import Constraint
from llamad_trio.core.info import ModelInfo
from llamad_trio.scheduling.plan import CompiledConstraint, StepPlan, StepResult


@attrs.frozen(kw_only=True)
class ModelFacts(ModelInfo):
    """What a model says of itself: what users are told, and what only the engine needs.

    Attributes:
        bos_text, eos_text: how a template writes the tokens of these names.
        max_bytes_per_token: the most text one token can stand for; `None` if unknown.
        n_seqs: sequences its context has: more than slots, if any is to be retained.
        n_window: how far the shortest sliding window reaches back, 0 without one: a saved
            state holds no more than that before its end.
        control_tokens: those that are no text, by how a template writes them.
        added_tokens: the texts that are always one token, wherever they stand.
    """

    has_template: bool = attrs.field(
        init=False, default=attrs.Factory(lambda self: self.chat_template is not None, True)
    )
    bos_text: str
    eos_text: str
    max_bytes_per_token: int | None
    n_seqs: int
    n_window: int = 0
    control_tokens: Mapping[str, int] = attrs.field(factory=dict, repr=False)
    added_tokens: frozenset[str] = attrs.field(default=frozenset(), repr=False)

    @property
    def info(self) -> ModelInfo:
        """What users are told."""
        return ModelInfo(**{f.name: getattr(self, f.name) for f in attrs.fields(ModelInfo)})


class Runtime(Protocol):
    """A loaded model that runs steps."""

    @property
    def facts(self) -> ModelFacts:
        """What the model says of itself."""
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Text to tokens.  From any thread, also while a step runs."""
        ...

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Tokens to text.  From any thread, also while a step runs."""
        ...

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token, control tokens written out.  From any thread."""
        ...

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Make a constraint ready for one request.  From any thread; may take seconds.

        Raises `ProtocolError` if it does not compile, is unsafe, or no text satisfies it.
        """
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Run one step, blocking.  Only on the lane.

        Raises `SessionFatal` if the KV pool no longer matches the plan's books.
        """
        ...

    def request_abort(self) -> None:
        """Make the running step end soon.  From any thread."""
        ...

    def clear_abort(self) -> None:
        """Let steps run again.  While none runs."""
        ...


@attrs.frozen
class Scoring:
    """What is to be computed to score continuations of a prompt.

    `targets` are the tokens of each that follow the prompt; `own` those that follow it if nothing
    is continued.  There are such where text and continuation meet within a token.
    """

    prompt: Sequence[int]
    targets: Sequence[Sequence[int]]
    own: Sequence[int]


def tokens_of_prompt(runtime: Runtime, text: str) -> list[int]:
    """A prompt's text as tokens, with BOS where the model wants it."""
    bos = runtime.facts.bos_text
    # A template that writes BOS itself must not get a second one.
    return runtime.tokenize(
        text, add_special=not bos or not text.startswith(bos), parse_special=True
    )


def without_sentinel(
    runtime: Runtime, tokens: Sequence[int], sentinel: str, count: int
) -> list[int] | None:
    """The tokens, without those of the sentinel, which the text has `count` times.

    `None` if a token joins it to its neighbour, or does not stand for text at all.
    """
    target = sentinel.encode()
    kept: list[int] = []
    n_matched = n_begun = n_found = 0  # bytes of the sentinel, tokens of it, whole ones
    for token, piece in zip(tokens, runtime.pieces(tokens), strict=True):
        kept.append(token)
        if n_matched and not (piece and target.startswith(piece, n_matched)):
            n_matched = n_begun = 0
        if piece and target.startswith(piece, n_matched):
            n_matched += len(piece)
            n_begun += 1
        if n_matched == len(target):
            del kept[-n_begun:]
            n_found += 1
            n_matched = n_begun = 0
    return kept if n_found == count else None
