"""Prefixes that leave the pool come back from RAM and from disk, and are never wrong."""

from __future__ import annotations

import errno
import logging
import os
import random
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llamad_trio import Request, open_engine
from llamad_trio.engine.lane import Lane
from llamad_trio.engine.store import SnapshotStore
from tests.models import DECODER_KINDS
from tests.support import (
    EXACT,
    HeldSteps,
    held_steps,
    side_by_side,
    threads_of_ours,
    until,
    until_idle,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from llamad_trio import Engine
    from tests.models import Kind, TinyModels

PLENTY = 1 << 30
N_CTX = 256
N_PREFIX = 80

kinds = pytest.mark.parametrize("kind", DECODER_KINDS)


def prefix(seed: int) -> list[int]:
    """Tokens of letters."""
    return random.Random(seed).choices(range(268, 294), k=N_PREFIX)


def first(seed: int) -> Request:
    """A request that leaves its prompt: the token it says is never computed."""
    return Request(prefix(seed), max_tokens=1, temperature=0)


def second(seed: int) -> Request:
    """One that goes on from there, with what no model says by itself."""
    return Request([*prefix(seed), *[5] * 10], max_tokens=12, temperature=0)


CROWD = Request([280] * 240, max_tokens=2, temperature=0)
"""It needs nearly all of the pool."""


def opened(
    path: Path, n_ctx: int = N_CTX, *, folder: Path | None = None, ram: int = 0, **settings: Any
) -> AbstractAsyncContextManager[Engine]:
    return open_engine(
        path,
        EXACT,
        n_ctx=n_ctx,
        n_slots=2,
        prompt_cache_ram_bytes=ram,
        prompt_cache_dir=folder,
        prompt_cache_disk_bytes=PLENTY if folder else 0,
        **settings,
    )


async def cold(path: Path, asked: Request | None = None) -> str:
    """What a request (the second one, if no other) says where nothing is reused."""
    async with open_engine(path, EXACT, n_ctx=N_CTX, kv_cache=False) as engine:
        return await engine.complete_text(asked or second(1))


async def leave_prefix(path: Path, folder: Path, seed: int = 1) -> None:
    """Let an engine come and go that leaves a prefix on disk."""
    async with opened(path, folder=folder) as engine:
        await engine.complete(first(seed))
    assert files_in(folder)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def knows(engine: Engine, asked: Request) -> bool:
    """Whether RAM or disk hold what the request begins with."""
    tokens = asked.prompt
    assert isinstance(tokens, tuple)
    return engine._desk.decode.scheduler.shelf.match(tokens, len(tokens) - 1).n == N_PREFIX


def warnings(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    messages = (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    return [message for message in messages if part in message]


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[HeldSteps]:
    """Make every `read` or `write` wait until it is let go."""
    disk = HeldSteps()
    real: Callable[..., object] = getattr(SnapshotStore, name)

    def slow(*args: object) -> object:
        disk.hold()
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotStore, name, slow)
        try:
            yield disk
        finally:
            disk.let_go()


@pytest.fixture
async def stored(tiny_model: TinyModels, tmp_path: Path) -> Path:
    """A model with a prefix of it on disk, in `tmp_path`."""
    path = tiny_model("attention")
    await leave_prefix(path, tmp_path)
    return path


# -- they come back -------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("tier", ["ram", "disk", "none", "too little ram"])
async def test_what_left_the_pool_comes_back_if_there_is_where_from(
    path: Path, tier: str, tmp_path: Path
) -> None:
    folder, ram = tmp_path if tier == "disk" else None, {"ram": PLENTY, "too little ram": 1}
    async with opened(path, folder=folder, ram=ram.get(tier, 0)) as engine:
        await engine.complete(first(1))
        await engine.complete(CROWD)
        assert engine._desk.resident(prefix(1)) == 0
        if tier == "disk":
            await until(lambda: knows(engine, second(1)))
        done = await engine.complete(second(1))
        assert engine.stats().cached_tokens == done.cached_tokens
    assert done.cached_tokens == (N_PREFIX if tier in {"ram", "disk"} else 0)
    assert done.text == await cold(path)


@kinds
async def test_what_was_known_is_known_after_a_restart(path: Path, tmp_path: Path) -> None:
    expected = await cold(path)
    await leave_prefix(path, tmp_path)
    for _ in range(3):
        async with opened(path, folder=tmp_path) as engine:
            done = await engine.complete(second(1))
            # Next time all of this prompt is known, but for its last token.
            assert done.cached_tokens in {N_PREFIX, done.prompt_tokens - 1}
            assert done.text == expected


@kinds
async def test_a_part_of_what_was_kept_is_of_use_where_all_of_it_was_written(
    path: Path, kind: Kind, tmp_path: Path
) -> None:
    asked = Request([*prefix(1)[:50], *[5] * 20], max_tokens=12, temperature=0)
    await leave_prefix(path, tmp_path)
    async with opened(path, folder=tmp_path) as engine:
        done = await engine.complete(asked)
        assert done.cached_tokens == (50 if kind == "attention" else 0)
        assert done.text == await cold(path, asked)
        assert engine.stats().aborted_steps == 0  # what is of no use is not tried


@kinds
async def test_many_prefixes_take_turns_in_a_pool_that_is_too_small(
    path: Path, tmp_path: Path
) -> None:
    async with opened(path, folder=tmp_path, ram=PLENTY) as engine:
        for seed in range(6):
            await engine.complete(first(seed))
        done = await side_by_side(partial(engine.complete, second(seed)) for seed in range(6))
    assert [each.text for each in done] == [await cold(path, second(seed)) for seed in range(6)]
    # Who is admitted together with another, for whom its prefix leaves, cannot wait for it.
    cached = [each.cached_tokens for each in done]
    assert set(cached) <= {0, N_PREFIX}
    assert cached.count(N_PREFIX) >= 3


# -- and only where they belong -------------------------------------------------------------


async def test_nothing_crosses_from_one_identity_to_another(
    stored: Path, tiny_model: TinyModels, tmp_path: Path
) -> None:
    files = files_in(tmp_path)
    others: list[tuple[Path, dict[str, Any]]] = [
        (tiny_model("attention", seed=1), {}),
        (tiny_model("attention", chat_template="{{ messages[0].content }}"), {}),
        (stored, {"type_k": "f16"}),
        (stored, {"type_v": "f16"}),
        (stored, {"rope_freq_base": 20_000.0}),
        (stored, {"rope_freq_scale": 0.5}),
        (stored, {"flash_attn": True}),
    ]
    identities = set()
    for other, settings in others:
        async with opened(other, folder=tmp_path / "none", **settings) as engine:
            expected = await engine.complete(second(1))
            identities.add(engine.info.identity)
        async with opened(other, folder=tmp_path, **settings) as engine:
            done = await engine.complete(second(1))
        assert done.cached_tokens == 0
        assert done.text == expected.text
    assert len(identities) == len(others)
    assert set(files) < set(files_in(tmp_path))
    async with opened(stored, 2 * N_CTX, folder=tmp_path) as engine:
        assert engine.info.identity not in identities
        assert (await engine.complete(second(1))).cached_tokens == N_PREFIX


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def rot(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])


@kinds
@pytest.mark.parametrize("spoil", [cut, rot, Path.unlink])
async def test_a_file_that_went_bad_costs_nothing_but_the_reuse(
    path: Path, tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    await leave_prefix(path, tmp_path)
    async with opened(path, folder=tmp_path) as engine:
        for file in files_in(tmp_path):
            spoil(file)
        done = await engine.complete(second(1))
        assert bool(warnings(caplog, "is removed")) == (spoil is not Path.unlink)
        await engine.complete(first(1))
    assert done.cached_tokens == 0
    assert done.text == await cold(path)
    async with opened(path, folder=tmp_path) as engine:  # what took its place is good
        assert (await engine.complete(second(1))).cached_tokens >= N_PREFIX


@kinds
async def test_two_engines_share_a_directory(path: Path, tmp_path: Path) -> None:
    async with opened(path, folder=tmp_path) as one, opened(path, folder=tmp_path) as other:
        async with trio.open_nursery() as nursery:
            for engine in (one, other):
                for asked in (first(1), first(2), CROWD):
                    nursery.start_soon(engine.complete, asked)
        assert (await one.complete(second(1))).text == await cold(path)
    for seed in (1, 2):
        async with opened(path, folder=tmp_path) as engine:
            done = await engine.complete(second(seed))
            assert done.cached_tokens >= N_PREFIX
            assert done.text == await cold(path, second(seed))


# -- waiting for a disk ---------------------------------------------------------------------


async def test_who_leaves_while_a_file_is_read_leaves_at_once_and_the_rest_go_on(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(stored, folder=tmp_path) as engine:
        with hanging(monkeypatch, "read") as disk:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.complete, second(1))
                await until(disk.begun.is_set)
                # Somebody else is served meanwhile.
                assert (await engine.complete(first(2))).generated_tokens == 1
                nursery.cancel_scope.cancel()
            await until_idle(engine)
            assert engine.stats().requests == {"completed": 1, "failed": 0, "cancelled": 1}
            disk.let_go()
        done = await engine.complete(second(1))
    assert done.cached_tokens == N_PREFIX
    assert done.text == await cold(stored)


async def test_an_engine_closes_while_a_file_is_read(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hanging(monkeypatch, "read") as disk:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with opened(stored, folder=tmp_path) as engine:
                    await engine.complete(second(1))

            nursery.start_soon(ask)
            await until(disk.begun.is_set)
            nursery.cancel_scope.cancel()
            disk.let_go()
    assert threads_of_ours() == []
    async with opened(stored, folder=tmp_path) as engine:
        assert (await engine.complete(second(1))).cached_tokens == N_PREFIX


async def test_an_engine_closes_while_a_file_is_written_and_loses_nothing(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hanging(monkeypatch, "write") as disk:
        async with opened(tiny_path, folder=tmp_path) as engine:
            for seed in (1, 2):
                for asked in (first(seed), CROWD):
                    await engine.complete(asked)
            await until(disk.begun.is_set)
            disk.let_go()
    assert threads_of_ours() == []
    for seed in (1, 2):
        async with opened(tiny_path, folder=tmp_path) as engine:
            assert (await engine.complete(second(seed))).cached_tokens == N_PREFIX


# -- closing ---------------------------------------------------------------------------------


@kinds
async def test_an_engine_that_closes_in_the_middle_of_a_step_keeps_nothing_wrong(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_steps(monkeypatch) as steps:
        steps.let_go()
        async with opened(path, folder=tmp_path) as engine, trio.open_nursery() as nursery:
            await engine.complete(first(1))
            for asked in (first(2), second(1)):
                nursery.start_soon(engine.complete, asked)
            await until(lambda: engine.stats().slots["free"] < 2)
            nursery.cancel_scope.cancel()
    async with opened(path, folder=tmp_path) as engine:
        for asked in (second(1), second(2)):
            assert await engine.complete_text(asked) == await cold(path, asked)


@kinds
async def test_what_a_step_that_never_began_was_to_arrange_is_not_kept(
    path: Path, tmp_path: Path
) -> None:
    lane, busy_lane = Lane(), HeldSteps()

    async def free_the_lane(engine: Engine) -> None:
        await until(lambda: engine._desk.decode.closed is not None)
        busy_lane.let_go()

    async with (
        lane.hosted(),
        trio.open_nursery() as busy,
        opened(path, n_ctx=2048, folder=tmp_path, lane=lane) as engine,
        trio.open_nursery() as nursery,
    ):
        # A prefix for every sequence: the first one is to give its own to the last request,
        # which goes on from all of the newest.
        n_seqs = engine._desk.facts.n_seqs
        for seed in range(n_seqs):
            await engine.complete(first(seed))
        busy.start_soon(lambda: lane.run(busy_lane.hold, abort=lambda: None))
        await until(busy_lane.begun.is_set)
        nursery.start_soon(engine.complete, second(n_seqs - 1))
        await until(lambda: engine._desk.decode.scheduler._plan is not None)
        # Its turn comes when the engine is closed.
        busy.start_soon(free_the_lane, engine)
        nursery.cancel_scope.cancel()
    async with opened(path, n_ctx=2048, folder=tmp_path) as engine:
        for asked in (second(0), second(n_seqs - 1)):
            assert await engine.complete_text(asked) == await cold(path, asked)


# -- nothing to keep them in ----------------------------------------------------------------


async def test_without_the_kv_cache_there_are_no_tiers(stored: Path, tmp_path: Path) -> None:
    files = {file: file.read_bytes() for file in files_in(tmp_path)}
    async with opened(stored, folder=tmp_path, ram=PLENTY, kv_cache=False) as engine:
        for asked in (first(1), CROWD, second(1), second(1)):
            assert (await engine.complete(asked)).cached_tokens == 0
    assert {file: file.read_bytes() for file in files_in(tmp_path)} == files


async def test_a_disk_that_takes_nothing_is_as_none_with_one_warning(
    tiny_model: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    path, folder = tiny_model("attention"), tmp_path / "cache"
    async with opened(path, folder=folder) as engine:
        for seed in (1, 2, 3):
            for asked in (first(seed), CROWD):
                assert (await engine.complete(asked)).generated_tokens > 0
        assert await engine.complete_text(second(1)) == await cold(path)
    assert len(warnings(caplog, str(folder))) == 1
    assert [file for file in folder.rglob("*") if file.is_file()] == []
