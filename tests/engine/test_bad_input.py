"""What cannot be computed is refused with a typed error, and the engine goes on serving."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import trio

from llamad_trio import (
    ModelLoadError,
    PromptTooLong,
    ProtocolError,
    UnsupportedFeature,
    open_engine,
)
from tests.support import ONE_THREAD, must_not_run, threads_of_ours

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llamad_trio import Engine
    from tests.models import TinyModels

# -- files ----------------------------------------------------------------------------------


async def refusal_of(model: str | Path) -> ModelLoadError:
    """The error with which a model is refused."""
    with pytest.raises(ModelLoadError) as caught:
        async with open_engine(model, ONE_THREAD):
            must_not_run("loaded")
    assert threads_of_ours() == []
    assert caught.value.path == str(model)
    assert caught.value.reason
    return caught.value


async def test_what_is_no_file_is_refused(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAD_MODELS_DIR", str(tmp_path))
    os.mkfifo(tmp_path / "pipe.gguf")  # whose writer nobody waits for
    for path, reason in (
        (tmp_path / "none.gguf", "no such file"),
        (tmp_path, "is a directory"),
        (tmp_path / "pipe.gguf", "is not a regular file"),
        (tiny_path / "model.gguf", ".+"),  # a path through a file
        *(("model\0.gguf", ".+"), ("x" * 10_000, ".+"), ("lone \ud800 surrogate.gguf", ".+")),
        ("smollm2-135m", ".+pull smollm2-135m.*"),  # known, and not pulled
        ("no-such-model", ".+"),
    ):
        assert re.fullmatch(reason, (await refusal_of(path)).reason, re.DOTALL)


@pytest.mark.parametrize(
    "content", [b"", b"G", b"GGUF", b"once upon a time\n", bytes(1000), b"\xff" * 1000]
)
async def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    await refusal_of(path)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.5, 0.99])
async def test_a_truncated_gguf_is_refused(tmp_path: Path, tiny_path: Path, share: float) -> None:
    path = tmp_path / "model.gguf"
    content = await trio.Path(tiny_path).read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    await refusal_of(path)


@pytest.mark.parametrize("name", ["with space ü 猫.gguf", os.fsdecode(b"not utf-8 \xff.gguf")])
async def test_any_file_name_will_do(tmp_path: Path, tiny_path: Path, name: str) -> None:
    path = tmp_path / name
    try:
        shutil.copy(tiny_path, path)
    except OSError:
        pytest.skip("the file system has no such names")
    async with open_engine(path, ONE_THREAD) as engine:
        assert (await engine.complete("the cat", max_tokens=2)).generated_tokens == 2


@contextmanager
def header_of(path: Path) -> Iterator[gguf.GGUFWriter]:
    """Write a GGUF without tensors, of what the block adds to it."""
    writer = gguf.GGUFWriter(path, "llama")
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("n_layers", [0, 513, 2**32 - 1])
async def test_a_number_of_layers_that_llama_cpp_dies_of_is_refused(
    tmp_path: Path, n_layers: int
) -> None:
    path = tmp_path / "deep.gguf"
    with header_of(path) as header:
        header.add_block_count(n_layers)
    assert f"{n_layers} layers" in (await refusal_of(path)).reason


async def test_a_vocabulary_that_cannot_write_every_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "poor.gguf"
    with header_of(path) as header:
        header.add_tokenizer_model("llama")
        tokens = [f"<0x{byte:02X}>" for byte in range(256) if byte != 0xC3]
        header.add_token_list(["<unk>", *tokens])
    assert "cannot write the byte 0xC3" in (await refusal_of(path)).reason


async def test_an_encoder_cannot_continue_a_text(tiny_model: TinyModels) -> None:
    with pytest.raises(UnsupportedFeature, match="generation"):
        async with open_engine(tiny_model("encoder"), ONE_THREAD):
            must_not_run("opened")
    assert threads_of_ours() == []


async def test_settings_that_llama_cpp_refuses_are_a_load_error(tiny_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        # A type of 32 values a block, and heads of 16.
        async with open_engine(tiny_path, ONE_THREAD, type_k="q8_0", n_ctx=256):
            must_not_run("opened")


# -- requests -------------------------------------------------------------------------------


async def test_an_empty_raw_prompt_is_refused_where_nothing_else_begins_the_text(
    engine: Engine,
) -> None:
    with pytest.raises(ProtocolError, match="empty"):
        await engine.complete("", raw=True)
    assert (await engine.complete("", max_tokens=1)).prompt_tokens > 1


async def test_an_empty_raw_prompt_is_bos_where_the_model_begins_with_it(tiny: Engine) -> None:
    assert (await tiny.complete("", raw=True, max_tokens=2)).prompt_tokens == 1


async def test_counting_a_text_that_can_never_fit_says_so(tiny: Engine) -> None:
    with pytest.raises(PromptTooLong):
        await tiny.count_tokens("a" * 3_000_000)


EXTREMES: dict[str, list[Any]] = {
    "max_tokens": [-5, 0, 10**30],
    "temperature": [float("nan"), float("inf"), float("-inf"), -1, 10**400],
    "top_k": [-1, 0, 1, 10**30],
    "top_p": [float("nan"), -1.0, 0.0, 1e-30, float("inf")],
    "min_p": [float("nan"), -1.0, 1.0, float("inf")],
    "repeat_penalty": [float("nan"), 0.0, -1.0, float("inf")],
    "repeat_last_n": [-5, 0, 1, 10**30],
    "presence_penalty": [float("nan"), float("-inf"), float("inf")],
    "frequency_penalty": [float("nan"), float("-inf"), float("inf")],
    "seed": [-1, 0, 2**32 - 1, 10**30],
    "stop": [(), [""], ["", "x"], iter(["y"])],
}


@pytest.mark.parametrize("field", EXTREMES)
async def test_a_number_out_of_range_is_clamped_and_nan_is_the_default(
    tiny_path: Path, field: str
) -> None:
    async with open_engine(tiny_path, ONE_THREAD, n_ctx=64) as engine:
        for value in EXTREMES[field]:
            fields = {"max_tokens": 8, "temperature": 1.0, field: value}
            done = await engine.complete("the cat", **fields)
            assert done.generated_tokens >= 1
        assert engine.stats().requests["completed"] == len(EXTREMES[field])


# -- templates ------------------------------------------------------------------------------

REFUSES = (
    "{%- if messages | length > 1 -%}{{ raise_exception('one message at a time') }}{%- endif -%}"
    "{{ messages[0].content }}"
)


async def test_a_template_that_refuses_a_conversation_costs_that_request_only(
    tiny_model: TinyModels,
) -> None:
    async with open_engine(tiny_model("attention", chat_template=REFUSES), ONE_THREAD) as engine:
        with pytest.raises(ProtocolError, match="one message at a time"):
            await engine.complete("the cat", system="a hat")
        assert (await engine.complete("the cat", max_tokens=2)).generated_tokens == 2


async def test_a_broken_template_leaves_raw_prompts(tiny_model: TinyModels) -> None:
    async with open_engine(tiny_model("attention", chat_template="{% if %}"), ONE_THREAD) as engine:
        with pytest.raises(UnsupportedFeature):
            await engine.complete("the cat")
        assert (await engine.complete("the cat", raw=True, max_tokens=2)).generated_tokens == 2
