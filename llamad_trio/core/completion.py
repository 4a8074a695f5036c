"""What a caller gets back."""

from __future__ import annotations

from typing import Literal

import attrs

__all__ = ["Completion", "FinishReason"]

FinishReason = Literal["stop", "length"]


@attrs.frozen(kw_only=True)
class Completion:
    """The end of one request.

    Attributes:
        text: everything generated, up to and without the stop sequence.
        prompt_tokens: length of the templated prompt.
        generated_tokens: tokens sampled, the one that ended the generation included.
        finish_reason: `"stop"` (end of generation or a stop sequence) or `"length"`.
        stop_sequence: the stop sequence that matched, if one did.
        cached_tokens: prompt tokens whose KV was reused instead of computed.
        ttft_s: seconds from submission to the first token.
        duration_s: seconds from submission to the end.
    """

    text: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: FinishReason
    stop_sequence: str | None = None
    cached_tokens: int = 0
    ttft_s: float = 0.0
    duration_s: float = 0.0
