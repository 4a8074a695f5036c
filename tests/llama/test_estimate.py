"""What an engine will take, estimated and then measured.

The measured numbers are the growth of fresh processes, in `RssAnon` and `RssFile`, from the
moment before an engine is opened to when its pool is full.
"""

from __future__ import annotations

import json
import logging
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import gguf
import llama_cpp.llama_cpp as lib
import pytest

from llamad_trio import EngineConfig, ModelLoadError, UnsupportedFeature
from llamad_trio.llama import estimate as module
from llamad_trio.llama.estimate import estimate
from llamad_trio.llama.gguf import read_layout, refuse_deadly
from llamad_trio.llama.llama_runtime import LlamaRuntime
from tests.apart import run_apart
from tests.llama.growth import peak_bytes, print_growth, print_peak
from tests.models import DECODER_KINDS, Kind, TinyModels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from llamad_trio.core.info import MemoryEstimate

    PathOf = Callable[[str], Path]

TOLERANCE = 0.15
MIB = 2**20
N_CTX_TRAIN = 32_768
REAL = ("smollm2", "gemma3")

# Sizes at which a tiny model's growth is more than what a process grows by anyhow.
TINY_CONFIGS: list[dict[str, Any]] = [
    {"n_ctx": 4096, "n_slots": 1},
    {"n_ctx": 16384, "n_slots": 8, "n_batch": 1024},
    {"n_ctx": 8192, "n_slots": 1, "type_k": "f32", "type_v": "f32", "flash_attn": False},
    {"n_ctx": 16384},
]
# Its states are small whatever the pool: what grows is the batch.
RECURRENT_CONFIGS: list[dict[str, Any]] = [
    {"n_ctx": 4096, "n_slots": 1, "n_batch": 4096},
    {"n_ctx": 16384, "n_slots": 8, "n_batch": 2048},
    {"n_ctx": 32768, "n_slots": 8, "n_batch": 4096},
    {"n_ctx": 16384, "n_batch": 4096, "flash_attn": False},
]
REAL_CONFIGS: list[dict[str, Any]] = [
    {"n_ctx": 512, "n_slots": 1},
    {"n_ctx": 4096, "n_slots": 8},
    {"n_ctx": 2048, "n_slots": 1, "type_k": "q8_0", "type_v": "q8_0", "flash_attn": True},
    {"n_ctx": 1024, "n_batch": 64, "flash_attn": False},
]
MATRIX: list[tuple[str, dict[str, Any]]] = [
    *((kind, fields) for kind in DECODER_KINDS if kind != "recurrent" for fields in TINY_CONFIGS),
    *(("recurrent", fields) for fields in RECURRENT_CONFIGS),
    *((name, fields) for name in REAL for fields in REAL_CONFIGS),
]
OF_THE_DEFAULT_RUN: list[tuple[str, dict[str, Any]]] = [
    ("attention", TINY_CONFIGS[0]),
    ("sliding-window", TINY_CONFIGS[0]),
    ("recurrent", RECURRENT_CONFIGS[0]),
    ("hybrid", TINY_CONFIGS[0]),
    *((name, {"n_ctx": 64, "n_slots": 1}) for name in REAL),
]


@pytest.fixture
def path_of(tiny_model: TinyModels, request: pytest.FixtureRequest) -> PathOf:
    """The file of a kind of tiny model, or of a real model, by its name."""

    def path_of(name: str) -> Path:
        if name in REAL:
            path: Path = request.getfixturevalue(f"{name}_path")
            return path
        return tiny(tiny_model, name)

    return path_of


def tiny(tiny_model: TinyModels, name: str) -> Path:
    kind: Kind = next(kind for kind in DECODER_KINDS if kind == name)
    return tiny_model(kind, n_ctx_train=N_CTX_TRAIN)


# -- measured ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *OF_THE_DEFAULT_RUN,
        *(pytest.param(name, fields, marks=pytest.mark.slow) for name, fields in MATRIX),
    ],
    ids=str,
)
def test_growth_is_within_15_percent(
    path_of: PathOf, tiny_model: TinyModels, name: str, fields: dict[str, Any]
) -> None:
    path, warm = path_of(name), tiny(tiny_model, "attention")
    config = EngineConfig(n_threads=1, n_threads_batch=1, **fields)
    grown = run_apart(print_growth, str(path), str(warm), json.dumps(fields))
    assert estimate(path, config, 1).total_bytes == pytest.approx(grown, rel=TOLERANCE)


# -- compared with what llama.cpp says when it loads ------------------------------------------


WITHOUT_MMAP = {"n_ctx": 512, "n_slots": 1, "use_mmap": False}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *((name, {}) for name in (*DECODER_KINDS, "smollm2")),
        ("attention", WITHOUT_MMAP),
        pytest.param("gemma3", {}, marks=pytest.mark.slow),
        pytest.param("gemma3", WITHOUT_MMAP, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_llama_cpp_agrees_when_it_really_loads(
    path_of: PathOf, caplog: pytest.LogCaptureFixture, name: str, fields: dict[str, Any]
) -> None:
    check_with_llama_cpp(
        path_of(name), EngineConfig(n_threads=1, n_threads_batch=1, **fields), caplog
    )


@pytest.mark.parametrize("fields", [{}, {"use_mmap": False}], ids=str)
@pytest.mark.parametrize("without", ["", "output.weight"])
def test_llama_cpp_agrees_on_matrices_it_arranges_for_the_processor(
    tiny_model: TinyModels,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    without: str,
    fields: dict[str, Any],
) -> None:
    path = tmp_path / "quantized.gguf"
    rewrite(tiny_model("attention"), path, without=without, quantized=True)
    check_with_llama_cpp(path, EngineConfig(n_threads=1, n_threads_batch=1, **fields), caplog)


def test_embeddings_are_copied_only_where_they_are_the_output_matrix(
    tiny_model: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever this processor can do: all matrices are rearranged.
    monkeypatch.setattr(module, "_is_rearranged", lambda tensor: len(tensor.shape) == 2)
    whole, shared = tiny_model("attention"), tmp_path / "shared.gguf"
    rewrite(whole, shared, without="output.weight")
    config = EngineConfig(use_mmap=False)
    # Of the same size, and one copy each: of the output matrix, or of the embeddings.
    sizes = [estimate(path, config, 1).weights_bytes for path in (whole, shared)]
    assert sizes[0] == sizes[1]
    tensors = {tensor.name: tensor.n_bytes for tensor in read_layout(whole).tensors}
    assert sizes[0] == sum(tensors.values())


def check_with_llama_cpp(
    path: Path, config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    expected = estimate(path, config, 1)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "llamad_trio.llama_cpp"):
        LlamaRuntime(path, config, 1, lambda _: True).close()

    def said(what: str) -> float:
        sizes = re.findall(rf"{what} buffer size = +([\d.]+) MiB", caplog.text)
        assert sizes
        return MIB * sum(map(float, sizes))

    rounding = 0.012 * MIB
    assert expected.weights_bytes == pytest.approx(said("model"), abs=rounding)
    assert expected.kv_bytes == pytest.approx(said("(?:KV|RS)"), abs=rounding)
    assert expected.compute_bytes == pytest.approx(said("(?:compute|output)"), abs=rounding)


def test_experts_are_asked_for_like_other_matrices() -> None:
    kinds = [gguf.GGMLQuantizationType[name].value for name in ("Q4_0", "Q4_K", "Q8_0", "F32")]
    for kind in kinds:
        of_one, of_experts = (module._can_rearrange(kind, 256, 64, n) for n in (0, 2))
        assert of_one == of_experts


@pytest.mark.parametrize("kind", DECODER_KINDS)
@pytest.mark.parametrize("fields", [{}, {"kv_cache": False, "n_slots": 300}, {"n_ctx": 1}], ids=str)
def test_the_context_is_made_as_an_engines(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch, kind: Kind, fields: dict[str, Any]
) -> None:
    path = tiny_model(kind)
    config = EngineConfig(
        n_threads=1, n_threads_batch=1, flash_attn=True, type_k="f32", type_v="f32", **fields
    )
    made: list[dict[str, object]] = []
    make = lib.llama_init_from_model

    def observed(model: object, params: Any) -> object:
        numbers = {name: getattr(params, name) for name, *_ in params._fields_}
        made.append({k: v for k, v in numbers.items() if isinstance(v, int | float)})
        return make(model, params)

    monkeypatch.setattr(lib, "llama_init_from_model", observed)
    estimate(path, config, 1)
    LlamaRuntime(path, config, 1, lambda _: True).close()
    of_estimate, of_engine = ({k: v for k, v in m.items() if "data" not in k} for m in made)
    assert of_estimate == of_engine
    assert of_estimate["n_seq_max"]


# -- what it is made of -----------------------------------------------------------------------


def in_kv(tiny_model: TinyModels, kind: Kind, **fields: Any) -> int:
    config = EngineConfig(n_threads=1, n_threads_batch=1, **fields)
    return estimate(tiny_model(kind, n_ctx_train=N_CTX_TRAIN), config, 1).kv_bytes


def test_the_pool_grows_with_its_cells_and_their_type(tiny_model: TinyModels) -> None:
    cell = 2 * 2 * 32 * 2  # layers, K and V, values of each, bytes of each
    assert in_kv(tiny_model, "attention", n_ctx=8192) == 8192 * cell
    assert in_kv(tiny_model, "attention", n_ctx=16384) == 16384 * cell
    assert in_kv(tiny_model, "attention", n_ctx=8192, type_k="f32", type_v="f32") == 16384 * cell
    assert in_kv(tiny_model, "sliding-window", n_ctx=8192) == 8192 * cell * 3 // 2


def test_states_grow_with_the_sequences_not_with_the_pool(tiny_model: TinyModels) -> None:
    one = in_kv(tiny_model, "recurrent", n_ctx=8192, n_slots=8)
    assert in_kv(tiny_model, "recurrent", n_ctx=16384, n_slots=8) == one
    eight_times = in_kv(tiny_model, "recurrent", n_ctx=8192, n_slots=64)
    assert eight_times == pytest.approx(8 * one, rel=0.05)


def test_the_prompt_cache_counts_as_a_whole(tiny_model: TinyModels) -> None:
    def overhead(**fields: Any) -> int:
        return estimate(tiny_model("attention"), EngineConfig(**fields), 1).overhead_bytes

    without = overhead()
    assert overhead(prompt_cache_ram_bytes=123_456) == without + 123_456
    assert overhead(prompt_cache_ram_bytes=123_456, kv_cache=False) == without


def test_a_split_model_is_the_sum_of_its_files(tiny_model: TinyModels, tmp_path: Path) -> None:
    whole = tiny_model("attention")
    rewrite(whole, tmp_path / "split.gguf", split_max_tensors=8)
    first, *others = sorted(tmp_path.iterdir())
    assert others
    found, expected = (estimate(path, EngineConfig(), 1) for path in (first, whole))
    assert found.weights_bytes == pytest.approx(expected.weights_bytes, abs=1024)
    assert attrs.evolve(found, weights_bytes=0) == attrs.evolve(expected, weights_bytes=0)


def rewrite(
    path: Path,
    to: Path,
    *,
    without: str = "",
    quantized: bool = False,
    split_max_tensors: int = 0,
    at_last: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Write a plain attention model anew; numbers `at_last` come after all other values."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, "llama", split_max_tensors=split_max_tensors)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", *at_last)):
            kind, *kinds = field.types
            writer.add_key_value(field.name, field.contents(), kind, *kinds[-1:])
    for name, number in at_last.items():
        writer.add_uint32(name, number)
    for tensor in reader.tensors:
        if tensor.name == without:
            continue
        if quantized and len(tensor.shape) == 2:
            q4_0 = gguf.GGMLQuantizationType.Q4_0
            data = gguf.quants.quantize(tensor.data, q4_0)
            writer.add_tensor(tensor.name, data, raw_dtype=q4_0)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_estimates_at_the_same_time_do_not_mix(tiny_model: TinyModels) -> None:
    asked = [(tiny_model(kind), EngineConfig(n_ctx=n)) for kind in DECODER_KINDS for n in (64, 999)]

    def one(item: tuple[Path, EngineConfig]) -> MemoryEstimate:
        return estimate(*item, 1)

    expected = [one(item) for item in asked]
    assert len(set(expected)) == len(asked)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, 5 * asked)) == 5 * expected


def test_the_log_goes_where_it_went(
    tiny_model: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    def lines_of(act: Callable[[], object]) -> int:
        caplog.clear()
        act()
        return sum("buffer size" in line for line in caplog.messages)

    def load() -> None:
        LlamaRuntime(tiny_model("attention"), EngineConfig(), 1, lambda _: True).close()

    with caplog.at_level(logging.DEBUG, "llamad_trio.llama_cpp"):
        before = lines_of(load)
        assert lines_of(lambda: estimate(tiny_model("attention"), EngineConfig(), 1)) > 0
        assert lines_of(load) == before > 0


def test_a_llama_cpp_that_says_nothing_is_not_guessed_at(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COMPUTE", re.compile("(never said)"))
    with pytest.raises(UnsupportedFeature, match="estimate"):
        estimate(tiny_model("attention"), EngineConfig(), 1)


# -- without loading, and whatever the file ---------------------------------------------------


def test_nothing_large_is_allocated(tiny_model: TinyModels) -> None:
    path = tiny_model("sliding-window", n_ctx_train=N_CTX_TRAIN)
    fields = {"n_ctx": 1_000_000, "n_slots": 64, "n_batch": 4096}
    found = run_apart(print_peak, str(path), json.dumps(fields))
    assert found["total"] > 10 * 1024 * MIB
    assert found["peak_growth"] < 200 * MIB


def test_an_encoder_is_refused_as_by_an_engine(tiny_model: TinyModels) -> None:
    with pytest.raises(UnsupportedFeature, match="encoder"):
        estimate(tiny_model("encoder"), EngineConfig(), 1)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"nonsense" * 100, b"GGUF" + b"\xff" * 1000])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    for path in (tmp_path / "x.gguf", tmp_path, tmp_path / "nowhere.gguf"):
        with pytest.raises(ModelLoadError):
            estimate(path, EngineConfig(), 1)


@pytest.mark.parametrize("n_flips", [10, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_damaged_file_does_harm(tiny_model: TinyModels, tmp_path: Path, n_flips: int) -> None:
    paths = [str(tiny_model(kind)) for kind in DECODER_KINDS]
    found = run_apart(print_harm, str(tmp_path / "damaged.gguf"), str(n_flips), *paths)
    assert found["refused"] > 100
    assert found["peak_growth"] < 200 * MIB


def print_harm(damaged: str, n_flips: str, *paths: str) -> None:
    """In a process of its own: estimate damaged files, and print how many were refused."""
    logging.disable(logging.CRITICAL)
    for path in paths:
        estimate(Path(path), EngineConfig(n_ctx=64), 1)
    before, refused = peak_bytes(), 0
    for content in (content for path in paths for content in damages(Path(path), int(n_flips))):
        Path(damaged).write_bytes(content)
        try:
            estimate(Path(damaged), EngineConfig(n_ctx=64), 1)
        except (ModelLoadError, UnsupportedFeature):
            refused += 1
    print(json.dumps({"refused": refused, "peak_growth": peak_bytes() - before}))


ABSURD = (0, 513, 2**32 - 1)


def damages(path: Path, n_flips: int) -> Iterator[bytes]:
    """A file cut off, with absurd numbers for each number it has, and with bits flipped."""
    whole, rng = path.read_bytes(), random.Random(path.name)
    reader = gguf.GGUFReader(path)
    n_header = min(tensor.data_offset for tensor in reader.tensors)
    for n in range(10):
        yield whole[: n_header * n // 10]
    yield whole[:-100]
    start = reader.data.ctypes.data
    for field in reader.fields.values():
        if len(field.data) > 8 or gguf.GGUFValueType.STRING in field.types:
            continue
        for part in (field.parts[index] for index in field.data):
            at, size = part.ctypes.data - start, part.nbytes
            for number in ABSURD:
                low = number % 256**size
                yield whole[:at] + low.to_bytes(size, "little") + whole[at + size :]
    for _ in range(n_flips):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(n_header)] ^= 1 << rng.randrange(8)
        yield bytes(content)


@pytest.mark.parametrize(
    ("key", "skipped", "n_bytes", "number", "reason"),
    [
        # An array longer than any memory, and layers at which llama.cpp aborts the process.
        *((b"tokenizer.ggml.scores", 8, 8, n, None) for n in (2**61, 2**64 - 1)),
        *((b"llama.block_count", 4, 4, n, f"{n} layers") for n in (0, 513, 2**32 - 1)),
    ],
)
def test_a_number_that_would_kill_is_refused(
    tiny_model: TinyModels,
    tmp_path: Path,
    key: bytes,
    skipped: int,
    n_bytes: int,
    number: int,
    reason: str | None,
) -> None:
    whole = tiny_model("attention").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    at = whole.index(key) + len(key) + skipped
    value = number.to_bytes(n_bytes, "little")
    damaged.write_bytes(whole[:at] + value + whole[at + n_bytes :])
    with pytest.raises(ModelLoadError, match=reason):
        estimate(damaged, EngineConfig(), 1)


def test_such_a_number_is_found_behind_the_vocabulary(
    tiny_model: TinyModels, tmp_path: Path
) -> None:
    path = tmp_path / "late.gguf"
    rewrite(tiny_model("attention"), path, at_last={"llama.block_count": 513})
    with pytest.raises(ModelLoadError, match="513 layers"):
        refuse_deadly(path)


# -- the header -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [*DECODER_KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in REAL)]
)
def test_the_header_is_read_as_the_gguf_package_reads_it(path_of: PathOf, name: str) -> None:
    layout, reader = read_layout(path_of(name)), gguf.GGUFReader(path_of(name))
    expected = {t.name: (int(t.tensor_type), *map(int, t.shape)) for t in reader.tensors}
    assert {t.name: (t.kind, *t.shape) for t in layout.tensors} == expected
    starts = {t.name: int(t.data_offset) for t in reader.tensors}
    assert {t.name: t.start_bytes for t in layout.tensors} == starts
    for tensor in reader.tensors:
        found = next(t for t in layout.tensors if t.name == tensor.name)
        assert 0 <= found.n_bytes - tensor.n_bytes < 32
    tokens = reader.fields["tokenizer.ggml.tokens"]
    assert layout.n_tokens == len(tokens.data)
    assert layout.n_files == 1
