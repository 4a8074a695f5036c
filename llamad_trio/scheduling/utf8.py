"""Bytes of tokens to text: a piece may end in the middle of a character."""

from __future__ import annotations

import codecs


class Utf8Assembler:
    """Joins byte pieces into whole characters.

    Whatever the cuts, the result is that of decoding all bytes at once with
    `errors="replace"`: bytes that are no UTF-8 become U+FFFD.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str:
        """Take the bytes of one token; return the characters that are complete."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """The bytes have ended: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
