"""Bytes to lines, however they are cut.  Decides what a line is, not what it says."""

from __future__ import annotations


class LineTooLong(Exception):
    """A line is longer than it may be."""


class LineBuffer:
    """Takes bytes as they come and gives whole lines.

    Args:
        max_bytes: longest line, its newline not counted; `None` is no limit.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._searched = 0  # no newline before this

    @property
    def is_empty(self) -> bool:
        """Whether no line has begun."""
        return not self._data

    def push(self, data: bytes) -> None:
        """Take what has arrived."""
        self._data += data

    def pop(self) -> bytes | None:
        """The next whole line without its newline, if there is one.

        Raises:
            LineTooLong: it is too long, or will be.
        """
        end = self._data.find(b"\n", self._searched)
        self._searched = max(len(self._data) if end < 0 else end, 0)
        if self._max_bytes is not None and self._searched > self._max_bytes:
            raise LineTooLong
        if end < 0:
            return None
        line = bytes(self._data[:end])
        del self._data[: end + 1]
        self._searched = 0
        return line

    def pop_rest(self) -> bytes:
        """The last line, which the end of the input has ended.  Raises as `pop`."""
        line = self.pop()
        if line is None:
            line = bytes(self._data)
            self._data.clear()
            self._searched = 0
        return line
