"""Who gets a socket's path: one daemon at a time, for its user alone, and nothing is left of it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from llamad_trio.core.errors import SocketUnavailable
from llamad_trio.serving import unix_socket
from llamad_trio.serving.unix_socket import claim_path, open_listener
from tests.apart import run_apart
from tests.serving.socket_processes import (
    open_once,
    race,
    report_every_call,
    report_refusal_without_rights,
)
from tests.serving.support import HANG_S

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux does this")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


# -- the mode ---------------------------------------------------------------------------------


@linux_only
@pytest.mark.parametrize(
    ("platform", "umask", "mode", "umasks"),
    [
        ("linux", "0000", 0o600, ["0000"]),
        ("linux", "0077", 0o600, ["0077"]),
        ("linux", "0277", 0o400, ["0277"]),
        # Where a umask is needed it is put back.
        ("another", "0000", 0o600, ["0000", "0177"]),
        ("another", "0022", 0o600, ["0022", "0177"]),
        ("another", "0277", 0o400, ["0277", "0177", "0377"]),
    ],
)
def test_between_no_two_calls_is_the_mode_wider_than_0600(
    path: Path, platform: str, umask: str, mode: int, umasks: list[str]
) -> None:
    modes, umasks_seen, umask_after = run_apart(report_every_call, str(path), umask, platform)
    assert modes == [mode]
    assert sorted(umasks_seen) == sorted(umasks)
    assert umask_after == int(umask, 8)


# -- what is at the path already --------------------------------------------------------------


async def open_client(path: Path) -> trio.SocketStream:
    return await trio.open_unix_socket(os.fspath(path))


def fill_backlog(path: Path, clients: ExitStack) -> int:
    """Connect until nobody more may wait.  Returns how many do."""
    for n in range(5000):
        sock = clients.enter_context(socket.socket(socket.AF_UNIX))
        sock.setblocking(False)
        try:
            sock.connect(os.fspath(path))
        except BlockingIOError:
            return n
    raise AssertionError("all that come may wait")


def make_empty(path: Path) -> None:
    path.touch()


def is_socket(path: Path) -> bool:
    return stat.S_ISSOCK(os.lstat(path).st_mode)


def look(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    found = os.lstat(path)
    return (found.st_dev, found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns)


async def refusal(path: Path | str) -> str:
    """Why the path cannot be had.  The refusal leaves no lock and no descriptor behind."""
    before = os.listdir("/dev/fd")
    with pytest.raises(SocketUnavailable) as caught:
        await open_once(os.fspath(path))
    assert caught.value.path == os.fspath(path)
    assert os.listdir("/dev/fd") == before
    return caught.value.reason


async def test_as_many_as_the_backlog_says_may_wait(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket, "BACKLOG", 2)
    async with open_listener(path):
        with ExitStack() as clients:
            assert fill_backlog(path, clients) in (2, 3)  # Linux lets one more wait


async def test_what_a_killed_daemon_has_left_is_replaced(path: Path) -> None:
    _bind(path)
    make_empty(Path(f"{path}.lock"))
    async with open_listener(path), await open_client(path):
        pass
    assert os.listdir(path.parent) == []


async def test_a_path_is_had_once_in_a_process(path: Path) -> None:
    async with open_listener(path):
        before = look(path)
        with pytest.raises(SocketUnavailable, match="another daemon is using it"):
            await open_once(os.fspath(path))
        assert look(path) == before
        async with await open_client(path):
            pass


async def test_a_daemon_that_takes_no_lock_is_not_disturbed(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(os.fspath(path))
        foreign.listen(0)
        assert await refusal(path) == "a daemon answers on it"
        with ExitStack() as clients:
            fill_backlog(path, clients)
            assert await refusal(path) == "a daemon answers on it"
        assert is_socket(path)


async def test_a_lost_lock_file_does_not_make_two_daemons(path: Path) -> None:
    async with open_listener(path):
        os.unlink(f"{path}.lock")  # as cleaners of temporary directories do
        assert await refusal(path) == "a daemon answers on it"


async def test_a_socket_of_another_type_that_is_in_use_is_refused(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as foreign:
        foreign.bind(os.fspath(path))
        assert await refusal(path) == os.strerror(errno.EPROTOTYPE)
        assert is_socket(path)


def _make_regular(path: Path) -> None:
    path.write_text("precious")


def _link_to_a_socket(path: Path) -> None:
    target = path.with_name("target")
    _bind(target)
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_make_regular, "it is not a socket"),
        (Path.mkdir, "it is not a socket"),
        (os.mkfifo, "it is not a socket"),
        (_link_to_a_socket, "it is a symbolic link"),
        (lambda path: path.symlink_to("nowhere"), "it is a symbolic link"),
    ],
    ids=["regular file", "directory", "FIFO", "link to a stale socket", "dangling link"],
)
async def test_what_is_not_a_socket_is_left_alone(
    path: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(path)
    names, before = sorted(os.listdir(path.parent)), look(path)
    assert await refusal(path) == reason
    assert look(path) == before
    assert sorted(os.listdir(path.parent)) == names


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "the path is empty"),
        ("\0abstract", "NUL byte"),
        ("a\0b", "NUL byte"),
        ("a\ud800b", "lone surrogate"),
        ("/tmp/" + "x" * 103, "too long: 108 bytes"),
        ("/tmp/" + "ü" * 60, "too long: 125 bytes"),
        ("/tmp/" + "x" * 5000, "too long"),
        ("/nonexistent/d.sock", "its directory does not exist"),
        ("/dev/null/d.sock", os.strerror(errno.ENOTDIR)),
    ],
)
async def test_a_path_that_cannot_be_says_why(name: str, reason: str) -> None:
    assert reason in await refusal(name)


@linux_only
async def test_the_longest_path_there_can_be_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_listener("x" * 107), await trio.open_unix_socket("x" * 107):
        pass
    assert "too long" in await refusal("x" * 108)


def test_a_directory_without_rights_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    reason = run_apart(report_refusal_without_rights, str(tmp_path / "d.sock"))
    assert os.strerror(errno.EACCES) in reason
    tmp_path.chmod(0o700)
    assert os.listdir(tmp_path) == []


def test_a_path_is_ours_before_anybody_listens(path: Path) -> None:
    with claim_path(path) as listen:
        assert not path.exists()
        with pytest.raises(SocketUnavailable, match="another daemon is using it"), claim_path(path):
            pass
        listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert os.listdir(path.parent) == []


def test_what_has_come_to_a_path_of_ours_meanwhile_is_left_alone(path: Path) -> None:
    with claim_path(path) as listen:
        _make_regular(path)
        with pytest.raises(SocketUnavailable, match="it is not a socket"):
            listen()
    assert path.read_text() == "precious"


# -- racing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_daemons", "n_rounds"),
    [
        (2, 8),
        (20, 2),
        pytest.param(2, 100, marks=pytest.mark.slow),
        pytest.param(20, 20, marks=pytest.mark.slow),
    ],
)
def test_one_of_several_racing_daemons_wins(path: Path, n_daemons: int, n_rounds: int) -> None:
    refused = ["another daemon is using it"] * (n_daemons - 1)
    rounds = run_apart(race, str(path), str(n_daemons), str(n_rounds))
    assert rounds == [[*refused, "won"]] * n_rounds


async def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_path = Path(f"{path}.lock")
    n_removals = 0

    def flock(fd: int, operation: int) -> None:
        nonlocal n_removals
        if n_removals < 3:
            n_removals += 1
            os.unlink(lock_path)
        fcntl_flock(fd, operation)

    fcntl_flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    async with open_listener(path):
        assert n_removals == 3
        lock = os.open(lock_path, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl_flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)


async def test_a_lock_that_is_never_had_is_given_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.unlink(f"{path}.lock"))
    assert "replaced all the time" in await refusal(path)


# -- the lock file ----------------------------------------------------------------------------


async def test_the_lock_is_private_and_gone_after_the_end(path: Path) -> None:
    async with open_listener(path):
        assert stat.S_IMODE(os.lstat(f"{path}.lock").st_mode) & ~0o600 == 0
    assert os.listdir(path.parent) == []


def _link_lock(lock_path: Path) -> None:
    make_empty(lock_path.with_name("target"))
    lock_path.symlink_to("target")


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.fspath(path))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_link_lock, "symbolic link"),
        (lambda path: path.symlink_to("nowhere"), "symbolic link"),
        (os.mkfifo, "is not a regular file"),
        (Path.mkdir, os.strerror(errno.EISDIR)),
        (_bind, os.strerror(errno.ENXIO)),
    ],
    ids=["link", "dangling link", "FIFO", "directory", "socket"],
)
async def test_a_lock_file_that_is_none_is_refused(
    path: Path, make: Callable[[Path], None], reason: str
) -> None:
    lock_path = Path(f"{path}.lock")
    make(lock_path)
    names = sorted(os.listdir(path.parent))
    reason_given = await refusal(path)
    assert reason in reason_given
    assert os.fspath(lock_path) in reason_given
    assert sorted(os.listdir(path.parent)) == names


async def test_a_lock_file_of_another_user_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_empty(Path(f"{path}.lock"))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "belongs to another user" in await refusal(path)
    assert os.listdir(path.parent) == [f"{path.name}.lock"]


# -- the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_both_files_are_removed_when_the_block(path: Path, how: str) -> None:
    fails = pytest.raises(ZeroDivisionError) if how == "fails" else nullcontext()
    with fails, trio.CancelScope() as scope:
        async with open_listener(path) as listener:
            if how == "fails":
                raise ZeroDivisionError
            scope.cancel()
            await trio.sleep(HANG_S)
    assert os.listdir(path.parent) == []
    assert listener.socket.fileno() == -1


async def test_a_task_that_accepts_learns_of_the_end(path: Path) -> None:
    async with trio.open_nursery() as nursery:

        async def accept() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await listener.accept()

        async with open_listener(path) as listener:
            nursery.start_soon(accept)
            await wait_all_tasks_blocked()


@pytest.mark.parametrize("closed_before", [False, True])
@pytest.mark.parametrize("make", [_make_regular, _bind], ids=["regular file", "socket"])
async def test_what_somebody_put_in_its_place_stays(
    path: Path, make: Callable[[Path], None], closed_before: bool
) -> None:
    async with open_listener(path) as listener:
        if closed_before:
            await listener.aclose()
        os.unlink(path)
        make(path)
        theirs = look(path)
    assert look(path) == theirs
    assert os.listdir(path.parent) == [path.name]


async def test_a_lock_that_somebody_put_in_its_place_stays(path: Path) -> None:
    lock_path = Path(f"{path}.lock")
    async with open_listener(path):
        os.unlink(lock_path)
        make_empty(lock_path)
    assert os.listdir(path.parent) == [lock_path.name]


async def test_a_directory_that_is_gone_at_the_end_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    async with open_listener(folder / "d.sock"):
        for name in os.listdir(folder):
            (folder / name).unlink()
        folder.rmdir()
    assert os.listdir(tmp_path) == []
    assert caplog.records == []


async def test_what_cannot_be_removed_is_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unlink(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with monkeypatch.context() as patch:
        async with open_listener(path):
            patch.setattr(os, "unlink", unlink)
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} cannot be removed: {os.strerror(errno.EACCES)}" for name in (path, f"{path}.lock")
    ]


async def test_a_relative_path_is_removed_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_listener("d.sock"):
        assert (tmp_path / "d.sock").is_socket()
        os.chdir("/")
    assert os.listdir(tmp_path) == []


async def test_nothing_is_inherited_and_nothing_leaks(path: Path) -> None:
    def open_fds() -> set[str]:
        return {fd for fd in os.listdir("/dev/fd") if os.path.lexists(f"/dev/fd/{fd}")}

    before = open_fds()
    async with open_listener(path):
        ours = open_fds() - before
        assert len(ours) >= 2
        assert [fd for fd in ours if os.get_inheritable(int(fd))] == []
    assert open_fds() == before


async def test_a_start_that_fails_late_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(unix_socket, "_pin", refuse)
    assert await refusal(path) == os.strerror(errno.EMFILE)
    assert os.listdir(path.parent) == []


async def test_entering_is_a_checkpoint(path: Path) -> None:
    manager = open_listener(path)
    with assert_checkpoints():
        await manager.__aenter__()
    await manager.__aexit__(None, None, None)
    with trio.CancelScope() as scope:
        scope.cancel()
        await open_once(os.fspath(path))
    assert scope.cancelled_caught
    assert os.listdir(path.parent) == []
