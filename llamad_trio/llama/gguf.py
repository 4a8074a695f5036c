"""A look into a GGUF file's header, before llama.cpp reads it.

llama.cpp refuses nearly every broken file cleanly.  What it does not refuse but dies of
is found here.  The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import attrs

from llamad_trio.core.errors import ModelLoadError

T = TypeVar("T")

_LENGTH = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}


@attrs.frozen(kw_only=True)
class Tensor:
    """A tensor of a file: ggml's number for its type, its shape, and where its bytes are.

    `end_bytes` is where the next one begins, so it includes what the file pads it with.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    start_bytes: int
    end_bytes: int

    @property
    def n_bytes(self) -> int:
        return self.end_bytes - self.start_bytes


@attrs.frozen(kw_only=True)
class Layout:
    """What a file's header says of its size.

    The tensors are in their order in the file, the numbers of tokens and merges the vocabulary's,
    and `n_files` counts the files the model is split into, this one included.
    """

    tensors: tuple[Tensor, ...]
    n_tokens: int
    n_merges: int
    n_files: int


def refuse_deadly(path: Path) -> None:
    """Raise `ModelLoadError` for a file that would abort the process.

    Known to: more layers or experts than llama.cpp has room for, a vocabulary that lists a
    token twice, and a SentencePiece vocabulary with which some text cannot be written.  A
    header this cannot follow is left to llama.cpp, which says what is wrong with it.
    """
    with suppress(_BrokenHeader):
        _read(path, _read_values)


def read_layout(path: Path) -> Layout:
    """Read where the tensors of a file are, from its header only.

    Raises `ModelLoadError` if the header is broken, the file ends before its tensors do, or it
    would abort the process, as `refuse_deadly` says.
    """
    return _read(path, _read_layout)


class _BrokenHeader(ModelLoadError):
    pass


def _read(path: Path, read: Callable[[_Reader], T]) -> T:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return read(_Reader(data))
        except ValueError as error:
            raise ModelLoadError(str(path), str(error)) from None
        except (struct.error, KeyError, RecursionError, OverflowError):
            raise _BrokenHeader(str(path), "the header is broken or cut off") from None


class _Reader:
    """Walks through the header; raises `struct.error` or `KeyError` where it is broken."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.file_bytes = len(data)
        self.position = 8  # after the magic and the version
        self.n_tensors = self.integer()
        self.n_values = self.integer()

    def integer(self, code: str = "<Q") -> int:
        (value,) = struct.unpack_from(code, self._data, self.position)
        self.position += struct.calcsize(code)
        return int(value)

    def string(self) -> bytes:
        start = self.position + _LENGTH.size
        self._go_to(start + self.integer())
        return self._data[start : self.position]

    def distinct_strings(self) -> set[bytes]:
        """The strings of an array value, `ValueError` if one comes twice; an array of anything
        else is gone past.
        """
        kind, count = self.integer("<I"), self.integer()
        found = set[bytes]()
        if kind != _STRING:
            self._skip_items(kind, count)
            return found
        data, end = self._data, self.position
        for _ in range(count):  # a vocabulary has up to some hundred thousand
            start = end + _LENGTH.size
            end = start + _LENGTH.unpack_from(data, end)[0]
            string = data[start:end]
            if string in found:
                raise ValueError(f"the vocabulary lists {string.decode(errors='replace')!r} twice")
            found.add(string)
        self._go_to(end)
        return found

    def skip(self, kind: int) -> None:
        if kind == _STRING:
            self.string()
        elif kind == _ARRAY:
            self.skip_array()
        else:
            self.position += _SIZES[kind]

    def skip_array(self) -> int:
        """Go past an array; return how many items it has."""
        kind, count = self.integer("<I"), self.integer()
        self._skip_items(kind, count)
        return count

    def _skip_items(self, kind: int, count: int) -> None:
        if kind in _SIZES:
            self.position += _SIZES[kind] * count
        elif kind == _STRING:
            data, end = self._data, self.position
            for _ in range(count):
                end += _LENGTH.size + _LENGTH.unpack_from(data, end)[0]
            self._go_to(end)
        else:
            for _ in range(count):
                self.skip(kind)

    def _go_to(self, end: int) -> None:
        if end > self.file_bytes:
            raise struct.error("a string reaches beyond the end")
        self.position = end


# -- the values -----------------------------------------------------------------------------

_TOKENIZER, _TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.tokens"


def _read_values(reader: _Reader) -> dict[str, int]:
    """The integers among the values, and of arrays the length.

    Raises `ValueError` where llama.cpp would abort the process.
    """
    numbers: dict[str, int] = {}
    tokenizer, tokens = b"", set[bytes]()
    for _ in range(reader.n_values):
        key, kind = reader.string().decode(errors="replace"), reader.integer("<I")
        if kind in _INTEGERS:
            numbers[key] = reader.integer(_INTEGERS[kind])
            _refuse_deadly_number(key, numbers[key])
        elif key == _TOKENIZER and kind == _STRING:
            tokenizer = reader.string()
        elif key == _TOKENS and kind == _ARRAY:
            tokens = reader.distinct_strings()
            numbers[key] = len(tokens)
        elif kind == _ARRAY:
            numbers[key] = reader.skip_array()
        else:
            reader.skip(kind)
    if tokenizer == b"llama" and tokens:
        for byte in _UTF8_BYTES:
            if b"<0x%02X>" % byte not in tokens and bytes([byte]) not in tokens:
                raise ValueError(f"the vocabulary cannot write the byte 0x{byte:02X}")
    return numbers


# llama.cpp keeps a table of this many layers and of this many experts, and aborts the process
# when a model has more.
_MAX_LAYERS = 512
_MAX_EXPERTS = 1024


def _refuse_deadly_number(key: str, number: int) -> None:
    if key.endswith(".block_count") and not 0 < number <= _MAX_LAYERS:
        raise ValueError(f"it has {number} layers, and llama.cpp takes 1 to {_MAX_LAYERS}")
    if key.endswith(".expert_count") and number > _MAX_EXPERTS:
        raise ValueError(f"it has {number} experts, and llama.cpp takes {_MAX_EXPERTS}")


_UTF8_BYTES = [*range(0x01, 0xC0), *range(0xC2, 0xF5)]
"""Those that occur in texts: what SentencePiece has no token for is written with them."""


# -- where the tensors are ------------------------------------------------------------------

_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


def _read_layout(reader: _Reader) -> Layout:
    numbers = _read_values(reader)
    infos = []  # of each tensor: name, shape, type, and offset from where the tensors begin
    for _ in range(reader.n_tensors):
        name = reader.string().decode(errors="replace")
        n_dimensions = reader.integer("<I")
        if n_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {n_dimensions} dimensions")
        shape = tuple(reader.integer() for _ in range(n_dimensions))
        infos.append((name, shape, reader.integer("<I"), reader.integer()))
    alignment = numbers.get("general.alignment", _DEFAULT_ALIGNMENT)
    if alignment <= 0:
        raise ValueError(f"the tensors are aligned to {alignment} bytes")
    first = -(-reader.position // alignment) * alignment
    infos.sort(key=lambda info: info[-1])
    starts = [first + offset for *_, offset in infos]
    if starts and starts[-1] > reader.file_bytes:
        raise ValueError("the file ends before its tensors do")
    tensors = tuple(
        Tensor(name=name, kind=kind, shape=shape, start_bytes=start, end_bytes=end)
        for (name, shape, kind, _), start, end in zip(
            infos, starts, [*starts[1:], reader.file_bytes], strict=True
        )
    )
    return Layout(
        tensors=tensors,
        n_tokens=numbers.get(_TOKENS, 0),
        n_merges=numbers.get("tokenizer.ggml.merges", 0),
        n_files=max(1, numbers.get("split.count", 1)),
    )
