"""What Prometheus reads is what happened."""

from __future__ import annotations

import re
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock

from llamad_trio import EngineSpec, InferenceError, ModelLoadError, connect, serve_unix
from llamad_trio.core.engine_events import EngineFailed, EngineRestarted, Lagged
from llamad_trio.testing import ScriptedModel, open_scripted_engine, open_scripted_models
from llamad_trio.watch import REFRESH_S
from llamad_trio.watch.prometheus import EngineMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llamad_trio import Engine
    from llamad_trio.core.info import EngineStats

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: bytes) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"llamad_{name}", frozenset({"engine": "", **labels}.items())]


async def test_the_statistics_are_there_as_they_are(autojump_clock: MockClock) -> None:
    model = ScriptedModel("yes", decode_s=1)
    async with open_scripted_engine(model, n_slots=2) as engine:
        metrics = EngineMetrics(lambda: {"": engine.stats()})
        async with engine.stream("a prompt") as stream:
            await stream.receive()
            running = read(metrics.render())
            stats = engine.stats()
            assert of(running, "slots", state="decode") == 1
            assert of(running, "slots", state="free") == 1
            assert of(running, "queued_requests") == 0
            assert of(running, "kv_tokens", state="used") == stats.kv_used_tokens > 0
            assert of(running, "kv_tokens", state="free") == stats.kv_free_tokens
        await engine.complete("a prompt")
        ended, stats = read(metrics.render()), engine.stats()
        assert of(ended, "kv_tokens", state="retained") == stats.kv_retained_tokens > 0
        for outcome, n in {"completed": 1, "cancelled": 1, "failed": 0}.items():
            assert of(ended, "requests_total", outcome=outcome) == n
        assert of(ended, "tokens_total", kind="prefill") == stats.prefill_tokens > 0
        assert of(ended, "tokens_total", kind="decode") == stats.decode_tokens > 0
        assert of(ended, "tokens_total", kind="cached") == stats.cached_tokens > 0
        assert of(ended, "compute_seconds_total", kind="prefill") == stats.prefill_s > 0
        assert of(ended, "compute_seconds_total", kind="decode") == stats.decode_s > 0
        assert of(ended, "steps_total") == stats.steps > 0
        assert of(ended, "aborted_steps_total") == stats.aborted_steps
        assert of(ended, "preemptions_total") == stats.preemptions


@asynccontextmanager
async def measured(
    model: ScriptedModel | str, **config: Any
) -> AsyncIterator[tuple[Engine, EngineMetrics]]:
    """A scripted engine, and metrics that count its events up to its end."""
    async with trio.open_nursery() as nursery, open_scripted_engine(model, **config) as engine:
        metrics = EngineMetrics(lambda: {"": engine.stats()})
        await nursery.start(metrics.run, engine)
        yield engine, metrics


async def test_distributions_come_from_the_events(autojump_clock: MockClock) -> None:
    model = ScriptedModel({"good": "yes"}, decode_s=1)
    async with measured(model, n_slots=1) as (engine, metrics):
        async with trio.open_nursery() as users:
            users.start_soon(engine.complete, "good")
            await trio.testing.wait_all_tasks_blocked()
            users.start_soon(engine.complete, "good")
        with pytest.raises(InferenceError):
            await engine.complete("bad")
        with trio.move_on_after(0.5):
            await engine.complete("good")
        await trio.testing.wait_all_tasks_blocked()
        samples = read(metrics.render())
    assert of(samples, "queue_seconds_sum") == 4
    assert of(samples, "queue_seconds_count") == 4
    assert of(samples, "time_to_first_token_seconds_sum") == 1 + 5
    assert of(samples, "time_to_first_token_seconds_count") == 2
    assert of(samples, "time_to_first_token_seconds_bucket", le="1.0") == 1
    assert of(samples, "request_duration_seconds_sum", outcome="completed") == 4 + 8
    assert of(samples, "request_duration_seconds_count", outcome="failed") == 1
    assert of(samples, "request_duration_seconds_sum", outcome="cancelled") == 0.5
    assert of(samples, "generated_tokens_sum") == 8
    assert of(samples, "prompt_tokens_count") == 2
    assert of(samples, "request_errors_total", error="InferenceError") == 1


async def test_what_a_supervisor_tells_is_counted() -> None:
    metrics = EngineMetrics(dict)
    metrics.count(EngineFailed(time=1, engine="", error=InferenceError("of a test")))
    metrics.count(EngineRestarted(time=2, engine="", attempt=1, after_s=1))
    metrics.count(Lagged(time=3, engine="", n_lost=5))
    samples = read(metrics.render())
    assert of(samples, "engine_failures_total", error="InferenceError") == 1
    assert of(samples, "engine_restarts_total") == 1
    assert samples["llamad_events_lost_total", frozenset()] == 5


async def test_every_metric_is_in_the_documents_and_every_one_there_is_told() -> None:
    async with measured(ScriptedModel({"good": "yes"})) as (engine, metrics):
        await engine.complete("good")
        with pytest.raises(InferenceError):
            await engine.complete("bad")
    metrics.count(EngineFailed(time=1, engine="", error=InferenceError("of a test")))
    metrics.count(EngineRestarted(time=2, engine="", attempt=1, after_s=1))
    told = {
        re.sub(r"_(bucket|sum|count)$", "", sample.name)
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }
    document = Path(__file__).parents[2] / "docs" / "watching.md"
    table = [
        line.split("|")[1]
        for line in document.read_text().splitlines()
        if line.startswith("| `llamad_")
    ]
    assert told == set(re.findall(r"`(llamad_\w+)`", "".join(table)))


async def test_engines_are_told_apart_and_may_come_and_go(autojump_clock: MockClock) -> None:
    stats: dict[str, EngineStats] = {}
    metrics = EngineMetrics(lambda: stats)
    async with open_scripted_engine("yes") as engine:
        stats["a"] = engine.stats()
        await engine.complete("x")
        stats['"b"\n'] = engine.stats()
    both = read(metrics.render())
    assert of(both, "requests_total", engine="a", outcome="completed") == 0
    assert of(both, "requests_total", engine='"b"\n', outcome="completed") == 1
    del stats["a"]
    names = {dict(labels).get("engine") for _, labels in read(metrics.render())}
    assert names - {None} == {'"b"\n'}


async def test_models_that_are_not_loaded_are_left_out() -> None:
    specs = {
        "a": EngineSpec("a"),
        "lazy": EngineSpec("a", load="lazy"),
        "bad": EngineSpec("bad", load="lazy"),
    }
    bad = ModelLoadError("bad", "of a test")
    async with open_scripted_models({"a": "yes", "bad": bad}, specs) as models:
        metrics = EngineMetrics(models)
        await models.wait_ready("a")
        with pytest.raises(ModelLoadError):
            await models.load("bad")
        for body in (metrics.render(), await metrics.scrape()):
            assert engines_in(body) == {"a"}
        await models.complete("x", model="lazy")
        both = await metrics.scrape()
        assert engines_in(both) == {"a", "lazy"}
        assert of(read(both), "requests_total", engine="lazy", outcome="completed") == 1
        await models.unload("a")
        assert engines_in(await metrics.scrape()) == {"lazy"}


async def test_a_scrape_asks_engines_that_are_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    async with open_scripted_engine("yes") as engine, trio.open_nursery() as nursery:
        await nursery.start(serve_unix, engine, path)
        async with connect(path) as remote:
            metrics = EngineMetrics({"": remote})
            await engine.complete("x")
            assert of(read(metrics.render()), "requests_total", outcome="completed") == 0
            assert of(read(await metrics.scrape()), "requests_total", outcome="completed") == 1
        nursery.cancel_scope.cancel()


async def test_engines_that_do_not_answer_are_waited_for_together(
    autojump_clock: MockClock,
) -> None:
    async with open_scripted_engine("yes") as engine:
        silent = {name: SilentEngine(engine) for name in "abc"}
        began = trio.current_time()
        assert engines_in(await EngineMetrics(silent).scrape()) == {"a", "b", "c"}
        assert trio.current_time() - began == REFRESH_S


class SilentEngine:
    """Somewhere else, where nobody answers in time."""

    def __init__(self, engine: Engine) -> None:
        self.stats = engine.stats

    async def refresh(self) -> EngineStats:
        await trio.sleep(10 * REFRESH_S)
        return self.stats()


def engines_in(body: bytes) -> set[str]:
    return {dict(labels)["engine"] for _, labels in read(body) if dict(labels)}


async def test_a_scrape_asks_in_the_trio_thread_and_writes_in_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_by: list[int] = []

    def stats() -> dict[str, EngineStats]:
        asked_by.append(threading.get_ident())
        return {}

    metrics = EngineMetrics(stats)
    text = metrics.render()
    with trio.testing.assert_checkpoints():
        assert await metrics.scrape() == text
    assert set(asked_by) == {threading.get_ident()}

    def must_be_elsewhere(registry: object) -> bytes:
        assert threading.get_ident() not in asked_by
        return b""

    monkeypatch.setattr("llamad_trio.watch.prometheus.generate_latest", must_be_elsewhere)
    assert await metrics.scrape() == b""
