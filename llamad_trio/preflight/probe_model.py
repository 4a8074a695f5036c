"""A tiny GGUF with a tensor for each family of kernels that llama.cpp picks by the CPU.

Decides what is in it and writes it; knows nothing of who computes with it.  The weights are
random and say nothing.  It is made when it is needed: a file of random bytes is nobody's source.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the layout of the
quantised blocks: ggml-common.h.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

_ALIGNMENT = 32
_UINT32, _FLOAT32, _STRING = 4, 6, 8
_TILE_BLOCKS = 256


class _Kind(NamedTuple):
    """How a kind of tensor is stored.

    `type_id` is ggml's number, `n_weights` how many a block has, `n_bytes` what it takes,
    `scales` the offsets of its 16-bit floats, and `scale` what to put there so that weights
    are about 0.06.
    """

    type_id: int
    n_weights: int
    n_bytes: int
    scales: tuple[int, ...]
    scale: float


_KINDS = {
    "Q4_0": _Kind(2, 32, 18, (0,), 0.013),
    "Q4_1": _Kind(3, 32, 20, (0, 2), 0.013),
    "Q5_0": _Kind(6, 32, 22, (0,), 0.007),
    "Q5_1": _Kind(7, 32, 24, (0, 2), 0.007),
    "Q8_0": _Kind(8, 32, 34, (0,), 0.0008),
    "Q2_K": _Kind(10, 256, 84, (80, 82), 0.005),
    "Q3_K": _Kind(11, 256, 110, (108,), 0.001),
    "Q4_K": _Kind(12, 256, 144, (0, 2), 0.0002),
    "Q5_K": _Kind(13, 256, 176, (0, 2), 0.0001),
    "Q6_K": _Kind(14, 256, 210, (208,), 0.00005),
    "IQ4_NL": _Kind(20, 32, 18, (0,), 0.001),
    "IQ4_XS": _Kind(23, 256, 136, (0,), 0.00004),
    "F16": _Kind(1, 1, 2, (0,), 0.06),
}
_F32 = _Kind(0, 1, 4, (), 1.0)

# AMX and repacked kernels take rows of 256 weights, and outputs by the 32.
_WIDE = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16", "Q5_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")
_NARROW = ("Q5_0", "Q4_0", "Q5_1", "Q4_0")


class ProbeShape(NamedTuple):
    """How large the model is.  `wide` and `narrow` are the kinds that its matrices take in turn:
    those that read the residual stream, and those that write to it."""

    n_embd: int = 256
    n_inner: int = 32
    n_layer: int = 2
    n_vocab: int = 32
    n_ctx: int = 256
    wide: Sequence[str] = _WIDE
    narrow: Sequence[str] = _NARROW


PROBE = ProbeShape()
"""Under 100 KB."""


def probe_gguf(shape: ProbeShape) -> bytes:
    """The file: the same bytes for the same shape."""
    tensors = list(_tensors(shape))
    values = list(_metadata(shape))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values)
    infos, data = [], []
    offset = 0
    rng = random.Random(1)
    for name, n_in, n_out, kind in tensors:
        dims = (n_in,) if n_out == 0 else (n_in, n_out)
        n_bytes = n_in * max(n_out, 1) // kind.n_weights * kind.n_bytes
        infos.append(
            _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind.type_id, offset)
        )
        data.append(_blocks(kind, n_bytes, rng))
        offset += len(data[-1])
    head += b"".join(infos)
    return head + bytes(-len(head) % _ALIGNMENT) + b"".join(data)


def _metadata(shape: ProbeShape) -> Iterator[bytes]:
    n_head = max(1, shape.n_inner // 64)
    texts = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    numbers = {
        "block_count": shape.n_layer,
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_inner,
        "vocab_size": shape.n_vocab,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head,
        "attention.key_length": shape.n_inner // n_head,
        "attention.value_length": shape.n_inner // n_head,
        "rope.dimension_count": shape.n_inner // n_head,
    }
    for key, text in texts.items():
        yield _text(key) + struct.pack("<I", _STRING) + _text(text)
    for key, number in numbers.items():
        yield _text(f"llama.{key}") + struct.pack("<II", _UINT32, number)
    epsilon = "llama.attention.layer_norm_rms_epsilon"
    yield _text(epsilon) + struct.pack("<If", _FLOAT32, 1e-5)


def _tensors(shape: ProbeShape) -> Iterator[tuple[str, int, int, _Kind]]:
    """Name, inputs, outputs (0 for a vector) and kind of each tensor."""
    wide = cycle(_KINDS[name] for name in shape.wide)
    narrow = cycle(_KINDS[name] for name in shape.narrow)
    yield "token_embd.weight", shape.n_embd, shape.n_vocab, _KINDS["Q4_0"]
    yield "output.weight", shape.n_embd, shape.n_vocab, next(wide)
    yield "output_norm.weight", shape.n_embd, 0, _F32
    for block in (f"blk.{i}" for i in range(shape.n_layer)):
        yield f"{block}.attn_norm.weight", shape.n_embd, 0, _F32
        yield f"{block}.ffn_norm.weight", shape.n_embd, 0, _F32
        for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
            yield f"{block}.{name}.weight", shape.n_embd, shape.n_inner, next(wide)
        for name in ("attn_output", "ffn_down"):
            yield f"{block}.{name}.weight", shape.n_inner, shape.n_embd, next(narrow)


def _blocks(kind: _Kind, n_bytes: int, rng: random.Random) -> bytes:
    """Random weights of a tensor; those of a large one repeat themselves."""
    if kind is _F32:
        return struct.pack("<f", kind.scale) * (n_bytes // 4) + bytes(-n_bytes % _ALIGNMENT)
    tile = bytearray(rng.randbytes(min(n_bytes, _TILE_BLOCKS * kind.n_bytes)))
    for start in range(0, len(tile), kind.n_bytes):
        for offset in kind.scales:
            scale = struct.pack("<e", kind.scale * rng.uniform(0.5, 1.5) * rng.choice((-1, 1)))
            tile[start + offset : start + offset + 2] = scale
    repeated = bytes(tile) * -(-n_bytes // len(tile))
    return repeated[:n_bytes] + bytes(-n_bytes % _ALIGNMENT)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
