"""Loading a model: in a thread, with progress, stopped by a cancel."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING

import attrs
import trio

from llamad_trio.chat.template import ChatTemplate
from llamad_trio.core.config import EngineConfig, LaneLike
from llamad_trio.core.errors import LlamadError, ModelLoadError, ProtocolError, UnsupportedFeature
from llamad_trio.hub.manifest import file_sha256, resolve_model
from llamad_trio.scheduling.runtime import ModelFacts
from llamad_trio.system.host import physical_cores
from llamad_trio.system.nursery import ends_in_order, run_uninterrupted

if TYPE_CHECKING:
    from llamad_trio.llama.llama_runtime import LlamaRuntime

PROGRESS_STEP = 0.01
"""Progress is told in hundredths: a large model has thousands of tensors."""


@attrs.frozen
class Loaded:
    """A loaded model, and its chat template or the error for requests that need one."""

    runtime: LlamaRuntime
    template: ChatTemplate | LlamadError


@asynccontextmanager
@ends_in_order
async def loaded_model(
    model: str | PathLike[str],
    config: EngineConfig,
    lane: LaneLike,
    on_load: Callable[[float], object] | None,
) -> AsyncIterator[Loaded]:
    """A loaded, warmed-up model, freed when the block ends.

    The load reads and arranges memory, it computes nothing: it runs beside the lane, so
    that other engines go on.  Cancelled, it stops at the next tensor.  The model is freed
    however often Ctrl-C comes, and not before the lane has done with it.
    """
    # Not a place in Trio's default limiter: the application's threads go on as before.
    limiter = trio.CapacityLimiter(1)
    loaded = await trio.to_thread.run_sync(_load, model, config, on_load, limiter=limiter)
    runtime = loaded.runtime
    try:
        with _os_errors_as_load_error(model):
            await lane.run(runtime.warm_up, abort=runtime.request_abort)
        yield loaded
    finally:
        await run_uninterrupted(partial(trio.to_thread.run_sync, runtime.close, limiter=limiter))


def _load(
    model: str | PathLike[str], config: EngineConfig, on_load: Callable[[float], object] | None
) -> Loaded:
    """On a worker thread."""
    # Importing llama.cpp takes half a second: here, where it blocks nobody.
    with _library_errors(model):
        from llamad_trio.llama.llama_runtime import LlamaRuntime

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
        with _os_errors_as_load_error(model):
            path = resolve_model(model)
            runtime = LlamaRuntime(path, config, physical_cores(), on_progress)
    except Exception:
        if stopped_by is not None:
            raise stopped_by from None
        raise
    try:
        with _os_errors_as_load_error(model):
            runtime.identify(file_sha256(path, between_chunks=trio.from_thread.check_cancelled))
        return Loaded(runtime, compile_template(runtime.facts))
    except BaseException:
        runtime.close()
        raise


@contextmanager
def _library_errors(model: str | PathLike[str]) -> Iterator[None]:
    """A library that cannot be loaded, or is not the one that is bound, makes the load fail."""
    try:
        yield
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = f"llama.cpp's library cannot be loaded: {error} (docs/install.md)"
        raise ModelLoadError(fspath(model), reason) from error


@contextmanager
def _os_errors_as_load_error(model: str | PathLike[str]) -> Iterator[None]:
    """What the system refuses makes the load fail.  What `on_load` raises is not ours to say."""
    try:
        yield
    except OSError as error:
        raise ModelLoadError(fspath(model), error.strerror or str(error)) from error


def compile_template(facts: ModelFacts) -> ChatTemplate | LlamadError:
    """A model's chat template, or the error for requests that need one.

    Takes tens of milliseconds for a long template: not for the Trio thread.
    """
    if facts.chat_template is None:
        return ProtocolError("the model has no chat template: send the prompt with raw=True")
    try:
        return ChatTemplate(facts.chat_template, bos_token=facts.bos_text, eos_token=facts.eos_text)
    except UnsupportedFeature as error:
        return error
