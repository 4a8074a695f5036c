"""`open_engine`: an engine in this process, or in one of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from os import PathLike
from typing import Literal, Unpack, overload

from llamad_trio.core.config import ConfigFields, EngineConfig
from llamad_trio.core.errors import ProtocolError
from llamad_trio.engine.assembly import open_named_engine
from llamad_trio.engine.engine import Engine
from llamad_trio.isolation.isolation import open_isolated_engine
from llamad_trio.remote.remote import RemoteEngine


@overload
def open_engine(
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    isolation: None = None,
    on_load: Callable[[float], object] | None = None,
    **overrides: Unpack[ConfigFields],
) -> AbstractAsyncContextManager[Engine]: ...


@overload
def open_engine(
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    isolation: Literal["process"],
    on_load: Callable[[float], object] | None = None,
    **overrides: Unpack[ConfigFields],
) -> AbstractAsyncContextManager[RemoteEngine]: ...


@overload
def open_engine(
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    isolation: Literal["process"] | None,
    on_load: Callable[[float], object] | None = None,
    **overrides: Unpack[ConfigFields],
) -> AbstractAsyncContextManager[Engine | RemoteEngine]: ...


def open_engine(
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    isolation: Literal["process"] | None = None,
    on_load: Callable[[float], object] | None = None,
    **overrides: Unpack[ConfigFields],
) -> AbstractAsyncContextManager[Engine | RemoteEngine]:
    """Load a model and run its engine inside the block of an async context manager.

    Args:
        model: path of a GGUF file, or the name of a known model that has been pulled.
        config: settings; `None` takes them from the `LLAMAD_*` environment variables.
        isolation: `"process"` runs it in a process of its own: whatever brings that down
            is an `EngineCrashed` here.  A `lane` of the application's is not used then.
        on_load: called in the Trio thread with the load's progress, 0 to 1.
        overrides: `EngineConfig` fields that replace the config's.

    Leaving the block cancels what is running, waits for at most one graph node, and
    frees everything.  Cancelling the load stops it.  Exceptions of the body come out as
    themselves; a crash of the engine ends the block with its own error.

    Raises:
        ModelLoadError: missing, unreadable, no GGUF, unsupported, out of memory.
        UnsupportedFeature: the model cannot continue a text.
        ProtocolError: a setting of the wrong type, or an unknown one.
        EngineCrashed: the process of an isolated engine has ended.
    """
    config = EngineConfig.merge(config, overrides)
    if isolation is None:
        return open_named_engine(model, config, on_load=on_load)
    if isolation != "process":
        raise ProtocolError(f'isolation must be "process" or None, not {isolation!r}')
    return open_isolated_engine(model, config, on_load)
