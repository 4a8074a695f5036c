"""What happens in an engine, as data for whoever watches it.

Decides what is told, and nothing of when or to whom.  An event is true at its time, and
stands for itself: no reader has to remember another one to understand it.

The events of one request, in order: `RequestQueued`, `RequestStarted`, `PrefixReused` if
anything was reused, `FirstToken` if one was generated, and exactly one end:
`RequestFinished`, `RequestFailed` or `RequestCancelled`.  `RequestPreempted` may come any
number of times between its start and its end; an end may come at any time.
"""

from __future__ import annotations

from contextvars import Context
from typing import Literal

import attrs

from llamad_trio.core.completion import FinishReason
from llamad_trio.core.errors import LlamadError

RequestKind = Literal["chat", "completion", "score", "prefill"]
"""`"chat"` goes through the chat template, `"completion"` does not; `"score"` asks how likely
a text is (`score`, `choose`), `"prefill"` only has a prompt computed (`Session`)."""


@attrs.frozen(kw_only=True)
class _Event:
    """Every event.

    Attributes:
        time: when, in seconds of Trio's clock.
        engine: the name of the engine; empty for one that has none.
    """

    time: float
    engine: str


@attrs.frozen(kw_only=True)
class _RequestEvent(_Event):
    """An event of one request.

    Attributes:
        request_id: unique among the requests of one engine since it was loaded.
    """

    request_id: int


@attrs.frozen(kw_only=True)
class _WholeRequest(_RequestEvent):
    """A request comes or goes.

    Attributes:
        kind: what is asked for.
        context: the context variables of the task that asked, as they were when it did;
            `None` if they are not known, or of another program.
    """

    kind: RequestKind
    context: Context | None = attrs.field(default=None, repr=False, eq=False)


@attrs.frozen(kw_only=True)
class _RequestEnd(_WholeRequest):
    """The one end of a request, `duration_s` seconds after it was submitted."""

    duration_s: float


@attrs.frozen(kw_only=True)
class EngineLoaded(_Event):
    """The engine takes requests from now on.  `load_s` is how many seconds it took to load."""

    load_s: float


@attrs.frozen(kw_only=True)
class EngineStopped(_Event):
    """The engine takes nothing any more, and all its requests have ended.

    `reason` is `None` when its block ended, and what broke otherwise.
    """

    reason: str | None


@attrs.frozen(kw_only=True)
class EngineRestarted(_Event):
    """A supervisor has an engine again that had failed.

    `attempt` is how many times it has failed in the time that its restart policy looks at;
    `after_s` is how many seconds it was gone.
    """

    attempt: int
    after_s: float


@attrs.frozen(kw_only=True)
class EngineFailed(_Event):
    """A supervisor's engine has failed, or could not be loaded: `error` says how."""

    error: LlamadError


@attrs.frozen(kw_only=True)
class RequestQueued(_WholeRequest):
    """A request was accepted.  One that is refused at once (`Busy`) has no events at all."""


@attrs.frozen(kw_only=True)
class RequestStarted(_RequestEvent):
    """A request is in a step for the first time.

    `queued_s` is how many seconds it waited, its preparation included; `prompt_tokens` the
    length of its templated prompt.
    """

    queued_s: float
    prompt_tokens: int


@attrs.frozen(kw_only=True)
class PrefixReused(_RequestEvent):
    """A request begins behind `cached_tokens` of its prompt that are in the KV cache already.

    `RequestFinished` says how many it was in the end: fewer, if they had to give way before
    its first token.
    """

    cached_tokens: int


@attrs.frozen(kw_only=True)
class FirstToken(_RequestEvent):
    """The first token of a request, `ttft_s` seconds after it was submitted."""

    ttft_s: float


@attrs.frozen(kw_only=True)
class RequestPreempted(_RequestEvent):
    """A running request had to give its room back; it goes on as soon as there is room again."""


@attrs.frozen(kw_only=True)
class RequestFinished(_RequestEnd):
    """A request is complete; the numbers are those of its `Completion`."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    finish_reason: FinishReason
    ttft_s: float


@attrs.frozen(kw_only=True)
class RequestFailed(_RequestEnd):
    """A request ended with `error`."""

    error: LlamadError


@attrs.frozen(kw_only=True)
class RequestCancelled(_RequestEnd):
    """Whoever asked has left before the end."""


@attrs.frozen(kw_only=True)
class StepDone(_Event):
    """A step has ended.

    Attributes:
        duration_s: seconds of computation; 0 if nothing of the step stands.
        decode_tokens: tokens computed that had been generated.
        prefill_tokens: prompt tokens computed.
        aborted: whether a cancel cut it short.
        slots_in_use: requests that held a slot.
    """

    duration_s: float
    decode_tokens: int
    prefill_tokens: int
    aborted: bool
    slots_in_use: int


@attrs.frozen(kw_only=True)
class ThreadsChanged(_Event):
    """The engine computes with another number of threads, because others want the cores, too,
    or do no longer: `n_threads` for steps that only decode, `n_threads_batch` for those with
    prompts.
    """

    n_threads: int
    n_threads_batch: int


@attrs.frozen(kw_only=True)
class Lagged(_Event):
    """In place of the `n_lost` events that this reader was too slow for.

    `time` is that of the last one of them; `engine` is empty, they may be of any.
    """

    n_lost: int


EngineEvent = (
    EngineLoaded
    | EngineStopped
    | EngineRestarted
    | EngineFailed
    | RequestQueued
    | RequestStarted
    | PrefixReused
    | FirstToken
    | RequestPreempted
    | RequestFinished
    | RequestFailed
    | RequestCancelled
    | StepDone
    | ThreadsChanged
    | Lagged
)
