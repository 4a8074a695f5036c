"""Stop sequences: where the text ends, and how much of it must still be withheld.

The rule, the same for every way of cutting the text into pieces: read character
by character, the generation stops at the first character that completes any stop
sequence; if it completes several, the longest counts.  Text is withheld only while
it is a proper prefix of some stop sequence.
"""

from __future__ import annotations

from collections.abc import Iterable


class _Candidate:
    """A stop sequence, and how much of it the text's end matches (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self.fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self.fallback[length - 1]
            length += text[i] == text[length]
            self.fallback[i] = length

    def feed(self, char: str) -> bool:
        """Take one character; true if it completes the sequence."""
        while self.matched and char != self.text[self.matched]:
            self.matched = self.fallback[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)


class StopMatcher:
    """Passes text through until a stop sequence is complete.

    Args:
        stops: the stop sequences; empty ones are ignored.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        # Longest first, so that the first to complete at a character is the longest.
        unique = sorted({s for s in stops if s}, key=len, reverse=True)
        self._candidates = [_Candidate(s) for s in unique]
        self._withheld = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what can be shown.  After a match, always `""`."""
        if self.matched is not None:
            return ""
        if not self._candidates:
            return text
        buffer = self._withheld + text
        for end, char in enumerate(text, len(self._withheld) + 1):
            # Every sequence must see every character: no short circuit.
            complete = [s for s in self._candidates if s.feed(char)]
            if complete:
                self.matched = complete[0].text
                self._withheld = ""
                return buffer[: end - len(self.matched)]
        keep = max(s.matched for s in self._candidates)
        shown = len(buffer) - keep
        self._withheld = buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """The text has ended: return what was withheld and is no stop sequence."""
        rest, self._withheld = self._withheld, ""
        return rest
