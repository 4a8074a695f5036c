"""What the tests of inherited sockets do in a process of its own.

Without pytest and Trio, whose imports take longer than all that it does.
"""

from __future__ import annotations

import os

from llamad_trio.core.errors import SocketUnavailable
from llamad_trio.daemon.systemd import inherited_listener

VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def report_inherited(*variables: str) -> None:
    """Print what is inherited.  `PID` in a variable stands for this process's number."""
    for variable in variables:
        name, _, value = variable.partition("=")
        os.environ[name] = value.replace("PID", str(os.getpid()))
    try:
        sock = inherited_listener()
    except SocketUnavailable as error:
        print(error.path, error.reason, sep=": ")
    else:
        print(sock and sock.getsockname())
        if sock is not None:
            print(sock.fileno(), sock.get_inheritable())
            sock.settimeout(10)
            sock.accept()[0].sendall(b"hello")
    print("left:", *(name for name in VARIABLES if name in os.environ))
    print("inheritable:", *(fd for fd in (3, 4) if _is_inheritable(fd)))


def _is_inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False
