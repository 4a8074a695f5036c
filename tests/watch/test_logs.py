"""A log record says what happened, as data, on one line."""

from __future__ import annotations

import json
import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from llamad_trio import InferenceError
from llamad_trio.core.engine_events import (
    EngineEvent,
    EngineFailed,
    EngineStopped,
    Lagged,
    RequestFailed,
    RequestFinished,
    RequestQueued,
    StepDone,
)
from llamad_trio.testing import open_scripted_engine
from llamad_trio.watch.broadcast import Broadcast
from llamad_trio.watch.logs import DEFAULT_EVENTS, JsonFormatter, as_fields, log_events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llamad_trio.watch.broadcast import EventReader

FAILED = RequestFailed(
    time=2.5, engine="e", request_id=7, kind="chat", duration_s=1, error=InferenceError('"a"\nb')
)


class Lines(logging.Handler):
    """Keeps records, and the lines they come to."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.records: list[logging.LogRecord] = []
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.lines.append(self.format(record))

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def logger(lines: Lines) -> logging.Logger:
    logger = logging.Logger("of.a.test", logging.INFO)
    logger.addHandler(lines)
    return logger


class Told:
    """A source whose events are known."""

    def __init__(self, *events: EngineEvent) -> None:
        self._events = events

    @asynccontextmanager
    async def events(self, max_events: int = 1024) -> AsyncIterator[EventReader]:
        broadcast = Broadcast()
        async with broadcast.subscribe(max_events) as reader:
            for event in self._events:
                broadcast.publish(event)
            broadcast.close()
            yield reader


ALL = get_args(EngineEvent)


async def test_each_record_is_one_line_of_json_with_the_events_fields(
    logger: logging.Logger, lines: Lines
) -> None:
    await log_events(Told(FAILED), logger=logger, events=ALL)
    (line,) = lines.lines
    assert "\n" not in line
    read = json.loads(line)
    assert read.pop("timestamp").endswith("+00:00")
    assert read == {
        "level": "WARNING",
        "logger": "of.a.test",
        "event": "request_failed",
        "time": 2.5,
        "engine": "e",
        "request_id": 7,
        "kind": "chat",
        "duration_s": 1,
        "error": "InferenceError",
        "message": 'inference: "a"\nb',
    }


async def test_a_plain_formatter_gets_a_message_of_one_line_and_the_fields_beside_it(
    logger: logging.Logger, lines: Lines
) -> None:
    await log_events(Told(FAILED), logger=logger, events=ALL)
    (record,) = lines.records
    message = record.getMessage()
    assert message.startswith("request_failed ")
    assert "request_id=7" in message
    assert "\n" not in message
    assert record.__dict__["llamad"] == as_fields(FAILED)


async def test_what_breaks_is_louder_than_what_goes_well(
    logger: logging.Logger, lines: Lines
) -> None:
    error = InferenceError("of a test")
    told = Told(
        EngineFailed(time=0, engine="", error=error),
        EngineStopped(time=0, engine="", reason="it broke"),
        EngineStopped(time=0, engine="", reason=None),
        Lagged(time=0, engine="", n_lost=1),
        FAILED,
    )
    await log_events(told, logger=logger, events=ALL)
    levels = [record.levelname for record in lines.records]
    assert levels == ["ERROR", "ERROR", "INFO", "WARNING", "WARNING"]


async def test_only_the_chosen_events_are_logged(logger: logging.Logger, lines: Lines) -> None:
    queued = RequestQueued(time=0, engine="", request_id=1, kind="chat")
    await log_events(Told(queued, FAILED), logger=logger, events=[RequestQueued])
    assert [line["event"] for line in lines.read()] == ["request_queued"]


async def test_by_default_it_is_how_requests_and_engines_fared(
    logger: logging.Logger, lines: Lines, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery, open_scripted_engine({"good": "yes"}) as engine:
        await nursery.start(partial(log_events, engine, logger=logger))
        done = await engine.complete("good")
        with pytest.raises(InferenceError):
            await engine.complete("bad")
    finished, failed, stopped = lines.read()
    assert finished["event"] == "request_finished"
    assert finished["generated_tokens"] == done.generated_tokens
    assert "context" not in finished
    assert failed["event"] == "request_failed"
    assert stopped["event"] == "engine_stopped"
    assert not {StepDone, RequestQueued} & set(DEFAULT_EVENTS)


def test_a_finished_request_is_all_its_numbers() -> None:
    numbers: dict[str, Any] = {
        "time": 9.0,
        "engine": "e",
        "request_id": 1,
        "kind": "score",
        "duration_s": 2.0,
        "prompt_tokens": 3,
        "generated_tokens": 0,
        "cached_tokens": 1,
        "finish_reason": "length",
        "ttft_s": 2.0,
    }
    assert as_fields(RequestFinished(**numbers)) == {"event": "request_finished", **numbers}


def test_records_of_others_are_lines_too(logger: logging.Logger, lines: Lines) -> None:
    try:
        raise ZeroDivisionError("of a test")
    except ZeroDivisionError:
        logger.exception("a %s", "record")
    (line,) = lines.read()
    assert line["message"] == "a record"
    assert "ZeroDivisionError: of a test" in line["exception"]
