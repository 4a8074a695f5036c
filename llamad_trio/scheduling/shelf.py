"""Prefixes that left the KV pool: kept in RAM, known on disk, found again by their tokens.

Decides what is kept within a number of bytes, and what gives way.  Knows neither files
nor llama.cpp: a state is bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import attrs

from llamad_trio.scheduling.prefix import Match, PrefixTree


@attrs.frozen(eq=False)
class Snapshot:
    """The state of a sequence that holds `tokens`, as llama.cpp wrote it."""

    tokens: tuple[int, ...]
    state: bytes

    @property
    def n_bytes(self) -> int:
        """What it takes to keep it: the state, and four bytes a token."""
        return len(self.state) + 4 * len(self.tokens)


@attrs.define(eq=False)
class _Entry:
    tokens: tuple[int, ...]
    snapshot: Snapshot | None  # None: on disk only
    on_disk: bool


class Shelf:
    """Snapshots by number, within `max_bytes` of RAM; the least recently used give way.

    With `has_disk`, what leaves RAM can still be stored; with `any_prefix`, a part of a snapshot
    is of use, too.
    """

    def __init__(
        self, *, max_bytes: int = 0, has_disk: bool = False, any_prefix: bool = True
    ) -> None:
        self._max_bytes = max_bytes
        self._is_off = max_bytes == 0 and not has_disk
        self._any_prefix = any_prefix
        self._entries: dict[int, _Entry] = {}  # the least recently used first
        self._index = PrefixTree()
        self._leaving: list[Snapshot] = []
        self._keys = count()

    @property
    def n_bytes(self) -> int:
        """RAM in use."""
        return sum(e.snapshot.n_bytes for e in self._entries.values() if e.snapshot)

    def match(self, tokens: Sequence[int], limit: int) -> Match:
        """The entry (as `seq`) that holds most of the first `limit` tokens."""
        return self._index.match(tokens, limit, whole=not self._any_prefix)

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether a snapshot of `tokens` can be kept somewhere, and would give anything new."""
        return not self._is_off and self.match(tokens, len(tokens)).n < len(tokens)

    def length(self, key: int) -> int:
        """Tokens an entry holds."""
        return len(self._entries[key].tokens)

    def snapshot(self, key: int) -> Snapshot | None:
        """What an entry holds, used now; `None` if it must be read from disk first."""
        self._touch(key)
        return self._entries[key].snapshot

    def put(self, snapshot: Snapshot) -> None:
        """Keep a snapshot, if it is wanted.  One larger than the shelf leaves at once."""
        if self.wants(snapshot.tokens):
            if self._any_prefix:
                self._drop_covered_by(snapshot.tokens)
            self._add(snapshot.tokens, snapshot)
            self._shrink()

    def take_leaving(self) -> list[Snapshot]:
        """What had to leave RAM since the last call and is not on disk, oldest first.

        It is forgotten: once it has been stored, `add_stored` makes it known again.
        """
        leaving, self._leaving = self._leaving, []
        return leaving

    def add_stored(self, tokens: Sequence[int]) -> int:
        """Know of a snapshot on disk; return its key."""
        return self._add(tuple(tokens), None)

    def take_all(self) -> list[Snapshot]:
        """Everything that is not on disk, to be stored: what is in RAM, and what has left it."""
        in_ram = (e.snapshot for e in self._entries.values() if e.snapshot and not e.on_disk)
        return [*self.take_leaving(), *in_ram]

    def add_read(self, key: int, snapshot: Snapshot | None) -> None:
        """An entry was read from disk: hold it until the next `put` or `add_read` at least.

        With `None`, it could not be read, and is forgotten.
        """
        entry = self._entries.get(key)
        if entry is None:
            return
        if snapshot is None or entry.tokens != snapshot.tokens:  # gone, or another one by now
            self._remove(key)
            return
        self._touch(key)
        self._shrink(beside=snapshot.n_bytes)
        entry.snapshot = snapshot

    def _add(self, tokens: tuple[int, ...], snapshot: Snapshot | None) -> int:
        key = next(self._keys)
        self._entries[key] = _Entry(tokens, snapshot, on_disk=snapshot is None)
        self._index.extend(key, tokens)
        return key

    def _remove(self, key: int) -> None:
        del self._entries[key]
        self._index.drop(key)

    def _touch(self, key: int) -> None:
        self._entries[key] = self._entries.pop(key)

    def _drop_covered_by(self, tokens: tuple[int, ...]) -> None:
        for key, entry in list(self._entries.items()):
            if not entry.on_disk and tokens[: len(entry.tokens)] == entry.tokens:
                self._remove(key)

    def _shrink(self, beside: int = 0) -> None:
        """Let the least recently used leave RAM until the rest fits `beside` some more bytes."""
        limit = max(0, self._max_bytes - beside)
        in_ram = [(key, e, e.snapshot) for key, e in self._entries.items() if e.snapshot]
        for key, entry, snapshot in in_ram:
            if self.n_bytes <= limit:
                break
            entry.snapshot = None
            if not entry.on_disk:
                self._leaving.append(snapshot)
                self._remove(key)
