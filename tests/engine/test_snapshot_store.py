"""Files of snapshots: whole or not there, within their bytes, and never anybody's trouble."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llamad_trio.engine.store import SnapshotStore
from llamad_trio.scheduling.shelf import Snapshot
from llamad_trio.scheduling.snapshot_file import HEADER_BYTES, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

OURS = "a1" * 32
OTHERS = "b2" * 32
PLENTY = 1 << 30


def store_in(folder: Path, manifest: str = OURS, max_bytes: int = PLENTY) -> SnapshotStore:
    """A store that has looked around already."""
    store = SnapshotStore(folder, manifest, max_bytes)
    store.scan()
    return store


def snapshot(*tokens: int, n_file: int = 1000) -> Snapshot:
    """A snapshot whose file is `n_file` bytes long."""
    return Snapshot(tokens, bytes(n_file - HEADER_BYTES - 4 * len(tokens)))


def written(store: SnapshotStore, snapshot: Snapshot) -> Path:
    path = store.write(snapshot)
    assert path is not None
    return path


def read_back(store: SnapshotStore, path: Path) -> tuple[tuple[int, ...], bytes]:
    back = store.read(path)
    assert back is not None
    return back.tokens, back.state


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# -- what is stored -------------------------------------------------------------------------


def test_what_was_written_is_found_and_read(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    first, second = Snapshot((1, 2, 3), b"abc"), Snapshot((1, 2), b"de")
    paths = {written(store, first): first, written(store, second): second}
    assert dict(store_in(tmp_path).scan()) == {path: s.tokens for path, s in paths.items()}
    for path, expected in paths.items():
        assert read_back(store, path) == (expected.tokens, expected.state)


def test_the_directory_is_made_and_all_in_it_is_ours_alone(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "cache"
    before = os.umask(0)
    try:
        path = written(store_in(folder), snapshot(1))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (folder, path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]


def test_identities_do_not_see_each_other(tmp_path: Path) -> None:
    path = written(store_in(tmp_path), snapshot(1, 2))
    other = store_in(tmp_path, OTHERS)
    assert other.scan() == []
    assert path.exists()
    assert written(other, snapshot(1, 2)) != path


# -- what is bad ----------------------------------------------------------------------------


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-1],
    "emptied": lambda data: b"",
    "prolonged": lambda data: data + b"\0",
    "foreign": lambda data: b"GGUF" + data[4:],
    "of another version": lambda data: data[:8] + b"\2" + data[9:],
    "of another identity": lambda data: data[:12] + bytes.fromhex(OTHERS) + data[44:],
    "rotten": lambda data: data[:-7] + bytes([data[-7] ^ 4]) + data[-6:],
}


FOUND = [(how, by) for how in SPOILED for by in ("scan", "read")]
FOUND.remove(("rotten", "scan"))  # who looks around reads no state


@pytest.mark.parametrize(("how", "by"), FOUND)
def test_a_bad_file_is_found_out_reported_and_removed(
    tmp_path: Path, how: str, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path)
    good, bad = written(store, snapshot(1)), written(store, snapshot(2))
    bad.write_bytes(SPOILED[how](bad.read_bytes()))
    for _ in range(2):  # gone is not worth another word
        if by == "read":
            assert store.read(bad) is None
        else:
            assert store.scan() == [(good, (1,))]
        assert not bad.exists()
        (message,) = warnings(caplog)
        assert str(bad) in message


def test_what_is_none_of_ours_is_left_alone(tmp_path: Path) -> None:
    store = store_in(tmp_path, max_bytes=1000)
    first = written(store, snapshot(1))
    notes = [folder / "notes.txt" for folder in (tmp_path, first.parent)]
    for path in notes:
        path.write_bytes(bytes(5000))
    for name in ("x.kv", "1-x.writing"):
        (first.parent / name).mkdir()
    assert store.scan() == [(first, (1,))]
    assert written(store, snapshot(2)).exists()
    assert all(path.exists() for path in notes)


def test_a_good_file_whose_time_cannot_be_set_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path)
    path = written(store, snapshot(1))
    monkeypatch.setattr(os, "utime", raising(errno.EROFS))
    assert store.read(path) is not None
    assert path.exists()
    assert warnings(caplog) == []


# -- the budget -----------------------------------------------------------------------------


def test_the_files_used_longest_ago_make_room_whoever_they_belong_to(tmp_path: Path) -> None:
    ours, others = store_in(tmp_path, max_bytes=3000), store_in(tmp_path, OTHERS)
    paths = [
        written(store, snapshot(token))
        for token, store in enumerate([ours, others, ours, others], start=1)
        if token < 4
    ]
    for age, path in enumerate(paths):
        os.utime(path, (1000 + age, 1000 + age))
    assert ours.read(paths[0]) is not None  # used now
    newest = written(ours, snapshot(7))
    assert [path.exists() for path in paths] == [True, False, True]
    assert newest.exists()
    assert ours.take_removed() == [paths[1]]
    assert ours.take_removed() == []


def test_the_newest_is_kept_whatever_the_clock_says(tmp_path: Path) -> None:
    store = store_in(tmp_path, max_bytes=2000)
    from_the_future = [written(store, snapshot(token)) for token in (1, 2)]
    for path in from_the_future:
        os.utime(path, (2**33, 2**33))
    newest = written(store, snapshot(3))
    assert newest.exists()
    assert sum(path.exists() for path in from_the_future) == 1


def test_files_together_never_exceed_the_budget(tmp_path: Path) -> None:
    store = store_in(tmp_path, max_bytes=2500)
    for token in range(1, 20):
        written(store, snapshot(token, n_file=100 + 113 * token))
        sizes = [(tmp_path / name).stat().st_size for name in files_in(tmp_path)]
        assert sum(sizes) <= 2500


def test_what_exceeds_the_budget_alone_is_not_written_and_drives_nobody_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path, max_bytes=1000)
    path = written(store, snapshot(1))
    assert store.write(snapshot(2, n_file=1001)) is None
    assert files_in(tmp_path) == [str(path.relative_to(tmp_path))]
    assert warnings(caplog) == []


# -- trouble with the disk ------------------------------------------------------------------


def raising(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("owner", "name", "code"),
    [
        (os, "fsync", errno.ENOSPC),
        (os, "fsync", errno.EIO),
        (os, "replace", errno.EACCES),
        (os, "open", errno.EACCES),
        (os, "open", errno.EROFS),
    ],
)
def test_a_disk_that_takes_nothing_is_warned_of_once_and_leaves_no_rubbish(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: object,
    name: str,
    code: int,
) -> None:
    store = store_in(tmp_path)
    path = written(store, snapshot(1))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(code))
        assert [store.write(snapshot(token)) for token in (2, 3, 4)] == [None] * 3
    assert store.write(snapshot(5)) is None
    (message,) = warnings(caplog)
    assert str(tmp_path) in message
    assert os.strerror(code) in message
    assert files_in(tmp_path) == [str(path.relative_to(tmp_path))]
    assert store.read(path) is not None  # what is there still serves


@pytest.mark.parametrize(
    ("file", "folder"), [("file", "file"), ("file", "file/cache"), (OURS[:32], ".")]
)
def test_a_directory_that_cannot_be_is_warned_of_once(
    tmp_path: Path, file: str, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / file).write_text("")
    store = SnapshotStore(tmp_path / folder, OURS, PLENTY)
    assert store.scan() == []
    assert [store.write(snapshot(token)) for token in (1, 2)] == [None, None]
    assert len(warnings(caplog)) == 1


def test_a_directory_that_goes_away_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path / "cache")
    path = written(store, snapshot(1))
    path.unlink()
    path.parent.rmdir()
    assert [store.write(snapshot(token)) for token in (1, 2)] == [None, None]
    assert store.read(path) is None
    assert len(warnings(caplog)) == 1


def test_files_that_cannot_be_removed_are_nobodys_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path, max_bytes=1000)
    first = written(store, snapshot(1))
    (first.parent / "rubbish.writing").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", raising(errno.EACCES))
        second = written(store, snapshot(2))
        assert store.take_removed() == []
        assert dict(store.scan()) == {first: (1,), second: (2,)}
        first.write_bytes(b"bad")
        assert store.read(first) is None
        assert dict(store.scan()) == {second: (2,)}


# -- other processes ------------------------------------------------------------------------

PROLOGUE = """
import os, sys, threading
from pathlib import Path
from llamad_trio.engine.store import SnapshotStore
from llamad_trio.scheduling.shelf import Snapshot

store = SnapshotStore(Path(sys.argv[1]), "a1" * 32, 1 << 30)
store.scan()
"""


def process(folder: Path, script: str, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + script, str(folder), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def said_by(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out, err


def test_what_a_living_process_is_writing_is_left_to_it_and_a_killed_one_leaves_nothing_that_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = """
def fsync(fd):
    print("in the middle", flush=True)
    threading.Event().wait()

os.fsync = fsync
store.write(Snapshot((1, 2, 3), bytes(100_000)))
"""
    with process(tmp_path, script) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "in the middle\n"
            (temporary,) = files_in(tmp_path)
            assert str(writer.pid) in temporary
            assert store_in(tmp_path).scan() == []
            assert files_in(tmp_path) == [temporary]
        finally:
            writer.kill()
    assert store_in(tmp_path).scan() == []
    assert files_in(tmp_path) == warnings(caplog) == []


def test_unfinished_files_that_nobody_can_be_writing_are_removed(tmp_path: Path) -> None:
    path = written(store_in(tmp_path), snapshot(1))
    names = ["x.writing", "-.writing", "99999999-x.writing"]  # of no process, or of none there is
    old, new = f"{os.getpid()}-a.writing", f"{os.getpid()}-b.writing"
    for name in (*names, old, new):
        (path.parent / name).write_text("half a snap")
    os.utime(path.parent / old, (1, 1))  # of long ago: another process had the number
    store_in(tmp_path)
    assert {file.name for file in path.parent.iterdir()} == {path.name, new}


def test_a_disk_that_is_full_half_way_through_leaves_no_half(tmp_path: Path) -> None:
    script = """
import logging, resource
logging.basicConfig()
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
print([store.write(Snapshot((n,), bytes(200_000))) for n in range(3)])
"""
    out, err = said_by(process(tmp_path, script))
    assert out.strip() == "[None, None, None]"
    assert err.count("no prompts are kept") == 1
    assert files_in(tmp_path) == []


def test_writers_and_a_reader_of_the_same_prefix_never_see_a_broken_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = """
for _ in range(60):
    assert store.write(Snapshot((1, 2, 3), sys.argv[2].encode() * 50_000))
"""
    store = store_in(tmp_path)
    path = written(store, Snapshot((1, 2, 3), b"c" * 50_000))
    expected_name = hashlib.sha256(pack_tokens((1, 2, 3))).hexdigest()[:32]
    assert path.stem == expected_name
    writers = [process(tmp_path, script, letter) for letter in "ab"]
    whole = {letter * 50_000 for letter in (b"a", b"b", b"c")}
    n_reads = 0
    while any(writer.poll() is None for writer in writers):
        assert read_back(store, path)[1] in whole
        n_reads += 1
    for writer in writers:
        said_by(writer)
    assert n_reads > 0
    assert store.scan() == [(path, (1, 2, 3))]
    assert read_back(store, path)[1] in whole - {b"c" * 50_000}
    assert len(files_in(tmp_path)) == 1
    assert warnings(caplog) == []
