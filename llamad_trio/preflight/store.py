"""Verdicts of earlier runs, in the user's cache.

Decides what a verdict depends on.  Whatever cannot be read or written is as if it were not there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from llamad_trio.preflight.verdict import Verdict
from llamad_trio.system.host import replace_text, user_cache

CPUINFO = Path("/proc/cpuinfo")
CPUINFO_BYTES = 16 * 1024
"""More than the account of the first of a machine's processors takes."""

FORMAT = 1
"""Of what is tried and how it is told; another one makes all verdicts void."""

MOST_KEPT = 64

_LOADER_VARIABLES = (
    "LLAMA_CPP_LIB_PATH",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "DYLD_INSERT_LIBRARIES",
    "DYLD_LIBRARY_PATH",
)


def key_of(settings: Mapping[str, object]) -> str:
    """What a verdict depends on, as the name it is kept under.

    The libraries by name, size and time of change; the CPU, the kernel, the settings, and the
    variables that decide what is loaded.
    """
    parts = {
        "format": FORMAT,
        "libraries": libraries(),
        "cpu": [platform.machine(), cpu_model(), sorted(cpu_flags())],
        "kernel": [platform.system(), platform.release()],
        "settings": dict(settings),
        "loader": {name: os.environ.get(name) for name in _LOADER_VARIABLES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def libraries() -> list[tuple[str, int, int]]:
    """llama.cpp's libraries as they lie there: path, bytes and time of change (ns)."""
    folder_set = os.environ.get("LLAMA_CPP_LIB_PATH")
    folders = [Path(folder_set)] if folder_set else []
    # Without importing it: loading the libraries may be what kills.
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("llama_cpp")
        places = (spec and spec.submodule_search_locations) or ()
        folders += [Path(place, "lib") for place in places]
    found = []
    for folder in folders:
        with suppress(OSError):
            for path in sorted(folder.iterdir()):
                if ".so" in path.name or path.suffix in (".dylib", ".dll"):
                    stat = path.stat()
                    found.append((str(path), stat.st_size, stat.st_mtime_ns))
    return found


def cpu_model() -> str:
    """The CPU's name; empty where the system does not tell."""
    return _cpuinfo().get("model name", "") or platform.processor()


def cpu_flags() -> frozenset[str]:
    """The features of the CPU by Linux's names; empty where the system does not tell."""
    info = _cpuinfo()
    return frozenset((info.get("flags") or info.get("Features") or "").split())


def _cpuinfo() -> dict[str, str]:
    try:
        with CPUINFO.open("rb") as file:
            text = file.read(CPUINFO_BYTES).decode(errors="replace")
    except OSError:
        return {}
    first = text.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def recall(key: str) -> Verdict | None:
    """The verdict that was kept under `key`, if any."""
    with suppress(OSError, ValueError):
        if folder := _folder():
            return Verdict.from_text((folder / f"{key}.json").read_text())
    return None


def remember(key: str, verdict: Verdict) -> None:
    """Keep a verdict, if there is a place for it."""
    folder = _folder()
    if folder is None:
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("*.json"), key=_changed_at)[: -MOST_KEPT + 1]:
            old.unlink(missing_ok=True)
        replace_text(folder / f"{key}.json", verdict.as_text())


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _folder() -> Path | None:
    cache = user_cache()
    return None if cache is None else cache / "preflight"
