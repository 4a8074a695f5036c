"""The process of an isolated engine: `python -m llamad_trio.isolation.isolated FD PARENT`.

PARENT is the process that started it.  FD is one end of a socket pair.  The first line that
comes through it says what to open; afterwards connections come through it, which speak the
daemon's protocol.

Decides that this process ends with its parent, and imports nothing before that is sure.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import threading
import time

GRACE_S = 0.5
"""How long this process may take to end after its parent has gone."""


def main() -> None:
    """Run the engine until the parent has gone or wants it no more."""
    fd, parent = map(int, sys.argv[1:])
    # A process that is stuck cannot see that its parent has gone; a thread of its own can.
    threading.Thread(target=_end_with_parent, args=[os.dup(fd), parent], daemon=True).start()
    import trio

    from llamad_trio.isolation.isolated_engine import serve

    trio.run(serve, socket.socket(fileno=fd))


def _end_with_parent(fd: int, parent: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # hanging up is always reported
    if sys.platform == "linux":
        # A child that the parent forked off may hold its end of the socket pair, too.
        try:
            poll.register(os.pidfd_open(parent), select.POLLIN)
        except OSError as error:
            if error.errno == errno.ESRCH:
                os._exit(1)
    poll.poll()
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
