"""The preflight: before an engine trusts llama.cpp, it has computed something here.

Decides when it is tried, and what an engine is told of it.  Costs a process of a third of a
second the first time, and a look into a small file afterwards.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from functools import partial
from os import PathLike, fspath
from typing import Any

import attrs
import trio
from trio.lowlevel import RunVar

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import ModelLoadError
from llamad_trio.preflight import store
from llamad_trio.preflight.advice import CppCompiler, advice_on
from llamad_trio.preflight.trial import try_llama_cpp
from llamad_trio.preflight.verdict import Verdict
from llamad_trio.system.host import physical_cores

logger: logging.Logger = logging.getLogger("llamad_trio.preflight")

_PASSED_ON = (
    "n_gpu_layers",
    "split_mode",
    "main_gpu",
    "tensor_split",
    "flash_attn",
    "type_k",
    "type_v",
)

_one_at_a_time: RunVar[trio.Lock | None] = RunVar("llamad_trio preflight", None)
_known: dict[str, Verdict] = {}  # of this process, where there is no place to keep them
_told: set[str] = set()


async def proven_config(config: EngineConfig, model: str | PathLike[str]) -> EngineConfig:
    """The config with `use_extra_bufts` as it works on this machine.

    With `preflight=False` it comes back as it is.  The model is only for the error.

    A checkpoint.  Cancelled, it leaves no process behind.

    Raises:
        ModelLoadError: llama.cpp cannot compute here with these settings; the reason says why
            and what mends it.
    """
    if not config.preflight:
        await trio.lowlevel.checkpoint()
        return config
    key, verdict = await _verdict(config)
    if verdict.trouble:
        _tell_once(key, f"whether llama.cpp runs on this machine is not known: {verdict.trouble}")
        return config
    allowed = verdict.allows(config.use_extra_bufts)
    if allowed is None:
        raise ModelLoadError(fspath(model), await advice_for(verdict))
    if not allowed and config.use_extra_bufts is None and key not in _told:
        _tell_once(key, await advice_for(verdict))
    return attrs.evolve(config, use_extra_bufts=allowed)


async def _verdict(config: EngineConfig) -> tuple[str, Verdict]:
    settings = settings_of(config)
    extra = (False,) if config.use_extra_bufts is False else (False, True)
    # Not a place in Trio's default limiter: the application's threads go on as before.
    in_thread = partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(1))
    key: str = await in_thread(store.key_of, {**settings, "extra": extra})
    lock = _one_at_a_time.get()
    if lock is None:
        lock = trio.Lock()
        _one_at_a_time.set(lock)
    async with lock:
        verdict = _known.get(key) or await in_thread(store.recall, key)
        if verdict is None:
            verdict = await try_llama_cpp(settings, extra)
            if verdict.is_lasting:
                await in_thread(store.remember, key, verdict)
        if verdict.is_lasting:
            _known[key] = verdict
    return key, verdict


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """The fields of a config that decide which of llama.cpp's code runs."""
    cores = physical_cores()
    settings = {name: getattr(config, name) for name in _PASSED_ON}
    n_threads = config.n_threads or cores
    return {**settings, "n_threads": n_threads, "n_threads_batch": config.n_threads_batch or cores}


def _tell_once(key: str, text: str) -> None:
    if key not in _told:
        _told.add(key)
        logger.warning("%s", text)


async def advice_for(verdict: Verdict) -> str:
    """What is wrong here, and what mends it.  A checkpoint."""
    return advice_on(
        verdict,
        store.cpu_flags(),
        await installed_compiler(),
        python=sys.executable or "python",
        binding_version=installed_version("llama-cpp-python"),
    )


def installed_version(package: str) -> str | None:
    """The version of a Python package; `None` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


async def installed_compiler() -> CppCompiler | None:
    """The C++ compiler that a build would use, if there is one and it is known.  A checkpoint."""
    command = os.environ.get("CXX", "c++").split() or ["c++"]
    try:
        with trio.move_on_after(5):
            done = await trio.run_process(
                [*command, "--version"], capture_stdout=True, capture_stderr=True, check=False
            )
            return CppCompiler.from_version_text(done.stdout.decode(errors="replace"))
    except OSError:
        pass
    return None
