"""What there is of memory, read from made-up machines, and whether a model fits."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from llamad_trio import EngineConfig, ModelLoadError, ProtocolError, UnsupportedFeature
from llamad_trio.core.errors import InsufficientMemory
from llamad_trio.memory import (
    MemoryEstimate,
    available_memory,
    check_budget,
    estimate_memory,
    total_memory,
)
from tests.models import TinyModels

GIB, MIB = 2**30, 2**20


class Machine:
    """A directory for the kernel's files, and one of control groups."""

    def __init__(self, path: Path) -> None:
        self.proc = path / "proc"
        self.cgroup = path / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()

    def info(self, text: str) -> None:
        (self.proc / "meminfo").write_text(text)

    def is_in(self, *lines: str) -> None:
        """Say which control groups the process is in."""
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def group(self, path: str, **files: str | int) -> None:
        """Add a control group; `_` in a file's name stands for its first dot."""
        directory = self.cgroup / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name.replace("_", ".", 1)).write_text(f"{content}\n")

    @property
    def total(self) -> int:
        return total_memory(proc=self.proc, cgroup=self.cgroup)

    @property
    def available(self) -> int:
        return available_memory(proc=self.proc, cgroup=self.cgroup)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """16 GiB, of which 10 are available, and a process in no group with a limit."""
    machine = Machine(tmp_path)
    machine.info(
        "MemTotal:       16777216 kB\nMemFree:         1048576 kB\n"
        "MemAvailable:   10485760 kB\nHugePages_Total:       0\n"
    )
    return machine


# -- the machine ------------------------------------------------------------------------------


def test_without_limits_the_machines_memory_counts(machine: Machine) -> None:
    assert (machine.total, machine.available) == (16 * GIB, 10 * GIB)


def test_a_group_without_a_limit_is_none(machine: Machine) -> None:
    machine.is_in("0::/app")
    machine.group("app", memory_max="max", memory_high="max", memory_current=5 * GIB)
    machine.group("", memory_stat="inactive_file 0")
    assert (machine.total, machine.available) == (16 * GIB, 10 * GIB)


def test_the_least_limit_up_the_hierarchy_counts(machine: Machine) -> None:
    machine.is_in("0::/slice/app")
    machine.group("slice/app", memory_max=8 * GIB, memory_current=1 * GIB)
    machine.group("slice", memory_max=4 * GIB, memory_current=3 * GIB)
    machine.group("", memory_max=12 * GIB, memory_current=4 * GIB)
    assert (machine.total, machine.available) == (4 * GIB, 1 * GIB)


def test_what_is_left_can_be_least_where_the_limit_is_not(machine: Machine) -> None:
    machine.is_in("0::/slice/app")
    machine.group("slice/app", memory_max=4 * GIB, memory_current=1 * GIB)
    machine.group("slice", memory_max=9 * GIB, memory_current=8 * GIB)
    assert (machine.total, machine.available) == (4 * GIB, 1 * GIB)


def test_a_group_of_others_does_not_count(machine: Machine) -> None:
    machine.is_in("0::/app")
    machine.group("app")
    machine.group("other", memory_max=1, memory_current=0)
    machine.group("memory/app", memory_limit_in_bytes=1, memory_usage_in_bytes=0)
    assert (machine.total, machine.available) == (16 * GIB, 10 * GIB)


def test_a_limit_that_throttles_is_a_limit(machine: Machine) -> None:
    machine.is_in("0::/app")
    machine.group("app", memory_max=8 * GIB, memory_high=6 * GIB, memory_current=2 * GIB)
    assert (machine.total, machine.available) == (6 * GIB, 4 * GIB)


def test_pages_that_can_be_dropped_are_not_used(machine: Machine) -> None:
    machine.is_in("0::/app")
    stat = f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}"
    machine.group("app", memory_max=4 * GIB, memory_current=4 * GIB, memory_stat=stat)
    assert machine.available == 2 * GIB


def test_a_group_above_its_limit_has_nothing_left(machine: Machine) -> None:
    machine.is_in("0::/app")
    machine.group("app", memory_max=GIB, memory_current=2 * GIB)
    assert machine.available == 0


def test_the_older_control_groups_are_understood(machine: Machine) -> None:
    machine.is_in("5:cpu,cpuacct:/", "4:hugetlb,memory:/slice/app", "0::/")
    machine.group(
        "memory/slice/app",
        memory_limit_in_bytes=8 * GIB,
        memory_usage_in_bytes=5 * GIB,
        memory_stat=f"inactive_file 1\ntotal_inactive_file {GIB}",
    )
    no_limit = 2**63 - 4096
    machine.group("memory", memory_limit_in_bytes=no_limit, memory_usage_in_bytes=9 * GIB)
    assert (machine.total, machine.available) == (8 * GIB, 4 * GIB)


def test_in_a_container_the_root_of_the_mount_counts(machine: Machine) -> None:
    machine.is_in("0::/docker/0123abcd")
    machine.group("", memory_max=2 * GIB, memory_current=GIB)
    assert (machine.total, machine.available) == (2 * GIB, 1 * GIB)


def test_a_path_out_of_the_mount_is_not_followed(machine: Machine) -> None:
    machine.is_in("0::/../../outside")
    machine.group("", memory_max=2 * GIB, memory_current=GIB)
    machine.group("../../outside", memory_max=1)
    assert machine.total == 2 * GIB


@pytest.mark.parametrize("text", ["", "nonsense", "-1", "1 2 3", "\0"])
def test_files_that_make_no_sense_are_no_limit(machine: Machine, text: str) -> None:
    machine.is_in("0::/app", text, f"memory:{text}")
    machine.group("app", memory_max=text, memory_high=text, memory_current=text)
    assert (machine.total, machine.available) == (16 * GIB, 10 * GIB)


@pytest.mark.parametrize("text", [None, "", "MemTotal:", "MemTotal: many kB\nMemAvailable: 1 MB"])
def test_where_the_kernel_does_not_tell_all_memory_counts(
    machine: Machine, text: str | None
) -> None:
    (machine.proc / "meminfo").unlink() if text is None else machine.info(text)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert (machine.total, machine.available) == (physical, physical)


def test_this_machine_has_memory() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 64 * MIB < total_memory() <= physical
    assert 0 < available_memory() <= physical


# -- the budget -------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [{}, {"a": 60}, {"a": 20, "b": 40}])
def test_what_fits_is_let_through(held: dict[str, int]) -> None:
    check_budget(100 - sum(held.values()), 100, held)
    with pytest.raises(InsufficientMemory) as caught:
        check_budget(101 - sum(held.values()), 100, held)
    error = caught.value
    assert error.required == error.available + 1 == 101 - sum(held.values())
    assert error.held_by == held


def test_nothing_is_left_of_a_budget_that_is_overdrawn() -> None:
    check_budget(0, 100, {"a": 200})
    with pytest.raises(InsufficientMemory) as caught:
        check_budget(1, 100, {"a": 200})
    assert caught.value.available == 0


def test_the_error_tells_who_holds_what() -> None:
    held = {"router": 300 * MIB, "thinker": 5 * GIB // 2}
    error = InsufficientMemory(3 * GIB, 512 * MIB, held)
    held.clear()
    assert str(error) == (
        "insufficient memory: 3.00 GiB are needed and 512.0 MiB are left, "
        "held by router 300.0 MiB, thinker 2.50 GiB"
    )
    assert str(InsufficientMemory(GIB, 0, {})).endswith("held by nobody")


# -- the estimate -----------------------------------------------------------------------------


def test_the_total_is_the_sum_and_nothing_can_be_changed() -> None:
    found = MemoryEstimate(weights_bytes=1, kv_bytes=20, compute_bytes=300, overhead_bytes=4000)
    assert found.total_bytes == 4321
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        found.kv_bytes = 0  # type: ignore[misc]


async def test_config_and_overrides_decide(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("attention")
    small, large = EngineConfig(n_ctx=8192), EngineConfig(n_ctx=16384)
    expected = await estimate_memory(path, large)
    assert await estimate_memory(str(path), small, n_ctx=16384) == expected
    assert (await estimate_memory(path, small)).kv_bytes == expected.kv_bytes // 2
    monkeypatch.setenv("LLAMAD_N_CTX", "16384")
    assert await estimate_memory(path) == expected


async def test_errors_are_those_of_opening_an_engine(tiny_model: TinyModels) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        await estimate_memory("/no/such/file.gguf")
    with pytest.raises(UnsupportedFeature, match="encoder"):
        await estimate_memory(tiny_model("encoder"))
    with pytest.raises(ProtocolError, match="n_context"):
        await estimate_memory(tiny_model("attention"), n_context=1)  # type: ignore[call-arg]
    with pytest.raises(ProtocolError, match="n_ctx"):
        await estimate_memory(tiny_model("attention"), n_ctx="1")  # type: ignore[arg-type]


async def test_it_is_a_checkpoint(tiny_model: TinyModels) -> None:
    path = tiny_model("attention")
    with trio.testing.assert_checkpoints():
        await estimate_memory(path, n_ctx=64)
    with trio.CancelScope() as scope:
        scope.cancel()
        await estimate_memory(path, n_ctx=64)
    assert scope.cancelled_caught
