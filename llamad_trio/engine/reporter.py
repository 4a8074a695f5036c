"""Tells of one engine, as events on its broadcast.

Decides what each event says.  While nobody listens, nothing is made or copied.
"""

from __future__ import annotations

import copy
from typing import Any

import trio

from llamad_trio.core.completion import Completion
from llamad_trio.core.engine_events import (
    EngineLoaded,
    EngineStopped,
    FirstToken,
    PrefixReused,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestStarted,
    StepDone,
    ThreadsChanged,
)
from llamad_trio.core.errors import LlamadError
from llamad_trio.engine.ticket import Ticket
from llamad_trio.watch.broadcast import Broadcast


class Reporter:
    """One engine's way to its watchers, by the name that its events carry.  No method blocks."""

    def __init__(self, broadcast: Broadcast, engine: str) -> None:
        self._broadcast = broadcast
        self._engine = engine

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens."""
        return self._broadcast.has_readers

    def tell_loaded(self, load_s: float) -> None:
        """The engine takes requests."""
        if self.is_heard:
            self._broadcast.publish(EngineLoaded(**self._now(), load_s=load_s))

    def tell_stopped(self, reason: str | None) -> None:
        """The engine takes no requests any more."""
        if self.is_heard:
            self._broadcast.publish(EngineStopped(**self._now(), reason=reason))

    def tell_queued(self, ticket: Ticket) -> None:
        """A request was accepted."""
        if self.is_heard:
            self._broadcast.publish(RequestQueued(**self._whole(ticket)))

    def tell_started(self, ticket: Ticket, cached_tokens: int) -> None:
        """A request is in a step for the first time, behind `cached_tokens` of its prompt."""
        if not self.is_heard:
            return
        of = self._of(ticket)
        queued_s = of["time"] - ticket.submitted_at
        self._broadcast.publish(
            RequestStarted(**of, queued_s=queued_s, prompt_tokens=ticket.prompt_tokens)
        )
        if cached_tokens:
            self._broadcast.publish(PrefixReused(**of, cached_tokens=cached_tokens))

    def tell_first_token(self, ticket: Ticket) -> None:
        """A request has generated something."""
        if self.is_heard:
            self._broadcast.publish(FirstToken(**self._of(ticket), ttft_s=ticket.ttft_s))

    def tell_preempted(self, ticket: Ticket) -> None:
        """A running request waits again."""
        if self.is_heard:
            self._broadcast.publish(RequestPreempted(**self._of(ticket)))

    def tell_finished(self, ticket: Ticket, completion: Completion) -> None:
        """A request is complete."""
        if self.is_heard:
            self._broadcast.publish(
                RequestFinished(
                    **self._whole(ticket),
                    duration_s=completion.duration_s,
                    prompt_tokens=completion.prompt_tokens,
                    generated_tokens=completion.generated_tokens,
                    cached_tokens=completion.cached_tokens,
                    finish_reason=completion.finish_reason,
                    ttft_s=completion.ttft_s,
                )
            )

    def tell_failed(self, ticket: Ticket, error: LlamadError) -> None:
        """A request ended with an error."""
        if self.is_heard:
            end = self._whole(ticket)
            duration_s = end["time"] - ticket.submitted_at
            # A copy: what is raised gets a traceback, which no reader should keep alive.
            self._broadcast.publish(
                RequestFailed(**end, duration_s=duration_s, error=copy.copy(error))
            )

    def tell_cancelled(self, ticket: Ticket) -> None:
        """Whoever asked has left."""
        if self.is_heard:
            end = self._whole(ticket)
            self._broadcast.publish(
                RequestCancelled(**end, duration_s=end["time"] - ticket.submitted_at)
            )

    def tell_step(
        self,
        *,
        duration_s: float,
        decode_tokens: int,
        prefill_tokens: int,
        aborted: bool,
        slots_in_use: int,
    ) -> None:
        """A step has ended."""
        if self.is_heard:
            self._broadcast.publish(
                StepDone(
                    **self._now(),
                    duration_s=duration_s,
                    decode_tokens=decode_tokens,
                    prefill_tokens=prefill_tokens,
                    aborted=aborted,
                    slots_in_use=slots_in_use,
                )
            )

    def tell_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Other numbers of threads compute from now on."""
        if self.is_heard:
            self._broadcast.publish(
                ThreadsChanged(**self._now(), n_threads=n_threads, n_threads_batch=n_threads_batch)
            )

    def _now(self) -> dict[str, Any]:
        return {"time": trio.current_time(), "engine": self._engine}

    def _of(self, ticket: Ticket) -> dict[str, Any]:
        return {**self._now(), "request_id": ticket.id}

    def _whole(self, ticket: Ticket) -> dict[str, Any]:
        return {**self._of(ticket), "kind": ticket.kind, "context": ticket.context}
