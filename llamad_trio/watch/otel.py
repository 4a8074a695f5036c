"""An engine's requests as OpenTelemetry spans and metrics.

Decides what they are called, after the semantic conventions for generative AI.  Knows
nothing of exporters: those are the application's, in the providers it has set up.  No text
of a prompt or a reply ever gets here, except what the message of an error quotes.

Needs the extra `otel`; without it this module can be imported, but not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from llamad_trio.core.engine_events import (
    EngineEvent,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from llamad_trio.core.errors import UnsupportedFeature
from llamad_trio.system.nursery import TaskStatus
from llamad_trio.watch import EventSource, follow

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import TracerProvider

PROVIDER = "llamad_trio"

OPERATIONS = {"chat": "chat", "completion": "text_completion"}
"""Those that the conventions have names for; the others keep ours."""

ONLY_READ = ("score", "prefill")
"""Kinds of requests that generate nothing, and so have no reason to finish."""

# The buckets are those that the conventions ask for.
REQUEST_S = tuple(0.01 * 2**n for n in range(14))
# fmt: off
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)
# fmt: on
OUTPUT_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = tuple(4**n for n in range(14))

End = RequestFinished | RequestFailed | RequestCancelled

Value = str | int | float | tuple[str, ...]


class EngineTelemetry:
    """Spans and metrics of any number of engines.

    Args:
        model: tells the model's name by the name of its engine, which is empty for an engine
            that was opened alone.
        tracer_provider, meter_provider: where spans and metrics go; by default, the global
            ones.

    Every request becomes one span when it ends, a child of the span that was current where it
    was asked for.

    Raises:
        UnsupportedFeature: OpenTelemetry is not installed.
    """

    def __init__(
        self,
        model: Callable[[str], str],
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError:
            raise UnsupportedFeature(
                "OpenTelemetry", "it is not installed: run `pip install 'llamad-trio[otel]'`"
            ) from None
        self._model = model
        self._tracer = trace.get_tracer("llamad_trio", tracer_provider=tracer_provider)
        meter = metrics.get_meter("llamad_trio", meter_provider=meter_provider)

        def histogram(name: str, buckets: Sequence[float], text: str, unit: str = "s") -> Histogram:
            return meter.create_histogram(
                f"gen_ai.{name}", unit, text, explicit_bucket_boundaries_advisory=buckets
            )

        self._tokens = histogram(
            "client.token.usage", TOKENS, "Number of input and output tokens used.", "{token}"
        )
        self._duration = histogram(
            "server.request.duration", REQUEST_S, "From submission to the end of a request."
        )
        self._first_token = histogram(
            "server.time_to_first_token",
            FIRST_TOKEN_S,
            "From submission to the first token, of completed requests.",
        )
        self._output_token = histogram(
            "server.time_per_output_token",
            OUTPUT_TOKEN_S,
            "Time for each token after the first, of completed requests.",
        )

    async def run(
        self, source: EventSource, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Record the requests of a source, until it ends.  Any number may be recorded at once.

        Args:
            source: an engine, or whatever else has `events`.
            task_status: for `nursery.start`, which returns when no request is missed any more.

        A checkpoint.  Cancelled, it records no further.
        """
        await follow(source, self.record, task_status=task_status)

    def record(self, event: EngineEvent) -> None:
        """Record one event.  At its time or soon after: it is dated by what has passed since."""
        if isinstance(event, RequestFinished | RequestFailed | RequestCancelled):
            common: dict[str, Value] = {
                "gen_ai.operation.name": OPERATIONS.get(event.kind, event.kind),
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self._model(event.engine),
            }
            if isinstance(event, RequestFinished):
                self._measure(event, common)
            elif isinstance(event, RequestFailed):
                common["error.type"] = type(event.error).__name__
            else:
                common["error.type"] = "cancelled"
            self._duration.record(event.duration_s, common)
            self._trace(event, common)

    def _measure(self, event: RequestFinished, common: dict[str, Value]) -> None:
        self._tokens.record(event.prompt_tokens, {**common, "gen_ai.token.type": "input"})
        self._tokens.record(event.generated_tokens, {**common, "gen_ai.token.type": "output"})
        if event.generated_tokens:
            self._first_token.record(event.ttft_s, common)
        if event.generated_tokens > 1:
            rest_s = event.duration_s - event.ttft_s
            self._output_token.record(rest_s / (event.generated_tokens - 1), common)

    def _trace(self, event: End, common: dict[str, Value]) -> None:
        from opentelemetry.context import get_current
        from opentelemetry.trace import SpanKind, Status, StatusCode

        attributes = dict(common)
        if isinstance(event, RequestFinished):
            attributes["gen_ai.usage.input_tokens"] = event.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = event.generated_tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = event.cached_tokens
            if event.kind not in ONLY_READ:
                attributes["gen_ai.response.finish_reasons"] = (event.finish_reason,)
        asked_in = None if event.context is None else event.context.run(get_current)
        end_s = time.time() - (trio.current_time() - event.time)
        span = self._tracer.start_span(
            f"{common['gen_ai.operation.name']} {common['gen_ai.request.model']}",
            context=asked_in,
            kind=SpanKind.INTERNAL,  # the model runs in this process
            attributes=attributes,
            start_time=_nanoseconds(end_s - event.duration_s),
        )
        if isinstance(event, RequestFinished) and event.generated_tokens:
            first_s = end_s - event.duration_s + event.ttft_s
            span.add_event("first token", timestamp=_nanoseconds(first_s))
        if isinstance(event, RequestFailed):
            span.set_status(Status(StatusCode.ERROR, str(event.error)))
        span.end(_nanoseconds(end_s))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
