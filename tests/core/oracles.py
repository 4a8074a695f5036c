"""What the text ought to be, computed the slow and obvious way."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable


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
