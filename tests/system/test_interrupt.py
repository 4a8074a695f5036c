"""Ctrl-C ends the program in order, whichever task it happens to interrupt."""

from __future__ import annotations

import signal

import pytest
import trio
import trio.testing

from llamad_trio.scheduling.scheduler import Scheduler
from llamad_trio.system.nursery import ends_in_order, run_all
from llamad_trio.testing import open_scripted_engine


@pytest.mark.parametrize("nth", range(1, 30, 4))
@pytest.mark.parametrize("method", ["plan", "apply"])
def test_ctrl_c_strikes_the_program_and_no_actor(
    monkeypatch: pytest.MonkeyPatch, method: str, nth: int
) -> None:
    original = getattr(Scheduler, method)
    n_calls = 0

    def interrupted(*arguments: object) -> object:
        nonlocal n_calls
        n_calls += 1
        if n_calls == nth:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(Scheduler, method, interrupted)

    async def main() -> None:
        async with (
            open_scripted_engine("la " * 1000) as engine,
            engine.stream("x", raw=True, max_tokens=1000) as pieces,
        ):
            async for _ in pieces:
                pass

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert n_calls >= nth


def test_ctrl_c_while_tasks_run_side_by_side_comes_out_as_itself() -> None:
    n_ended = 0

    async def work() -> None:
        nonlocal n_ended
        try:
            await trio.sleep_forever()
        finally:
            n_ended += 1

    @ends_in_order  # so that it strikes the program's own task
    async def interrupt() -> None:
        await trio.testing.wait_all_tasks_blocked()
        signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(interrupt)
            with pytest.raises(KeyboardInterrupt):
                await run_all([work, work])

    trio.run(main)
    assert n_ended == 2
