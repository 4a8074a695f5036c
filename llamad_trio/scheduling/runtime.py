"""The seam between the actors and what computes.

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

        Raises:
            ProtocolError: it does not compile, is unsafe, or no text satisfies it.
        """
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Run one step, blocking.  Only on the lane.

        Raises:
            SessionFatal: the KV pool no longer matches the plan's books.
        """
        ...

    def request_abort(self) -> None:
        """Make the running step end soon.  From any thread."""
        ...

    def clear_abort(self) -> None:
        """Let steps run again.  While none runs."""
        ...
