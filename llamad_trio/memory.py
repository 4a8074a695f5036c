"""What a model needs in memory, and what there is.

Decides which of the system's files tell that; knows nothing of the engines that run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Unpack

import attrs
import trio

from llamad_trio.core.config import ConfigFields, EngineConfig
from llamad_trio.core.info import MemoryEstimate, check_budget
from llamad_trio.hub.manifest import resolve_model
from llamad_trio.preflight.prove import proven_config
from llamad_trio.system.host import physical_cores

__all__ = ["MemoryEstimate", "available_memory", "check_budget", "estimate_memory", "total_memory"]

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


async def estimate_memory(
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    **overrides: Unpack[ConfigFields],
) -> MemoryEstimate:
    """What an engine would take in memory, without loading the model's weights.

    Args:
        model: path of a GGUF file, or the name of a known model that has been pulled.
        config: settings; `None` takes them from the `LLAMAD_*` environment variables.
        overrides: `EngineConfig` fields that replace the config's.

    What constraints, tools and templates build on first use comes on top, and so does what
    the program keeps of its results.  What a GPU would hold is counted as if it were memory.

    A checkpoint.  Works in a thread: some milliseconds, for a large vocabulary a second or
    two.  Cancelled, it ends when the thread does.

    Raises:
        ModelLoadError: missing, unreadable, no GGUF, unsupported.
        UnsupportedFeature: the model cannot continue a text, or this llama.cpp does not tell
            what it needs.
        ProtocolError: a setting of the wrong type, or an unknown one.
    """
    merged = await proven_config(EngineConfig.merge(config, overrides), model)
    # Not a place in Trio's default limiter: the application's threads go on as before.
    limiter = trio.CapacityLimiter(1)
    return await trio.to_thread.run_sync(_estimate, model, merged, limiter=limiter)


def _estimate(model: str | PathLike[str], config: EngineConfig) -> MemoryEstimate:
    """On a worker thread."""
    # Importing llama.cpp takes half a second: here, where it blocks nobody.
    from llamad_trio.llama.estimate import estimate

    return estimate(resolve_model(model), config, physical_cores())


def total_memory(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes this process could take if nobody else took any.

    The machine's memory, without swap, or the least of the limits of the control groups the
    process is in.

    Args:
        proc: where the kernel describes itself and this process.
        cgroup: where the control groups are mounted (version 1 or 2).
    """
    limits = [limit for limit, _ in _groups(proc, cgroup)]
    return min([_memory_info(proc).get("MemTotal", _physical_memory()), *limits])


def available_memory(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes this process may still take now, without swap.

    What the machine has available, or the least that is left of the limits of the control
    groups the process is in.  Pages of files that the system can drop count as available.
    Where the system does not tell, all of the machine's memory is taken to be.

    Args:
        proc: where the kernel describes itself and this process.
        cgroup: where the control groups are mounted (version 1 or 2).
    """
    left = [max(0, limit - used) for limit, used in _groups(proc, cgroup)]
    return min([_memory_info(proc).get("MemAvailable", _physical_memory()), *left])


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_info(proc: Path) -> dict[str, int]:
    """Linux's account of the machine's memory, in bytes."""
    info = {}
    for line in _lines(proc / "meminfo"):
        name, _, amount = line.partition(":")
        match amount.split():
            case [number, "kB"] if number.isdecimal():
                info[name] = 1024 * int(number)
    return info


# -- control groups ---------------------------------------------------------------------------


@attrs.frozen
class _Files:
    """How a version of the control groups names its files."""

    limits: tuple[str, ...]
    usage: str
    droppable: str


_VERSION_1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def _groups(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """The limits on memory of the groups that this process is in, from the innermost out.

    With each comes what the group uses of it, without what the system can drop.
    """
    for line in _lines(proc / "self/cgroup"):
        match line.split(":", 2):
            case ["0", "", path]:
                yield from _groups_up(cgroup, path, _VERSION_2)
            case [_, controllers, path] if "memory" in controllers.split(","):
                yield from _groups_up(cgroup / "memory", path, _VERSION_1)


def _groups_up(root: Path, path: str, files: _Files) -> Iterator[tuple[int, int]]:
    # In a container the path can be the host's, of which only the root is to be seen.
    parts = [part for part in path.split("/") if part]
    for depth in range(0 if ".." in parts else len(parts), -1, -1):
        directory = root.joinpath(*parts[:depth])
        limits = [_number(directory / name) for name in files.limits]
        limit = min((number for number in limits if number is not None), default=None)
        if limit is not None:
            used = (_number(directory / files.usage) or 0) - _droppable(directory, files)
            yield limit, max(0, used)


def _number(file: Path) -> int | None:
    """The number in a file; `None` where there is none, as in "max"."""
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _droppable(directory: Path, files: _Files) -> int:
    for line in _lines(directory / "memory.stat"):
        match line.split():
            case [files.droppable, number] if number.isdecimal():
                return int(number)
    return 0


def _lines(file: Path) -> list[str]:
    """The lines of a file of the system's; none if it is not there."""
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []
