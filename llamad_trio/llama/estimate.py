"""What an engine will take in memory, found out without its weights.

The weights are added up from the file's header.  What a context takes, llama.cpp works out
itself: it makes one for a model without weights, by the code that makes an engine's, and
says in its log how large each buffer would be.  Its C interface has no function that tells.
Knows nothing of what the machine has.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import llama_cpp.llama_cpp as lib

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import UnsupportedFeature
from llamad_trio.core.info import MemoryEstimate
from llamad_trio.llama import backend, gguf
from llamad_trio.llama.backend import bind_ggml
from llamad_trio.llama.context import open_context
from llamad_trio.llama.model import LlamaModel, check_file, model_params, read_model

MIB = 2**20

# What no log tells, fitted to the growth of processes with vocabularies of 300 to 262,144
# tokens, pools of 512 to 32,768 cells, and 1 to 8 slots.
BASE_BYTES = 2_500_000
VOCABULARY_BYTES = 190
"""Of each token, and of each merge: its text as a string, in lists and in hash tables."""
SAMPLER_BYTES = 4
"""Of each token, in each slot."""
CELL_BYTES = 120
"""llama.cpp's own record of a cell, and its place in the trees that find it by position."""
RESIDENT_TOKEN_BYTES = 40
"""Of each token in the pool: the prompts it came from, and the index of prefixes."""
SCORE_BYTES = 3
"""Of each attention score where they are all computed at once: a copy in the type of the
values, which grows with the text, and what that growth leaves behind in the heap."""


def estimate(path: Path, config: EngineConfig, n_cores: int) -> MemoryEstimate:
    """What an engine with this model and config will take.

    Blocks: some milliseconds, and for a large vocabulary a second.  Takes itself what the
    vocabulary, the bookkeeping of the pool and the states of recurrent layers take, and gives
    it back.

    Of a split model, `path` is the first file; `config` is as the caller gave it.

    Raises:
        ModelLoadError: missing, unreadable, no GGUF, unsupported.
        UnsupportedFeature: the model cannot continue a text.
    """
    check_file(path)
    layout = gguf.read_layout(path)
    backend.start()  # which takes over the log that is listened to
    params = model_params(config)
    params.load_mode = lib.LLAMA_LOAD_MODE_NONE
    params.no_alloc = True  # a model that cannot compute, and whose context has no memory
    with _listen_to_log() as heard, closing(read_model(path, params)) as model:
        with closing(open_context(model, config, n_cores)) as context:
            config = context.config
        n_scores = _n_scores(model, config)
    backend.give_back_memory()
    said = b"".join(heard).decode(errors="replace")
    pool, compute = _sizes(_POOL, said), _sizes(_COMPUTE, said)
    if not pool or not compute:
        raise UnsupportedFeature("a memory estimate", "this llama.cpp does not tell what it needs")
    # llama.cpp has found the other files of a split model to be there.
    n_files = layout.n_files
    stem = path.name.removesuffix(f"-00001-of-{n_files:05}.gguf")
    names = [f"{stem}-{n:05}-of-{n_files:05}.gguf" for n in range(2, n_files + 1)]
    layouts = [layout, *(gguf.read_layout(path.with_name(name)) for name in names)]
    n_cells = sum(map(int, _CELLS.findall(said)))
    return MemoryEstimate(
        weights_bytes=_weights_bytes(layouts, uses_mmap=config.use_mmap is not False),
        kv_bytes=sum(pool),
        compute_bytes=sum(compute) + SCORE_BYTES * n_scores,
        overhead_bytes=_overhead_bytes(layout, config, n_cells),
    )


def _overhead_bytes(layout: gguf.Layout, config: EngineConfig, n_cells: int) -> int:
    assert config.n_ctx is not None
    return (
        BASE_BYTES
        + VOCABULARY_BYTES * (layout.n_tokens + layout.n_merges)
        + SAMPLER_BYTES * layout.n_tokens * config.n_slots
        + CELL_BYTES * n_cells
        + RESIDENT_TOKEN_BYTES * config.n_ctx
        + (config.prompt_cache_ram_bytes if config.kv_cache else 0)
    )


def _n_scores(model: LlamaModel, config: EngineConfig) -> int:
    """Attention scores that are held at once, beside those in llama.cpp's own account."""
    if config.flash_attn is not False or config.type_v == "f32":
        return 0
    assert config.n_ctx is not None
    n_head = max(0, int(lib.llama_model_n_head(model.pointer)))
    return n_head * min(config.n_batch, config.n_ctx) * config.n_ctx


# -- what llama.cpp says of it --------------------------------------------------------------

# "llama_kv_cache: size = 90.00 MiB (4096 cells, ...", and alike of recurrent states.  Not the
# size of their buffers, which is none.
_POOL = re.compile(
    r"^llama_(?:kv_cache|memory|dsv4)\w*: (?:.*, )?size = +([\d.]+) MiB", re.MULTILINE
)
_CELLS = re.compile(r"^llama_kv_cache\w*: size = .*\( *(\d+) cells", re.MULTILINE)
_COMPUTE = re.compile(r"^.*(?:compute|output) buffer size = +([\d.]+) MiB", re.MULTILINE)


def _sizes(pattern: re.Pattern[str], said: str) -> list[int]:
    return [round(float(size) * MIB) for size in pattern.findall(said)]


_heard: dict[int, list[bytes]] = {}  # by the thread that listens
_one_at_a_time = threading.Lock()
_log_before = lib.llama_log_callback()


@lib.llama_log_callback
def _on_log(level: int, text: bytes, user_data: object) -> None:
    heard = _heard.get(threading.get_ident())
    if heard is not None:
        heard.append(text)
    _log_before(level, text, user_data)


@contextmanager
def _listen_to_log() -> Iterator[list[bytes]]:
    """Collect what llama.cpp logs on this thread inside the block; it is logged as before."""
    with _one_at_a_time:
        user_data = ctypes.c_void_p()
        lib.llama_log_get(ctypes.byref(_log_before), ctypes.byref(user_data))
        lib.llama_log_set(_on_log, user_data)
        heard = _heard[threading.get_ident()] = []
        try:
            yield heard
        finally:
            _heard.clear()
            lib.llama_log_set(_log_before, user_data)


# -- the weights ----------------------------------------------------------------------------


def _weights_bytes(files: Sequence[gguf.Layout], *, uses_mmap: bool) -> int:
    names = {tensor.name for file in files for tensor in file.tensors}
    total = 0
    for file in files:
        copied, in_place = [], []
        for tensor in file.tensors:
            is_embedding = tensor.name == _EMBEDDING
            # Without an output matrix, llama.cpp takes the embeddings for one, beside themselves.
            is_product = not is_embedding or _OUTPUT not in names
            if is_copied := is_product and _is_rearranged(tensor):
                copied.append(tensor)
            if is_embedding or not is_copied:
                in_place.append(tensor)
        total += sum(tensor.n_bytes for tensor in copied)
        if uses_mmap and in_place:
            # The file's pages from the first to the last tensor that is used from there, also
            # those between that have been copied.
            total += in_place[-1].end_bytes - in_place[0].start_bytes
        else:
            total += sum(tensor.n_bytes for tensor in in_place)
    return total


# -- which matrices llama.cpp rearranges ----------------------------------------------------

_F32, _I32 = 0, 26
_CPU = 0

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"

# What rows are taken from, not multiplied with.
_LOOKED_UP = re.compile(r"(?:position_embd|token_types|per_layer_token_embd)\.weight")


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64
_init = bind_ggml("ggml_init", _pointer, _InitParams)
_free = bind_ggml("ggml_free", None, _pointer)
_is_quantized = bind_ggml("ggml_is_quantized", ctypes.c_bool, ctypes.c_int)
_new_tensor_2d = bind_ggml("ggml_new_tensor_2d", _pointer, _pointer, ctypes.c_int, _int64, _int64)
_new_tensor_3d = bind_ggml(
    "ggml_new_tensor_3d", _pointer, _pointer, ctypes.c_int, _int64, _int64, _int64
)
_mul_mat = bind_ggml("ggml_mul_mat", _pointer, _pointer, _pointer, _pointer)
_mul_mat_id = bind_ggml("ggml_mul_mat_id", _pointer, _pointer, _pointer, _pointer, _pointer)
_alloc_tensors = bind_ggml("ggml_backend_alloc_ctx_tensors_from_buft", _pointer, _pointer, _pointer)
_free_buffer = bind_ggml("ggml_backend_buffer_free", None, _pointer)
_device = bind_ggml("ggml_backend_dev_by_type", _pointer, ctypes.c_int)
_registry = bind_ggml("ggml_backend_dev_backend_reg", _pointer, _pointer)
_function_of = bind_ggml("ggml_backend_reg_get_proc_address", _pointer, _pointer, ctypes.c_char_p)
_supports = bind_ggml("ggml_backend_dev_supports_op", ctypes.c_bool, _pointer, _pointer)


def _is_rearranged(tensor: gguf.Tensor) -> bool:
    """Whether llama.cpp computes with a copy that is arranged for this processor."""
    if len(tensor.shape) not in {2, 3} or _LOOKED_UP.fullmatch(tensor.name):
        return False
    n_in, n_out, *experts = tensor.shape
    # Not the number of rows decides, but what it can be divided by.
    return _can_rearrange(tensor.kind, n_in, 64 + n_out % 64, 2 if experts else 0)


@functools.cache
def _can_rearrange(kind: int, n_in: int, n_out: int, n_experts: int) -> bool:
    """Ask the processor's backend as llama.cpp does: with a matrix, and a product to compute."""
    if not _is_quantized(kind):
        return False
    device = _device(_CPU)
    for kind_of_buffer in _special_buffers(device):
        context = _init(_InitParams(2**16, None, True))
        buffer = None
        try:
            if n_experts:
                matrix = _new_tensor_3d(context, kind, n_in, n_out, n_experts)
                buffer = _alloc_tensors(context, kind_of_buffer)
                vectors = _new_tensor_3d(context, _F32, n_in, 1, 1)
                chosen = _new_tensor_2d(context, _I32, 1, 1)
                product = _mul_mat_id(context, matrix, vectors, chosen)
            else:
                matrix = _new_tensor_2d(context, kind, n_in, n_out)
                buffer = _alloc_tensors(context, kind_of_buffer)
                product = _mul_mat(context, matrix, _new_tensor_2d(context, _F32, n_in, 1))
            if buffer and _supports(device, product):
                return True
        finally:
            _free_buffer(buffer)
            _free(context)
    return False


def _special_buffers(device: int) -> Iterator[int]:
    """The kinds of buffers of the processor's backend in which matrices are rearranged."""
    address = _function_of(_registry(device), b"ggml_backend_dev_get_extra_bufts")
    if address:
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(_pointer), _pointer)(address)(device)
        yield from itertools.takewhile(bool, kinds) if kinds else ()
