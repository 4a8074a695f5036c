"""Models for tests: tiny GGUFs with random weights, and the real ones of the manifest.

A tiny model stands for one kind of memory.  Its weights are random, so it says nothing
sensible, but it loads, decodes, forks and rewinds exactly as a real model of its kind does,
in milliseconds.  What it says is fixed by its seed, is mostly readable letters with a stray
byte here and there, and ends only where a test asks for a model that can end.

Tests take the fixtures `tiny_model`, `smollm2_path` and `gemma3_path`.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, Unpack, get_args

import gguf
import numpy as np
import pytest
import trio

from llamad_trio.core.config import EngineConfig
from llamad_trio.hub.manifest import known_model
from llamad_trio.hub.pull import PullError, pull
from llamad_trio.preflight.prove import proven_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

Kind = Literal["attention", "sliding-window", "recurrent", "hybrid", "encoder"]

KINDS: tuple[Kind, ...] = get_args(Kind)
DECODER_KINDS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "encoder")

SLIDING_WINDOW_TOKENS = 16

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

_N_EMBD = 64
_N_HEAD = 4
_N_HEAD_KV = 2
_HEAD_SIZE = _N_EMBD // _N_HEAD
_N_KV = _N_HEAD_KV * _HEAD_SIZE
_N_FF = 128
_NORM_EPS = 1e-5

# A channel of the residual stream that is positive for every token and that no layer writes to,
# so that its column of the output matrix works as a bias for each token.
_BIAS_CHANNEL = 0


def write_tiny_model(
    path: Path,
    kind: Kind,
    *,
    seed: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
    n_ctx_train: int = 2048,
    can_end: bool = False,
) -> None:
    """Write a GGUF of `kind` to `path`: the same arguments give the same bytes.

    `chat_template=None` leaves the template out; an encoder never has one.  With `can_end`
    the end-of-generation tokens compete like any letter, so that sampled text ends after some
    tens of tokens; without it they are practically never chosen.
    """
    architecture = _ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, architecture.name)
    try:
        writer.add_name(f"tiny-{kind}")
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        writer.add_context_length(n_ctx_train)
        writer.add_embedding_length(_N_EMBD)
        weights = _Weights(writer, seed)
        if kind == "encoder":
            vocabulary = _word_pieces()
            weights.normal("position_embd.weight", (n_ctx_train, _N_EMBD), 0.1)
        else:
            vocabulary = _byte_level_pieces()
            weights.norm(architecture.output_norm)
            weights.output(vocabulary.chances(can_end=can_end))
            if chat_template is not None:
                writer.add_chat_template(chat_template)
        vocabulary.write(writer)
        weights.embedding(len(vocabulary), architecture.embedding_std)
        architecture.write_layers(weights)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


class TinyModelOptions(TypedDict, total=False):
    """The options of `write_tiny_model`."""

    seed: int
    chat_template: str | None
    n_ctx_train: int
    can_end: bool


class TinyModels:
    """What the fixture `tiny_model` gives: paths of tiny models, each written once per run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[tuple[object, ...], Path] = {}

    def __call__(self, kind: Kind, **options: Unpack[TinyModelOptions]) -> Path:
        key = (kind, *sorted(options.items()))
        if key not in self._written:
            path = self._folder / f"{kind}-{len(self._written)}.gguf"
            write_tiny_model(path, kind, **options)
            self._written[key] = path
        return self._written[key]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """`tiny_model(kind, **options) -> Path`, with the options of `write_tiny_model`."""
    return TinyModels(tmp_path_factory.mktemp("tiny-models"))


def real_model(name: str) -> Path:
    """The path of a model of the manifest, pulled if it is not installed.

    Where it cannot be had the test is skipped, or fails if LLAMAD_REQUIRE_MODELS=1.
    """
    model = known_model(name)
    try:
        return pull(model)
    except PullError as error:
        reason = f"{name} is not installed: {error}"
    if os.environ.get("LLAMAD_REQUIRE_MODELS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def proven_here(config: EngineConfig) -> EngineConfig:
    """The config with the weight buffers that work on this machine, as an engine would have it.

    For tests that compute with a real model's weights and without an engine.
    """
    return trio.run(proven_config, config, "tests")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct: plain attention, a chat template."""
    return real_model("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma-3-270M: sliding window, a vocabulary of 262k tokens."""
    return real_model("gemma3-270m")


class _Chance(NamedTuple):
    """The distribution of a token's logit: about `spread` times a normal variable, plus `bias`."""

    spread: float
    bias: float


_LIKELY = _Chance(spread=3.0, bias=0.0)
_UNLIKELY = _Chance(spread=1.5, bias=-4.0)
_NEVER = _Chance(spread=0.0, bias=-15.0)


class _Vocabulary:
    """The tokens of a model, in order of their ids."""

    def __init__(self, tokenizer_model: str, specials: dict[str, int]) -> None:
        self.tokenizer_model = tokenizer_model
        self.specials = specials
        self.texts: list[str] = []
        self.types: list[gguf.TokenType] = []

    def __len__(self) -> int:
        return len(self.texts)

    def extend(self, texts: Sequence[str], type_: gguf.TokenType) -> None:
        self.texts += texts
        self.types += [type_] * len(texts)

    def write(self, writer: gguf.GGUFWriter) -> None:
        # llama.cpp does not refuse a token that is listed twice: it aborts the process.
        assert len(set(self.texts)) == len(self)
        writer.add_tokenizer_model(self.tokenizer_model)
        writer.add_token_list(self.texts)
        # Pieces merge best score first: here, in the order in which they are listed.
        writer.add_token_scores([float(-token) for token in range(len(self))])
        writer.add_token_types(self.types)
        for name, token in self.specials.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        if self.tokenizer_model == "llama":
            writer.add_add_bos_token(True)
            writer.add_add_eos_token(False)
            writer.add_add_space_prefix(False)

    def chances(self, *, can_end: bool) -> list[_Chance]:
        """How each token competes for being generated."""
        chance_of_type = {gguf.TokenType.NORMAL: _LIKELY, gguf.TokenType.BYTE: _UNLIKELY}
        chances = [chance_of_type.get(type_, _NEVER) for type_ in self.types]
        if can_end:
            for end in ("</s>", "<|im_end|>"):
                chances[self.texts.index(end)] = _LIKELY
        return chances


def _byte_level_pieces() -> _Vocabulary:
    """A SentencePiece-like vocabulary in which every text can be written, byte by byte if need be."""
    vocabulary = _Vocabulary("llama", {"unknown": 0, "bos": 1, "eos": 2})
    vocabulary.extend(["<unk>"], gguf.TokenType.UNKNOWN)
    vocabulary.extend(["<s>", "</s>"], gguf.TokenType.CONTROL)
    vocabulary.extend([f"<0x{byte:02X}>" for byte in range(256)], gguf.TokenType.BYTE)
    vocabulary.extend(["<|im_start|>", "<|im_end|>"], gguf.TokenType.CONTROL)
    vocabulary.extend(["th", "he", "▁the", "▁a", "in", "er"], gguf.TokenType.NORMAL)
    vocabulary.extend(["▁", *"abcdefghijklmnopqrstuvwxyz", ".", ","], gguf.TokenType.NORMAL)
    return vocabulary


def _word_pieces() -> _Vocabulary:
    """A WordPiece vocabulary of letters and digits; llama.cpp marks the start of a word with "▁"."""
    # "seperator" is how GGUF spells it.
    specials = {"padding": 0, "unknown": 1, "bos": 2, "cls": 2, "seperator": 3, "mask": 4}
    vocabulary = _Vocabulary("bert", specials)
    vocabulary.extend(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], gguf.TokenType.CONTROL)
    characters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?"
    for prefix in ("▁", ""):
        vocabulary.extend([prefix + character for character in characters], gguf.TokenType.NORMAL)
    vocabulary.extend(["▁the", "▁an", "ing", "er"], gguf.TokenType.NORMAL)
    return vocabulary


class _Weights:
    """Adds tensors of random weights to a GGUF, scaled so that activations keep their size.

    Shapes are (outputs, inputs): llama.cpp's own notation, and GGUF's, has them reversed.
    """

    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self.writer = writer
        self._random = np.random.default_rng(seed)

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> None:
        self.tensor(name, std * self._random.standard_normal(shape, dtype=np.float32))

    def embedding(self, n_vocab: int, std: float) -> None:
        rows = std * self._random.standard_normal((n_vocab, _N_EMBD), dtype=np.float32)
        rows[:, _BIAS_CHANNEL] = 2 * std
        self.tensor("token_embd.weight", rows)

    def linear(self, name: str, n_out: int, n_in: int, *, gain: float = 1.0) -> None:
        self.normal(f"{name}.weight", (n_out, n_in), gain / math.sqrt(n_in))

    def back_to_residual(self, name: str, n_in: int) -> None:
        """A linear map whose output is added to the residual stream."""
        matrix = self._random.standard_normal((_N_EMBD, n_in), dtype=np.float32) / math.sqrt(n_in)
        matrix[_BIAS_CHANNEL] = 0
        self.tensor(f"{name}.weight", matrix)

    def norm(self, name: str, size: int = _N_EMBD, *, bias: bool = False) -> None:
        noise = self._random.standard_normal(size, dtype=np.float32)
        self.tensor(f"{name}.weight", 1 + 0.1 * noise)
        if bias:
            self.normal(f"{name}.bias", (size,), 0.1)

    def constant(self, name: str, shape: tuple[int, ...], value: float) -> None:
        self.tensor(name, np.full(shape, value, dtype=np.float32))

    def tensor(self, name: str, values: npt.NDArray[np.float32]) -> None:
        self.writer.add_tensor(name, values.astype(np.float32, copy=False))

    def attention(self, block: str, *, qk_norm: bool = False, n_kv: int = _N_KV) -> None:
        # Sharp attention: what comes next then depends on more than the last token.
        self.linear(f"{block}.attn_q", _N_EMBD, _N_EMBD, gain=3.0)
        self.linear(f"{block}.attn_k", n_kv, _N_EMBD)
        self.linear(f"{block}.attn_v", n_kv, _N_EMBD)
        self.back_to_residual(f"{block}.attn_output", _N_EMBD)
        if qk_norm:
            self.norm(f"{block}.attn_q_norm", _HEAD_SIZE)
            self.norm(f"{block}.attn_k_norm", _HEAD_SIZE)

    def feed_forward(self, block: str, *, gated: bool = True) -> None:
        if gated:
            self.linear(f"{block}.ffn_gate", _N_FF, _N_EMBD)
        self.linear(f"{block}.ffn_up", _N_FF, _N_EMBD)
        self.back_to_residual(f"{block}.ffn_down", _N_FF)

    def output(self, chances: Sequence[_Chance]) -> None:
        spread, bias = np.array(chances, dtype=np.float32).T
        rows = self._random.standard_normal((len(chances), _N_EMBD), dtype=np.float32)
        rows *= spread[:, None] / math.sqrt(_N_EMBD)
        rows[:, _BIAS_CHANNEL] = bias
        self.tensor("output.weight", rows)


def _attention_layers(weights: _Weights) -> None:
    n_layer = 2
    _describe_transformer(weights.writer, n_layer, _N_HEAD_KV)
    weights.writer.add_rope_dimension_count(_HEAD_SIZE)
    for block in _blocks(n_layer):
        weights.norm(f"{block}.attn_norm")
        weights.attention(block)
        weights.norm(f"{block}.ffn_norm")
        weights.feed_forward(block)


def _sliding_window_layers(weights: _Weights) -> None:
    writer = weights.writer
    window_of_layer = [True, True, False]
    _describe_transformer(writer, len(window_of_layer), _N_HEAD_KV)
    writer.add_key_length(_HEAD_SIZE)
    writer.add_value_length(_HEAD_SIZE)
    writer.add_sliding_window(SLIDING_WINDOW_TOKENS)
    writer.add_sliding_window_pattern(window_of_layer)
    for block in _blocks(len(window_of_layer)):
        weights.norm(f"{block}.attn_norm")
        weights.attention(block, qk_norm=True)
        weights.norm(f"{block}.post_attention_norm")
        weights.norm(f"{block}.ffn_norm")
        weights.feed_forward(block)
        weights.norm(f"{block}.post_ffw_norm")


def _recurrent_layers(weights: _Weights) -> None:
    n_layer, n_conv, n_inner, n_state, dt_rank = 2, 4, 2 * _N_EMBD, 16, 4
    writer = weights.writer
    writer.add_block_count(n_layer)
    writer.add_head_count(0)
    writer.add_feed_forward_length(0)
    writer.add_layer_norm_rms_eps(_NORM_EPS)
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(dt_rank)
    for block in _blocks(n_layer):
        weights.norm(f"{block}.attn_norm")
        weights.linear(f"{block}.ssm_in", 2 * n_inner, _N_EMBD)
        weights.linear(f"{block}.ssm_conv1d", n_inner, n_conv)
        weights.normal(f"{block}.ssm_conv1d.bias", (n_inner,), 0.1)
        weights.linear(f"{block}.ssm_x", dt_rank + 2 * n_state, n_inner)
        weights.linear(f"{block}.ssm_dt", n_inner, dt_rank)
        # The step size is softplus of this bias, the decay exp(step * a): a state that lasts.
        weights.constant(f"{block}.ssm_dt.bias", (n_inner,), -2.0)
        decay_rates = np.arange(1, n_state + 1, dtype=np.float32)
        weights.tensor(f"{block}.ssm_a", np.tile(-decay_rates, (n_inner, 1)))
        weights.constant(f"{block}.ssm_d", (n_inner,), 1.0)
        weights.back_to_residual(f"{block}.ssm_out", n_inner)


def _hybrid_layers(weights: _Weights) -> None:
    n_conv = 3
    kv_heads_of_layer = [0, _N_HEAD_KV, 0]  # a layer without KV heads is a short convolution
    _describe_transformer(weights.writer, len(kv_heads_of_layer), kv_heads_of_layer)
    weights.writer.add_shortconv_l_cache(n_conv)
    for block, n_head_kv in zip(_blocks(len(kv_heads_of_layer)), kv_heads_of_layer, strict=True):
        weights.norm(f"{block}.attn_norm")
        if n_head_kv:
            weights.attention(block, qk_norm=True)
        else:
            weights.linear(f"{block}.shortconv.in_proj", 3 * _N_EMBD, _N_EMBD)
            weights.linear(f"{block}.shortconv.conv", _N_EMBD, n_conv)
            weights.back_to_residual(f"{block}.shortconv.out_proj", _N_EMBD)
        weights.norm(f"{block}.ffn_norm")
        weights.feed_forward(block)


def _encoder_layers(weights: _Weights) -> None:
    n_layer = 2
    writer = weights.writer
    writer.add_block_count(n_layer)
    writer.add_head_count(_N_HEAD)
    writer.add_feed_forward_length(_N_FF)
    writer.add_layer_norm_eps(_NORM_EPS)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(2)
    weights.normal("token_types.weight", (2, _N_EMBD), 0.1)
    weights.norm("token_embd_norm", bias=True)
    for block in _blocks(n_layer):
        weights.attention(block, n_kv=_N_EMBD)
        weights.norm(f"{block}.attn_output_norm", bias=True)
        weights.feed_forward(block, gated=False)
        weights.norm(f"{block}.layer_output_norm", bias=True)


def _describe_transformer(
    writer: gguf.GGUFWriter, n_layer: int, n_head_kv: int | list[int]
) -> None:
    writer.add_block_count(n_layer)
    writer.add_head_count(_N_HEAD)
    writer.add_head_count_kv(n_head_kv)
    writer.add_feed_forward_length(_N_FF)
    writer.add_layer_norm_rms_eps(_NORM_EPS)


def _blocks(n_layer: int) -> list[str]:
    return [f"blk.{layer}" for layer in range(n_layer)]


class _Architecture(NamedTuple):
    """One of llama.cpp's architectures, and what differs between them outside the layers."""

    name: str
    write_layers: Callable[[_Weights], None]
    embedding_std: float = 0.4
    output_norm: str = "output_norm"


_ARCHITECTURES: dict[Kind, _Architecture] = {
    "attention": _Architecture("llama", _attention_layers),
    # Gemma multiplies embeddings by sqrt(n_embd) as it reads them.
    "sliding-window": _Architecture(
        "gemma3", _sliding_window_layers, embedding_std=0.4 / math.sqrt(_N_EMBD)
    ),
    "recurrent": _Architecture("mamba", _recurrent_layers),
    "hybrid": _Architecture("lfm2", _hybrid_layers, output_norm="token_embd_norm"),
    "encoder": _Architecture("bert", _encoder_layers),
}
