"""How models end: given up, removed, replaced, or with their block."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llamad_trio import (
    Engine,
    EngineSpec,
    ModelLoadError,
    Models,
    ProtocolError,
    RestartPolicy,
    RestartsExhausted,
    SessionFatal,
    open_models,
)
from llamad_trio.testing import ScriptedModel, open_scripted_engine, open_scripted_models

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from llamad_trio.testing import Reply
    from llamad_trio.watch.broadcast import Broadcast

TWICE = RestartPolicy(max_restarts=2, first_delay_s=1.0, jitter=0.0)


class Breaking:
    """A model that breaks and cannot be loaded again."""

    def __init__(self) -> None:
        self.model = ScriptedModel("hello")
        self.loaded: dict[str, ScriptedModel | ModelLoadError] = {"a": self.model}

    async def break_down(self, models: Models) -> None:
        await models.wait_ready("a")
        self.loaded["a"] = ModelLoadError("a.gguf", "gone")
        self.model.crash_next_step()
        with pytest.raises(SessionFatal):
            await models.complete("x")


class Closing:
    """Engines that take until they are let to close."""

    def __init__(self, reply: Reply | ScriptedModel = "hello") -> None:
        self.reply = reply
        self.begun = trio.Event()
        self.allowed = trio.Event()

    @asynccontextmanager
    async def open(
        self, name: str, spec: EngineSpec, broadcast: Broadcast
    ) -> AsyncIterator[Engine]:
        try:
            async with open_scripted_engine(self.reply) as engine:
                yield engine
        finally:
            self.begun.set()
            with trio.CancelScope(shield=True):
                await self.allowed.wait()


async def stream(models: Models) -> None:
    async with models.stream("x") as pieces:
        await pieces.result()


WAITS: dict[str, Callable[[Models], Awaitable[object]]] = {
    "complete": lambda models: models.complete("x"),
    "stream": stream,
    "wait_ready": lambda models: models.wait_ready("a"),
    "load": lambda models: models.load("a"),
}


# -- giving up ----------------------------------------------------------------------------


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
async def test_the_block_that_waits_for_a_model_ends_with_why_it_was_given_up(
    wait: Callable[[Models], Awaitable[object]], autojump_clock: MockClock
) -> None:
    breaking = Breaking()
    with pytest.raises(RestartsExhausted) as caught:
        async with open_scripted_models(breaking.loaded, restart=TWICE) as models:
            await breaking.break_down(models)
            await wait(models)
    assert len(caught.value.failures) == 3
    assert isinstance(caught.value.__cause__, ModelLoadError)


async def test_tasks_of_the_block_that_wait_for_a_model_do_not_hide_why_it_was_given_up(
    autojump_clock: MockClock,
) -> None:
    breaking = Breaking()
    with pytest.raises(RestartsExhausted):
        async with (
            open_scripted_models(breaking.loaded, restart=TWICE) as models,
            trio.open_nursery() as nursery,
        ):
            await breaking.break_down(models)
            for wait in WAITS.values():
                nursery.start_soon(wait, models)


async def test_who_waits_outside_the_block_is_told_why_a_model_was_given_up(
    autojump_clock: MockClock,
) -> None:
    breaking = Breaking()
    n_told = 0

    async def ask(models: Models, wait: Callable[[Models], Awaitable[object]]) -> None:
        nonlocal n_told
        with pytest.raises(RestartsExhausted, match="gone"):
            await wait(models)
        n_told += 1

    async with trio.open_nursery() as outside:
        with pytest.raises(RestartsExhausted):
            async with open_scripted_models(breaking.loaded, restart=TWICE) as models:
                await breaking.break_down(models)
                for wait in WAITS.values():
                    outside.start_soon(ask, models, wait)
                await trio.sleep_forever()
    await ask(models, WAITS["complete"])
    assert n_told == 5
    with pytest.raises(RestartsExhausted):
        models["a"].stats()


async def test_models_that_are_given_up_at_once_end_the_block_with_one_error() -> None:
    go = trio.Event()

    @asynccontextmanager
    async def opener(name: str, spec: EngineSpec, broadcast: Broadcast) -> AsyncIterator[Engine]:
        async def break_down() -> None:
            await go.wait()
            raise SessionFatal(f"{name} broke")

        async with open_scripted_engine("x") as engine, trio.open_nursery() as nursery:
            nursery.start_soon(break_down)
            yield engine

    with pytest.raises(RestartsExhausted) as caught:
        async with open_models(
            {"a": EngineSpec("a"), "b": EngineSpec("b")},
            restart=RestartPolicy(max_restarts=0),
            opener=opener,
        ) as models:
            await models.wait_ready("a")
            await models.wait_ready("b")
            go.set()
            await trio.sleep_forever()
    (other,) = {"a", "b"} - {caught.value.model}
    assert any(f"model {other!r}" in note for note in caught.value.__notes__)


# -- the state meanwhile ------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [
        lambda models: models.remove("a"),
        lambda models: models.change({"b": EngineSpec("b", load="lazy")}),
        lambda models: models.unload("a"),
    ],
)
async def test_a_model_that_is_closed_in_order_is_never_backing_off(
    end: Callable[[Models], Awaitable[None]],
) -> None:
    for _ in range(10):  # Trio runs tasks in any order
        closing = Closing()
        async with open_models({"a": EngineSpec("a")}, opener=closing.open) as models:
            await models.wait_ready("a")
            model = models["a"]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end, models)
                await closing.begun.wait()
                state = model.state
                closing.allowed.set()
            assert (state, model.state) == ("unloaded", "unloaded")


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_model_that_closes_with_the_block_is_never_backing_off(is_cancelled: bool) -> None:
    for _ in range(10):  # Trio runs tasks in any order
        closing = Closing()
        states: list[str] = []

        async def watch(
            models: Models, closing: Closing = closing, states: list[str] = states
        ) -> None:
            await closing.begun.wait()
            await wait_all_tasks_blocked()
            states.append(models.state("a"))
            closing.allowed.set()

        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                async with open_models({"a": EngineSpec("a")}, opener=closing.open) as models:
                    await models.wait_ready("a")
                    nursery.start_soon(watch, models)
                    if is_cancelled:
                        scope.cancel()
                        await trio.sleep_forever()
        assert states == ["unloaded"]


async def test_a_model_that_broke_is_backing_off_also_while_its_engine_closes() -> None:
    scripted = ScriptedModel("hello")
    closing = Closing(scripted)
    async with open_models({"a": EngineSpec("a")}, opener=closing.open) as models:
        await models.wait_ready("a")
        scripted.crash_next_step()
        with pytest.raises(SessionFatal):
            await models.complete("x")
        await closing.begun.wait()
        await wait_all_tasks_blocked()
        state = models.state("a")
        closing.allowed.set()
        assert state == "backing off"


# -- cancelled meanwhile ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "left"),
    [
        (lambda models: models.remove("a"), []),
        (lambda models: models.change({"b": EngineSpec("b", load="lazy")}), ["b"]),
    ],
)
async def test_what_is_cancelled_while_engines_close_is_done_all_the_same(
    end: Callable[[Models], Awaitable[None]], left: list[str]
) -> None:
    closing = Closing()
    async with open_models({"a": EngineSpec("a")}, opener=closing.open) as models:
        await models.wait_ready("a")
        model = models["a"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end, models)
            await closing.begun.wait()
            nursery.cancel_scope.cancel()
        there_are = list(models)
        closing.allowed.set()
        await model.gone.wait()
        assert there_are == left


@pytest.mark.parametrize(
    "end",
    [
        lambda models: models.remove("a"),
        lambda models: models.change({}),
        lambda models: models.add("d", EngineSpec("a")),
    ],
)
async def test_what_is_cancelled_while_another_change_loads_is_not_done(
    end: Callable[[Models], Awaitable[None]], autojump_clock: MockClock
) -> None:
    async with open_scripted_models({"a": "hello"}, load_s=10.0) as models:
        await models.wait_ready("a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(models.add, "c", EngineSpec("a"))
            await wait_all_tasks_blocked()
            with trio.move_on_after(1.0) as scope:
                await end(models)
            assert scope.cancelled_caught
        assert list(models) == ["a", "c"]
        assert await models.complete_text("x", model="a") == "hello"


async def test_a_change_that_is_cancelled_while_it_loads_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted_models({"a": "hello", "b": "x"}, load_s=10.0) as models:
        await models.wait_ready("b")
        with trio.move_on_after(1.0) as scope:
            await models.change({"b": EngineSpec("b"), "c": EngineSpec("a")})
        assert scope.cancelled_caught
        assert list(models) == ["a", "b"]


# -- names --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, 1, ["a"], "zz"])
async def test_what_names_no_model_is_refused_and_never_the_default_one(
    name: Any, autojump_clock: MockClock
) -> None:
    async with open_scripted_models({"a": "hello"}) as models:
        await models.wait_ready("a")
        for call in (models.remove, models.load, models.unload, models.wait_ready):
            with pytest.raises(ProtocolError, match="model"):
                await call(name)
        with pytest.raises(ProtocolError, match="model"):
            models.state(name)
        if name is not None:
            with pytest.raises(ProtocolError, match="model"):
                await models.complete("x", model=name)
        assert list(models) == ["a"]
        assert models.state("a") == "ready"
