"""Finding markers in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence


class MarkerFinder:
    """Passes text through up to the next marker.

    Withholds text only while it is the beginning of a marker.
    """

    __slots__ = ("_candidate", "_held", "_markers")

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        firsts = "".join(re.escape(marker[0]) for marker in markers)
        self._candidate = re.compile(f"[{firsts}]") if firsts else None
        self._held = ""

    def scan(self, text: str, pos: int) -> tuple[str, str | None, int]:
        """Read `text` from `pos` on.

        Returns what is part of no marker, the marker if one is complete, and where to go on:
        behind the marker, or at the text's end.
        """
        if self._candidate is None:
            return text[pos:], None, len(text)
        plain: list[str] = []
        while pos < len(text):
            if not self._held:
                candidate = self._candidate.search(text, pos)
                start = len(text) if candidate is None else candidate.start()
                plain.append(text[pos:start])
                pos = start
                if candidate is None:
                    break
            held = self._held + text[pos]
            pos += 1
            if held in self._markers:
                self._held = ""
                return "".join(plain), held, pos
            keep = held
            while keep and not any(marker.startswith(keep) for marker in self._markers):
                keep = keep[1:]
            plain.append(held[: len(held) - len(keep)])
            self._held = keep
        return "".join(plain), None, pos

    def take(self) -> str:
        """The text has ended: return what was withheld."""
        held, self._held = self._held, ""
        return held
