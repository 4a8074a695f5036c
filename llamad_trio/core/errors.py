"""Every error the library raises.  Decides nothing; knows only its fields.

All derive from `LlamadError`, carry their fields as attributes, and pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

__all__ = [
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
]


class LlamadError(Exception):
    """Base of every error of this library."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exception pickles `args`, which attrs leaves empty; rebuild from the fields instead.
        fields = getattr(type(self), "__attrs_attrs__", ())
        return (type(self), tuple(getattr(self, field.name) for field in fields))


@attrs.define(auto_exc=True, str=False)
class ModelLoadError(LlamadError):
    """The model could not be loaded: missing, unreadable, not a GGUF, unsupported, out of memory."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"cannot load model {self.path!r}: {self.reason}"


@attrs.define(auto_exc=True, str=False)
class Busy(LlamadError):
    """The queue is full.  Retry later."""

    queued: int
    max_queue: int

    def __str__(self) -> str:
        return f"busy: {self.queued} requests are waiting, the limit is {self.max_queue}"


@attrs.define(auto_exc=True, str=False)
class PromptTooLong(LlamadError):
    """The templated prompt cannot fit, even alone in the pool.

    `tokens` is the prompt's length; for a text that is refused before it is
    tokenised, because no tokenisation of it could fit, it is a lower bound.
    """

    tokens: int
    budget: int

    def __str__(self) -> str:
        return f"prompt too long: {self.tokens} tokens, at most {self.budget} fit"


@attrs.define(auto_exc=True, str=False)
class ContextOverflow(LlamadError):
    """Growth beyond the KV pool, with the stage it happened in."""

    stage: Literal["prefix", "suffix", "decode"]
    resident_tokens: int
    additional_tokens: int
    n_ctx: int

    def __str__(self) -> str:
        return (
            f"context overflow in {self.stage}: {self.resident_tokens} tokens resident, "
            f"{self.additional_tokens} more do not fit in {self.n_ctx}"
        )


@attrs.define(auto_exc=True, str=False)
class ProtocolError(LlamadError):
    """A bad request: wrong type, unknown field, NUL byte, unknown role, refused grammar."""

    reason: str

    def __str__(self) -> str:
        return f"invalid request: {self.reason}"


@attrs.define(auto_exc=True, str=False)
class UnsupportedFeature(LlamadError):
    """This model or this build cannot do it."""

    feature: str
    reason: str

    def __str__(self) -> str:
        return f"{self.feature} is not supported: {self.reason}"


@attrs.define(auto_exc=True, str=False)
class IncompleteOutput(LlamadError):
    """The text was cut off before it was a value: by `max_tokens`, by what fits, or by a stop
    sequence.  `text` is what there is of it."""

    text: str

    def __str__(self) -> str:
        return f"the output is incomplete after {len(self.text)} characters"


@attrs.define(auto_exc=True, str=False)
class InferenceError(LlamadError):
    """A runtime failure of this request only."""

    reason: str

    def __str__(self) -> str:
        return f"inference: {self.reason}"


@attrs.define(auto_exc=True, str=False)
class SessionFatal(LlamadError):
    """The context's memory and the bookkeeping no longer agree: the engine stops."""

    reason: str

    def __str__(self) -> str:
        return f"engine stopped: {self.reason}"


@attrs.define(auto_exc=True, str=False)
class EngineClosed(LlamadError):
    """The engine is used after its block ended, or it stopped while the request was under way."""

    def __str__(self) -> str:
        return "the engine is closed"


@attrs.define(auto_exc=True, str=False)
class Disconnected(LlamadError):
    """The other side of a socket went away."""

    def __str__(self) -> str:
        return "the other side disconnected"


@attrs.define(auto_exc=True, str=False)
class SocketUnavailable(LlamadError):
    """The path cannot be listened on, or nobody listens there."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"socket {self.path!r}: {self.reason}"


@attrs.define(auto_exc=True, str=False)
class ConfigError(LlamadError):
    """A configuration file that cannot be used.

    `where` is the table and key, such as `models.small.n_ctx`; empty for the file as a whole.
    """

    path: str
    where: str
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.where}: {self.reason}"
            if self.where
            else f"{self.path}: {self.reason}"
        )


@attrs.define(auto_exc=True, str=False)
class EngineCrashed(LlamadError):
    """The process that an engine ran in has ended.

    `status` is its exit status, or minus the number of the signal that killed it;
    `last_log_lines` are what it wrote last on stderr.
    """

    status: int
    last_log_lines: Sequence[str] = ()

    def __str__(self) -> str:
        how = f"signal {-self.status}" if self.status < 0 else f"status {self.status}"
        last = f"; its last words: {self.last_log_lines[-1]}" if self.last_log_lines else ""
        return f"the engine's process ended with {how}{last}"


@attrs.frozen
class Failure:
    """One failure of a model: when, in seconds of Trio's clock, and what."""

    time_s: float
    error: str


@attrs.define(auto_exc=True, str=False)
class RestartsExhausted(LlamadError):
    """A model failed more often than its supervisor puts up with."""

    model: str
    failures: Sequence[Failure]

    def __str__(self) -> str:
        last = self.failures[-1].time_s if self.failures else 0.0
        story = "; ".join(f"{last - f.time_s:.1f} s before: {f.error}" for f in self.failures)
        return f"model {self.model!r} failed {len(self.failures)} times: {story}"


def _copy(held_by: Mapping[str, int]) -> dict[str, int]:
    return dict(held_by)


@attrs.define(auto_exc=True, str=False)
class InsufficientMemory(LlamadError):
    """The model does not fit into the memory budget beside those that are loaded.

    `required` and `available` are bytes, `held_by` the bytes that each model holds.
    """

    required: int
    available: int
    held_by: Mapping[str, int] = attrs.field(converter=_copy)

    def __str__(self) -> str:
        holders = ", ".join(f"{name} {_size(held)}" for name, held in self.held_by.items())
        return (
            f"insufficient memory: {_size(self.required)} are needed and {_size(self.available)} "
            f"are left, held by {holders or 'nobody'}"
        )


def _size(n_bytes: int) -> str:
    mib = n_bytes / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
