"""A prompt's text as tokens, BOS and sentinels seen to.  Knows nothing of templates."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from llamad_trio.scheduling.runtime import Runtime


@attrs.frozen
class Scoring:
    """What is to be computed to score continuations.

    Attributes:
        prompt: tokens that all have in common.
        targets: of each continuation, the tokens that follow the prompt.
        own: the tokens that follow it if nothing is continued.  There are such where text
            and continuation meet within a token.
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

    Returns:
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
