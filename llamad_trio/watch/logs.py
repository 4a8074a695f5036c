"""An engine's events as structured log records.

Decides what a record says, not where it goes: that is the application's `logging`
configuration, for which `JsonFormatter` makes one JSON object of each record.  No text of a
prompt or a reply ever gets here, except what the message of an error quotes.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from datetime import UTC, datetime
from functools import partial

import attrs
import trio

from llamad_trio.core.engine_events import (
    EngineEvent,
    EngineFailed,
    EngineLoaded,
    EngineRestarted,
    EngineStopped,
    Lagged,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    ThreadsChanged,
)
from llamad_trio.core.errors import LlamadError
from llamad_trio.system.nursery import TaskStatus
from llamad_trio.watch import EventSource, follow

Field = str | int | float | bool | None

DEFAULT_EVENTS: Collection[type[EngineEvent]] = (
    EngineLoaded,
    EngineStopped,
    EngineRestarted,
    EngineFailed,
    RequestFinished,
    RequestFailed,
    RequestCancelled,
    RequestPreempted,
    ThreadsChanged,
    Lagged,
)
"""How each request and each engine fared; not what comes many times a second."""

LOGGER = logging.getLogger("llamad_trio.events")

FIELDS = "llamad"
"""The attribute of a log record that holds the fields of its event."""


async def log_events(
    source: EventSource,
    *,
    logger: logging.Logger = LOGGER,
    events: Collection[type[EngineEvent]] = DEFAULT_EVENTS,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Log the events of a source, until it ends.

    Args:
        source: an engine, or whatever else has `events`.
        logger: gets a record for each: what has failed as errors, what failed a request or was
            lost as warnings, the rest as information.  Its handlers run in the Trio thread.
        events: the classes of those to log.
        task_status: for `nursery.start`, which returns when no event is missed any more.

    The attribute `llamad` of a record is a dict of the event's fields: see `as_fields`.

    A checkpoint.  Cancelled, it logs no further.
    """
    await follow(source, partial(_log, logger, tuple(events)), task_status=task_status)


def _log(logger: logging.Logger, wanted: tuple[type[EngineEvent], ...], event: EngineEvent) -> None:
    level = _level(event)
    if isinstance(event, wanted) and logger.isEnabledFor(level):
        fields = as_fields(event)
        text = " ".join(f"{key}={value!r}" for key, value in fields.items() if key != "event")
        logger.log(level, "%s %s", fields["event"], text, extra={FIELDS: fields})


def _level(event: EngineEvent) -> int:
    match event:
        case EngineFailed():
            return logging.ERROR
        case EngineStopped(reason=reason) if reason is not None:
            return logging.ERROR
        case RequestFailed() | Lagged():
            return logging.WARNING
        case _:
            return logging.INFO


def as_fields(event: EngineEvent) -> dict[str, Field]:
    """An event as plain data, ready for JSON.

    `event` is its name in snake case; the other keys are its attributes, but for an error,
    which is `error`, the name of its class, and `message`.
    """
    fields: dict[str, Field] = {
        "event": re.sub("(?!^)([A-Z])", r"_\1", type(event).__name__).lower()
    }
    for field in attrs.fields(type(event)):
        value = getattr(event, field.name)
        if isinstance(value, LlamadError):
            fields["error"] = type(value).__name__
            fields["message"] = str(value)
        elif field.name != "context":
            fields[field.name] = value
    return fields


class JsonFormatter(logging.Formatter):
    """Makes one line of JSON of each log record.

    `timestamp` (UTC, ISO 8601), `level`, `logger`, and the fields of the event; for records
    that are of no event, `message` instead, and `exception` if they have one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line, without the line's end."""
        line: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
        }
        fields = getattr(record, FIELDS, None)
        if isinstance(fields, dict):
            line |= fields
        else:
            line["message"] = record.getMessage()
            if record.exc_info:
                line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
