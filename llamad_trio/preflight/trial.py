"""Runs the process in which llama.cpp is tried: at most for a while, whatever it does."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import trio

from llamad_trio.preflight.verdict import Verdict, judge
from llamad_trio.system.host import has_interpreter, python_command, python_environment
from llamad_trio.system.nursery import ends_in_order, open_plain_nursery, run_uninterrupted

DEADLINE_S, GPU_DEADLINE_S = 30.0, 120.0
"""A hundred times what it takes on an idle machine; a GPU's kernels may have to be compiled."""

MAX_LOG_BYTES = 4096
MAX_SAID_BYTES = 1 << 20


async def try_llama_cpp(
    settings: Mapping[str, Any], extra: Sequence[bool], *, measure: bool | None = None
) -> Verdict:
    """Have a process compute with llama.cpp, and say what came of it.

    Args:
        settings: `EngineConfig` fields, the numbers of threads among them.
        extra: the values of `use_extra_bufts` to try, in this order.
        measure: with which of them to measure speed as well; `None` does not.

    A checkpoint.  Cancelled, the process is killed.
    """
    if not has_interpreter():
        await trio.lowlevel.checkpoint()
        return Verdict(trouble="this program is no Python that could be started again")
    deadline_s = GPU_DEADLINE_S if settings.get("n_gpu_layers") else DEADLINE_S
    try:
        with _place_for_model() as path:
            order = {
                "path": path,
                "deadline_s": deadline_s,
                "settings": dict(settings),
                "extra": list(extra),
                "measure": measure,
            }
            return await _run(json.dumps(order), deadline_s)
    except OSError as error:  # no process, no pipe, no folder
        await trio.lowlevel.checkpoint()
        return Verdict(trouble=f"no process for it: {error.strerror or error}")


@contextmanager
def _place_for_model() -> Iterator[str | None]:
    """A path for the model; `None` where a file can be in memory.

    There nothing is left behind, and no disk can be full.
    """
    if hasattr(os, "memfd_create"):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="llamad_trio-", ignore_cleanup_errors=True) as folder:
        yield os.path.join(folder, "probe.gguf")


@ends_in_order
async def _run(order: str, deadline_s: float) -> Verdict:
    process = await trio.lowlevel.open_process(
        [*python_command("llamad_trio.preflight.probe"), order],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # ggml would start a debugger to print where it aborts.
        env={**python_environment(), "GGML_NO_BACKTRACE": "1"},
        start_new_session=True,  # Ctrl-C is for the program, which ends this itself
    )
    assert process.stdout is not None
    assert process.stderr is not None
    said, log = bytearray(), bytearray()
    log_ended = trio.Event()

    async def keep_log(stream: trio.abc.ReceiveStream) -> None:
        await _keep(stream, log, MAX_LOG_BYTES)
        log_ended.set()

    try:
        with trio.move_on_after(deadline_s) as scope:
            async with open_plain_nursery() as nursery:
                nursery.start_soon(keep_log, process.stderr)
                await _keep(process.stdout, said, MAX_SAID_BYTES)
                await process.wait()
                await log_ended.wait()
    finally:
        await run_uninterrupted(partial(_end, process))
    status = None if scope.cancelled_caught else process.returncode
    log_lines = log.decode(errors="replace").strip().split("\n")
    return judge(_lines(said), status, log_lines[-1].strip()[:400])


async def _keep(stream: trio.abc.ReceiveStream, kept: bytearray, most: int) -> None:
    async for data in stream:
        kept += data
        del kept[:-most]


async def _end(process: trio.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            await stream.aclose()


def _lines(said: bytearray) -> list[dict[str, Any]]:
    """What was told; a line that was cut off is none."""
    lines = []
    for line in said.splitlines():
        with suppress(ValueError):
            told = json.loads(line)
            if isinstance(told, dict):
                lines.append(told)
    return lines
