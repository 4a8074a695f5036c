"""In-process GGUF inference for Trio programs.

    async with open_engine("model.gguf") as eng:
        print((await eng.complete("Tell me a joke")).text)

Importing this package loads neither Trio nor llama.cpp: each public name is imported
from its module when it is first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamad_trio.actors.lane import Lane
    from llamad_trio.core.completion import Completion
    from llamad_trio.core.config import EngineConfig
    from llamad_trio.core.errors import (
        Busy,
        ContextOverflow,
        Disconnected,
        EngineClosed,
        InferenceError,
        LlamadError,
        ModelLoadError,
        PromptTooLong,
        ProtocolError,
        SessionFatal,
        UnsupportedFeature,
    )
    from llamad_trio.core.request import Message, Request
    from llamad_trio.engine import Engine, open_engine
    from llamad_trio.info import EngineStats, ModelInfo
    from llamad_trio.session import ContextReport, PrefixStatus, Segment, Session, SuffixStatus
    from llamad_trio.stream import TokenStream

__all__ = [
    "Busy",
    "Completion",
    "ContextOverflow",
    "ContextReport",
    "Disconnected",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "InferenceError",
    "Lane",
    "LlamadError",
    "Message",
    "ModelInfo",
    "ModelLoadError",
    "PrefixStatus",
    "PromptTooLong",
    "ProtocolError",
    "Request",
    "Segment",
    "Session",
    "SessionFatal",
    "SuffixStatus",
    "TokenStream",
    "UnsupportedFeature",
    "open_engine",
]

_HOMES = {
    "actors.lane": ("Lane",),
    "core.completion": ("Completion",),
    "core.config": ("EngineConfig",),
    "core.errors": (
        "Busy",
        "ContextOverflow",
        "Disconnected",
        "EngineClosed",
        "InferenceError",
        "LlamadError",
        "ModelLoadError",
        "PromptTooLong",
        "ProtocolError",
        "SessionFatal",
        "UnsupportedFeature",
    ),
    "core.request": ("Message", "Request"),
    "engine": ("Engine", "open_engine"),
    "info": ("EngineStats", "ModelInfo"),
    "session": ("ContextReport", "PrefixStatus", "Segment", "Session", "SuffixStatus"),
    "stream": ("TokenStream",),
}

# An application that sets up no logging hears nothing from a library.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
