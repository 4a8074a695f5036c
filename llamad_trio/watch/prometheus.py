"""An engine's numbers in the text format of Prometheus.

Decides their names, labels and buckets.  Opens no port and no socket: `scrape` gives the
bytes, and the application serves them as it likes.

What the statistics of an engine hold (slots, queue, pool, totals) is read from them when it
is asked for, and is as exact as those are; what only the events tell (distributions, kinds of
errors) is counted by `run`, and lacks what a `Lagged` says was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

import trio
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llamad_trio.core.engine_events import (
    EngineEvent,
    EngineFailed,
    EngineRestarted,
    FirstToken,
    Lagged,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestStarted,
)
from llamad_trio.core.errors import LlamadError
from llamad_trio.core.info import EngineStats
from llamad_trio.system.nursery import TaskStatus
from llamad_trio.watch import EventSource, follow, refresh_all

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The `Content-Type` of what `EngineMetrics.scrape` gives."""

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)
TOKENS = tuple(2**n for n in range(0, 18, 2))
"""Up to 65,536, by fours."""

StatsByEngine = Mapping[str, EngineStats]


class StatsSource(Protocol):
    """What has statistics, such as an `Engine`, a `Model` or a `RemoteEngine`."""

    def stats(self) -> EngineStats:
        """Those of now.  Raises a `LlamadError` if there are none."""
        ...


class EngineMetrics:
    """The metrics of any number of engines.

    Args:
        stats: the engines by the name that their events carry (empty for an engine that was
            opened alone), such as what `open_models` gives.  Read by every `scrape`: engines
            may come and go, and one that has no statistics, since it is not loaded or could not
            be, is left out.  Or a function that gives the statistics of each engine; what it raises
            comes out of `scrape`.

        metrics = EngineMetrics({"": eng})
        await nursery.start(metrics.run, eng)
        ...
        body = await metrics.scrape()
    """

    def __init__(self, stats: Mapping[str, StatsSource] | Callable[[], StatsByEngine]) -> None:
        self._engines = stats if isinstance(stats, Mapping) else {}
        self._stats = partial(_read_stats, stats) if isinstance(stats, Mapping) else stats
        self._limiter = trio.CapacityLimiter(1)
        registry = self._registry = _Counted()
        seconds = partial(Histogram, namespace="llamad", registry=registry, buckets=SECONDS)
        tokens = partial(Histogram, namespace="llamad", registry=registry, buckets=TOKENS)
        counter = partial(Counter, namespace="llamad", registry=registry)
        whose = ("engine",)
        self._ttft = seconds("time_to_first_token_seconds", "From submission.", whose)
        self._queued = seconds("queue_seconds", "From submission to a slot.", whose)
        self._duration = seconds(
            "request_duration_seconds", "From submission to the end.", (*whose, "outcome")
        )
        self._prompt = tokens("prompt_tokens", "Length of prompts.", whose)
        self._generated = tokens("generated_tokens", "Length of replies.", whose)
        self._errors = counter("request_errors", "Failed requests by error.", (*whose, "error"))
        self._failures = counter("engine_failures", "Failures of an engine.", (*whose, "error"))
        self._restarts = counter("engine_restarts", "Restarts after a failure.", whose)
        self._lost = counter("events_lost", "Events these metrics were too slow for.")

    async def run(
        self, source: EventSource, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Count the events of a source, until it ends.  Any number may be counted at once.

        Args:
            source: an engine, or whatever else has `events`.
            task_status: for `nursery.start`, which returns when no event is missed any more.

        A checkpoint.  Cancelled, it counts no further; what was counted stays.
        """
        await follow(source, self.count, task_status=task_status)

    def count(self, event: EngineEvent) -> None:
        engine = event.engine
        match event:
            case RequestStarted():
                self._queued.labels(engine).observe(event.queued_s)
            case FirstToken():
                self._ttft.labels(engine).observe(event.ttft_s)
            case RequestFinished():
                self._duration.labels(engine, "completed").observe(event.duration_s)
                self._prompt.labels(engine).observe(event.prompt_tokens)
                self._generated.labels(engine).observe(event.generated_tokens)
            case RequestFailed():
                self._duration.labels(engine, "failed").observe(event.duration_s)
                self._errors.labels(engine, type(event.error).__name__).inc()
            case RequestCancelled():
                self._duration.labels(engine, "cancelled").observe(event.duration_s)
            case EngineFailed():
                self._failures.labels(engine, type(event.error).__name__).inc()
            case EngineRestarted():
                self._restarts.labels(engine).inc()
            case Lagged():
                self._lost.inc(event.n_lost)
            case _:
                pass  # the statistics have it

    def render(self) -> bytes:
        """All metrics as they are now, in the text format.

        Asks nobody: of an engine in another process it has what that told last.  Takes about
        2 ms for each engine: where others wait for the Trio thread, `scrape` is for them.
        """
        return _text(self._stats(), self._registry)

    async def scrape(self) -> bytes:
        """As `render`, but an engine in another process is asked for its statistics first, if
        engines were given, and the text is written by a worker thread.

        A checkpoint.  For an engine that does not answer within a second, those it told last.
        """
        await refresh_all(self._engines.values())
        stats = self._stats()
        return await trio.to_thread.run_sync(_text, stats, self._registry, limiter=self._limiter)


def _read_stats(engines: Mapping[str, StatsSource]) -> StatsByEngine:
    stats = {}
    for name, engine in engines.items():
        with suppress(LlamadError):
            stats[name] = engine.stats()
    return stats


def _text(stats: StatsByEngine, counted: CollectorRegistry) -> bytes:
    """What the statistics hold, and what was counted.  From any thread."""
    known = CollectorRegistry()
    known.register(_StatsCollector(stats))
    return generate_latest(known) + generate_latest(counted)


class _Counted(CollectorRegistry):
    """Leaves out the time at which each metric was made, which the client adds as a gauge.

    It has a switch for that, but one for all of the process.
    """

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class _StatsCollector(Collector):
    def __init__(self, stats: StatsByEngine) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        gauge = partial(self._metric, GaugeMetricFamily)
        counter = partial(self._metric, CounterMetricFamily)
        yield gauge("slots", "Slots by state.", lambda s: s.slots, "state")
        yield gauge("queued_requests", "Requests waiting for a slot.", lambda s: s.queued)
        yield gauge("kv_tokens", "The KV pool by use.", _kv_tokens, "state")
        yield counter("requests", "Requests by outcome.", lambda s: s.requests, "outcome")
        yield counter("tokens", "Tokens by how they came about.", _tokens, "kind")
        yield counter("compute_seconds", "Time spent in steps.", _seconds, "kind")
        yield counter("steps", "Steps run.", lambda s: s.steps)
        yield counter("aborted_steps", "Steps cut short.", lambda s: s.aborted_steps)
        yield counter("preemptions", "Running requests that gave way.", lambda s: s.preemptions)
        yield gauge("threads", "Threads that compute, by step.", _threads, "kind")

    def _metric(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        read: Callable[[EngineStats], Mapping[str, float] | float],
        *labels: str,
    ) -> Metric:
        metric = family(f"llamad_{name}", text, labels=("engine", *labels))
        for engine, stats in self._stats.items():
            value = read(stats)
            if isinstance(value, Mapping):
                for label, part in value.items():
                    metric.add_metric((engine, label), part)
            else:
                metric.add_metric((engine,), value)
        return metric


def _kv_tokens(stats: EngineStats) -> Mapping[str, float]:
    return {
        "used": stats.kv_used_tokens,
        "retained": stats.kv_retained_tokens,
        "free": stats.kv_free_tokens,
    }


def _tokens(stats: EngineStats) -> Mapping[str, float]:
    return {
        "prefill": stats.prefill_tokens,
        "decode": stats.decode_tokens,
        "cached": stats.cached_tokens,
    }


def _seconds(stats: EngineStats) -> Mapping[str, float]:
    return {"prefill": stats.prefill_s, "decode": stats.decode_s}


def _threads(stats: EngineStats) -> Mapping[str, float]:
    return {"prefill": stats.n_threads_batch, "decode": stats.n_threads}
