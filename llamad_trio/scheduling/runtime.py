"""The seam between the actors and what computes.

llama.cpp on a thread is one implementation; the scripted model of
`llamad_trio.testing` on Trio's clock is another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs

from llamad_trio.constraints.constraint import Constraint
from llamad_trio.scheduling.plan import CompiledConstraint, StepPlan, StepResult


@attrs.frozen(kw_only=True)
class ModelFacts:
    """What a model says of itself.  Sizes in bytes, lengths in tokens.

    `control_tokens` are those that are no text, by how a template writes them;
    `added_tokens` the texts that are always one token, wherever they stand.
    `max_bytes_per_token` is the most text one token can stand for, `None` if unknown.
    `n_window` is how far the shortest sliding window reaches back, 0 without one: a saved
    state holds no more than that before its end.  `n_seqs` is the number of sequences its
    context has: more than slots, if any is to be retained.  `identity` is a digest of
    everything that decides what its KV cache means.
    """

    architecture: str
    description: str
    name: str | None
    n_params: int
    file_bytes: int
    n_vocab: int
    n_ctx_train: int
    chat_template: str | None
    bos_text: str
    eos_text: str
    max_bytes_per_token: int | None
    can_rewind: bool
    n_seqs: int
    identity: str
    n_window: int = 0
    control_tokens: Mapping[str, int] = attrs.field(factory=dict, repr=False)
    added_tokens: frozenset[str] = attrs.field(default=frozenset(), repr=False)


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
