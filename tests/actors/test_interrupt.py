"""Ctrl-C ends the program in order, whichever task it happens to interrupt."""

from __future__ import annotations

import signal

import pytest
import trio

from llamad_trio.actors.preprocess import Preprocessor
from llamad_trio.core.scheduler import Scheduler
from llamad_trio.testing import open_scripted_engine


@pytest.mark.parametrize(
    ("owner", "name"), [(Scheduler, "plan"), (Preprocessor, "tokens")], ids=["decode", "preprocess"]
)
def test_ctrl_c_strikes_the_program_and_none_of_the_actors(
    monkeypatch: pytest.MonkeyPatch, owner: type[object], name: str
) -> None:
    original = getattr(owner, name)

    def interrupted(*arguments: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(owner, name, interrupted)

    async def main() -> None:
        async with open_scripted_engine("hello") as engine:
            await engine.complete("x", raw=True)

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
