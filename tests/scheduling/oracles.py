"""What the text and the reuse ought to be, computed the slow and obvious way."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence


def decoded(raw: bytes, *, final: bool) -> str:
    """The text of `raw`; a character that may still be completed is left out until `final`."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw, final)


def first_stop(text: str, stops: Iterable[str]) -> tuple[int, str] | None:
    """Where the first stop sequence begins, and which: the first to end, then the longest."""
    wanted = [stop for stop in stops if stop]
    for end in range(1, len(text) + 1):
        found = [stop for stop in wanted if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


def undecided(text: str, stops: Collection[str]) -> int:
    """How many last characters of `text` may turn out to begin a stop sequence."""
    return max(
        (
            n
            for n in range(1, len(text) + 1)
            if any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)
        ),
        default=0,
    )


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def longest_prefix(held: Iterable[Sequence[int]], tokens: Sequence[int], *, whole: bool) -> int:
    """How much of `tokens` somebody holds; with `whole`, and nothing else."""
    lengths = [(n_common(sequence, tokens), len(sequence)) for sequence in held]
    return max((n for n, length in lengths if n == length or not whole), default=0)
