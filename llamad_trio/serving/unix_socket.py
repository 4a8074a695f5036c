"""The Unix socket of a daemon: who may have its path, who may talk, who has gone.

Decides what may be removed from the path and which of two daemons gets it.  Knows
nothing of what is said over a connection.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
import stat
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

import trio

from llamad_trio.core.errors import SocketUnavailable
from llamad_trio.system.nursery import open_plain_nursery

logger = logging.getLogger("llamad_trio")

BACKLOG = 1024
"""Connections that may wait to be accepted; the system may allow fewer."""

PRIVATE = 0o600

MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""What `sun_path` holds beside its NUL."""

LOCK_TRIES = 100
"""Each further try means that another daemon has come and gone in between."""


# -- the path ---------------------------------------------------------------------------------


@asynccontextmanager
async def open_listener(path: str | os.PathLike[str]) -> AsyncIterator[trio.SocketListener]:
    """A Unix socket at `path` that listens inside the block: `claim_path`, and at once.

    Entering is a checkpoint; cancelled, it leaves nothing behind.  Leaving is none, and
    works in a cancelled scope.

    Raises:
        SocketUnavailable: the path cannot be had; says why.
    """
    await trio.lowlevel.checkpoint()
    with claim_path(path) as listen, closing(trio.socket.from_stdlib_socket(listen())) as sock:
        yield trio.SocketListener(sock)


@contextmanager
def claim_path(path: str | os.PathLike[str]) -> Iterator[Callable[[], socket.socket]]:
    """Have `path` for a Unix socket inside the block, which gives a function that listens there.

    The socket has mode 0600 from the instant it exists, or less if the umask says so.  A
    stale socket of a dead daemon is replaced; whatever else is at `path` is left alone.  Of
    several daemons that want the path one gets it: it holds a lock on the file `path` with
    `.lock` appended.  Leaving the block closes the socket and removes both files, unless
    somebody has replaced them.  In `path`, `~` is not expanded, a symbolic link not followed.

    Raises:
        SocketUnavailable: the path cannot be had; says why.  The function may raise it, too.
    """
    name = os.fspath(path)
    with ExitStack() as held:  # undoes it all, last things first
        with _os_errors_as(name):
            _check_spelling(name)
            lock = _lock(name)
            held.callback(os.close, lock)
            # Absolute, for the end: the working directory may be another then.
            held.callback(_remove_if_same, f"{Path(name).absolute()}.lock", os.fstat(lock))
            _remove_stale(name)

        def listen() -> socket.socket:
            with _os_errors_as(name):
                absolute = str(Path(name).absolute())
                _remove_stale(name)  # it may have come meanwhile
                sock = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                _bind_privately(sock, name)
                held.callback(_remove_if_same, absolute, os.lstat(name))
                _pin(name, held)
                sock.listen(BACKLOG)
                return sock

        yield listen


@contextmanager
def _os_errors_as(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SocketUnavailable(path, error.strerror or str(error)) from error


def _check_spelling(path: str) -> None:
    """Refuse what the system would take for something else, or not at all."""
    if not path:
        raise SocketUnavailable(path, "the path is empty")
    if "\0" in path:
        raise SocketUnavailable(path, "the path contains a NUL byte")
    try:
        n_bytes = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise SocketUnavailable(path, "the path contains a lone surrogate") from None
    if n_bytes > MAX_PATH_BYTES:
        raise SocketUnavailable(
            path, f"the path is too long: {n_bytes} bytes, a socket's has at most {MAX_PATH_BYTES}"
        )


def _lock(path: str) -> int:
    """Take the lock that goes with `path`; the descriptor holds it while it is open."""
    lock_path = f"{path}.lock"
    for _ in range(LOCK_TRIES):
        with ExitStack() as opened:
            lock = _open_lock(path, lock_path)
            opened.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SocketUnavailable(path, "another daemon is using it") from None
            # A daemon that was ending may have removed the file after we opened it.
            if _is_same(lock_path, os.fstat(lock)):
                opened.pop_all()
                return lock
    raise SocketUnavailable(path, f"{lock_path!r} is replaced all the time")


def _open_lock(path: str, lock_path: str) -> int:
    # O_NONBLOCK: whatever is there, opening it must not wait.
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        lock = os.open(lock_path, flags, PRIVATE)
    except FileNotFoundError:
        raise SocketUnavailable(path, "its directory does not exist") from None
    except OSError as error:
        reason = "it is a symbolic link" if os.path.islink(lock_path) else error.strerror
        raise SocketUnavailable(path, f"cannot open {lock_path!r}: {reason}") from error
    found = os.fstat(lock)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return lock
    os.close(lock)
    wrong = "belongs to another user" if stat.S_ISREG(found.st_mode) else "is not a regular file"
    raise SocketUnavailable(path, f"{lock_path!r} {wrong}")


def _remove_stale(path: str) -> None:
    """Remove a socket that nobody answers on; refuse anything else that is there."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise SocketUnavailable(path, "it is a symbolic link")
    if not stat.S_ISSOCK(mode):
        raise SocketUnavailable(path, "it is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(FileNotFoundError):
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # its backlog is full: somebody is behind it
        raise SocketUnavailable(path, "a daemon answers on it")


def _bind_privately(sock: socket.socket, path: str) -> None:
    if sys.platform == "linux":
        # bind() gives the file the mode that the socket itself has.
        os.fchmod(sock.fileno(), PRIVATE)
        sock.bind(path)
    else:
        # Other systems have no mode on a socket without a path.  The umask is the process's:
        # a file that a thread makes just now comes out narrower than it asked for.
        umask = os.umask(0o177)
        try:
            os.umask(umask | 0o177)
            sock.bind(path)
        finally:
            os.umask(umask)


def _pin(path: str, held: ExitStack) -> None:
    """Keep the inode's number from being given to another file while `held` lasts.

    The listener may be closed, and so let go of it, long before the file is to be removed.
    """
    if sys.platform == "linux":
        held.callback(os.close, os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))


def _is_same(path: str, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(path), found)
    except FileNotFoundError:
        return False


def _remove_if_same(path: str, ours: os.stat_result) -> None:
    try:
        if _is_same(path, ours):
            os.unlink(path)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error.strerror)


# -- the peer ---------------------------------------------------------------------------------


def peer_is_trusted(sock: socket.socket | trio.socket.SocketType) -> bool:
    """Whether the process that made the connection was run by our own user or by root.

    Always true where the system does not tell: the socket's mode protects it there.
    """
    if sys.platform != "linux":
        return True
    credentials = struct.Struct("iII")  # pid, uid, gid
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    _, uid, _ = credentials.unpack(packed)
    return uid in (0, os.geteuid())


class HangupWatcher:
    """Tells when the peer of a connection has gone, without reading from it.

    A peer that has only shut down its writing side, and waits for an answer, has not
    gone.  Where the system has no epoll nothing is told: there a peer's leaving is noticed
    at the next write.
    """

    def __init__(self) -> None:
        self._epoll: select.epoll | None = select.epoll() if hasattr(select, "epoll") else None
        self._hangups: dict[int, trio.Event] = {}
        self._closed = False

    async def wait_gone(self, sock: socket.socket | trio.socket.SocketType) -> None:
        """Wait until the peer of a connected Unix stream socket has closed it or died.

        Returns at once if it already has.  Also returns when both sides have shut down
        writing: the system makes no difference.  What the peer had sent can still be read.
        End the wait before you close `sock`; otherwise it lasts until it is cancelled.

        A checkpoint.  Cancelled, `sock` is no longer watched.

        Raises:
            trio.BusyResourceError: another task is waiting for the same socket.
            trio.ClosedResourceError: `sock` is closed, or the watcher is.
        """
        fd = sock.fileno()
        if self._closed or fd == -1:
            raise trio.ClosedResourceError
        if self._epoll is None:
            await trio.sleep_forever()
        try:
            # No events are asked for: EPOLLHUP and EPOLLERR are always told, data never is.
            self._epoll.register(fd, select.EPOLLET)
        except FileExistsError:
            raise trio.BusyResourceError("another task is waiting for this socket") from None
        # An earlier wait may still be there, for a socket that was closed under it.
        hangup = self._hangups[fd] = trio.Event()
        try:
            await hangup.wait()
        finally:
            if self._hangups.get(fd) is hangup:
                del self._hangups[fd]
                with suppress(OSError, ValueError):  # the socket or the watcher is closed
                    self._epoll.unregister(fd)
        if self._closed:
            raise trio.ClosedResourceError

    async def _run(self) -> None:
        if self._epoll is None:
            return
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for fd, _ in self._epoll.poll(0):
                if fd in self._hangups and _has_hung_up(fd):
                    self._hangups[fd].set()

    def _close(self) -> None:
        self._closed = True
        if self._epoll is not None:
            self._epoll.close()
        for hangup in self._hangups.values():
            hangup.set()


def _has_hung_up(fd: int) -> bool:
    # epoll may report a socket that was closed, lives on in a copy, and had the same number.
    poll = select.poll()
    poll.register(fd, 0)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


@asynccontextmanager
async def open_hangup_watcher() -> AsyncIterator[HangupWatcher]:
    """A `HangupWatcher` that works inside the block; leaving it ends every wait.

    Leaving is a checkpoint.
    """
    watcher = HangupWatcher()
    try:
        async with open_plain_nursery() as nursery:
            nursery.start_soon(watcher._run)
            yield watcher
    finally:
        watcher._close()
