"""What only an engine on the other side of a socket has: somebody else there, who may be
nobody, not a daemon, gone, or talking nonsense.  Whatever it is, it is a `LlamadError`.

What a `RemoteEngine` has in common with other engines is in `tests/conformance`.
"""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from llamad_trio import (
    Busy,
    DaemonStats,
    Disconnected,
    EngineClosed,
    EngineSpec,
    Limits,
    PromptTooLong,
    ProtocolError,
    SocketUnavailable,
    connect,
    daemon_stats,
)
from llamad_trio.testing import open_scripted_engine, open_scripted_models
from llamad_trio.watch import refresh_if_possible
from tests.remote.daemons import DONE, MIB, OF_DAEMON, QUESTIONS, answering, as_lines, served
from tests.serving.support import running_daemon
from tests.support import ENDLESS, read_all, until_idle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llamad_trio import Engine, EngineLike, Models, RemoteEngine


# -- nobody, or no daemon -------------------------------------------------------------------


async def check_unavailable(sock: Path | str, reason: str = "socket") -> None:
    for call in (connect(sock).__aenter__, lambda: daemon_stats(sock)):
        with pytest.raises(SocketUnavailable, match=reason) as caught:
            await call()
        assert caught.value.path == str(sock)


async def test_where_nothing_is_no_daemon_is(sock: Path, tmp_path: Path) -> None:
    await check_unavailable(sock, "no such socket")
    await check_unavailable(tmp_path / "nowhere" / "d.sock", "no such socket")
    await check_unavailable(tmp_path)
    await check_unavailable("")
    await check_unavailable("a\0b")
    await check_unavailable("/tmp/" + "x" * 200)
    await check_unavailable("\ud800")


async def test_what_nobody_listens_on_is_no_daemon(sock: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(sock))
        await check_unavailable(sock, "nobody listens")
    await check_unavailable(sock, "nobody listens")
    (tmp_path / "file").write_text("hello")
    await check_unavailable(tmp_path / "file", "nobody listens")


async def test_who_hangs_up_is_no_daemon(sock: Path) -> None:
    async with answering(sock, [b""]):
        with pytest.raises(SocketUnavailable, match="hangs up"):
            async with connect(sock):
                pass
        with pytest.raises(Disconnected):
            await daemon_stats(sock)


async def test_who_says_nothing_can_be_left(sock: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(sock))
        bound.listen()
        with trio.move_on_after(0.05) as deadline:
            async with connect(sock):
                pass
        assert deadline.cancelled_caught


async def test_errors_of_other_sockets_are_left_alone(remote: RemoteEngine, sock: Path) -> None:
    with pytest.raises(SocketUnavailable):
        async with remote.stream("x"), connect(f"{sock}.not"):
            pass


# -- a daemon that goes ---------------------------------------------------------------------


async def test_a_daemon_that_is_killed_disconnects(sock: Path, tiny_path: Path) -> None:
    with running_daemon(sock, tiny_path) as daemon:
        async with connect(sock) as remote, remote.stream("x", max_tokens=ENDLESS) as tokens:
            await tokens.receive()
            daemon.signal(signal.SIGKILL)
            with pytest.raises(Disconnected):
                await read_all(tokens)
            with pytest.raises(Disconnected):
                await tokens.result()
            assert tokens.text
            assert tokens.completion is None
            for question in QUESTIONS.values():
                with pytest.raises(Disconnected):
                    await question(remote)
            # What was known is still known.
            assert remote.info.architecture == "llama"
            assert remote.stats().requests["completed"] == 0
        await check_unavailable(sock, "nobody listens")


# -- the block ------------------------------------------------------------------------------


async def test_what_is_under_way_at_the_end_of_the_block_goes_on(
    sock: Path, behind: Engine
) -> None:
    async with served(sock, behind):
        async with connect(sock) as remote:
            opened = remote.stream("x", max_tokens=20)
            tokens = await opened.__aenter__()
            await tokens.receive()
        assert len((await tokens.result()).text) == 20
        await opened.__aexit__(None, None, None)


# -- statistics -----------------------------------------------------------------------------


async def test_stats_are_those_of_the_last_end_or_of_a_refresh(
    remote: RemoteEngine, behind: Engine
) -> None:
    def completed() -> int:
        return remote.stats().requests["completed"]

    await behind.complete("x", max_tokens=2)
    assert completed() == 0
    stats = await remote.refresh()
    assert stats == remote.stats() == behind.stats()
    assert completed() == 1
    await behind.complete("x", max_tokens=2)
    assert completed() == 1
    await remote.complete("x", max_tokens=2)
    assert completed() == 3
    async with remote.stream("x", max_tokens=2) as tokens:
        await tokens.receive()
        assert completed() == 3
        await tokens.result()
        assert completed() == 4
    async with remote.stream("x", max_tokens=ENDLESS) as tokens:
        await tokens.receive()
    await until_idle(behind)
    assert remote.stats().requests["cancelled"] == 0
    await refresh_if_possible(remote)
    assert remote.stats() == behind.stats()
    assert remote.stats().requests["cancelled"] == 1


async def test_whoever_does_not_answer_leaves_what_was_told(sock: Path, behind: Engine) -> None:
    async with served(sock, behind) as daemon, connect(sock) as remote:
        told = remote.stats()
        daemon.cancel()
        await wait_all_tasks_blocked()
        await refresh_if_possible(remote)
        assert remote.stats() == told
    await refresh_if_possible(remote)
    assert remote.stats() == told


@pytest.mark.parametrize("has_it", [False, True])
async def test_a_refresh_that_is_possible_or_not_is_a_checkpoint(
    remote: RemoteEngine, behind: Engine, has_it: bool
) -> None:
    with trio.testing.assert_checkpoints():
        await refresh_if_possible(remote if has_it else behind)


async def test_a_daemon_tells_of_all_its_models(sock: Path, behind: Engine) -> None:
    async with open_scripted_engine("other", n_ctx=64) as other:
        engines = {"a": behind, "b": other}
        async with served(sock, engines, default="b"):
            stats = await daemon_stats(sock)
        assert isinstance(stats, DaemonStats)
        assert (stats.default, list(stats.models), stats.connections) == ("b", ["a", "b"], 1)
        assert stats.uptime_s >= 0
        for name, engine in engines.items():
            assert stats.models[name].info == engine.info
            assert stats.models[name].config == engine.config
            assert stats.models[name].stats == engine.stats()


# -- models ---------------------------------------------------------------------------------


async def test_a_model_is_chosen_by_its_name(sock: Path) -> None:
    async with open_scripted_engine("first") as first, open_scripted_engine("second") as second:
        engines: dict[str, EngineLike] = {"a": first, "b": second}
        async with served(sock, engines):
            async with connect(sock) as default, connect(sock, model="b") as chosen:
                assert await default.complete_text("x") == "first"
                assert await chosen.complete_text("x") == "second"
                async with chosen.stream("x") as tokens:
                    assert (await tokens.result()).text == "second"
                assert (await chosen.choose("x", ["first", "second"])).text == "second"
                assert chosen.stats().requests == {"completed": 2, "failed": 0, "cancelled": 0}
                assert default.stats().requests["completed"] == 1
            for name in ("c", ""):
                with pytest.raises(ProtocolError, match="known are a, b"):
                    async with connect(sock, model=name):
                        pass
            with pytest.raises(ProtocolError, match="model must be text"):
                async with connect(sock, model=5):  # type: ignore[arg-type]
                    pass


async def test_the_model_that_was_the_default_stays_the_one(sock: Path) -> None:
    async with open_scripted_engine("first") as first, open_scripted_engine("second") as second:
        engines: dict[str, EngineLike] = {"a": first}
        async with served(sock, engines), connect(sock) as remote:
            engines.clear()
            engines["b"] = second
            for ask in (remote.complete_text, remote.render):
                with pytest.raises(ProtocolError, match="unknown model 'a'"):
                    await ask("x")
            with pytest.raises(EngineClosed):
                await remote.refresh()
            engines["a"] = first
            assert await remote.complete_text("x") == "first"


# -- a model that is not loaded -------------------------------------------------------------


@pytest.fixture
async def lazy(sock: Path) -> AsyncIterator[Models]:
    """Models behind a socket: one that answers `"ok"` and is loaded when it is asked."""
    specs = {"lazy": EngineSpec("lazy", load="lazy")}
    async with open_scripted_models({"lazy": "ok"}, specs) as models, served(sock, models):
        yield models


def check_unknown(remote: RemoteEngine) -> None:
    for look in (lambda: remote.info, lambda: remote.config, remote.stats):
        with pytest.raises(EngineClosed):
            look()


@pytest.mark.parametrize("name", ["complete", "stream", "stream_events", "render", "choose"])
async def test_the_first_reply_tells_what_a_lazy_model_is(
    sock: Path, lazy: Models, name: str
) -> None:
    async with connect(sock) as remote:
        check_unknown(remote)
        await QUESTIONS[name](remote)
        assert remote.info == lazy["lazy"].info
        assert remote.config.n_slots == lazy["lazy"].config.n_slots
        assert remote.stats() == lazy["lazy"].stats()


async def test_the_end_of_a_request_tells_the_stats_before_the_model_is_known(
    sock: Path, lazy: Models
) -> None:
    async with connect(sock) as remote, remote.stream("x") as tokens:
        await tokens.result()
        assert remote.stats().requests["completed"] == 1


async def test_a_reply_counts_also_when_nothing_more_can_be_learned(sock: Path) -> None:
    unloaded = OF_DAEMON | {"models": {}, "states": {"default": "unloaded"}}
    replies = [as_lines(unloaded)]
    async with answering(sock, replies), connect(sock) as remote:
        replies.append(as_lines(DONE))  # to the request, and to what comes after it
        assert (await remote.complete("x")).text == "ab"
        assert remote.stats().kv_retained_tokens == 7
        with pytest.raises(EngineClosed):
            remote.info  # noqa: B018


async def test_what_was_known_of_a_model_stays_known_when_it_is_unloaded(
    sock: Path, lazy: Models
) -> None:
    async with connect(sock) as remote:
        await remote.complete("x")
        await lazy.unload("lazy")
        with pytest.raises(EngineClosed):
            await remote.refresh()
        assert remote.info.architecture == "scripted"
        assert remote.stats().requests["completed"] == 1


# -- limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n_mib", [1, 2, 20])
async def test_a_request_beyond_the_limit_is_refused_and_the_next_one_is_not(
    remote: RemoteEngine, n_mib: int
) -> None:
    for question in (remote.complete_text, remote.count_tokens):
        with pytest.raises(ProtocolError, match="request too large"):
            await question("x" * (n_mib * MIB))
    assert len(await remote.complete_text("x", max_tokens=3)) == 3


@pytest.mark.parametrize("n_mib", [1, 4])
async def test_a_request_just_within_the_limit_is_taken(
    sock: Path, behind: Engine, n_mib: int
) -> None:
    limits, text = Limits(max_request_bytes=n_mib * MIB), "x" * (n_mib * MIB - 1000)
    async with served(sock, behind, limits=limits), connect(sock) as remote:
        with pytest.raises(PromptTooLong):
            await remote.complete(text)
        assert len(await remote.tokenize(text)) == len(text)


async def test_beyond_its_connections_a_daemon_is_busy(sock: Path, behind: Engine) -> None:
    async with served(sock, behind, limits=Limits(max_connections=1)), connect(sock) as remote:
        await wait_all_tasks_blocked(0.05)  # until the daemon sees that `connect` has hung up
        async with remote.stream("x", max_tokens=ENDLESS) as tokens:
            await tokens.receive()
            for call in (connect(sock).__aenter__, remote.refresh, lambda: remote.complete("x")):
                with pytest.raises(Busy) as caught:
                    await call()
                assert attrs.astuple(caught.value) == (1, 1)
        await wait_all_tasks_blocked(0.05)
        assert len(await remote.complete_text("x", max_tokens=3)) == 3
