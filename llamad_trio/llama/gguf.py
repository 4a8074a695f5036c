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
        """The strings of an array value; for an array of anything else, none."""
        kind = self.unsigned("<I")
        count = self.unsigned()
        for _ in range(count if kind == _STRING else 0):
            yield self.string()

    def skip(self, kind: int) -> None:
        if kind == _STRING:
            self.string()
        elif kind == _ARRAY:
            kind, count = self.unsigned("<I"), self.unsigned()
            if kind in _SIZES:
                self._pos += _SIZES[kind] * count
            else:
                for _ in range(count):
                    self.skip(kind)
        else:
            self._pos += _SIZES[kind]


def refuse_deadly(path: Path) -> None:
    """Raise `ModelLoadError` for a file that would abort the process.

    Known to: a vocabulary that lists a token twice.  A header this cannot follow is left
    to llama.cpp, which says what is wrong with it.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            _check_vocabulary(path, _Reader(data))
        except (struct.error, KeyError, RecursionError):
            return


def _check_vocabulary(path: Path, reader: _Reader) -> None:
    reader.unsigned()  # number of tensors
    for _ in range(reader.unsigned()):
        key, kind = reader.string(), reader.unsigned("<I")
        if key != b"tokenizer.ggml.tokens" or kind != _ARRAY:
            reader.skip(kind)
            continue
        seen: set[bytes] = set()
        for token in reader.strings():
            if token in seen:
                text = token.decode(errors="replace")
                raise ModelLoadError(str(path), f"the vocabulary lists {text!r} twice")
            seen.add(token)
        return
