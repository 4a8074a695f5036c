"""The messages between the scheduler and whatever computes a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto

import attrs

from llamad_trio.core.sampling import SamplingParams

__all__ = [
    "Prepared",
    "Sampled",
    "SamplerSpec",
    "StepPlan",
    "StepResult",
    "StepStatus",
    "Trim",
    "Work",
]


@attrs.frozen(kw_only=True)
class Prepared:
    """A request made ready to run: templated, tokenised, within budget.

    Attributes:
        id: unique.
        tokens: the whole prompt, at least one token.
        max_tokens: most tokens to generate, already capped by what an empty pool leaves.
        streams: whether the caller wants the text piece by piece.
    """

    id: int
    tokens: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    stop: Sequence[str] = ()
    streams: bool = True


@attrs.frozen
class Trim:
    """Keep the first `keep` tokens of sequence `seq` in the KV cache, drop the rest."""

    seq: int
    keep: int


@attrs.frozen(kw_only=True)
class SamplerSpec:
    """A sampler to make before the step: its numbers, and the tokens it has seen."""

    request_id: int
    params: SamplingParams
    seen: Sequence[int]


@attrs.frozen
class Work:
    """Tokens of one sequence to compute in a step.

    Attributes:
        request_id: whose work it is.
        seq: the llama.cpp sequence (the slot's number).
        pos: position of the first of `tokens`; everything before it is in the KV cache.
        tokens: at least one token.
        sample: whether to sample a token after the last of them.
    """

    request_id: int
    seq: int
    pos: int
    tokens: Sequence[int]
    sample: bool


@attrs.frozen(kw_only=True)
class StepPlan:
    """One step: first the trims and the samplers, then all `work` in one batch."""

    work: tuple[Work, ...]
    trims: tuple[Trim, ...] = ()
    new_samplers: tuple[SamplerSpec, ...] = ()
    old_samplers: tuple[int, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Tokens in the batch."""
        return sum(len(w.tokens) for w in self.work)


class StepStatus(Enum):
    """How a step ended."""

    DONE = auto()
    ABORTED = auto()
    """Stopped between graph nodes; nothing of it stands."""
    NO_ROOM = auto()
    """llama.cpp found no cells for the batch; nothing of it stands."""
    FAILED = auto()
    """The computation failed; the sequences of the step were cleared."""


@attrs.frozen
class Sampled:
    """One sampled token: its id, its bytes, and whether it ends the generation."""

    token: int
    piece: bytes
    ends: bool


@attrs.frozen(kw_only=True)
class StepResult:
    """What a step did.

    Attributes:
        sampled: by request id, for the work that asked for a token.
        failures: by request id, why no token could be sampled.
        cleared: sequences that lost *all* their tokens, because the model's memory
            cannot be rolled back to a position.
        elapsed_s: seconds the computation took.
        reason: why, when the status is `FAILED`.
    """

    status: StepStatus
    sampled: Mapping[int, Sampled] = attrs.field(factory=dict)
    failures: Mapping[int, str] = attrs.field(factory=dict)
    cleared: frozenset[int] = frozenset()
    elapsed_s: float = 0.0
    reason: str = ""
