"""The disk tier: snapshots of prefixes that survive a restart.

One file a snapshot, in a folder for its identity.  A file is written under a temporary
name, synced and renamed, so that it is whole or not there; what is not whole, or not
ours, is reported and removed, and never an error for a request.  Several processes may
share the directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from llamad_trio.scheduling.shelf import Snapshot
from llamad_trio.scheduling.snapshot_file import (
    HEADER_BYTES,
    BadSnapshotError,
    Header,
    decode,
    encode,
    unpack_tokens,
)
from llamad_trio.system.host import replace_file
from llamad_trio.system.nursery import ends_in_order, open_plain_nursery

logger = logging.getLogger("llamad_trio")

T = TypeVar("T")

MAX_WRITES = 8
"""Snapshots that may wait to be written: they are RAM that nobody budgeted."""

MAX_READS = 512
"""A slot waits for one at most, and there are no more slots."""

ABANDONED_S = 3600
"""No snapshot takes an hour to write."""

SUFFIX = ".kv"
TEMPORARY = ".writing"


class SnapshotStore:
    """The files of one identity.  Blocking; one thread at a time.

    `directory`, made with mode 0700, is where all identities have their folders, which together
    may take `max_bytes`; `manifest` is the digest (hex) of this one.
    """

    def __init__(self, directory: Path, manifest: str, max_bytes: int) -> None:
        self._root = directory
        self._folder = directory / manifest[:32]
        self._manifest = manifest
        self._max_bytes = max_bytes
        self._writable = True
        self._removed: list[Path] = []

    def scan(self) -> list[tuple[Path, tuple[int, ...]]]:
        """The snapshots there are, with their tokens; what is none of ours is removed."""
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self._give_up(error)
            return []
        self._remove_abandoned()
        found = []
        for path in sorted(p for p in self._folder.glob(f"*{SUFFIX}") if p.is_file()):
            try:
                found.append((path, self._read_tokens(path)))
            except FileNotFoundError:
                continue  # another process was faster
            except (OSError, BadSnapshotError) as error:
                self._discard(path, error)
        return found

    def write(self, snapshot: Snapshot) -> Path | None:
        """Store a snapshot; `None` if that cannot be, which is warned of once."""
        if not self._writable or snapshot.n_bytes + HEADER_BYTES > self._max_bytes:
            return None
        parts = encode(snapshot, manifest=self._manifest)
        path = self._folder / (hashlib.sha256(parts[1]).hexdigest()[:32] + SUFFIX)
        draft = self._folder / f"{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY}"
        try:
            replace_file(path, parts, draft=draft)
        except OSError as error:
            self._give_up(error)
            return None
        self._keep_within(path)
        return path

    def read(self, path: Path) -> Snapshot | None:
        """A stored snapshot; `None` if it is gone, or was bad and is gone now."""
        try:
            snapshot = decode(path.read_bytes(), manifest=self._manifest)
        except FileNotFoundError:
            return None
        except (OSError, BadSnapshotError) as error:
            self._discard(path, error)
            return None
        with contextlib.suppress(OSError):  # it is only older than it could be
            os.utime(path)
        return snapshot

    def take_removed(self) -> list[Path]:
        """Files that had to make room since the last call."""
        removed, self._removed = self._removed, []
        return removed

    # -- inside -----------------------------------------------------------------------------

    def _read_tokens(self, path: Path) -> tuple[int, ...]:
        with path.open("rb") as file:
            n_file = os.fstat(file.fileno()).st_size
            header = Header.parse(file.read(HEADER_BYTES), manifest=self._manifest, n_file=n_file)
            return unpack_tokens(file.read(4 * header.n_tokens))

    def _discard(self, path: Path, reason: Exception) -> None:
        logger.warning("snapshot %s is removed: %s", path, reason)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("snapshot %s cannot be removed: %s", path, error)

    def _give_up(self, error: OSError) -> None:
        if self._writable:
            logger.warning("no prompts are kept in %s any more: %s", self._root, error)
        self._writable = False

    def _remove_abandoned(self) -> None:
        """Remove what processes that were killed have left half written."""
        for path in self._folder.glob(f"*{TEMPORARY}"):
            owner = path.name.split("-")[0]
            if not (owner.isdecimal() and _is_alive(int(owner))) or _is_old(path):
                _unlink(path)

    def _keep_within(self, newest: Path) -> None:
        """Remove the files used longest ago until the rest is within bounds."""
        # The newest comes first whatever the clocks say: it is kept.
        files = sorted(self._all_files(), key=lambda f: (f[2] == newest, f[0]), reverse=True)
        total = 0
        for _, size, path in files:
            total += size
            if total > self._max_bytes and path != newest and _unlink(path):
                self._removed.append(path)
                total -= size

    def _all_files(self) -> Iterator[tuple[float, int, Path]]:
        for path in self._root.glob(f"*/*{SUFFIX}"):
            try:
                stat = path.stat()
            except OSError:
                continue  # another process was faster, or it is not ours to see
            yield stat.st_mtime, stat.st_size, path


class StoreActor:
    """Reads and writes snapshots beside the engine.

    `add_stored` takes the tokens of a snapshot on disk and gives the key to ask for it by;
    `deliver` takes a key and what was read for it.
    """

    def __init__(
        self,
        store: SnapshotStore,
        add_stored: Callable[[tuple[int, ...]], int],
        deliver: Callable[[int, Snapshot | None], None],
    ) -> None:
        self._store = store
        self._add_stored = add_stored
        self._deliver = deliver
        self._paths: dict[int, Path] = {}
        self._reading: set[int] = set()
        self._limiter = trio.CapacityLimiter(1)
        self._to_write, self._writes = trio.open_memory_channel[Snapshot](MAX_WRITES)
        self._to_read, self._reads = trio.open_memory_channel[int](MAX_READS)

    def write(self, snapshot: Snapshot) -> None:
        """Store a snapshot when there is time.  Never blocks: a slow disk loses snapshots."""
        try:
            self._to_write.send_nowait(snapshot)
        except trio.WouldBlock:
            logger.debug("%d tokens are not stored: the disk is slow", len(snapshot.tokens))

    def fetch(self, key: int) -> None:
        """Read a snapshot and deliver it.  Never blocks; asked again, it does nothing."""
        if key in self._reading:
            return
        try:
            self._to_read.send_nowait(key)
        except trio.WouldBlock:
            return  # who waits for it asks again after the next read
        self._reading.add(key)

    async def load_index(self) -> None:
        """Make known what is stored."""
        for path, tokens in await self._in_thread(self._store.scan):
            self._paths[self._add_stored(tokens)] = path

    @ends_in_order
    async def run(self) -> None:
        """Run until cancelled."""
        async with open_plain_nursery() as nursery:
            nursery.start_soon(self._run_writes)
            async for key in self._reads:
                path = self._paths[key]
                snapshot = await self._in_thread(partial(self._store.read, path))
                self._reading.discard(key)
                if snapshot is None:
                    del self._paths[key]
                self._deliver(key, snapshot)

    async def write_now(self, snapshots: Sequence[Snapshot]) -> None:
        """Store snapshots, and what still waits to be, and return when they are."""
        for snapshot in (*self._take_waiting(), *snapshots):
            await self._in_thread(partial(self._store.write, snapshot))

    async def _run_writes(self) -> None:
        async for snapshot in self._writes:
            path = await self._in_thread(partial(self._store.write, snapshot))
            if path is not None and path not in self._paths.values():
                self._paths[self._add_stored(snapshot.tokens)] = path
            self._forget(self._store.take_removed())

    def _forget(self, removed: Sequence[Path]) -> None:
        for key in [key for key, path in self._paths.items() if path in removed]:
            if key not in self._reading:  # or it will be found to be gone
                del self._paths[key]
                self._deliver(key, None)

    def _take_waiting(self) -> list[Snapshot]:
        waiting: list[Snapshot] = []
        while True:
            try:
                waiting.append(self._writes.receive_nowait())
            except trio.WouldBlock:
                return waiting

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(function, limiter=self._limiter)


def _unlink(path: Path) -> bool:
    """Remove a file; false if that cannot be done, which is not worth an error."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _is_old(path: Path) -> bool:
    """Whether nobody can be writing it any more, though a process has its writer's number."""
    try:
        return time.time() - path.stat().st_mtime > ABANDONED_S
    except OSError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
