"""What a machine is to llama.cpp, and what is wrong with it: for `doctor`, and for bug reports.

Decides what is looked at and what counts as wrong; the preflight finds it out, so that nothing
here can die of it.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import attrs
import trio

from llamad_trio.core.config import EngineConfig
from llamad_trio.core.errors import ModelLoadError
from llamad_trio.daemon.config import DEFAULT_SOCKET
from llamad_trio.hub.manifest import installed_path, load_manifest, models_dir
from llamad_trio.memory import available_memory, total_memory
from llamad_trio.preflight import store
from llamad_trio.preflight.advice import available_sets, built_sets
from llamad_trio.preflight.prove import (
    advice_for,
    installed_compiler,
    installed_version,
    settings_of,
)
from llamad_trio.preflight.trial import try_llama_cpp
from llamad_trio.preflight.verdict import Verdict
from llamad_trio.system.host import cpu_quota, physical_cores

__all__ = ["MachineReport", "examine_machine"]

_PACKAGES = ("llamad-trio", "llama-cpp-python", "llguidance", "trio", "numpy")


@attrs.frozen(kw_only=True)
class MachineReport:
    """What there is.  Sizes in bytes.

    Attributes:
        packages: their versions; empty for one that is not installed.
        llama_cpp: its version; empty if it could not say.
        built_for, cpu_has: instruction sets by llama.cpp's names, sorted.
        compiler: the C++ compiler here; empty if there is none, or it is not known.
        use_extra_bufts: whether weights are kept for special kernels; `None` if nothing works.
        extra_bufts_reason: why they are, or are not.
        cores: logical ones, those this process may use, how many of them are physical ones
            within the quota, and the quota of CPU time, if there is one.
        memory: `total`, `available`, and `limit` on addresses, if there is one.
        open_files: how many this process may have open.
        devices: what llama.cpp can compute on.
        speeds: tokens a second by the number of threads, of a model of 120 million weights.
        models: the folder of pulled models, and which of the known ones lie there.
        socket: where a daemon listens by default, and whether one does.
        problems: what is wrong, with what to do; empty if nothing is.
    """

    python: str
    system: str
    cpu: str
    packages: dict[str, str]
    llama_cpp: str
    built_for: list[str]
    cpu_has: list[str]
    compiler: str
    use_extra_bufts: bool | None
    extra_bufts_reason: str
    cores: dict[str, float | None]
    memory: dict[str, int | None]
    open_files: int
    devices: list[dict[str, str]]
    speeds: dict[str, float]
    models: dict[str, object]
    socket: dict[str, object]
    problems: list[str]


async def examine_machine(config: EngineConfig | None = None) -> MachineReport:
    """Look at everything, and compute for a second with the settings of an engine.

    Args:
        config: those settings; `None` takes the `LLAMAD_*` environment variables.

    A checkpoint.  Nothing that was found earlier is believed.
    """
    config = config or EngineConfig.from_env()
    settings = settings_of(config)
    verdict = await try_llama_cpp(settings, (False, True))
    allowed = verdict.allows(config.use_extra_bufts)
    speeds: Mapping[str, float] = {}
    if allowed is not None:
        speeds = (await try_llama_cpp(settings, (), measure=allowed)).speeds
    compiler = await installed_compiler()
    # On a worker thread: a disk can be slow, and so can a daemon.
    models = await trio.to_thread.run_sync(_models)
    daemon = await trio.to_thread.run_sync(_socket)
    flags = store.cpu_flags()
    logical = os.cpu_count() or 1
    n_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return MachineReport(
        python=f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=store.cpu_model(),
        packages={name: installed_version(name) or "" for name in _PACKAGES},
        llama_cpp=verdict.version,
        built_for=sorted(built_sets(verdict.system_info)),
        cpu_has=sorted(available_sets(flags)),
        compiler="" if compiler is None else str(compiler),
        use_extra_bufts=allowed,
        extra_bufts_reason=_reason(verdict, config.use_extra_bufts),
        cores={
            "logical": logical,
            "allowed": n_allowed,
            "physical": physical_cores(),
            "quota": cpu_quota(),
        },
        memory={
            "total": total_memory(),
            "available": available_memory(),
            "limit": None if limit == resource.RLIM_INFINITY else limit,
        },
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        devices=[dict(device) for device in verdict.devices],
        speeds=dict(speeds),
        models=models,
        socket=daemon,
        problems=[
            *await _problems(verdict, allowed),
            *_problems_with_models(str(models["folder"])),
        ],
    )


async def _problems(verdict: Verdict, allowed: bool | None) -> list[str]:
    if not store.libraries():
        return [
            "llama.cpp's libraries are not there: pip install --force-reinstall llama-cpp-python"
        ]
    if verdict.trouble:
        return [f"llama.cpp could not be tried: {verdict.trouble}; see docs/install.md"]
    if allowed is None or not verdict.extra.is_good:
        return [await advice_for(verdict)]
    return []


def _problems_with_models(folder: str) -> list[str]:
    if not folder:
        return ["there is no home to keep models in: set LLAMAD_MODELS_DIR"]
    if os.path.exists(folder) and not os.access(folder, os.R_OK | os.X_OK):
        return [f"{folder} cannot be read: mend its mode, or set LLAMAD_MODELS_DIR"]
    return []


def _reason(verdict: Verdict, asked: bool | None) -> str:
    if verdict.trouble:
        return "not known"
    if asked is False:
        return "the settings say so"
    return "they work here" if verdict.extra.is_good else verdict.extra.detail or "not tried"


def _models() -> dict[str, object]:
    try:
        folder = str(models_dir())
    except ModelLoadError:  # a user without a home
        return {"folder": "", "installed": []}
    installed = [name for name in load_manifest() if installed_path(name) is not None]
    return {"folder": folder, "installed": installed}


def _socket() -> dict[str, object]:
    listens = False
    with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        if Path(DEFAULT_SOCKET).is_socket():
            client.settimeout(1)
            client.connect(DEFAULT_SOCKET)
            listens = True
    return {"path": DEFAULT_SOCKET, "listens": listens}
