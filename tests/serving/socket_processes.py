"""What the tests of a daemon's socket do in processes of their own.

Without pytest, whose import takes longer than all that they do.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import trio

from llamad_trio.core.errors import SocketUnavailable
from llamad_trio.serving.unix_socket import open_listener, peer_is_trusted

NOBODY = 65534


async def open_once(path: str) -> None:
    async with open_listener(path):
        pass


def report_every_call(path: str, umask: str, platform: str) -> None:
    """Print every mode of the socket and every umask there is between any two calls."""
    os.umask(int(umask, 8))
    sys.platform = platform
    modes: set[int] = set()
    umasks: set[str] = set()

    def look(*_: object) -> None:
        with suppress(FileNotFoundError):
            modes.add(stat.S_IMODE(os.lstat(path).st_mode))
        status = Path("/proc/self/status").read_text()
        umasks.update(line.split()[1] for line in status.splitlines() if line.startswith("Umask"))

    sys.setprofile(look)
    trio.run(open_once, path)
    sys.setprofile(None)
    print(json.dumps([list(modes), list(umasks), os.umask(0)]))


def race(path: str, n_daemons: str, n_rounds: str) -> None:
    """Let daemons race over a stale socket; print of each round what became of them."""
    forked = multiprocessing.get_context("fork")
    rounds = []
    for _ in range(int(n_rounds)):
        Path(path).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(path)
        start, outcomes = forked.Barrier(int(n_daemons)), forked.SimpleQueue()
        daemons = [
            forked.Process(target=_take_part, args=(path, start.wait, outcomes.put))
            for _ in range(int(n_daemons))
        ]
        for daemon in daemons:
            daemon.start()
        rounds.append(sorted(outcomes.get() for _ in daemons))
        for daemon in daemons:
            daemon.kill()  # the winner leaves its socket and its lock behind
            daemon.join()
    print(json.dumps(rounds))


def _take_part(
    path: str, wait_for_start: Callable[[], object], tell: Callable[[str], None]
) -> None:
    async def main() -> None:
        async with open_listener(path):
            tell("won")
            await trio.sleep_forever()

    wait_for_start()
    try:
        trio.run(main)
    except SocketUnavailable as error:
        tell(error.reason)


def report_refusal_without_rights(path: str) -> None:
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    try:
        trio.run(open_once, path)
    except SocketUnavailable as error:
        print(json.dumps(error.reason))


def report_trust() -> None:
    """As root: print whether nobody, root and another trust root and nobody."""
    roots, _ = pair_of_root = socket.socketpair()
    os.seteuid(NOBODY)
    nobodys, _ = pair_of_nobody = socket.socketpair()
    trusted = []
    for user in (NOBODY, 0, NOBODY + 1):
        os.seteuid(0)
        os.seteuid(user)
        trusted.append([peer_is_trusted(roots), peer_is_trusted(nobodys)])
    print(json.dumps(trusted))
    for sock in (*pair_of_root, *pair_of_nobody):
        sock.close()
