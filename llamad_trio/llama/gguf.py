"""A look into a GGUF file's header, before llama.cpp reads it.

llama.cpp refuses nearly every broken file cleanly.  What it does not refuse but dies of
is found here.  The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from llamad_trio.core.errors import ModelLoadError

__all__ = ["refuse_deadly"]

_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class _Reader:
    """Walks through the header; raises `struct.error` or `KeyError` where it is broken."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._pos = 8  # after the magic and the version

    def unsigned(self, code: str = "<Q") -> int:
        (value,) = struct.unpack_from(code, self._data, self._pos)
        self._pos += struct.calcsize(code)
        return int(value)

    def string(self) -> bytes:
        start = self._pos + 8
        end = start + self.unsigned()
        if end > len(self._data):
            raise struct.error("a string reaches beyond the end")
        self._pos = end
        return self._data[start:end]

    def strings(self) -> Iterator[bytes]:
        """The strings of an array value; an array of anything else is gone past."""
        kind, count = self.unsigned("<I"), self.unsigned()
        if kind != _STRING:
            self._skip_items(kind, count)
            return
        for _ in range(count):
            yield self.string()

    def skip(self, kind: int) -> None:
        if kind == _STRING:
            self.string()
        elif kind == _ARRAY:
            self._skip_items(self.unsigned("<I"), self.unsigned())
        else:
            self._pos += _SIZES[kind]

    def _skip_items(self, kind: int, count: int) -> None:
        if kind in _SIZES:
            self._pos += _SIZES[kind] * count
        else:
            for _ in range(count):
                self.skip(kind)


def refuse_deadly(path: Path) -> None:
    """Raise `ModelLoadError` for a file that would abort the process.

    Known to: a vocabulary that lists a token twice, and a SentencePiece vocabulary with which
    some text cannot be written.  A header this cannot follow is left to llama.cpp, which says
    what is wrong with it.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            reason = _deadly(_Reader(data))
        except (struct.error, KeyError, RecursionError):
            return
    if reason is not None:
        raise ModelLoadError(str(path), reason)


def _deadly(reader: _Reader) -> str | None:
    """What is deadly in the vocabulary, if anything is."""
    tokenizer, tokens = b"", set[bytes]()
    reader.unsigned()  # number of tensors
    for _ in range(reader.unsigned()):
        key, kind = reader.string(), reader.unsigned("<I")
        if key == b"tokenizer.ggml.model" and kind == _STRING:
            tokenizer = reader.string()
        elif key == b"tokenizer.ggml.tokens" and kind == _ARRAY:
            for token in reader.strings():
                if token in tokens:
                    return f"the vocabulary lists {token.decode(errors='replace')!r} twice"
                tokens.add(token)
        else:
            reader.skip(kind)
        if tokenizer and tokens:
            break
    if tokenizer != b"llama" or not tokens:
        return None
    missing = [byte for byte in _UTF8_BYTES if not _can_write(byte, tokens)]
    return f"the vocabulary cannot write the byte 0x{missing[0]:02X}" if missing else None


_UTF8_BYTES = [*range(0x01, 0xC0), *range(0xC2, 0xF5)]
"""Those that occur in texts: what SentencePiece has no token for is written with them."""


def _can_write(byte: int, tokens: set[bytes]) -> bool:
    return b"<0x%02X>" % byte in tokens or bytes([byte]) in tokens
