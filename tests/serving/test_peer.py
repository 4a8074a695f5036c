"""Who is trusted on a socket, and when a peer has gone."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from llamad_trio.serving.unix_socket import HangupWatcher, open_hangup_watcher, peer_is_trusted
from tests.apart import run_apart
from tests.serving.socket_processes import report_trust

# -- the peer's user --------------------------------------------------------------------------


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can become somebody else"
)
def test_root_trusts_only_itself_and_others_trust_themselves_and_root() -> None:
    assert run_apart(report_trust) == [[True, True], [True, False], [True, False]]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_peer_that_the_system_does_not_vouch_for_is_not_trusted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert not peer_is_trusted(client)


def test_where_the_system_does_not_tell_everybody_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        monkeypatch.setattr(sys, "platform", "another")
        assert peer_is_trusted(sock)


# -- the peer's leaving -----------------------------------------------------------------------


@pytest.fixture
async def watcher() -> AsyncIterator[HangupWatcher]:
    if not hasattr(select, "epoll"):
        pytest.skip("there is no epoll")
    async with open_hangup_watcher() as watcher:
        yield watcher


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, peer = socket.socketpair()
    with ours, peer:
        yield ours, peer


Pair = tuple[socket.socket, socket.socket]
AnySocket = socket.socket | trio.socket.SocketType


class Wait:
    """One `wait_gone`, in a task of its own."""

    def __init__(self, nursery: trio.Nursery, watcher: HangupWatcher, sock: AnySocket) -> None:
        self._has_ended = False
        self.scope = trio.CancelScope()
        self._watcher = watcher
        self._sock = sock
        nursery.start_soon(self._run)

    def has_ended(self) -> bool:
        return self._has_ended

    async def _run(self) -> None:
        with self.scope:
            await self._watcher.wait_gone(self._sock)
            self._has_ended = True


async def settle() -> None:
    """Wait until everything that has happened has been noticed."""
    # The watcher itself waits for the system, and is not seen to be busy before it wakes.
    for _ in range(3):
        await wait_all_tasks_blocked(0.02)


@asynccontextmanager
async def waiting(watcher: HangupWatcher, sock: AnySocket) -> AsyncIterator[Wait]:
    """A wait that has begun, and has ended when the block has."""
    async with trio.open_nursery() as nursery:
        wait = Wait(nursery, watcher, sock)
        await settle()
        assert not wait.has_ended()
        yield wait
    assert wait.has_ended()


@pytest.mark.parametrize("left", ["nothing", "a question", "an answer"])
async def test_a_peer_that_closes_has_gone_whatever_it_leaves_unread(
    watcher: HangupWatcher, pair: Pair, left: str
) -> None:
    ours, peer = pair
    if left == "an answer":
        ours.send(b"answer")
    async with waiting(watcher, ours) as wait:
        if left == "a question":
            peer.send(b"question")
            await settle()
            assert not wait.has_ended()
        peer.close()
    assert left != "a question" or ours.recv(100) == b"question"


async def test_a_peer_that_has_gone_before_is_noticed(watcher: HangupWatcher, pair: Pair) -> None:
    ours, peer = pair
    peer.close()
    await watcher.wait_gone(ours)
    await watcher.wait_gone(ours)
    with assert_checkpoints():
        await watcher.wait_gone(ours)


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_peer_that_only_stops_writing_has_not_gone(
    watcher: HangupWatcher, pair: Pair, when: str
) -> None:
    ours, peer = pair
    if when == "before":
        peer.shutdown(socket.SHUT_WR)
    async with waiting(watcher, ours) as wait:
        peer.shutdown(socket.SHUT_WR)
        await settle()
        assert not wait.has_ended()
        ours.send(b"answer")
        assert peer.recv(100) == b"answer"
        peer.close()


async def test_of_a_hundred_those_that_leave_have_gone(watcher: HangupWatcher) -> None:
    pairs = [socket.socketpair() for _ in range(100)]
    with ExitStack() as sockets:
        for sock in (sock for pair in pairs for sock in pair):
            sockets.enter_context(sock)
        async with trio.open_nursery() as nursery:
            waits = [Wait(nursery, watcher, ours) for ours, _ in pairs]
            await settle()
            for _, peer in pairs[::2]:
                peer.close()
            await settle()
            assert [wait.has_ended() for wait in waits] == [True, False] * 50
            for _, peer in pairs[1::2]:
                peer.close()
        assert all(wait.has_ended() for wait in waits)


async def test_a_cancelled_wait_can_be_begun_again(watcher: HangupWatcher, pair: Pair) -> None:
    ours, peer = pair
    for _ in range(3):
        with trio.move_on_after(0.01) as scope:
            await watcher.wait_gone(ours)
        assert scope.cancelled_caught
    peer.close()
    await watcher.wait_gone(ours)


def _reuse(fd: int) -> Pair:
    """A new pair whose first socket has a number that has just been closed."""
    one, peer = socket.socketpair()
    if one.fileno() == fd:
        return one, peer
    os.dup2(one.fileno(), fd, inheritable=False)
    one.close()
    return socket.socket(fileno=fd), peer


@pytest.mark.parametrize("copied", [False, True])
async def test_a_number_that_is_used_again_stands_for_the_new_socket(
    watcher: HangupWatcher, copied: bool
) -> None:
    old, old_peer = socket.socketpair()
    fd = old.fileno()
    with ExitStack() as sockets:
        if copied:  # as a child process does for a moment between fork and exec
            sockets.enter_context(old.dup())
        async with trio.open_nursery() as nursery:
            old_wait = Wait(nursery, watcher, old)
            await settle()
            old.close()
            new, new_peer = _reuse(fd)
            sockets.enter_context(new)
            new_wait = Wait(nursery, watcher, new)
            await settle()
            old_wait.scope.cancel()
            await settle()
            old_peer.close()
            await settle()
            assert not new_wait.has_ended()
            assert not old_wait.has_ended()
            new_peer.close()
        assert new_wait.has_ended()


async def test_a_socket_closed_under_a_cancelled_wait_is_no_error(
    watcher: HangupWatcher, pair: Pair
) -> None:
    ours, _ = pair
    async with trio.open_nursery() as nursery:
        wait = Wait(nursery, watcher, ours)
        await settle()
        ours.close()
        wait.scope.cancel()
    assert wait.scope.cancelled_caught


async def test_a_second_wait_for_a_socket_is_refused(watcher: HangupWatcher, pair: Pair) -> None:
    ours, peer = pair
    async with waiting(watcher, ours):
        with pytest.raises(trio.BusyResourceError):
            await watcher.wait_gone(ours)
        peer.close()


async def test_a_closed_socket_cannot_be_waited_for(watcher: HangupWatcher, pair: Pair) -> None:
    ours, _ = pair
    ours.close()
    with pytest.raises(trio.ClosedResourceError):
        await watcher.wait_gone(ours)


async def test_the_end_of_the_watcher_ends_every_wait(pair: Pair) -> None:
    ours, _ = pair
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await ending.wait_gone(ours)

        async with open_hangup_watcher() as ending:
            nursery.start_soon(wait)
            await settle()
    await wait()


async def test_an_error_in_the_watchers_block_comes_out_as_itself() -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_hangup_watcher():
            raise ZeroDivisionError


async def test_waiting_costs_no_step_of_any_task_even_while_data_comes(
    watcher: HangupWatcher, pair: Pair
) -> None:
    ours, peer = pair
    steps: list[str] = []

    class CountSteps(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            steps.append(task.name)

    async with waiting(watcher, ours):
        counter = CountSteps()
        trio.lowlevel.add_instrument(counter)
        for _ in range(10):
            peer.send(b"more")
            await trio.sleep(0.01)
        trio.lowlevel.remove_instrument(counter)
        peer.close()
    assert len(steps) == 10  # this task's own


async def test_without_epoll_a_wait_lasts_until_it_is_cancelled(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, peer = pair
    monkeypatch.delattr(select, "epoll", raising=False)
    async with open_hangup_watcher() as watcher:
        peer.close()
        with trio.move_on_after(0.05) as scope:
            await watcher.wait_gone(ours)
    assert scope.cancelled_caught
