"""Spans and metrics say what happened, in the words of the conventions."""

from __future__ import annotations

import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from trio.testing import MockClock

from llamad_trio import InferenceError, UnsupportedFeature
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from llamad_trio.watch.otel import EngineTelemetry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from opentelemetry.sdk.trace import ReadableSpan

    from llamad_trio import Engine

COMMON = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "llamad_trio",
    "gen_ai.request.model": "the model",
}


class Recorded:
    """An `EngineTelemetry`, and what it has recorded."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self._metrics = InMemoryMetricReader()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.telemetry = EngineTelemetry(
            lambda engine: engine or "the model",
            tracer_provider=self.tracer_provider,
            meter_provider=MeterProvider([self._metrics]),
        )

    def spans(self) -> list[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if "model" in span.name]

    def points(self) -> dict[str, list[HistogramDataPoint]]:
        data = self._metrics.get_metrics_data()
        assert data is not None
        return {
            metric.name: [p for p in metric.data.data_points if isinstance(p, HistogramDataPoint)]
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@asynccontextmanager
async def recording(model: ScriptedModel | str) -> AsyncIterator[tuple[Engine, Recorded]]:
    """A scripted engine, and what is recorded of it up to its end."""
    recorded = Recorded()
    async with trio.open_nursery() as nursery, open_scripted_engine(model) as engine:
        await nursery.start(recorded.telemetry.run, engine)
        yield engine, recorded


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_a_completed_request_is_a_span_with_its_usage(autojump_clock: MockClock) -> None:
    async with recording(ScriptedModel("yes", decode_s=1)) as (engine, recorded):
        done = await engine.complete("a")
    (span,) = recorded.spans()
    assert span.name == "chat the model"
    assert span.kind is SpanKind.INTERNAL
    assert span.status.status_code is StatusCode.UNSET
    assert attributes(span) == {
        **COMMON,
        "gen_ai.usage.input_tokens": done.prompt_tokens,
        "gen_ai.usage.output_tokens": done.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert seconds(span) == pytest.approx(4)
    assert span.start_time is not None
    assert span.end_time is not None
    assert abs(span.end_time / 1e9 - time.time()) < 60, "dated by the wall clock"
    (first,) = span.events
    assert (first.timestamp - span.start_time) / 1e9 == pytest.approx(1)


async def test_a_span_is_the_child_of_the_one_it_was_asked_in(autojump_clock: MockClock) -> None:
    contexts = []
    async with recording("yes") as (engine, recorded):
        tracer = recorded.tracer_provider.get_tracer("of the application")

        async def ask(name: str) -> None:
            with tracer.start_as_current_span(name) as span:
                contexts.append(span.get_span_context())
                await engine.complete(name)

        async with trio.open_nursery() as users:
            users.start_soon(ask, "one")
            users.start_soon(ask, "two")
        await engine.complete("alone")
    *children, alone = recorded.spans()
    parents = {span.parent.span_id for span in children if span.parent is not None}
    assert parents == {context.span_id for context in contexts}
    assert len(parents) == 2
    assert alone.parent is None
    assert not trace.get_current_span().is_recording(), "nothing is left behind"


async def test_a_failure_is_an_error_and_a_cancel_is_not(autojump_clock: MockClock) -> None:
    async with recording(ScriptedModel({"good": "yes"}, decode_s=1)) as (engine, recorded):
        with pytest.raises(InferenceError):
            await engine.complete("bad", raw=True)
        with trio.move_on_after(0.5):
            await engine.complete("good", raw=True)
    failed, cancelled = recorded.spans()
    common = {**COMMON, "gen_ai.operation.name": "text_completion"}
    assert failed.name == "text_completion the model"
    assert attributes(failed) == {**common, "error.type": "InferenceError"}
    assert failed.status.status_code is StatusCode.ERROR
    assert "no reply is scripted" in (failed.status.description or "")
    assert attributes(cancelled) == {**common, "error.type": "cancelled"}
    assert cancelled.status.status_code is StatusCode.UNSET
    assert seconds(cancelled) == pytest.approx(0.5)


async def test_metrics_have_the_names_and_units_of_the_conventions(
    autojump_clock: MockClock,
) -> None:
    async with recording(ScriptedModel({"good": "yes"}, decode_s=1)) as (engine, recorded):
        done = await engine.complete("good")
        with pytest.raises(InferenceError):
            await engine.complete("bad")
    points = recorded.points()
    asked, answered = points["gen_ai.client.token.usage"]
    assert asked.attributes == {**COMMON, "gen_ai.token.type": "input"}
    assert asked.sum == done.prompt_tokens
    assert asked.explicit_bounds[:3] == (1, 4, 16)
    assert answered.attributes == {**COMMON, "gen_ai.token.type": "output"}
    assert answered.sum == done.generated_tokens
    well, badly = points["gen_ai.server.request.duration"]
    assert (well.sum, well.attributes) == (4, COMMON)
    assert badly.attributes == {**COMMON, "error.type": "InferenceError"}
    (first,) = points["gen_ai.server.time_to_first_token"]
    assert (first.sum, first.count) == (1, 1)
    (output,) = points["gen_ai.server.time_per_output_token"]
    assert (output.sum, output.count) == (1, 1)


async def test_what_only_scores_has_no_first_token_and_no_reason_to_finish(
    autojump_clock: MockClock,
) -> None:
    async with recording("yes") as (engine, recorded):
        await engine.score("a", ["yes"])
    spans = recorded.spans()
    assert [span.name for span in spans] == ["prefill the model", "score the model"]
    assert [span.events for span in spans] == [(), ()]
    for span in spans:
        assert "gen_ai.usage.input_tokens" in attributes(span)
        assert "gen_ai.response.finish_reasons" not in attributes(span)
    assert "gen_ai.server.time_to_first_token" not in recorded.points()


def test_without_opentelemetry_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(UnsupportedFeature, match=r"llamad-trio\[otel\]"):
        EngineTelemetry(str)
