"""How much of a prompt goes into a step, so that the streams beside it do not stall."""

from __future__ import annotations

MIN_CHUNK = 16
"""A prompt always advances by this many tokens a step; smaller chunks waste the batch."""

FIRST_CHUNK = 32
"""The first shared chunk, before any speed is known: near full prefill speed, and short."""

SMOOTHING = 0.3
"""Weight of the newest measurement: follows a growing context, forgives one slow step."""


class StepPacer:
    """Learns the cost of decode rows and prompt tokens from the steps that were run.

    Args:
        target_s: seconds a step with running streams should take.
        n_batch: most tokens in any step.
    """

    def __init__(self, *, target_s: float, n_batch: int) -> None:
        self._target_s = target_s
        self._n_batch = n_batch
        self._decode_s: float | None = None
        self._token_s: float | None = None

    def observe(self, *, n_decode: int, n_prefill: int, elapsed_s: float) -> None:
        """Learn from a finished step of `n_decode` single rows and `n_prefill` prompt tokens."""
        if n_prefill == 0:
            self._decode_s = _blend(self._decode_s, elapsed_s)
        elif n_prefill >= MIN_CHUNK or self._token_s is None:
            decode_s = (self._decode_s or 0.0) if n_decode else 0.0
            # A chunk can not be cheaper than its share of the whole step's tokens.
            floor_s = elapsed_s * n_prefill / (n_prefill + n_decode) / 2
            prefill_s = max(elapsed_s - decode_s, floor_s)
            self._token_s = _blend(self._token_s, prefill_s / n_prefill)

    def prefill_budget(self, *, n_decode: int) -> int:
        """Prompt tokens for the next step, beside `n_decode` rows that decode a token."""
        room = self._n_batch - n_decode
        if n_decode == 0:
            return room
        if self._token_s is None:
            return min(FIRST_CHUNK, room)
        spare_s = self._target_s - (self._decode_s or 0.0)
        return max(0, min(room, max(MIN_CHUNK, int(spare_s / max(self._token_s, 1e-9)))))


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
