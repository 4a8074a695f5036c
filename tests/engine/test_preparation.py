"""Who has requests prepared pays for it: neither the loop does, nor who comes after those that
have left."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import trio

from llamad_trio import Request
from llamad_trio.constraints.gbnf_lark import gbnf_to_lark
from llamad_trio.engine.preprocess import MAX_THREADS
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from tests.support import until

if TYPE_CHECKING:
    from llamad_trio.constraints.compiler import Matcher
    from llamad_trio.constraints.constraint import Constraint

HANG_S = 30


class SlowToCompile(ScriptedModel):
    """Compiles what is hard only when it may."""

    def __init__(self) -> None:
        super().__init__("easy")
        self.may_go_on = threading.Event()
        self.compiled: list[object] = []

    def compile(self, constraint: Constraint) -> Matcher:
        self.compiled.append(constraint.source)
        if constraint.source == "hard":
            assert self.may_go_on.wait(HANG_S)
        return super().compile(constraint)


async def test_what_waits_to_be_compiled_and_is_cancelled_is_not_compiled() -> None:
    model = SlowToCompile()
    async with open_scripted_engine(model) as engine:
        async with trio.open_nursery() as nursery:
            for _ in range(3 * MAX_THREADS):
                nursery.start_soon(engine.complete, Request("x", raw=True, regex="hard"))
            await until(lambda: len(model.compiled) == MAX_THREADS)
            nursery.cancel_scope.cancel()
        model.may_go_on.set()
        assert (await engine.complete("x", raw=True, regex="easy")).text == "easy"
    assert model.compiled == ["hard"] * MAX_THREADS + ["easy"]


async def test_no_grammar_is_read_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noting(source: str, root: str) -> str:
        threads.append(threading.current_thread())
        return gbnf_to_lark(source, root)

    monkeypatch.setattr("llamad_trio.chat.conversation.gbnf_to_lark", noting)
    request = Request("x", raw=True, grammar='root ::= "easy"')
    async with open_scripted_engine("easy") as engine:
        await engine.complete(request)
        await engine.count_tokens(request)
        await engine.render(request)
        await engine.score(request, ["easy"])
    assert len(threads) == 4
    assert threading.current_thread() not in threads
