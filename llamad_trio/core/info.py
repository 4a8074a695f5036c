"""What an engine tells of its model and of itself, and what it takes in memory."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import InsufficientMemory


@attrs.frozen(kw_only=True)
class ModelInfo:
    """What is known of a loaded model.

    Attributes:
        architecture: such as `"llama"`.
        description: llama.cpp's own, such as `"llama 256M Q4_1"`.
        name: the name in the file, if it has one.
        n_params: number of weights.
        file_bytes: size of the file.
        n_vocab: tokens in the vocabulary.
        n_ctx_train: tokens of context the model was trained for.
        has_template: whether it brings a chat template.
        chat_template: that template (Jinja).
        can_rewind: whether its memory can go back to an earlier token.  Where it cannot
            (recurrent and hybrid models), a prompt is reused only when the whole of what
            was computed is continued.
        identity: digest of everything that decides what its KV cache means.
    """

    architecture: str
    description: str
    name: str | None
    n_params: int
    file_bytes: int
    n_vocab: int
    n_ctx_train: int
    has_template: bool
    chat_template: str | None
    can_rewind: bool
    identity: str


@attrs.frozen(kw_only=True)
class EngineStats:
    """A snapshot of an engine.

    Attributes:
        slots: number of slots by state: `free`, `prefill`, `decode`, `paused`.
        queued: requests that wait for a slot.
        kv_used_tokens, kv_retained_tokens, kv_free_tokens: the KV pool.  Retained is
            what ended requests left for reuse; it gives way to any need.
        prefill_tokens, prefill_s: prompt tokens computed, and seconds spent on them.
        decode_tokens, decode_s: the same for single generated tokens.
        cached_tokens: prompt tokens that were reused instead of computed.
        requests: number of requests by outcome: `completed`, `failed`, `cancelled`.
        preemptions: times a running request had to give its room back.
        steps, aborted_steps: steps run, and those of them that a cancel cut short.
        n_threads, n_threads_batch: threads that compute now, steps that only decode and those
            with prompts; fewer than the config says while others want the cores.
    """

    slots: Mapping[str, int]
    queued: int
    kv_used_tokens: int
    kv_retained_tokens: int
    kv_free_tokens: int
    prefill_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    cached_tokens: int
    requests: Mapping[str, int]
    preemptions: int
    steps: int
    aborted_steps: int
    n_threads: int
    n_threads_batch: int


@attrs.frozen(kw_only=True)
class ModelStats:
    """One model of a daemon: what it is, how it is set up, what it is doing."""

    info: ModelInfo
    config: EngineConfig
    stats: EngineStats


@attrs.frozen(kw_only=True)
class DaemonStats:
    """A snapshot of a daemon.

    Attributes:
        uptime_s: seconds since it began to listen.
        connections: clients that are connected, the one that asks included.
        default: the model of requests that name none.
        models: those that are loaded, by name.
        states: what is going on with each model, loaded or not, as `Models.state` tells it.
    """

    uptime_s: float
    connections: int
    default: str
    models: Mapping[str, ModelStats]
    states: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class MemoryEstimate:
    """What an engine will have resident once it is loaded and its pool is full, in bytes.

    Attributes:
        weights_bytes: the tensors.  With `use_mmap`, the default, they are pages of the file:
            they count, as they become resident, though the system can take them back and
            read them again.  Matrices that llama.cpp rearranges for the processor are a copy
            beside the file's pages, and count twice.
        kv_bytes: the KV pool, and the states of recurrent layers.  llama.cpp writes all of it
            when the engine opens, so it is resident before a token is.
        compute_bytes: buffers for one step's intermediate results and its logits.
        overhead_bytes: what the process needs beside: the vocabulary, the bookkeeping of the
            pool, its requests, and the whole of `prompt_cache_ram_bytes`.
    """

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.overhead_bytes


def check_budget(required: int, budget: int, held: Mapping[str, int]) -> None:
    """Raise `InsufficientMemory` if `required` does not fit beside what is held.

    Args:
        required: bytes that are asked for.
        budget: bytes there are for all.
        held: bytes by who holds them.
    """
    available = max(0, budget - sum(held.values()))
    if required > available:
        raise InsufficientMemory(required, available, held)
