"""What the tests of a daemon's socket do in processes of their own.

Without pytest, whose import takes longer than all that they do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
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
    """Let daemons race over a stale socket; print how many won and why the others did not."""
    rounds = []
    for _ in range(int(n_rounds)):
        Path(path).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(path)
        rounds.append(_one_race(path, int(n_daemons)))
    print(json.dumps(rounds))


def _one_race(path: str, n_daemons: int) -> list[str]:
    start_reader, start_writer = os.pipe()
    end_reader, end_writer = os.pipe()
    reports = [os.pipe() for _ in range(n_daemons)]
    pids = []
    for _, report in reports:
        pid = os.fork()
        if pid == 0:
            os.close(start_writer)
            os.close(end_writer)
            os.read(start_reader, 1)  # all of them are let go at once
            _take_part(path, report, end_reader)
            # Without a word to anybody: the winner leaves its socket and its lock behind.
            os.kill(os.getpid(), signal.SIGKILL)
        pids.append(pid)
    os.close(start_writer)
    said = [os.read(reader, 1000).decode() for reader, _ in reports]
    os.close(end_writer)
    for pid in pids:
        os.waitpid(pid, 0)
    for fd in (start_reader, end_reader, *(fd for pair in reports for fd in pair)):
        os.close(fd)
    return sorted(said)


def _take_part(path: str, report: int, end: int) -> None:
    async def main() -> None:
        try:
            async with open_listener(path):
                os.write(report, b"won")
                os.read(end, 1)
        except SocketUnavailable as error:
            os.write(report, error.reason.encode())
            os.read(end, 1)

    trio.run(main)


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
