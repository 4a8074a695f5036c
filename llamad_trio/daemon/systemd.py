"""What systemd and a service say to each other: a socket handed over, a state reported.

Decides whether a handed-over descriptor can be listened on.  Knows nothing of what is
served, and does nothing where there is no systemd.
"""

from __future__ import annotations

import logging
import os
import socket

from llamad_trio.core.errors import SocketUnavailable

logger = logging.getLogger("llamad_trio")

FIRST_FD = 3


def inherited_listener() -> socket.socket | None:
    """The listening socket that systemd has opened for this process (`LISTEN_FDS`).

    `None` if there is none.  Of several the first is taken.  The caller owns it, but its
    path belongs to systemd.  To be called once: the variables are removed from the
    environment, and no child process inherits the descriptors.

    Raises:
        SocketUnavailable: what was handed over is not a listening Unix stream socket.
    """
    told = {name: os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS")}
    for name in ("LISTEN_FDNAMES", "LISTEN_PIDFDID"):
        os.environ.pop(name, None)
    if told["LISTEN_PID"] != str(os.getpid()):
        return None
    try:
        n_fds = int(told["LISTEN_FDS"])
    except ValueError:
        raise SocketUnavailable("LISTEN_FDS", f"{told['LISTEN_FDS']!r} is not a number") from None
    if n_fds < 1:
        return None
    fd = FIRST_FD
    try:
        for fd in range(FIRST_FD, FIRST_FD + n_fds):
            os.set_inheritable(fd, False)
        sock = socket.socket(fileno=FIRST_FD)
    except OSError as error:
        raise SocketUnavailable("LISTEN_FDS", f"descriptor {fd}: {error.strerror}") from error
    is_unix_stream = sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM
    if not is_unix_stream or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise SocketUnavailable(
            "LISTEN_FDS", f"descriptor {FIRST_FD} is not a listening Unix stream socket"
        )
    return sock


def notify(state: str) -> None:
    """Tell the service manager a state, such as `READY=1`, where it wants to be told.

    Does nothing without `NOTIFY_SOCKET`.  Never blocks and never raises: what cannot be
    told is a warning in the log.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto(state.encode(errors="replace"), address)
    except OSError as error:
        logger.warning("the service manager cannot be told %r: %s", state, error)
