"""Reading and writing beside the engine: nothing waits for a disk but who asked for it."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
import trio.testing

from llamad_trio.engine.store import MAX_READS, MAX_WRITES, SnapshotStore, StoreActor
from llamad_trio.scheduling.shelf import Snapshot
from llamad_trio.scheduling.snapshot_file import HEADER_BYTES
from llamad_trio.system.nursery import open_plain_nursery
from tests.support import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MANIFEST = "a1" * 32


def snapshot(*tokens: int) -> Snapshot:
    return Snapshot(tokens, b"state of " + bytes(tokens))


class SlowStore(SnapshotStore):
    """A store on a disk that can be made to do nothing before it is told to.

    Args:
        stored: what is there already.
        is_slow: whether it does nothing yet.
    """

    def __init__(
        self, folder: Path, *stored: Snapshot, is_slow: bool = True, max_bytes: int = 1 << 30
    ) -> None:
        super().__init__(folder, MANIFEST, max_bytes)
        self.disk = threading.Event()
        self.begun = threading.Event()
        self.n_reads = 0
        self.scan()
        for each in stored:
            assert super().write(each) is not None
        if not is_slow:
            self.disk.set()

    def write(self, snapshot: Snapshot) -> Path | None:
        self._wait()
        return super().write(snapshot)

    def read(self, path: Path) -> Snapshot | None:
        self.n_reads += 1
        self._wait()
        return super().read(path)

    def _wait(self) -> None:
        self.begun.set()
        assert self.disk.wait(timeout=60)


class Books:
    """What an actor tells the engine: keys and tokens of what is stored, and what was read."""

    def __init__(self, store: SnapshotStore) -> None:
        self.stored: dict[int, tuple[int, ...]] = {}
        self.read: list[tuple[int, Snapshot | None]] = []
        self.actor = StoreActor(store, self._add_stored, lambda *read: self.read.append(read))

    def _add_stored(self, tokens: tuple[int, ...]) -> int:
        key = 100 + len(self.stored)
        self.stored[key] = tokens
        return key

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StoreActor]:
        """The actor, which knows what is there and runs inside the block."""
        await self.actor.load_index()
        async with open_plain_nursery() as nursery:
            nursery.start_soon(self.actor.run)
            yield self.actor


async def test_what_is_written_is_known_once_and_can_be_fetched(tmp_path: Path) -> None:
    books = Books(SlowStore(tmp_path, is_slow=False))
    async with books.running() as actor:
        for tokens in ((1, 2), (1, 2), (3,)):
            actor.write(snapshot(*tokens))
        await until(lambda: (3,) in books.stored.values())
        actor.fetch(100)
        await until(lambda: bool(books.read))
    assert books.stored == {100: (1, 2), 101: (3,)}
    ((key, read),) = books.read
    assert key == 100
    assert read is not None
    assert read.state == snapshot(1, 2).state


async def test_a_slow_disk_loses_snapshots_and_holds_only_so_many(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    books = Books(store)
    async with books.running() as actor:
        actor.write(snapshot(0))
        await until(store.begun.is_set)
        for token in range(1, 100):
            actor.write(snapshot(token))  # returns at once: this task never waits
        store.disk.set()
        await until(lambda: len(books.stored) == 1 + MAX_WRITES)
        actor.write(snapshot(200))
        await until(lambda: (200,) in books.stored.values())
    assert len(books.stored) == 1 + MAX_WRITES + 1


async def test_what_is_fetched_twice_is_read_once(tmp_path: Path) -> None:
    store = SlowStore(tmp_path, snapshot(1))
    books = Books(store)
    async with books.running() as actor:
        for _ in range(10):
            actor.fetch(100)
        await until(lambda: store.n_reads == 1)
        actor.fetch(100)
        store.disk.set()
        await until(lambda: bool(books.read))
        actor.fetch(100)  # read once more: the first one may be gone from RAM
        await until(lambda: len(books.read) == 2)
    assert store.n_reads == 2


async def test_more_reads_than_can_wait_are_asked_for_again(tmp_path: Path) -> None:
    store = SlowStore(tmp_path, *map(snapshot, (1, 2, 3)))
    books = Books(store)
    async with books.running() as actor:
        first, second, third = books.stored
        for n in range(MAX_READS):  # as of callers that came and left while the disk hung
            actor._paths[-n - 1] = tmp_path / "gone.kv"
        actor.fetch(first)
        await until(store.begun.is_set)
        for n in range(MAX_READS):
            actor.fetch(-n - 1)
        actor.fetch(third)
        store.disk.set()
        await until(lambda: len(books.read) == 1 + MAX_READS)
        assert third not in dict(books.read)
        actor.fetch(third)
        actor.fetch(second)
        await until(lambda: len(books.read) == 3 + MAX_READS)
    assert dict(books.read)[third] is not None


async def test_a_bad_file_is_delivered_as_nothing(tmp_path: Path) -> None:
    store = SlowStore(tmp_path, snapshot(1), is_slow=False)
    books = Books(store)
    ((path, _),) = store.scan()
    async with books.running() as actor:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        actor.fetch(100)
        await until(lambda: bool(books.read))
    assert books.read == [(100, None)]


async def test_files_that_made_room_are_no_longer_known(tmp_path: Path) -> None:
    size = HEADER_BYTES + 4 + len(snapshot(1).state)
    store = SlowStore(tmp_path, is_slow=False, max_bytes=2 * size)
    books = Books(store)
    async with books.running() as actor:
        for token in range(1, 6):
            actor.write(snapshot(token))
            await until(lambda n=token: len(books.stored) == n)  # type: ignore[misc]
        await until(lambda: len(books.read) == 3)
    assert {read for _, read in books.read} == {None}
    left = books.stored.keys() - dict(books.read).keys()
    assert {books.stored[key] for key in left} == {tokens for _, tokens in store.scan()}


async def test_a_cancelled_actor_waits_for_the_file_in_its_hands_and_the_rest_is_written_at_the_end(
    tmp_path: Path,
) -> None:
    store = SlowStore(tmp_path)
    books = Books(store)
    ended = trio.Event()

    async def run() -> None:
        try:
            await books.actor.run()
        finally:
            ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        for token in (1, 2, 3):
            books.actor.write(snapshot(token))
        await until(store.begun.is_set)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
            assert not ended.is_set()
            store.disk.set()
            await ended.wait()
    assert [tokens for _, tokens in store.scan()] == [(1,)]
    await books.actor.write_now([snapshot(4)])
    assert {tokens for _, tokens in store.scan()} == {(1,), (2,), (3,), (4,)}
