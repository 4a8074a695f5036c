"""Several models: loading, restarting, giving up, coming and going."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from llamad_trio import (
    EngineClosed,
    EngineSpec,
    ModelLoadError,
    Models,
    ProtocolError,
    RestartPolicy,
    RestartsExhausted,
    SessionFatal,
    open_models,
)
from llamad_trio.testing import ScriptedModel, open_scripted_models

if TYPE_CHECKING:
    from collections.abc import Callable

STEADY = RestartPolicy(jitter=0.0, first_delay_s=1.0, max_restarts=3, within_s=60.0)


async def crash(models: Models, name: str, model: ScriptedModel) -> None:
    """Have a request break the model's engine."""
    model.crash_next_step()
    with pytest.raises(SessionFatal):
        await models[name].complete("x")


async def restart_s(models: Models, name: str, model: ScriptedModel) -> float:
    """How long a model that has just broken makes the next request wait."""
    await crash(models, name, model)
    began = trio.current_time()
    await models[name].complete("x")
    return trio.current_time() - began


# -- asking -------------------------------------------------------------------------------


async def test_each_model_answers_by_its_name_and_one_by_default(autojump_clock: MockClock) -> None:
    async with open_scripted_models({"a": "from a", "b": "from b"}, default="b") as models:
        assert await models["a"].complete_text("x") == "from a"
        assert await models.complete_text("x") == "from b"
        assert (await models.complete("x", model="a")).text == "from a"
        async with models.stream("x", model="a") as pieces:
            assert "".join([piece async for piece in pieces]) == "from a"
        async with models.stream_events("x") as events:
            assert (await events.result()).text == "from b"
        assert list(models) == ["a", "b"]
        assert models.default == "b"


async def test_an_unknown_model_is_a_protocol_error_that_names_those_there_are(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted_models({"a": "x", "b": "y"}) as models:
        assert models.default == "a"  # the first
        assert await models.complete_text("x") == "x"
        with pytest.raises(ProtocolError, match=r"'c'.*a, b"):
            await models.complete("x", model="c")
    with pytest.raises(ProtocolError, match="'c'"):
        async with open_scripted_models({"a": "x"}, default="c"):
            pass


# -- loading ------------------------------------------------------------------------------


async def test_requests_wait_for_the_load_and_entering_does_not(autojump_clock: MockClock) -> None:
    started = trio.current_time()
    async with open_scripted_models({"a": "hello"}, load_s=5.0) as models:
        assert trio.current_time() == started
        await trio.testing.wait_all_tasks_blocked()
        assert models.state("a") == "loading"
        assert await models.complete_text("x") == "hello"
        assert trio.current_time() - started == pytest.approx(5.0)
        assert models.state("a") == "ready"


async def test_loads_run_side_by_side(autojump_clock: MockClock) -> None:
    started = trio.current_time()
    async with open_scripted_models({"a": "x", "b": "y", "c": "z"}, load_s=5.0) as models:
        for name in models:
            await models.wait_ready(name)
        assert trio.current_time() - started == pytest.approx(5.0)


async def test_a_request_stops_waiting_with_its_own_scope(autojump_clock: MockClock) -> None:
    async with open_scripted_models({"a": "hello"}, load_s=5.0) as models:
        with trio.move_on_after(1.0) as scope:
            await models.complete("x")
        assert scope.cancelled_caught
        assert models.state("a") == "loading"
        assert await models.complete_text("x") == "hello"


async def test_a_failed_load_is_that_models_alone(autojump_clock: MockClock) -> None:
    error = ModelLoadError("a.gguf", "scripted")
    async with open_scripted_models({"a": error, "b": "fine"}) as models:
        with pytest.raises(ModelLoadError):
            await models["a"].complete("x")
        assert models.state("a") == "failed"
        with pytest.raises(ModelLoadError):
            await models.wait_ready("a")
        assert await models["b"].complete_text("x") == "fine"


async def test_a_failed_load_is_tried_again_when_told_to(autojump_clock: MockClock) -> None:
    loaded: dict[str, ScriptedModel | ModelLoadError] = {"a": ModelLoadError("a", "scripted")}
    async with open_scripted_models(loaded) as models:
        with pytest.raises(ModelLoadError):
            await models.load("a")
        loaded["a"] = ScriptedModel("hello")
        with pytest.raises(ModelLoadError):
            await models.complete("x")
        await models.load("a")
        assert await models.complete_text("x") == "hello"


async def test_what_was_ready_before_is_tried_again_by_every_request(
    autojump_clock: MockClock,
) -> None:
    loaded: dict[str, ScriptedModel | ModelLoadError] = {"a": ScriptedModel("hello")}
    async with open_scripted_models(loaded) as models:
        await models.wait_ready("a")
        await models.unload("a")
        loaded["a"] = ModelLoadError("a", "scripted")
        with pytest.raises(ModelLoadError):
            await models.complete("x")
        assert models.state("a") == "failed"
        loaded["a"] = ScriptedModel("hello again")
        assert await models.complete_text("x") == "hello again"


async def test_a_load_that_fails_after_an_unload_is_not_counted(autojump_clock: MockClock) -> None:
    loaded: dict[str, ScriptedModel | ModelLoadError] = {"a": ScriptedModel("hello")}
    async with open_scripted_models(loaded, restart=RestartPolicy(max_restarts=0)) as models:
        await models.wait_ready("a")
        await models.unload("a")
        loaded["a"] = ModelLoadError("a", "scripted")
        for _ in range(3):
            with pytest.raises(ModelLoadError):
                await models.complete("x")
        await trio.sleep(100)
        assert models.state("a") == "failed"


async def test_a_lazy_model_is_loaded_by_its_first_request(autojump_clock: MockClock) -> None:
    specs = {"a": EngineSpec("a", load="lazy")}
    async with open_scripted_models({"a": "hello"}, specs, load_s=1.0) as models:
        await trio.sleep(100)
        assert models.state("a") == "unloaded"
        with pytest.raises(EngineClosed):
            models["a"].stats()
        assert await models.complete_text("x") == "hello"
        assert models["a"].stats().requests["completed"] == 1


async def test_waiting_for_a_lazy_model_does_not_load_it(autojump_clock: MockClock) -> None:
    specs = {"a": EngineSpec("a", load="lazy")}
    async with open_scripted_models({"a": "hello"}, specs) as models:
        with trio.move_on_after(10) as scope:
            await models.wait_ready("a")
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(models.wait_ready, "a")
            await models.load("a")


# -- unloading ----------------------------------------------------------------------------


async def test_a_model_is_closed_when_it_was_idle_for_so_long_and_no_earlier(
    autojump_clock: MockClock,
) -> None:
    specs = {"a": EngineSpec("a", unload_after_s=10.0)}
    async with open_scripted_models({"a": ScriptedModel("x" * 4, decode_s=5.0)}, specs) as models:
        await models.complete("x")  # takes 25 s
        await trio.sleep(9.0)
        assert models.state("a") == "ready"
        await models.complete("x")
        await trio.sleep(9.0)
        assert models.state("a") == "ready"
        await trio.sleep(2.0)
        assert models.state("a") == "unloaded"
        assert await models.complete_text("x") == "xxxx"


async def test_a_model_without_a_time_is_never_closed(autojump_clock: MockClock) -> None:
    async with open_scripted_models({"a": "x"}) as models:
        await models.complete("x")
        await trio.sleep(80_000)
        assert models.state("a") == "ready"


async def test_requests_at_the_moment_of_unloading_are_not_lost(autojump_clock: MockClock) -> None:
    specs = {"a": EngineSpec("a", unload_after_s=1.0)}
    async with open_scripted_models({"a": "hello"}, specs, load_s=0.5) as models:
        for pause_s in [0.999999, 1.0, 1.000001] * 5:
            await trio.sleep(pause_s)
            assert await models.complete_text("x") == "hello"


async def test_unload_ends_what_runs_and_the_next_request_loads_again(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted_models({"a": ScriptedModel("x" * 99, decode_s=1.0)}) as models:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(EngineClosed):
                    await models.complete("x")

            nursery.start_soon(ask)
            await trio.sleep(5)
            await models.unload("a")
            assert models.state("a") == "unloaded"
        assert await models.complete_text("x", max_tokens=3) == "xxx"
        await models.unload("a")
        await models.unload("a")


async def test_who_waits_when_a_model_is_unloaded_has_it_loaded_again(
    autojump_clock: MockClock,
) -> None:
    specs = {"a": EngineSpec("a", load="lazy")}
    for _ in range(20):  # Trio runs tasks in any order
        async with (
            open_scripted_models({"a": "hello"}, specs) as models,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(models.complete, "x")
            nursery.start_soon(models.unload, "a")
            nursery.start_soon(models.complete, "x")
            nursery.start_soon(models.unload, "a")


async def test_unload_stops_a_load(autojump_clock: MockClock) -> None:
    async with open_scripted_models({"a": "x"}, load_s=1000.0) as models:
        await trio.sleep(1)
        await models.unload("a")
        assert models.state("a") == "unloaded"
        assert trio.current_time() < 500


# -- restarting ---------------------------------------------------------------------------


async def test_a_crash_is_its_requests_error_and_the_model_comes_back(
    autojump_clock: MockClock,
) -> None:
    model = ScriptedModel("hello")
    async with open_scripted_models({"a": model, "b": "fine"}, restart=STEADY) as models:
        await models.wait_ready("a")
        await crash(models, "a", model)
        began = trio.current_time()
        await trio.testing.wait_all_tasks_blocked()
        assert models.state("a") == "backing off"
        assert await models["b"].complete_text("x") == "fine"
        assert trio.current_time() == began
        assert await models["a"].complete_text("x") == "hello"
        assert trio.current_time() - began == pytest.approx(1.0)


async def test_each_further_restart_waits_twice_as_long(autojump_clock: MockClock) -> None:
    model = ScriptedModel("hello")
    async with open_scripted_models({"a": model}, restart=STEADY) as models:
        waits = [await restart_s(models, "a", model) for _ in range(3)]
        assert waits == pytest.approx([1.0, 2.0, 4.0])


async def test_waits_have_a_longest_and_a_jitter(autojump_clock: MockClock) -> None:
    policy = RestartPolicy(
        jitter=0.5, first_delay_s=10.0, max_delay_s=20.0, max_restarts=20, within_s=1e6
    )
    model = ScriptedModel("hello")
    async with open_scripted_models({"a": model}, restart=policy) as models:
        waits = [await restart_s(models, "a", model) for _ in range(12)]
    assert all(10.0 <= wait <= 30.0 for wait in waits[1:])
    assert len(set(waits)) == len(waits)


async def test_failures_of_long_ago_do_not_count(autojump_clock: MockClock) -> None:
    model = ScriptedModel("hello")
    async with open_scripted_models({"a": model}, restart=STEADY) as models:
        for _ in range(10):
            assert await restart_s(models, "a", model) == pytest.approx(1.0)
            await trio.sleep(61)


async def test_past_the_limit_the_block_ends_with_the_whole_story(
    autojump_clock: MockClock,
) -> None:
    model = ScriptedModel("hello")
    with pytest.raises(RestartsExhausted) as caught:
        async with open_scripted_models({"a": model, "b": "x"}, restart=STEADY) as models:
            for _ in range(4):
                await crash(models, "a", model)
                await trio.sleep(10)
            pytest.fail("it ought to have given up")
    assert caught.value.model == "a"
    assert len(caught.value.failures) == 4
    times = [failure.time_s for failure in caught.value.failures]
    assert times == sorted(times)
    assert all("scripted crash" in failure.error for failure in caught.value.failures)
    assert isinstance(caught.value.__cause__, SessionFatal)


async def test_a_restart_that_cannot_load_is_a_failure_too(autojump_clock: MockClock) -> None:
    model = ScriptedModel("hello")
    loaded: dict[str, ScriptedModel | ModelLoadError] = {"a": model}
    with pytest.raises(RestartsExhausted) as caught:
        async with open_scripted_models(loaded, restart=STEADY) as models:
            await models.wait_ready("a")
            loaded["a"] = ModelLoadError("a.gguf", "gone")
            await crash(models, "a", model)
            await trio.sleep(1000)
    assert ["crash" in f.error for f in caught.value.failures] == [True, False, False, False]


async def test_requests_wait_through_a_restart_that_cannot_load(autojump_clock: MockClock) -> None:
    model = ScriptedModel("hello")
    loaded: dict[str, ScriptedModel | ModelLoadError] = {"a": model}
    async with open_scripted_models(loaded, restart=STEADY) as models:
        await models.wait_ready("a")
        loaded["a"] = ModelLoadError("a.gguf", "gone")
        await crash(models, "a", model)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(models.complete, "x")
            await trio.sleep(2.0)  # the first restart was after 1 s
            loaded["a"] = ScriptedModel("hello again")
        assert trio.current_time() - began == pytest.approx(1.0 + 2.0)


async def test_a_request_that_waits_through_a_restart_can_leave(autojump_clock: MockClock) -> None:
    model = ScriptedModel("hello")
    async with open_scripted_models({"a": model}, restart=STEADY) as models:
        await crash(models, "a", model)
        with trio.move_on_after(0.5) as scope:
            await models.complete("x")
        assert scope.cancelled_caught
        assert await models.complete_text("x") == "hello"


# -- coming and going ----------------------------------------------------------------------


async def test_models_can_be_added_and_removed(autojump_clock: MockClock) -> None:
    async with open_scripted_models({"a": "from a", "c": "from c"}, {"a": EngineSpec("a")}) as m:
        await m.add("third", EngineSpec("c"))
        assert await m.complete_text("x", model="third") == "from c"
        with pytest.raises(ProtocolError, match="already"):
            await m.add("third", EngineSpec("c"))
        await m.remove("third")
        with pytest.raises(ProtocolError, match="unknown"):
            await m.complete("x", model="third")
        with pytest.raises(ProtocolError, match="unknown"):
            await m.remove("third")
        await m.add("third", EngineSpec("c", load="lazy"))
        assert m.state("third") == "unloaded"


async def test_after_the_block_no_model_is_added(autojump_clock: MockClock) -> None:
    async with open_scripted_models({"a": "hello"}) as models:
        pass
    with pytest.raises(EngineClosed):
        await models.add("b", EngineSpec("b"))
    with pytest.raises(EngineClosed):
        await models.change({})


async def test_a_model_that_cannot_be_loaded_is_not_added(autojump_clock: MockClock) -> None:
    loaded: dict[str, str | Exception] = {"a": "x", "bad": ModelLoadError("bad", "scripted")}
    async with open_scripted_models(loaded, {"a": EngineSpec("a")}) as models:
        with pytest.raises(ModelLoadError):
            await models.add("bad", EngineSpec("bad"))
        assert list(models) == ["a"]


async def test_removing_ends_what_runs_and_what_waits(autojump_clock: MockClock) -> None:
    model = ScriptedModel("x" * 99, decode_s=1.0)
    async with open_scripted_models({"a": model, "b": "x"}, load_s=2.0) as models:

        async def ask(name: str) -> None:
            with pytest.raises(EngineClosed):
                await models[name].complete("x")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "a")
            nursery.start_soon(ask, "b")
            await trio.sleep(1)
            await models.remove("b")
            await trio.sleep(5)
            await models.remove("a")
        assert list(models) == []


async def test_leaving_the_block_ends_everything_and_a_body_error_comes_out_as_itself(
    autojump_clock: MockClock,
) -> None:
    with pytest.raises(KeyError):
        async with open_scripted_models({"a": "x"}, load_s=100.0):
            raise KeyError("mine")


@pytest.mark.parametrize(
    "make",
    [
        lambda: EngineSpec(1),  # type: ignore[arg-type]
        lambda: EngineSpec("a", load="soon"),  # type: ignore[arg-type]
        lambda: EngineSpec("a", load=["lazy"]),  # type: ignore[arg-type]
        lambda: EngineSpec("a", unload_after_s="5"),  # type: ignore[arg-type]
        lambda: EngineSpec("a", isolation="thread"),  # type: ignore[arg-type]
        lambda: EngineSpec("a", isolation={}),  # type: ignore[arg-type]
        lambda: EngineSpec("a", n_slot=3),  # type: ignore[call-arg]
        lambda: EngineSpec("a", n_slots="3"),  # type: ignore[arg-type]
    ],
)
async def test_a_wrong_spec_is_refused(make: Callable[[], EngineSpec]) -> None:
    with pytest.raises(ProtocolError):
        make()


SPEC = EngineSpec("a")


@pytest.mark.parametrize(
    ("specs", "options", "names"),
    [
        ("a", {}, "models .* str"),
        ({"a": "path"}, {}, "model 'a' must be an EngineSpec, not str"),
        ({"a": SPEC, 1: SPEC}, {}, "name of a model .* int"),
        ({"a": SPEC}, {"default": ["a"]}, "default .* list"),
        ({}, {"restart": 5}, "restart .* int"),
        ({}, {"restart": 0}, "restart .* int"),
        ({}, {"memory_budget_bytes": -1}, "memory_budget_bytes"),
        ({}, {"memory_budget_bytes": 1.5}, "memory_budget_bytes"),
    ],
)
async def test_wrong_arguments_are_refused_by_name(
    specs: Any, options: dict[str, Any], names: str
) -> None:
    with pytest.raises(ProtocolError, match=names):
        async with open_models(specs, **options):
            pytest.fail("it was opened")


@pytest.mark.parametrize(("name", "spec"), [("b", "path"), (1, SPEC), (["a"], SPEC), (None, SPEC)])
async def test_what_is_no_model_is_not_taken_in(
    name: Any, spec: Any, autojump_clock: MockClock
) -> None:
    async with open_scripted_models({"a": "hello"}) as models:
        with pytest.raises(ProtocolError, match="model"):
            await models.add(name, spec)
        if not isinstance(name, list):
            with pytest.raises(ProtocolError, match="model"):
                await models.change({"a": SPEC, name: spec})
        assert list(models) == ["a"]
        assert await models.complete_text("x") == "hello"
