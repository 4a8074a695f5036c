"""Prefixes that left the KV pool: kept in RAM, known on disk, found again by their tokens.

Decides what is kept within a number of bytes, and what gives way.  Knows neither files
nor llama.cpp: a state is bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import attrs

from llamad_trio.scheduling.prefix import Match, PrefixTree, common_length


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
    last_used: int


class Shelf:
    """Snapshots by number, the least recently used giving way.

    Args:
        max_bytes: how much RAM the snapshots may take.
        any_prefix: whether a part of a snapshot is of use, or only all of it.
    """

    def __init__(self, *, max_bytes: int, any_prefix: bool) -> None:
        self._max_bytes = max_bytes
        self._any_prefix = any_prefix
        self._entries: dict[int, _Entry] = {}
        self._index = PrefixTree()
        self._keys = count()
        self._clock = 0

    @property
    def n_bytes(self) -> int:
        """RAM in use."""
        return sum(e.snapshot.n_bytes for e in self._entries.values() if e.snapshot)

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, tokens: Sequence[int], limit: int | None = None) -> Match | None:
        """The entry that holds most of the first `limit` tokens; by default of all but the last."""
        limit = len(tokens) - 1 if limit is None else limit
        return self._index.match(tokens, limit, whole=not self._any_prefix)

    def covers(self, tokens: Sequence[int]) -> bool:
        """Whether a snapshot of `tokens` would give nothing new."""
        match = self._index.match(tokens, len(tokens), whole=not self._any_prefix)
        return match is not None and match.n == len(tokens)

    def length(self, key: int) -> int:
        """Tokens an entry holds."""
        return len(self._entries[key].tokens)

    def snapshot(self, key: int) -> Snapshot | None:
        """What an entry holds, used now; `None` if it must be read from disk first."""
        self._touch(key)
        return self._entries[key].snapshot

    # -- changes --------------------------------------------------------------------------

    def put(self, snapshot: Snapshot) -> list[Snapshot]:
        """Keep a snapshot; return what has to leave RAM for it and is not on disk, oldest first.

        One larger than the shelf leaves at once.  What is returned is forgotten: once it
        has been stored, `add_stored` makes it known again.
        """
        if self.covers(snapshot.tokens):
            return []
        self._drop_what_it_covers(snapshot)
        self._add(snapshot.tokens, snapshot)
        return self._shrink()

    def add_stored(self, tokens: Sequence[int]) -> int:
        """Know of a snapshot on disk; return its key."""
        key = self._add(tuple(tokens), None)
        self._entries[key].on_disk = True
        return key

    def take_all(self) -> list[Snapshot]:
        """Everything that is in RAM and not on disk, to be stored."""
        return [e.snapshot for e in self._entries.values() if e.snapshot and not e.on_disk]

    def read(self, key: int, snapshot: Snapshot) -> list[Snapshot]:
        """A snapshot was read from disk: hold it until the next `put` or `read` at least.

        Returns what has to leave RAM for it, as `put` does.
        """
        entry = self._entries.get(key)
        if entry is None:
            return []
        if entry.tokens != snapshot.tokens:  # the file is another one by now
            self.remove(key)
            return []
        self._touch(key)
        left = self._shrink(max(0, self._max_bytes - snapshot.n_bytes))
        entry.snapshot = snapshot
        return left

    def remove(self, key: int) -> None:
        """Forget an entry, known or not."""
        if self._entries.pop(key, None):
            self._index.drop(key)

    # -- inside ---------------------------------------------------------------------------

    def _add(self, tokens: tuple[int, ...], snapshot: Snapshot | None) -> int:
        key = next(self._keys)
        self._entries[key] = _Entry(tokens, snapshot, snapshot is None, 0)
        self._index.extend(key, tokens)
        self._touch(key)
        return key

    def _touch(self, key: int) -> None:
        self._clock += 1
        self._entries[key].last_used = self._clock

    def _drop_what_it_covers(self, snapshot: Snapshot) -> None:
        if not self._any_prefix:
            return
        for key, entry in list(self._entries.items()):
            n = len(entry.tokens)
            if not entry.on_disk and common_length(entry.tokens, snapshot.tokens, n) == n:
                self.remove(key)

    def _shrink(self, max_bytes: int | None = None) -> list[Snapshot]:
        limit = self._max_bytes if max_bytes is None else max_bytes
        left: list[Snapshot] = []
        in_ram = sorted(
            (key for key, e in self._entries.items() if e.snapshot),
            key=lambda key: self._entries[key].last_used,
        )
        for key in in_ram:
            if self.n_bytes <= limit:
                break
            entry = self._entries[key]
            assert entry.snapshot is not None
            if not entry.on_disk:
                left.append(entry.snapshot)
                self.remove(key)
            entry.snapshot = None
        return left
