"""A llama.cpp context: the KV pool, the operations on it, and the batch that fills it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy import ctypeslib
from numpy.typing import NDArray

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import ModelLoadError, SessionFatal, UnsupportedFeature
from llamad_trio.llama import backend
from llamad_trio.llama.model import LlamaModel

_FLASH_ATTENTION = {
    None: lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    True: lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    False: lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}

_KV_TYPES = {
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "bf16": 30,
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q4_0": lib.GGML_TYPE_Q4_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
    "iq4_nl": 20,
}


RETAINED_SEQS = 16
"""Prefixes kept beside those in use.  llama.cpp reserves a row of logits for each sequence
there can be: 1 MB for a vocabulary of 262,144."""


def open_context(model: LlamaModel, config: EngineConfig, n_cores: int) -> Context:
    """The context of an engine, with sequences for its slots and for prefixes beside them.

    `config` is as the caller gave it; that of the context is the resolved one.

    Raises:
        ModelLoadError: out of memory, or a combination llama.cpp refuses.
        UnsupportedFeature: the model cannot continue a text.
    """
    model.require_generation()
    most = int(lib.llama_max_parallel_sequences())
    config = config.resolve(n_ctx_train=model.n_ctx_train, n_cores=n_cores, max_slots=most)
    # A retained sequence costs a row of bookkeeping, but where the model has a state it
    # costs another copy of that.
    retained = config.n_slots if model.has_state else RETAINED_SEQS
    n_seqs = min(config.n_slots + retained, most) if config.kv_cache else config.n_slots
    return Context(model, config, n_seqs)


class Context:
    """One KV pool shared by `n_seqs` sequences, and a batch to fill it.

    The model must outlive it; the config is resolved, with thread counts and `n_ctx`.

    Raises:
        ModelLoadError: out of memory, or a combination llama.cpp refuses.
        UnsupportedFeature: the model has no memory to continue a text with.
    """

    def __init__(self, model: LlamaModel, config: EngineConfig, n_seqs: int) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx = config.n_ctx
        params.n_batch = params.n_ubatch = config.n_batch
        params.n_seq_max = n_seqs
        # Rows of logits in a step: as many as are sampled would do, but llama.cpp insists
        # on one for each sequence.  Its own default is a row for each token of a batch.
        params.n_outputs_max = n_seqs
        params.n_threads = config.n_threads
        params.n_threads_batch = config.n_threads_batch
        params.kv_unified = True
        params.swa_full = True
        params.no_perf = True
        params.flash_attn_type = _FLASH_ATTENTION[config.flash_attn]
        params.rope_freq_base = config.rope_freq_base
        params.rope_freq_scale = config.rope_freq_scale
        if config.type_k is not None:
            params.type_k = _KV_TYPES[config.type_k]
        if config.type_v is not None:
            params.type_v = _KV_TYPES[config.type_v]
        self._abort_flag = ctypes.create_string_buffer(2)
        # llama.cpp calls it after every graph node.  libc's `strlen` tells without Python and
        # without the GIL whether the flag is set: of a byte and a terminating NUL it is 1 or 0.
        params.abort_callback = ctypes.cast(ctypes.CDLL(None).strlen, lib.ggml_abort_callback)
        params.abort_callback_data = ctypes.cast(self._abort_flag, ctypes.c_void_p)
        with backend.captured_errors() as errors:
            pointer = lib.llama_init_from_model(model.pointer, params)
        if not pointer:
            reason = errors[0] if errors else "llama.cpp could not make a context"
            raise ModelLoadError(str(model.path), reason)
        self.pointer = pointer
        self.config = config
        self.n_seqs = n_seqs
        self.batch: Batch = Batch(config.n_batch)
        self._memory = lib.llama_get_memory(pointer)
        if not self._memory:  # what an encoder lacks, whatever it says of itself
            lib.llama_free(pointer)
            raise UnsupportedFeature("generation", f"{model.path.name} is an encoder model")
        self._n_vocab = model.n_vocab
        self._has_state = model.has_state
        self._n_threads: int | None = None  # as the config has them
        self._n_window = lib.llama_model_n_swa(model.pointer)

    def close(self) -> None:
        """Free the pool.  The context must not be used again."""
        lib.llama_free(self.pointer)

    # -- abort: the only part that other threads may call ---------------------------------

    def request_abort(self) -> None:
        """Make the step that is running, or the next one, stop at the next graph node."""
        self._abort_flag[0] = b"\x01"

    def clear_abort(self) -> None:
        self._abort_flag[0] = b"\x00"

    def use_threads(self, n_threads: int) -> None:
        """Compute the following batches with as many threads, whatever is in them.

        llama.cpp's own two numbers are for batches of one token and for all others.
        """
        if n_threads != self._n_threads:
            lib.llama_set_n_threads(self.pointer, n_threads, n_threads)
            self._n_threads = n_threads

    # -- memory -----------------------------------------------------------------------------

    def trim(self, seq: int, keep: int) -> bool:
        """Drop everything of a sequence but its first `keep` tokens; false if it cannot."""
        return bool(lib.llama_memory_seq_rm(self._memory, seq, keep, -1))

    def n_resident(self, seq: int) -> int:
        """Tokens of a sequence in the pool, by its last position."""
        return int(lib.llama_memory_seq_pos_max(self._memory, seq)) + 1

    def clear(self) -> None:
        lib.llama_memory_clear(self._memory, False)

    def trim_or_clear(self, seq: int, keep: int) -> bool:
        """Go back to the first `keep` tokens, or to none where the memory cannot rewind.

        Returns whether the `keep` tokens are still there.  Raises `SessionFatal` if the sequence
        is in neither state.
        """
        kept = self.trim(seq, keep) and self._has_window(seq, keep)
        if not kept:
            self.trim(seq, 0)
        resident = self.n_resident(seq)
        if resident != (keep if kept else 0):
            raise SessionFatal(f"sequence {seq} holds {resident} tokens after a rollback to {keep}")
        return kept

    def copy(self, src: int, dst: int, n: int) -> bool:
        """Let `dst`, which is empty, share the first `n` tokens of `src`.

        Metadata only: no cell is copied.  Of a memory with a state `n` must be all that `src`
        holds: llama.cpp would copy the state of its end, whatever the `n`.  Returns whether `dst`
        can go on from there; if not, it is left empty.  Raises `SessionFatal` if it is neither.
        """
        if self._has_state and n != self.n_resident(src):
            return False
        lib.llama_memory_seq_cp(self._memory, src, dst, 0, n)
        if self.n_resident(dst) == n and self._has_window(dst, n):
            return True
        self.trim_or_clear(dst, 0)
        return False

    def save(self, seq: int) -> bytes | None:
        """The state of a sequence as llama.cpp writes it; `None` if there is none."""
        if not self.n_resident(seq):
            return None
        size = lib.llama_state_seq_get_size(self.pointer, seq)
        buffer = (ctypes.c_uint8 * size)()
        written = lib.llama_state_seq_get_data(self.pointer, buffer, size, seq)
        return bytes(buffer)[:written] if written else None

    def load(self, seq: int, state: bytes, length: int, keep: int) -> bool:
        """Give `seq`, which is empty, a saved state of `length` tokens; keep `keep` of them.

        Returns and raises as `copy`.
        """
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        read = lib.llama_state_seq_set_data(self.pointer, data, len(state), seq)
        if read and self.n_resident(seq) == length:
            return self.trim_or_clear(seq, keep)
        self.trim_or_clear(seq, 0)
        return False

    def _has_window(self, seq: int, keep: int) -> bool:
        """Whether everything is there that the token at position `keep` will look at.

        Layers with a sliding window give away the cells that have left it, also of a
        sequence that is trimmed to before them later.  What is left of a sequence is
        always without gaps.
        """
        if not self._n_window or keep == 0:
            return True
        first = lib.llama_memory_seq_pos_min(self._memory, seq)
        return bool(0 <= first <= max(0, keep - self._n_window))

    # -- results ------------------------------------------------------------------------------

    def logits(self, n_outputs: int) -> NDArray[np.float32]:
        """The logits of the last batch, in its row order, shape (n_outputs, n_vocab).

        A view of llama.cpp's own buffer: valid, and writable, until the next batch.
        """
        pointer = lib.llama_get_logits(self.pointer)
        return ctypeslib.as_array(pointer, (n_outputs, self._n_vocab))


class Batch:
    """Room for `n_batch` tokens, each of exactly one sequence."""

    def __init__(self, n_batch: int) -> None:
        # The arrays are ours, and live as long as the batch: llama_batch only points at them.
        self._token = np.zeros(n_batch, dtype=np.int32)
        self._pos = np.zeros(n_batch, dtype=np.int32)
        self._seq = np.zeros(n_batch, dtype=np.int32)
        self._n_seq = np.ones(n_batch, dtype=np.int32)
        self._output = np.zeros(n_batch, dtype=np.int8)
        # llama.cpp takes a pointer to each token's list of sequences: here, of one id.
        self._seq_lists = self._seq.ctypes.data + self._seq.itemsize * np.arange(
            n_batch, dtype=np.uintp
        )
        self._batch = lib.llama_batch(
            token=_pointer(self._token, ctypes.c_int32),
            pos=_pointer(self._pos, ctypes.c_int32),
            n_seq_id=_pointer(self._n_seq, ctypes.c_int32),
            seq_id=_pointer(self._seq_lists, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._output, ctypes.c_int8),
        )
        self.n_outputs = 0

    def clear(self) -> None:
        self._batch.n_tokens = 0
        self.n_outputs = 0

    def add(self, tokens: Sequence[int], *, pos: int, seq: int, n_outputs: int) -> None:
        """Append tokens of one sequence, the first at `pos`, with logits for the last `n_outputs`."""
        start: int = self._batch.n_tokens
        end = start + len(tokens)
        self._token[start:end] = tokens
        self._pos[start:end] = range(pos, pos + len(tokens))
        self._seq[start:end] = seq
        self._output[start:end] = 0
        self._output[end - n_outputs : end] = 1
        self._batch.n_tokens = end
        self.n_outputs += n_outputs

    def decode(self, context: lib.llama_context_p) -> int:
        """Run `llama_decode`; return its code (0 done, 1 no room, 2 aborted, < 0 failed)."""
        return int(lib.llama_decode(context, self._batch))


def _pointer(array: np.ndarray[Any, Any], item: type[Any]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(item))
