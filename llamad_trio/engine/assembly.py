"""Puts the actors of one engine together, and runs them.

Decides what an engine is made of.  Knows nothing of what is asked of it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from os import PathLike
from pathlib import Path

import trio

from llamad_trio.chat.template import ChatTemplate
from llamad_trio.core.config import EngineConfig, LaneLike
from llamad_trio.core.errors import EngineClosed, LlamadError
from llamad_trio.engine.decode import DecodeActor
from llamad_trio.engine.desk import Desk
from llamad_trio.engine.engine import Engine
from llamad_trio.engine.lane import Lane, count_lane_threads, shared_lane, with_lane_threads
from llamad_trio.engine.loading import loaded_model
from llamad_trio.engine.preprocess import Preprocessor, Query
from llamad_trio.engine.reporter import Reporter
from llamad_trio.engine.store import SnapshotStore
from llamad_trio.engine.ticket import Ticket
from llamad_trio.preflight.prove import proven_config
from llamad_trio.scheduling.pacing import ComputeThreads
from llamad_trio.scheduling.plan import Prepared
from llamad_trio.scheduling.pool import Reuse
from llamad_trio.scheduling.runtime import ModelFacts, Runtime
from llamad_trio.scheduling.scheduler import Scheduler
from llamad_trio.scheduling.shelf import Shelf
from llamad_trio.system.nursery import ends_in_order, open_plain_nursery
from llamad_trio.watch.broadcast import Broadcast

logger = logging.getLogger("llamad_trio")


@asynccontextmanager
@ends_in_order
async def open_named_engine(
    model: str | PathLike[str],
    config: EngineConfig,
    *,
    name: str = "",
    broadcast: Broadcast | None = None,
    on_load: Callable[[float], object] | None = None,
) -> AsyncIterator[Engine]:
    """As `open_engine` in this process; `name` and `broadcast` as for `run_engine`."""
    began = trio.current_time()
    lane = Lane() if config.lane == "own" else config.lane or shared_lane()
    config = await proven_config(with_lane_threads(config), model)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(lane.hosted())
        loaded = await stack.enter_async_context(loaded_model(model, config, lane, on_load))
        config = loaded.runtime.config
        stack.enter_context(count_lane_threads(lane, config))
        yield await stack.enter_async_context(
            run_engine(
                loaded.runtime,
                loaded.template,
                config,
                lane,
                name=name,
                broadcast=broadcast,
                loading_since=began,
            )
        )


@asynccontextmanager
@ends_in_order
async def run_engine(
    runtime: Runtime,
    template: ChatTemplate | LlamadError,
    config: EngineConfig,
    lane: LaneLike,
    *,
    name: str = "",
    broadcast: Broadcast | None = None,
    loading_since: float | None = None,
) -> AsyncIterator[Engine]:
    """Run the actors of one engine inside the block.

    Its `config` must be resolved and its `lane` hosted; `template` may be the error for requests
    that need one.  Its events carry `name`, and go to `broadcast`, too, which is not closed.
    `loading_since` is when its load began, on Trio's clock; by default, now.
    """
    if loading_since is None:
        loading_since = trio.current_time()
    facts = runtime.facts
    assert config.n_ctx is not None
    assert config.n_threads is not None
    assert config.n_threads_batch is not None
    threads = ComputeThreads(
        config.n_threads, config.n_threads_batch, adaptive=config.adaptive_threads
    )
    scheduler = Scheduler(
        n_slots=config.n_slots,
        n_seqs=facts.n_seqs,
        n_ctx=config.n_ctx,
        n_batch=config.n_batch,
        step_target_s=config.step_target_s,
        threads=threads,
        reuse=_reuse(config, facts),
        shelf=_shelf(config, facts),
    )
    to_preprocess, from_callers = trio.open_memory_channel[Ticket | Query](0)
    to_decode, from_preprocess = trio.open_memory_channel[Prepared](config.n_slots)
    own_broadcast = Broadcast(onward=broadcast)
    reporter = Reporter(own_broadcast, name)
    store = _store(config, facts)
    decode = DecodeActor(runtime, lane, scheduler, from_preprocess, reporter, store, config.weight)
    await decode.load_index()
    preprocessor = Preprocessor(
        runtime, template, _most_tokens(config, facts.n_ctx_train), decode, from_callers, to_decode
    )
    async with open_plain_nursery() as nursery:
        nursery.start_soon(decode.run)
        nursery.start_soon(preprocessor.run)
        reporter.tell_loaded(trio.current_time() - loading_since)
        try:
            desk = Desk(runtime, config, decode, preprocessor, to_preprocess)
            yield Engine(desk, own_broadcast)
        finally:
            # Here and not when the actor is cancelled: nobody sees a half-closed engine.
            decode.close(EngineClosed())
            own_broadcast.close()


def _shelf(config: EngineConfig, facts: ModelFacts) -> Shelf:
    return Shelf(
        max_bytes=config.prompt_cache_ram_bytes,
        has_disk=_has_disk(config),
        # llama.cpp saves what a window still holds: such a state is of use at its end only.
        any_prefix=facts.can_rewind and not facts.n_window,
    )


def _store(config: EngineConfig, facts: ModelFacts) -> SnapshotStore | None:
    if not config.kv_cache or not _has_disk(config):
        return None
    assert config.prompt_cache_dir is not None
    directory = Path(config.prompt_cache_dir).expanduser()
    return SnapshotStore(directory, facts.identity, config.prompt_cache_disk_bytes)


def _has_disk(config: EngineConfig) -> bool:
    return config.prompt_cache_dir is not None and config.prompt_cache_disk_bytes > 0


def _reuse(config: EngineConfig, facts: ModelFacts) -> Reuse:
    if not config.kv_cache:
        return Reuse.NOTHING
    if facts.n_seqs <= config.n_slots:
        logger.warning("%d slots leave no sequence to retain: nothing is reused", config.n_slots)
        return Reuse.NOTHING
    if facts.can_rewind:
        return Reuse.PREFIX
    logger.warning(
        "the memory of %s cannot go back to an earlier token: a prompt is reused only when "
        "the whole of what was computed is continued",
        facts.name or facts.description,
    )
    return Reuse.WHOLE


def _most_tokens(config: EngineConfig, n_ctx_train: int) -> int:
    """Most tokens of one request: the pool, and no more than the model was trained for,
    unless its RoPE is stretched on purpose."""
    assert config.n_ctx is not None
    if config.rope_freq_base or config.rope_freq_scale or n_ctx_train <= 0:
        return config.n_ctx
    return min(config.n_ctx, n_ctx_train)
