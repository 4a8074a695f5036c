"""Reading and writing beside the engine: nothing waits for a disk but who asked for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import trio
import trio.testing

from llamad_trio.engine.store import MAX_READS, MAX_WRITES, SnapshotStore, StoreActor
from llamad_trio.scheduling.shelf import Snapshot
from llamad_trio.scheduling.snapshot_file import HEADER_BYTES
from llamad_trio.system.nursery import open_plain_nursery
from tests.support import until

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "a1" * 32


def snapshot(*tokens: int) -> Snapshot:
    return Snapshot(tokens, b"state of " + bytes(tokens))


class SlowStore(SnapshotStore):
    """A store on a disk that does nothing before it is told to."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 30) -> None:
        super().__init__(folder, MANIFEST, max_bytes)
        self.disk = threading.Event()
        self.begun = threading.Event()
        self.n_reads = 0

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


async def test_what_is_written_is_known_and_can_be_fetched(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.disk.set()
    store.scan()
    books = Books(store)
    async with open_plain_nursery() as nursery:
        nursery.start_soon(books.actor.run)
        books.actor.write(snapshot(1, 2))
        await until(lambda: books.stored == {100: (1, 2)})
        books.actor.fetch(100)
        await until(lambda: bool(books.read))
    ((key, read),) = books.read
    assert key == 100
    assert read is not None
    assert read.state == snapshot(1, 2).state


async def test_what_was_there_before_is_known(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.disk.set()
    store.scan()
    for token in (1, 2):
        assert store.write(snapshot(token)) is not None
    books = Books(store)
    await books.actor.load_index()
    assert set(books.stored.values()) == {(1,), (2,)}


async def test_the_same_prefix_written_again_is_known_once(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.disk.set()
    store.scan()
    books = Books(store)
    async with open_plain_nursery() as nursery:
        nursery.start_soon(books.actor.run)
        for tokens in ((1,), (1,), (2,)):
            books.actor.write(snapshot(*tokens))
        await until(lambda: (2,) in books.stored.values())
    assert list(books.stored.values()) == [(1,), (2,)]


async def test_a_slow_disk_loses_snapshots_and_holds_only_so_many(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.scan()
    books = Books(store)
    async with open_plain_nursery() as nursery:
        nursery.start_soon(books.actor.run)
        books.actor.write(snapshot(0))
        await until(store.begun.is_set)
        for token in range(1, 100):
            books.actor.write(snapshot(token))  # returns at once: this task never waits
        store.disk.set()
        await until(lambda: len(books.stored) == 1 + MAX_WRITES)
        books.actor.write(snapshot(200))
        await until(lambda: (200,) in books.stored.values())
    assert len(books.stored) == 1 + MAX_WRITES + 1


async def test_what_is_fetched_twice_is_read_once(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.disk.set()
    store.scan()
    store.write(snapshot(1))
    store.disk.clear()
    books = Books(store)
    await books.actor.load_index()
    async with open_plain_nursery() as nursery:
        nursery.start_soon(books.actor.run)
        for _ in range(10):
            books.actor.fetch(100)
        await until(lambda: store.n_reads == 1)
        books.actor.fetch(100)
        store.disk.set()
        await until(lambda: bool(books.read))
        books.actor.fetch(100)  # read once more: the first one may be gone from RAM
        await until(lambda: len(books.read) == 2)
    assert store.n_reads == 2


async def test_more_reads_than_can_wait_are_asked_for_again(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.disk.set()
    store.scan()
    for token in range(1, 4):
        store.write(snapshot(token))
    store.disk.clear()
    store.begun.clear()
    books = Books(store)
    await books.actor.load_index()
    (first, second, third) = books.stored
    for n in range(MAX_READS):  # as of callers that came and left while the disk hung
        books.actor._paths[-n - 1] = tmp_path / "gone.kv"
    async with open_plain_nursery() as nursery:
        nursery.start_soon(books.actor.run)
        books.actor.fetch(first)
        await until(store.begun.is_set)
        for n in range(MAX_READS):
            books.actor.fetch(-n - 1)
        books.actor.fetch(third)
        store.disk.set()
        await until(lambda: len(books.read) == 1 + MAX_READS)
        assert third not in dict(books.read)
        books.actor.fetch(third)
        books.actor.fetch(second)
        await until(lambda: len(books.read) == 3 + MAX_READS)
    assert dict(books.read)[third] is not None


async def test_a_bad_file_is_delivered_as_nothing(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.disk.set()
    store.scan()
    path = store.write(snapshot(1))
    assert path is not None
    books = Books(store)
    await books.actor.load_index()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    async with open_plain_nursery() as nursery:
        nursery.start_soon(books.actor.run)
        books.actor.fetch(100)
        await until(lambda: bool(books.read))
    assert books.read == [(100, None)]


async def test_files_that_made_room_are_no_longer_known(tmp_path: Path) -> None:
    size = HEADER_BYTES + 4 + len(snapshot(1).state)
    store = SlowStore(tmp_path, max_bytes=2 * size)
    store.disk.set()
    store.scan()
    books = Books(store)
    async with open_plain_nursery() as nursery:
        nursery.start_soon(books.actor.run)
        for token in range(1, 6):
            books.actor.write(snapshot(token))
            await until(lambda n=token: len(books.stored) == n)  # type: ignore[misc]
        await until(lambda: len(books.read) == 3)
    assert {read for _, read in books.read} == {None}
    left = books.stored.keys() - dict(books.read).keys()
    assert {books.stored[key] for key in left} == {tokens for _, tokens in store.scan()}


async def test_what_still_waits_is_written_with_the_last(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.scan()
    books = Books(store)
    async with open_plain_nursery() as nursery:
        nursery.start_soon(books.actor.run)
        for token in (1, 2, 3):
            books.actor.write(snapshot(token))
        await until(store.begun.is_set)
        nursery.cancel_scope.cancel()
        store.disk.set()
    await books.actor.write_now([snapshot(4)])
    assert {tokens for _, tokens in store.scan()} == {(1,), (2,), (3,), (4,)}


async def test_a_cancelled_actor_waits_for_the_file_in_its_hands_and_no_longer(
    tmp_path: Path,
) -> None:
    store = SlowStore(tmp_path)
    store.scan()
    books = Books(store)
    ended = trio.Event()

    async def run() -> None:
        try:
            await books.actor.run()
        finally:
            ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        books.actor.write(snapshot(1))
        books.actor.write(snapshot(2))
        await until(store.begun.is_set)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
            assert not ended.is_set()
            store.disk.set()
            await ended.wait()
    assert [tokens for _, tokens in store.scan()] == [(1,)]
