"""What happens in an engine, as JSON and back.  Knows no clock: how far the times of the two
sides are apart is told."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, get_args

import attrs
from cattrs.gen import override

from llamad_trio.core.engine_events import EngineEvent
from llamad_trio.core.errors import LlamadError, ProtocolError
from llamad_trio.wire.calls import CallId
from llamad_trio.wire.converter import register, structure_known, unstructure
from llamad_trio.wire.errors import error_from, error_reply

call_id: ContextVar[CallId | None] = ContextVar("llamad_trio call id", default=None)
"""The `id` of the call that a task answers: events tell it of the requests it makes."""

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(EngineEvent)}


def _write_error(error: LlamadError) -> dict[str, object]:
    return error_reply(error, is_original=False)


def _read_error(value: object, _: object) -> LlamadError:
    if not isinstance(value, dict):
        raise ProtocolError(f"an error must be an object, not {type(value).__name__}")
    return error_from(value)


def _write_context(context: Context | None) -> CallId | None:
    return None if context is None else context.get(call_id)


def _read_context(value: Context | None, _: object) -> Context | None:
    return value


_OVERRIDES = {
    "context": override(rename="call", struct_hook=_read_context, unstruct_hook=_write_context),
    "error": override(struct_hook=_read_error, unstruct_hook=_write_error),
}

for _kind in _KINDS.values():
    _fields = attrs.fields_dict(_kind)
    register(_kind, **{name: how for name, how in _OVERRIDES.items() if name in _fields})


def engine_event_reply(event: EngineEvent, shift_s: float) -> dict[str, object]:
    """An event as it is sent.

    Args:
        event: what happened.
        shift_s: added to its time.
    """
    return {
        "event": {
            "type": type(event).__name__,
            **unstructure(event),
            "time": event.time + shift_s,
        }
    }


def engine_event_from(
    reply: dict[str, object], shift_s: float, context_of: Callable[[object], Context | None]
) -> EngineEvent | None:
    """The event that a line tells of; `None` for one of a kind that is not known here.

    Args:
        reply: the line.
        shift_s: added to the event's time.
        context_of: the context of the task that made a call, by what is told of its id.

    Raises:
        ProtocolError: it tells of none.
    """
    data = reply.get("event")
    if not isinstance(data, dict):
        raise ProtocolError("not an event")
    kind = _KINDS.get(str(data.get("type")))
    if kind is None:
        return None
    known = {**data, "call": context_of(data.get("call"))}
    event: EngineEvent = structure_known(known, kind)
    return attrs.evolve(event, time=event.time + shift_s)
