"""Ctrl-C while an isolated engine closes: the process ends, and so does the program."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import trio

if TYPE_CHECKING:
    from pathlib import Path

HANG_S = 60

PROGRAM = """
import os, signal, sys
import trio
from llamad_trio import EngineConfig, open_engine
from llamad_trio.isolation import isolation

path, moment, is_stuck = sys.argv[1], sys.argv[2], sys.argv[3] == "stuck"
# Whoever runs the tests in the background may have them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
press_ctrl_c = trio.lowlevel.enable_ki_protection(lambda: signal.raise_signal(signal.SIGINT))

processes = []
open_process = trio.lowlevel.open_process

async def open_and_keep(*args, **kwargs):
    processes.append(await open_process(*args, **kwargs))
    return processes[0]

trio.lowlevel.open_process = open_and_keep
isolation.GRACE_S = 0.2 if is_stuck else 1000

async def wait(process):
    if moment == "ending" and closing:
        press_ctrl_c()
    return await wait_for(process)

closing = []
wait_for = trio.Process.wait
trio.Process.wait = wait

async def main():
    try:
        async with open_engine(path, EngineConfig(n_threads=1, n_threads_batch=1), isolation="process") as engine:
            async with engine.stream("the cat", max_tokens=10**5) as pieces:
                await pieces.receive()
                if is_stuck:
                    os.kill(processes[0].pid, signal.SIGSTOP)
                closing.append(True)
                if moment == "closing":
                    press_ctrl_c()
                else:
                    raise KeyboardInterrupt
    finally:
        # Raises if it is not a child any more: it was waited for.
        print("killed" if processes[0].returncode == -signal.SIGKILL else processes[0].returncode)
        try:
            os.waitpid(processes[0].pid, os.WNOHANG)
        except ChildProcessError:
            print("reaped")

try:
    trio.run(main)
except KeyboardInterrupt:
    print("KeyboardInterrupt")
"""


@pytest.mark.parametrize("state", ["well", "stuck"])
@pytest.mark.parametrize("moment", ["closing", "ending"])
async def test_ctrl_c_while_an_isolated_engine_closes_ends_the_process_and_the_program(
    tiny_path: Path, moment: str, state: str
) -> None:
    with trio.fail_after(HANG_S):
        done = await trio.run_process(
            [sys.executable, "-c", PROGRAM, tiny_path, moment, state], capture_stdout=True
        )
    end = "killed" if state == "stuck" else "0"
    assert done.stdout.decode().split() == [end, "reaped", "KeyboardInterrupt"]
