"""How an engine is set up: by fields, by the environment, and what is left to the machine."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import attrs
import pytest

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import ProtocolError

T = TypeVar("T")


class SomeLane:
    """Just enough to be taken for a lane."""

    def hosted(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def run(self, job: Callable[[], T], **_: object) -> T:
        return job()


def test_the_defaults_are_those_of_the_contract() -> None:
    config = EngineConfig()
    assert (config.n_slots, config.n_batch, config.kv_cache) == (4, 512, True)
    assert (config.n_ctx, config.n_threads, config.n_threads_batch) == (None, None, None)
    assert (config.max_queue, config.lane) == (None, None)
    assert (config.n_gpu_layers, config.use_mlock) == (0, False)


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("n_slots", 1, 512),
        ("n_ctx", 1, 1_048_576),
        ("n_threads", 1, 256),
        ("n_threads_batch", 1, 256),
        ("n_batch", 1, 1_048_576),
        ("max_queue", 0, 2**31 - 1),
        ("step_target_s", 0.001, 60.0),
        ("n_gpu_layers", -1, 2**31 - 1),
        ("main_gpu", 0, 255),
        ("rope_freq_base", 0.0, 1e12),
        ("rope_freq_scale", 0.0, 1e6),
    ],
)
def test_numbers_are_clamped_to_their_range(field: str, low: float, high: float) -> None:
    def given_as(value: float) -> Any:
        return getattr(EngineConfig(**{field: value}), field)  # type: ignore[arg-type]

    assert (given_as(-(10**400)), given_as(10**400)) == (low, high)


def test_nan_is_the_default() -> None:
    assert EngineConfig(step_target_s=math.nan).step_target_s == 0.1


BAD_VALUES: dict[str, list[Any]] = {
    "n_slots": [True, None],
    "n_ctx": ["4096"],
    "n_threads": [2.0],
    "kv_cache": [1],
    "use_mlock": [None],
    "flash_attn": ["on"],
    "split_mode": ["rows"],
    "type_k": ["q3_0"],
    "type_v": [8],
    "tensor_split": ["1,2", b"12", ["1"], 1.0],
    "lane": ["mine", 3],
}


@pytest.mark.parametrize("field", BAD_VALUES)
def test_what_a_setting_cannot_be_is_refused_by_name(field: str) -> None:
    for value in BAD_VALUES[field]:
        with pytest.raises(ProtocolError, match=field):
            EngineConfig(**{field: value})


def test_what_is_passed_to_llama_cpp_is_kept() -> None:
    kept: dict[str, list[Any]] = {"flash_attn": [None, False], "use_mmap": [None], "lane": ["own"]}
    for field, values in (kept | {"split_mode": ["row"], "type_k": ["q8_0"]}).items():
        for value in values:
            assert getattr(EngineConfig(**{field: value}), field) == value


def test_shares_become_numbers() -> None:
    assert EngineConfig(tensor_split=[1, 2.5, -3]).tensor_split == (1.0, 2.5, 0.0)  # type: ignore[arg-type]


def test_a_lane_of_the_applications_own_is_kept() -> None:
    lane = SomeLane()
    assert EngineConfig(lane=lane).lane is lane


def test_a_config_is_frozen_and_varied_by_evolve() -> None:
    config = EngineConfig()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.n_slots = 8  # type: ignore[misc]
    assert attrs.evolve(config, n_slots=9999).n_slots == 512
    with pytest.raises(TypeError):
        EngineConfig(slots=4)  # type: ignore[call-arg]


# -- the environment ----------------------------------------------------------------------


def test_an_empty_environment_is_the_defaults() -> None:
    assert EngineConfig.from_env({}) == EngineConfig()


def test_every_variable_of_the_contract_is_read() -> None:
    environ = {
        "LLAMAD_N_SLOTS": "2",
        "LLAMAD_N_CTX": " 1024 ",
        "LLAMAD_N_THREADS": "3",
        "LLAMAD_N_THREADS_BATCH": "5",
        "LLAMAD_ADAPTIVE_THREADS": "no",
        "LLAMAD_KV_CACHE": "off",
        "LLAMAD_N_BATCH": "64",
        "LLAMAD_MAX_QUEUE": "7",
        "LLAMAD_PREFLIGHT": "off",
        "LLAMAD_USE_EXTRA_BUFTS": "0",
        "LLAMAD_UNKNOWN": "1",
        "N_SLOTS": "9",
    }
    assert EngineConfig.from_env(environ) == EngineConfig(
        n_slots=2,
        n_ctx=1024,
        n_threads=3,
        n_threads_batch=5,
        adaptive_threads=False,
        kv_cache=False,
        n_batch=64,
        max_queue=7,
        preflight=False,
        use_extra_bufts=False,
    )


def test_the_environment_is_the_processs_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAD_N_SLOTS", "11")
    assert EngineConfig.from_env().n_slots == 11


@pytest.mark.parametrize("variable", ["LLAMAD_N_SLOTS", "LLAMAD_N_CTX", "LLAMAD_KV_CACHE"])
@pytest.mark.parametrize("value", ["", "many", "4.5", "0x10", "nan", "9" * 5000, "2 3"])
def test_what_cannot_be_read_keeps_the_default_and_is_logged(
    variable: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="llamad_trio"):
        assert EngineConfig.from_env({variable: value}) == EngineConfig()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert variable in record.getMessage()


@pytest.mark.parametrize(
    ("variable", "field", "value", "clamped"),
    [
        ("LLAMAD_N_SLOTS", "n_slots", "0", 1),
        ("LLAMAD_N_SLOTS", "n_slots", "100000", 512),
        ("LLAMAD_N_CTX", "n_ctx", "-5", 1),
        ("LLAMAD_N_CTX", "n_ctx", "9999999999999", 1_048_576),
        ("LLAMAD_N_THREADS", "n_threads", "257", 256),
        ("LLAMAD_MAX_QUEUE", "max_queue", "-1", 0),
    ],
)
def test_what_is_out_of_range_is_clamped_without_a_word(
    variable: str, field: str, value: str, clamped: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert getattr(EngineConfig.from_env({variable: value}), field) == clamped
    assert caplog.records == []


WORDS = {True: ["1", "true", "YES", "On", " true "], False: ["0", "false", "NO", "Off", " no\n"]}


@pytest.mark.parametrize("value", WORDS)
def test_words_for_true_and_false(value: bool) -> None:
    for word in WORDS[value]:
        assert EngineConfig.from_env({"LLAMAD_KV_CACHE": word}).kv_cache is value


# -- what depends on the model and the machine --------------------------------------------


def resolved(*, n_ctx_train: int = 2048, n_cores: int = 6, **fields: Any) -> EngineConfig:
    return EngineConfig(**fields).resolve(n_ctx_train=n_ctx_train, n_cores=n_cores, max_slots=256)


@pytest.mark.parametrize(
    ("given", "then"),
    [
        # The pool: 4096 tokens, or what the model was trained for.
        ({}, {"n_ctx": 2048}),
        ({"n_ctx_train": 131_072}, {"n_ctx": 4096}),
        ({"n_ctx_train": 0}, {"n_ctx": 4096}),
        ({"n_ctx": 9000}, {"n_ctx": 9000}),
        ({"n_ctx": 10, "n_ctx_train": 0}, {"n_ctx": 10}),
        # Threads: the cores, as many as llama.cpp takes.
        ({}, {"n_threads": 6, "n_threads_batch": 6}),
        ({"n_threads": 2}, {"n_threads": 2, "n_threads_batch": 6}),
        ({"n_threads_batch": 3}, {"n_threads": 6, "n_threads_batch": 3}),
        ({"n_threads": 2, "n_threads_batch": 4}, {"n_threads": 2, "n_threads_batch": 4}),
        ({"n_cores": 1000}, {"n_threads": 256, "n_threads_batch": 256}),
        # Slots: as many as llama.cpp allows; a step has room for a token of each.
        ({"n_slots": 500}, {"n_slots": 256}),
        ({"n_batch": 1, "n_slots": 8}, {"n_batch": 8}),
        ({"n_batch": 512, "n_slots": 8}, {"n_batch": 512}),
    ],
)
def test_what_is_not_given_is_what_the_model_and_the_machine_allow(
    given: dict[str, int], then: dict[str, int]
) -> None:
    config = resolved(**given)
    assert {field: getattr(config, field) for field in then} == then


def test_everything_else_stays_and_a_second_time_changes_nothing() -> None:
    once = resolved(kv_cache=False, max_queue=3, type_k="q8_0", step_target_s=0.5)
    assert (once.kv_cache, once.max_queue, once.type_k, once.step_target_s) == (
        False,
        3,
        "q8_0",
        0.5,
    )
    assert once.resolve(n_ctx_train=1, n_cores=1, max_slots=256) == once


def test_what_is_no_config_is_refused() -> None:
    wrong: tuple[Any, ...] = (5, 0, "x", {})
    for config in wrong:
        with pytest.raises(ProtocolError, match="config must be an EngineConfig"):
            EngineConfig.merge(config, {})
