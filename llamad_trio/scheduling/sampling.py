"""From a request's wishes to the numbers a sampler is built from."""

from __future__ import annotations

import attrs

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

    Args:
        request: where the fields come from.
        n_ctx: what `repeat_last_n = -1` stands for, in tokens.
        fresh_seed: the seed of a request that names none.
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
