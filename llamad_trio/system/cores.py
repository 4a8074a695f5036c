"""How many cores this process may compute on."""

from __future__ import annotations

import math
import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")


def physical_cores(*, cpus: Path = CPUS, cgroup: Path = CGROUP) -> int:
    """Physical cores this process may use, at least 1.

    Counts the cores in its CPU affinity, hyper-threads of one core once, and no more
    than its cgroup's CPU quota pays for, rounded up.  Where the system does not tell,
    logical cores count.

    Args:
        cpus: Linux's description of the processors.
        cgroup: where the control groups are mounted (version 1 or 2).
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
    """CPUs' worth of time this process's cgroup may use, `None` without a limit."""
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
