"""The machine as this process finds it: cores it may compute on, how it starts another Python,
the user's cache and how a file in it is replaced."""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")


# -- cores --------------------------------------------------------------------------------------


def physical_cores(*, cpus: Path = CPUS, cgroup: Path = CGROUP) -> int:
    """Physical cores this process may use, at least 1.

    Counts the cores in its CPU affinity, hyper-threads of one core once, and no more
    than its cgroup's CPU quota pays for, rounded up.  Where the system does not tell,
    logical cores count.  `cpus` and `cgroup` are where Linux describes the processors and
    mounts the control groups.
    """
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    cores = len({_siblings(cpus, cpu) for cpu in allowed})
    quota = cpu_quota(cgroup)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _siblings(cpus: Path, cpu: int) -> str:
    """The hyper-threads that share a core with `cpu`, as a name for that core."""
    try:
        return (cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """CPUs' worth of time this process's cgroup (version 1 or 2) may use; `None` is no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max": no limit
        return None


# -- another Python -----------------------------------------------------------------------------


def has_interpreter() -> bool:
    """Whether there is a Python to start: a frozen program would start itself again."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def python_command(module: str) -> list[str]:
    """The command that runs a module.

    Not from the working directory, unless this program imports from there, too.
    """
    return [sys.executable, "-P", "-m", module]


def python_environment() -> dict[str, str]:
    """This program's environment, with what it imports from, for a process started elsewhere."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was removed: nothing is imported from there either
        paths = [path for path in sys.path if os.path.isabs(path)]
    else:
        paths = [os.path.join(here, path) for path in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


# -- the user's cache ---------------------------------------------------------------------------


def user_cache() -> Path | None:
    """The folder for this library in the user's cache; it may not exist yet.

    `None` for a user without a home, such as that of a container.
    """
    import platformdirs  # here: the import costs more than the modules that ask

    try:
        folder = Path(platformdirs.user_cache_dir("llamad-trio", appauthor=False))
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # older ones leave a "~" as it is


def replace_text(path: Path, text: str) -> None:
    """`replace_file`, for a small text; its draft is in the same folder."""
    replace_file(path, [text.encode()], draft=path.with_name(f"{path.name}.{secrets.token_hex(8)}"))


def replace_file(path: Path, parts: Iterable[bytes], *, draft: Path, mode: int = 0o600) -> None:
    """Write a file whole: whoever reads it meanwhile sees all of it, or the one before.

    It survives a power cut as soon as its folder does.  `draft` is where it is written before it
    is moved: a path that nobody else has, in the same file system.  `mode` is its
    permissions, as far as the umask has them.

    Raises:
        OSError: it cannot be written; what was there stays, and nothing else is left.
    """
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
