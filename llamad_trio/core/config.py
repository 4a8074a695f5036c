"""How engines and daemons are set up.  Decides ranges and defaults; knows neither files nor cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from os import PathLike
from typing import Any, Literal, Protocol, TypedDict, TypeVar, get_args, runtime_checkable

import attrs

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.fields import (
    apply_converters,
    boolean,
    checked,
    number,
    one_of,
    optional,
    typed_init,
    unknown_names,
    whole_number,
)
from llamad_trio.core.request import MAX_INT

T = TypeVar("T")


@runtime_checkable
class LaneLike(Protocol):
    """Where steps run, one at a time."""

    def hosted(self) -> AbstractAsyncContextManager[None]:
        """Keep the lane alive inside the block."""
        ...

    async def run(
        self,
        job: Callable[[], T],
        *,
        abort: Callable[[], None],
        engine: object = None,
        weight: int = 1,
    ) -> T:
        """Run `job` on the lane: one of `engine`, which may have `weight` of them in a row.

        When cancelled, calls `abort` once if the job has begun, waits for it to end, and
        raises `Cancelled`; a job that has not begun never will.
        """
        ...


logger: logging.Logger = logging.getLogger("llamad_trio")

DEFAULT_N_CTX = 4096
MAX_N_CTX = 1_048_576
MAX_SLOTS = 512
MAX_THREADS = 256
MAX_BYTES = 2**63 - 1

SplitMode = Literal["none", "layer", "row"]
KVType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _shares(value: object, name: str) -> tuple[float, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ProtocolError(f"{name} must be numbers, not {type(value).__name__}")
    return tuple(number(0.0, 0.0, 1e6)(item, name) for item in value)


def _directory(value: object, name: str) -> str:
    if not isinstance(value, str | PathLike):
        raise ProtocolError(f"{name} must be a path, not {type(value).__name__}")
    return os.fsdecode(value)


def _lane(value: object, _name: str) -> LaneLike | Literal["own"] | None:
    if isinstance(value, LaneLike):
        return value
    if value is None or value == "own":
        return "own" if value else None
    raise ProtocolError(f'lane must be a Lane, "own" or None, not {value!r}')


@typed_init
@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class EngineConfig:
    """Settings of one engine.  Frozen; numbers out of range are clamped.

    Args:
        n_slots: sequences computed at once, 1-512, and at most what llama.cpp allows
            (256 in today's version).  Slots share the pool.
        n_ctx: tokens in the KV pool; `None` is 4096, or what the model was trained
            for if that is less.
        n_threads: most threads for steps that only decode; `None` is the physical cores
            this process may use.
        n_threads_batch: most threads for steps with prompts; `None` is the physical cores,
            whatever `n_threads` is.
        adaptive_threads: compute with fewer threads while others want the cores, too, if
            that is faster; otherwise always with as many.
        kv_cache: reuse the KV of ended requests for prompts that begin alike.
        n_batch: most tokens in a step, at least `n_slots`.
        max_queue: waiting requests beyond this are refused with `Busy`; `None` is no limit.
        step_target_s: seconds a step may take while streams are running; sizes the part
            of a prompt that is put in beside them.
        prompt_cache_ram_bytes: RAM for prefixes that had to leave the pool; 0 is off.
        prompt_cache_dir: where prefixes are kept over a restart, with
        prompt_cache_disk_bytes: how much of the disk they may take; 0 is off.
        weight: steps in a turn, on a lane that others compute on, too; 1-100.
        lane: the OS thread to compute on: `None` the one shared by default, `"own"` a
            new one, or a `Lane` of the application's.
        preflight: prove in a process of its own, once for each build, machine and settings,
            that llama.cpp runs here, before it is trusted.
        use_extra_bufts: keep weights in the buffers of special kernels (AMX, repacked), which
            are faster; `None` is yes, unless they fail the preflight.
        n_gpu_layers, split_mode, main_gpu, tensor_split, use_mmap, use_mlock,
        flash_attn, type_k, type_v, rope_freq_base, rope_freq_scale: llama.cpp's own;
            `None` and 0 leave the choice to it.

    Raises:
        ProtocolError: a field has the wrong type.
    """

    n_slots: int = attrs.field(default=4, metadata=checked(whole_number(1, MAX_SLOTS)))
    n_ctx: int | None = attrs.field(
        default=None, metadata=checked(optional(whole_number(1, MAX_N_CTX)))
    )
    n_threads: int | None = attrs.field(
        default=None, metadata=checked(optional(whole_number(1, MAX_THREADS)))
    )
    n_threads_batch: int | None = attrs.field(
        default=None, metadata=checked(optional(whole_number(1, MAX_THREADS)))
    )
    adaptive_threads: bool = attrs.field(default=True, metadata=checked(boolean))
    kv_cache: bool = attrs.field(default=True, metadata=checked(boolean))
    n_batch: int = attrs.field(default=512, metadata=checked(whole_number(1, MAX_N_CTX)))
    max_queue: int | None = attrs.field(
        default=None, metadata=checked(optional(whole_number(0, MAX_INT)))
    )
    step_target_s: float = attrs.field(default=0.1, metadata=checked(number(0.1, 0.001, 60.0)))
    prompt_cache_ram_bytes: int = attrs.field(
        default=0, metadata=checked(whole_number(0, MAX_BYTES))
    )
    prompt_cache_dir: str | None = attrs.field(default=None, metadata=checked(optional(_directory)))
    prompt_cache_disk_bytes: int = attrs.field(
        default=0, metadata=checked(whole_number(0, MAX_BYTES))
    )
    lane: LaneLike | Literal["own"] | None = attrs.field(default=None, metadata=checked(_lane))
    weight: int = attrs.field(default=1, metadata=checked(whole_number(1, 100)))
    preflight: bool = attrs.field(default=True, metadata=checked(boolean))
    use_extra_bufts: bool | None = attrs.field(default=None, metadata=checked(optional(boolean)))
    n_gpu_layers: int = attrs.field(default=0, metadata=checked(whole_number(-1, MAX_INT)))
    split_mode: SplitMode | None = attrs.field(
        default=None, metadata=checked(optional(one_of("none", "layer", "row")))
    )
    main_gpu: int = attrs.field(default=0, metadata=checked(whole_number(0, 255)))
    tensor_split: tuple[float, ...] = attrs.field(default=(), metadata=checked(_shares))
    use_mmap: bool | None = attrs.field(default=None, metadata=checked(optional(boolean)))
    use_mlock: bool = attrs.field(default=False, metadata=checked(boolean))
    flash_attn: bool | None = attrs.field(default=None, metadata=checked(optional(boolean)))
    type_k: KVType | None = attrs.field(
        default=None, metadata=checked(optional(one_of(*get_args(KVType))))
    )
    type_v: KVType | None = attrs.field(
        default=None, metadata=checked(optional(one_of(*get_args(KVType))))
    )
    rope_freq_base: float = attrs.field(default=0.0, metadata=checked(number(0.0, 0.0, 1e12)))
    rope_freq_scale: float = attrs.field(default=0.0, metadata=checked(number(0.0, 0.0, 1e6)))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> EngineConfig:
        """A config from the `LLAMAD_*` variables; what is unset keeps its default.

        A value that cannot be read keeps the default, with a warning in the log; one out
        of range is clamped.
        """
        values: dict[str, Any] = {}
        for name, parse in _ENVIRONMENT.items():
            variable = f"LLAMAD_{name.upper()}"
            if (text := environ.get(variable)) is None:
                continue
            value = parse(text.strip())
            if value is None:
                logger.warning("%s=%r is not understood; the default stays", variable, text)
            else:
                values[name] = value
        return cls(**values)

    @classmethod
    def merge(cls, config: EngineConfig | None, overrides: Mapping[str, Any]) -> EngineConfig:
        """A config, by default the environment's, with some of its fields replaced.

        Raises:
            ProtocolError: an unknown field, or one of the wrong type.
        """
        known = {field.name for field in attrs.fields(cls)}
        if unknown := overrides.keys() - known:
            raise ProtocolError(f"unknown config field {unknown_names(unknown, known)}")
        if not isinstance(config, cls | None):
            raise ProtocolError(f"config must be an EngineConfig, not {type(config).__name__}")
        return attrs.evolve(config or cls.from_env(), **overrides)

    def resolve(self, *, n_ctx_train: int, n_cores: int, max_slots: int) -> EngineConfig:
        """Fill in what depends on the model and the machine.

        Args:
            n_ctx_train: context the model was trained for, in tokens; 0 is unknown.
            n_cores: physical cores this process may use.
            max_slots: most sequences llama.cpp allows.
        """
        n_ctx = self.n_ctx or min(DEFAULT_N_CTX, n_ctx_train or DEFAULT_N_CTX)
        n_slots = min(self.n_slots, max_slots)
        n_cores = min(n_cores, MAX_THREADS)
        return attrs.evolve(
            self,
            n_slots=n_slots,
            n_ctx=n_ctx,
            n_threads=self.n_threads or n_cores,
            n_threads_batch=self.n_threads_batch or n_cores,
            n_batch=max(self.n_batch, n_slots),
        )


class ConfigFields(TypedDict, total=False):
    """The fields of an `EngineConfig`, for type checkers and editors: see `RequestFields`."""

    n_slots: int
    n_ctx: int | None
    n_threads: int | None
    n_threads_batch: int | None
    adaptive_threads: bool
    kv_cache: bool
    n_batch: int
    max_queue: int | None
    step_target_s: float
    prompt_cache_ram_bytes: int
    prompt_cache_dir: str | PathLike[str] | None
    prompt_cache_disk_bytes: int
    lane: LaneLike | Literal["own"] | None
    weight: int
    preflight: bool
    use_extra_bufts: bool | None
    n_gpu_layers: int
    split_mode: SplitMode | None
    main_gpu: int
    tensor_split: Sequence[float]
    use_mmap: bool | None
    use_mlock: bool
    flash_attn: bool | None
    type_k: KVType | None
    type_v: KVType | None
    rope_freq_base: float
    rope_freq_scale: float


def _parse_int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _parse_bool(text: str) -> bool | None:
    word = text.lower()
    return True if word in _TRUE else False if word in _FALSE else None


_NUMBERS = ("n_slots", "n_ctx", "n_threads", "n_threads_batch", "n_batch", "max_queue")
_FLAGS = ("adaptive_threads", "kv_cache", "preflight", "use_extra_bufts")
_ENVIRONMENT: Mapping[str, Callable[[str], int | bool | None]] = {
    **dict.fromkeys(_NUMBERS, _parse_int),
    **dict.fromkeys(_FLAGS, _parse_bool),
}


MIB = 1024 * 1024
DAY_S = 86_400.0


@typed_init
@attrs.frozen(kw_only=True, field_transformer=apply_converters)
class Limits:
    """Limits of one daemon.  Frozen; numbers out of range are clamped.

    Args:
        max_request_bytes: most bytes of one request, 64 to 1 GiB.
        request_timeout_s: seconds a client has to send its request, 0.001 to a day.
        stream_timeout_s: seconds a reply may stand still, because no token came or
            because the client takes none; 0.001 to a day.
        max_connections: connections at once, 1-65,536; more are refused with `Busy`.

    Raises:
        ProtocolError: a field has the wrong type.
    """

    max_request_bytes: int = attrs.field(
        default=MIB, metadata=checked(whole_number(64, 1024 * MIB))
    )
    request_timeout_s: float = attrs.field(
        default=30.0, metadata=checked(number(30.0, 0.001, DAY_S))
    )
    stream_timeout_s: float = attrs.field(
        default=60.0, metadata=checked(number(60.0, 0.001, DAY_S))
    )
    max_connections: int = attrs.field(default=256, metadata=checked(whole_number(1, 65_536)))
