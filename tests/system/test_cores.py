"""How many cores this process may compute on, read from made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamad_trio.system.host import physical_cores


class Machine:
    """A directory of processors, one of control groups, and an affinity."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpus = path / "cpus"
        self.cgroup = path / "cgroup"
        self.cgroup.mkdir(parents=True)
        self._monkeypatch = monkeypatch

    def allow(self, *cpus: int) -> None:
        """Set the affinity."""
        self._monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus), raising=False)

    def core(self, *cpus: int) -> None:
        """Add a core with these hyper-threads."""
        for cpu in cpus:
            topology = self.cpus / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            siblings = ",".join(map(str, cpus))
            (topology / "thread_siblings_list").write_text(f"{siblings}\n")

    def quota(self, text: str) -> None:
        """Limit a version 2 group."""
        (self.cgroup / "cpu.max").write_text(text)

    def old_quota(self, quota: str, period: str) -> None:
        """Limit a version 1 group."""
        (self.cgroup / "cpu").mkdir()
        (self.cgroup / "cpu" / "cpu.cfs_quota_us").write_text(quota)
        (self.cgroup / "cpu" / "cpu.cfs_period_us").write_text(period)

    @property
    def n_cores(self) -> int:
        return physical_cores(cpus=self.cpus, cgroup=self.cgroup)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Four cores of two hyper-threads each, all allowed, without a quota."""
    machine = Machine(tmp_path, monkeypatch)
    for first in range(4):
        machine.core(first, first + 4)
    machine.allow(*range(8))
    return machine


def test_hyper_threads_of_one_core_count_once(machine: Machine) -> None:
    assert machine.n_cores == 4


@pytest.mark.parametrize(
    ("cpus", "expected"), [((0, 4), 1), ((0, 1), 2), ((7,), 1), ((0, 4, 1, 2), 3)]
)
def test_only_cores_of_the_affinity_count(
    machine: Machine, cpus: tuple[int, ...], expected: int
) -> None:
    machine.allow(*cpus)
    assert machine.n_cores == expected


def test_without_a_topology_logical_cores_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    machine.allow(0, 1, 2)
    assert machine.n_cores == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("10000 100000\n", 1),
        ("9900000 100000\n", 4),
        ("max 100000\n", 4),
    ],
)
def test_a_quota_is_a_limit_rounded_up(machine: Machine, text: str, expected: int) -> None:
    machine.quota(text)
    assert machine.n_cores == expected


@pytest.mark.parametrize("text", ["", "max", "100000 0\n", "a b\n", "1 2 3\n", "-1 100000\n"])
def test_a_quota_that_makes_no_sense_is_no_limit(machine: Machine, text: str) -> None:
    machine.quota(text)
    assert machine.n_cores == 4


@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [("-1\n", "100000\n", 4), ("250000\n", "100000\n", 3), ("x", "100000\n", 4)],
)
def test_the_older_control_groups_are_understood(
    machine: Machine, quota: str, period: str, expected: int
) -> None:
    machine.old_quota(quota, period)
    assert machine.n_cores == expected


def test_where_there_is_no_affinity_logical_cores_count(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert machine.n_cores == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.n_cores == 1


def test_there_is_always_one(machine: Machine) -> None:
    machine.allow()
    assert machine.n_cores == 1
