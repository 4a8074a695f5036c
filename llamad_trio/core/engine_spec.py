"""One model of several: its file, its settings, when it is loaded; and which one is meant."""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike, fsdecode
from typing import Literal, Unpack

import attrs

from llamad_trio.core.config import ConfigFields, EngineConfig
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.fields import number, optional, text

Isolation = Literal["process"]
Load = Literal["eager", "lazy"]

YEAR_S = 365 * 86_400.0


@attrs.frozen(init=False)
class EngineSpec:
    """One model of `open_models`.

    Args:
        model: path of a GGUF file, or the name of a known model that has been pulled.
        config: settings; `None` takes them from the `LLAMAD_*` environment variables.
        load: `"eager"` loads it at once, `"lazy"` when it is first asked, and again
            by each request after a load that failed.
        unload_after_s: close it when it has been idle for so long, in seconds; it is loaded
            again when it is asked.  `None` never closes it.
        isolation: `"process"` runs it in a process of its own.
        overrides: `EngineConfig` fields that replace the config's.

    Raises:
        ProtocolError: a setting of the wrong type, or an unknown one.
    """

    model: str
    config: EngineConfig
    load: Load
    unload_after_s: float | None
    isolation: Isolation | None

    def __init__(
        self,
        model: str | PathLike[str],
        config: EngineConfig | None = None,
        *,
        load: Load = "eager",
        unload_after_s: float | None = None,
        isolation: Isolation | None = None,
        **overrides: Unpack[ConfigFields],
    ) -> None:
        if not isinstance(model, str | PathLike):
            raise ProtocolError(f"model must be a path or a name, not {type(model).__name__}")
        if load not in ("eager", "lazy"):
            raise ProtocolError(f'load must be "eager" or "lazy", not {load!r}')
        if isolation not in (None, "process"):
            raise ProtocolError(f'isolation must be "process" or None, not {isolation!r}')
        if unload_after_s is not None:
            unload_after_s = number(YEAR_S, 0.0, YEAR_S)(unload_after_s, "unload_after_s")
        whole = EngineConfig.merge(config, overrides)
        init = self.__attrs_init__  # type: ignore[attr-defined,unused-ignore]  # pyright: ignore[reportAttributeAccessIssue]
        init(fsdecode(model), whole, load, unload_after_s, isolation)


def pick_model(name: str | None, known: Collection[str], default: str | None) -> str:
    """The name of the model that is meant.

    Args:
        name: the one that is asked for; `None` is the default one.
        known: those there are.
        default: which of them is the default; the first one is, if that is not there.

    Raises:
        ProtocolError: there is no such model, or none at all, or the name is no text.
    """
    name = optional(text)(name, "model")
    if name is None:
        name = default if default in known else next(iter(known), None)
    if name is None:
        raise ProtocolError("there is no model")
    if name not in known:
        raise ProtocolError(f"unknown model {name[:64]!r}; known are {', '.join(known)}")
    return name
