"""The messages between the scheduler and whatever computes a step; a sampler's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Protocol

import attrs

from llamad_trio.core.completion import TokenLogprob
from llamad_trio.core.request import Request

RANDOM_SEED = 2**32 - 1
"""llama.cpp takes this seed to mean "draw one", which would break "same seed, same text"."""

MIN_REPEAT_PENALTY = 0.01
"""The penalty divides logits; at 0 they would be infinite or NaN."""


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Resolved sampling numbers, in the order they are applied: penalties, top-k,
    top-p, min-p, temperature, draw.  With `greedy` the likeliest token is taken and
    everything else is ignored."""

    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    penalty_window: int
    presence_penalty: float
    frequency_penalty: float
    seed: int

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits at all."""
        return self.penalty_window > 0 and (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def resolve_sampling(request: Request, *, n_ctx: int, fresh_seed: int) -> SamplingParams:
    """Resolve a request's sampling fields.

    `repeat_last_n = -1` stands for `n_ctx` tokens; one that names no seed gets `fresh_seed`.
    """
    seed = fresh_seed if request.seed is None else request.seed
    return SamplingParams(
        greedy=request.temperature <= 0.0,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repeat_penalty=max(request.repeat_penalty, MIN_REPEAT_PENALTY),
        penalty_window=n_ctx if request.repeat_last_n < 0 else min(request.repeat_last_n, n_ctx),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=seed if seed != RANDOM_SEED else RANDOM_SEED - 1,
    )


class CompiledConstraint(Protocol):
    """A constraint as a runtime has compiled it: nothing to look into."""


@attrs.frozen(kw_only=True)
class Prepared:
    """A request made ready to run: templated, tokenised, within budget.

    Attributes:
        tokens: the whole prompt, at least one token.
        max_tokens: most tokens to generate, already capped by what an empty pool leaves;
            0 only computes the prompt.
        session: its prefix is kept in preference to those of no session.
        holder: who holds on to the prompt's KV when the request is complete; it is kept
            in preference to all others, until the holder holds something else.
        targets: to score instead of generating: target `i` is the token whose logarithmic
            probability is asked for after token `len(tokens) - len(targets) + i`.  What
            was computed for it is not retained.
        constraint: what the text must be, as the runtime has compiled it.
        visible: control tokens whose text counts as generated text.
        n_logprobs: how many of the likeliest tokens to tell with each one; `None` tells
            no probabilities at all.
    """

    id: int
    tokens: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    stop: Sequence[str] = ()
    streams: bool = True
    session: str | None = None
    holder: str | None = None
    targets: Sequence[int] = ()
    constraint: CompiledConstraint | None = None
    visible: frozenset[int] = frozenset()
    n_logprobs: int | None = None


@attrs.frozen
class Drop:
    """Remove all of a sequence from the KV cache."""

    seq: int


@attrs.frozen
class Copy:
    """Let `dst`, which is empty, share the first `n` tokens of `src`."""

    src: int
    dst: int
    n: int


@attrs.frozen
class Save:
    """Write out the state of a sequence; the result carries it under `key`."""

    seq: int
    key: int


@attrs.frozen(eq=False)
class Restore:
    """Give `seq`, which is empty, a state of `length` tokens; keep the first `n` of them."""

    seq: int
    state: bytes
    length: int
    n: int


MemoryOp = Drop | Copy | Save | Restore


@attrs.frozen
class Work:
    """Tokens of one sequence to compute in a step, at least one.

    Attributes:
        pos: position of the first of `tokens`; everything before it is in the KV cache.
        sample: whether to sample a token after the last of them.
        targets: tokens to score, one after each of the last `len(targets)` of `tokens`.
        decodes: whether `tokens` were generated, not prompted.
    """

    request_id: int
    seq: int
    pos: int
    tokens: Sequence[int]
    sample: bool
    targets: Sequence[int] = ()
    decodes: bool = False

    @property
    def n_outputs(self) -> int:
        """After how many of the last tokens logits are wanted."""
        return max(int(self.sample), len(self.targets))


@attrs.frozen(kw_only=True)
class StepPlan:
    """One step: first the memory operations, in order, then all `work` in one batch.

    Attributes:
        work: without it, only the memory operations are made.
        n_threads: how many compute it; 0 is as many as before.
        new_samplers: the requests that have a sampler from this step on.
        old_samplers: ids of those whose sampler is no longer needed.
    """

    work: tuple[Work, ...]
    n_threads: int = 0
    memory: tuple[MemoryOp, ...] = ()
    new_samplers: tuple[Prepared, ...] = ()
    old_samplers: tuple[int, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Tokens in the batch."""
        return sum(len(w.tokens) for w in self.work)

    @property
    def n_generated(self) -> int:
        """Of these, the ones that were generated, not prompted."""
        return sum(len(w.tokens) for w in self.work if w.decodes)


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
    """One sampled token, its bytes, and what follows from it.

    Attributes:
        ends: whether it ends the generation; it is no text then.
        forced: ids and bytes of the tokens after it, where the constraint leaves no choice.
        is_complete: whether the constraint lets nothing follow those.
        logprobs: how likely it was, if that was asked for; no token is `forced` then.
    """

    token: int
    piece: bytes
    ends: bool
    forced: Sequence[tuple[int, bytes]] = ()
    is_complete: bool = False
    logprobs: TokenLogprob | None = None


@attrs.frozen(kw_only=True)
class StepResult:
    """What a step did.

    Attributes:
        sampled: by request id, for the work that asked for a token.
        failures: by request id, why no token could be sampled.
        scores: by request id, the logarithmic probabilities of the work's targets.
        cleared: sequences that lost *all* their tokens, because the model's memory
            cannot be rolled back to a position.
        saved: by key, the states that were to be saved and could be.
        compute_s: seconds of `elapsed_s` in llama.cpp; 0 if they are not known.
        waited_s: seconds of these for which the lane's thread had no core.
        reason: why, when the status is `FAILED`.
    """

    status: StepStatus
    sampled: Mapping[int, Sampled] = attrs.field(factory=dict)
    failures: Mapping[int, str] = attrs.field(factory=dict)
    scores: Mapping[int, Sequence[float]] = attrs.field(factory=dict)
    cleared: frozenset[int] = frozenset()
    saved: Mapping[int, bytes] = attrs.field(factory=dict)
    elapsed_s: float = 0.0
    compute_s: float = 0.0
    waited_s: float = 0.0
    reason: str = ""
