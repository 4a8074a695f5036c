"""Loading a model: in a thread, with progress, stopped by a cancel."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from os import PathLike
from typing import TYPE_CHECKING

import trio

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.runtime import LaneLike
from llamad_trio.cores import physical_cores
from llamad_trio.manifest import resolve_model

if TYPE_CHECKING:
    from llamad_trio.llama.runtime import LlamaRuntime

__all__ = ["loaded_runtime"]

PROGRESS_STEP = 0.01
"""Progress is told in hundredths: a large model has thousands of tensors."""


@asynccontextmanager
async def loaded_runtime(
    model: str | PathLike[str],
    config: EngineConfig,
    lane: LaneLike,
    on_load: Callable[[float], object] | None,
) -> AsyncIterator[LlamaRuntime]:
    """A loaded, warmed-up model, freed when the block ends.

    The load reads and arranges memory, it computes nothing: it runs beside the lane, so
    that other engines go on.  Cancelled, it stops at the next tensor.
    """
    # Not a place in Trio's default limiter: the application's threads go on as before.
    limiter = trio.CapacityLimiter(1)
    runtime = await trio.to_thread.run_sync(_load, model, config, on_load, limiter=limiter)
    try:
        await lane.run(runtime.warm_up, abort=runtime.request_abort)
        yield runtime
    finally:
        # The ignore is for trio-typing's stubs, where CancelScope cannot be made.
        with trio.CancelScope(shield=True):  # pyright: ignore[reportCallIssue]
            await trio.to_thread.run_sync(runtime.close, limiter=limiter)


def _load(
    model: str | PathLike[str], config: EngineConfig, on_load: Callable[[float], object] | None
) -> LlamaRuntime:
    """On a worker thread."""
    # Importing llama.cpp takes half a second: here, where it blocks nobody.
    from llamad_trio.llama.runtime import LlamaRuntime

    stopped_by: BaseException | None = None
    told = 0.0

    def on_progress(fraction: float) -> bool:
        # Called by C, through which no exception can pass.
        nonlocal stopped_by, told
        try:
            if on_load is not None and (fraction >= told + PROGRESS_STEP or fraction >= 1.0):
                told = fraction
                trio.from_thread.run_sync(on_load, fraction)
            else:
                trio.from_thread.check_cancelled()
        except BaseException as error:
            stopped_by = error
            return False
        return True

    try:
        return LlamaRuntime(resolve_model(model), config, physical_cores(), on_progress)
    except Exception:
        if stopped_by is not None:
            raise stopped_by from None
        raise
