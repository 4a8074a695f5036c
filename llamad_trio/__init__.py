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
    from llamad_trio.core.completion import Choice, Completion, TokenLogprob
    from llamad_trio.core.config import EngineConfig
    from llamad_trio.core.engine_events import (
        EngineEvent,
        EngineFailed,
        EngineLoaded,
        EngineRestarted,
        EngineStopped,
        FirstToken,
        Lagged,
        PrefixReused,
        RequestCancelled,
        RequestFailed,
        RequestFinished,
        RequestPreempted,
        RequestQueued,
        RequestStarted,
        StepDone,
        ThreadsChanged,
    )
    from llamad_trio.core.engine_spec import EngineSpec
    from llamad_trio.core.errors import (
        Busy,
        ConfigError,
        ContextOverflow,
        Disconnected,
        EngineClosed,
        EngineCrashed,
        IncompleteOutput,
        InferenceError,
        InsufficientMemory,
        LlamadError,
        ModelLoadError,
        PromptTooLong,
        ProtocolError,
        RestartsExhausted,
        SessionFatal,
        SocketUnavailable,
        UnsupportedFeature,
    )
    from llamad_trio.core.events import (
        Done,
        ReasoningDelta,
        StreamEvent,
        TextDelta,
        ToolCallDelta,
        ToolCallStart,
    )
    from llamad_trio.core.info import DaemonStats, EngineStats, ModelInfo, ModelStats
    from llamad_trio.core.limits import Limits
    from llamad_trio.core.request import Message, Request
    from llamad_trio.core.restarts import RestartPolicy
    from llamad_trio.core.tools import Tool, ToolCall
    from llamad_trio.engine.engine import Engine
    from llamad_trio.engine.engine_like import EngineLike
    from llamad_trio.engine.lane import Lane
    from llamad_trio.engine.session import (
        ContextReport,
        PrefixStatus,
        Segment,
        Session,
        SuffixStatus,
    )
    from llamad_trio.engine.stream import EventStream, TokenStream
    from llamad_trio.engine.tool_loop import ToolRun, run_tools
    from llamad_trio.memory import MemoryEstimate, estimate_memory
    from llamad_trio.opening import open_engine
    from llamad_trio.remote.remote import RemoteEngine, connect, daemon_stats
    from llamad_trio.serving.listener import serve_unix
    from llamad_trio.supervision.models import Model, Models, open_models
    from llamad_trio.watch.broadcast import EventReader

__all__ = [
    "Busy",
    "Choice",
    "Completion",
    "ConfigError",
    "ContextOverflow",
    "ContextReport",
    "DaemonStats",
    "Disconnected",
    "Done",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineCrashed",
    "EngineEvent",
    "EngineFailed",
    "EngineLike",
    "EngineLoaded",
    "EngineRestarted",
    "EngineSpec",
    "EngineStats",
    "EngineStopped",
    "EventReader",
    "EventStream",
    "FirstToken",
    "IncompleteOutput",
    "InferenceError",
    "InsufficientMemory",
    "Lagged",
    "Lane",
    "Limits",
    "LlamadError",
    "MemoryEstimate",
    "Message",
    "Model",
    "ModelInfo",
    "ModelLoadError",
    "ModelStats",
    "Models",
    "PrefixReused",
    "PrefixStatus",
    "PromptTooLong",
    "ProtocolError",
    "ReasoningDelta",
    "RemoteEngine",
    "Request",
    "RequestCancelled",
    "RequestFailed",
    "RequestFinished",
    "RequestPreempted",
    "RequestQueued",
    "RequestStarted",
    "RestartPolicy",
    "RestartsExhausted",
    "Segment",
    "Session",
    "SessionFatal",
    "SocketUnavailable",
    "StepDone",
    "StreamEvent",
    "SuffixStatus",
    "TextDelta",
    "ThreadsChanged",
    "TokenLogprob",
    "TokenStream",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallStart",
    "ToolRun",
    "UnsupportedFeature",
    "connect",
    "daemon_stats",
    "estimate_memory",
    "open_engine",
    "open_models",
    "run_tools",
    "serve_unix",
]

_HOMES = {
    "watch.broadcast": ("EventReader",),
    "engine.lane": ("Lane",),
    "core.completion": ("Choice", "Completion", "TokenLogprob"),
    "core.config": ("EngineConfig",),
    "core.engine_events": (
        "EngineEvent",
        "EngineFailed",
        "EngineLoaded",
        "EngineRestarted",
        "EngineStopped",
        "FirstToken",
        "Lagged",
        "PrefixReused",
        "RequestCancelled",
        "RequestFailed",
        "RequestFinished",
        "RequestPreempted",
        "RequestQueued",
        "RequestStarted",
        "StepDone",
        "ThreadsChanged",
    ),
    "core.engine_spec": ("EngineSpec",),
    "core.errors": (
        "Busy",
        "ConfigError",
        "ContextOverflow",
        "Disconnected",
        "EngineClosed",
        "EngineCrashed",
        "IncompleteOutput",
        "InferenceError",
        "InsufficientMemory",
        "LlamadError",
        "ModelLoadError",
        "PromptTooLong",
        "ProtocolError",
        "RestartsExhausted",
        "SessionFatal",
        "SocketUnavailable",
        "UnsupportedFeature",
    ),
    "core.events": (
        "Done",
        "ReasoningDelta",
        "StreamEvent",
        "TextDelta",
        "ToolCallDelta",
        "ToolCallStart",
    ),
    "core.request": ("Message", "Request"),
    "core.restarts": ("RestartPolicy",),
    "core.tools": ("Tool", "ToolCall"),
    "serving.listener": ("serve_unix",),
    "core.limits": ("Limits",),
    "engine.engine": ("Engine",),
    "opening": ("open_engine",),
    "engine.engine_like": ("EngineLike",),
    "core.info": ("DaemonStats", "EngineStats", "ModelInfo", "ModelStats"),
    "memory": ("MemoryEstimate", "estimate_memory"),
    "supervision.models": ("Model", "Models", "open_models"),
    "remote.remote": ("RemoteEngine", "connect", "daemon_stats"),
    "engine.session": ("ContextReport", "PrefixStatus", "Segment", "Session", "SuffixStatus"),
    "engine.stream": ("EventStream", "TokenStream"),
    "engine.tool_loop": ("ToolRun", "run_tools"),
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
