"""A type asked for is a value got, or an error that says what there is instead."""

from __future__ import annotations

import datetime as dt
import enum
import json
from typing import TYPE_CHECKING, Any, Literal

import attrs
import msgspec
import pydantic
import pytest

from llamad_trio import InferenceError, Message, ProtocolError, Request
from llamad_trio.testing import open_scripted_engine

if TYPE_CHECKING:
    from llamad_trio import Engine


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Whole(enum.Enum):
    ONE = 1.0
    TWO = 2.0


@attrs.frozen
class Person:
    """Somebody.

    Attributes:
        name: what people call them.
        age: in years.
    """

    name: str
    age: int


@attrs.frozen
class Even:
    number: int = attrs.field()

    @number.validator
    def _check(self, _attribute: object, value: int) -> None:
        if value % 2:
            raise ValueError("must be even")


class Struct(msgspec.Struct):
    x: int
    tags: list[str] = []


class Model(pydantic.BaseModel):
    x: int
    mood: Mood


A_NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

JSON_OF: list[tuple[object, str, object]] = [
    (Person, '{"name": "Ada", "age": 36}', Person("Ada", 36)),
    (Struct, '{"x": 1, "tags": ["a"]}', Struct(1, ["a"])),
    (Model, '{"x": 1, "mood": "bad"}', Model(x=1, mood=Mood.BAD)),
    (Literal["yes", "no"], '"no"', "no"),
    (dt.datetime, '"2024-05-01T12:30:59Z"', dt.datetime(2024, 5, 1, 12, 30, 59, tzinfo=dt.UTC)),
    (Whole, "2", Whole.TWO),
    (str, '"caf\u00e9 \U0001f408"', "caf\u00e9 \U0001f408"),
    (Person | None, "null", None),
    (list[Mood] | str, '["good"]', [Mood.GOOD]),
    (tuple[int, str], '[1, "a"]', (1, "a")),
]
"""All that types can be is in `tests.typed`."""


@pytest.mark.parametrize(("kind", "text", "value"), JSON_OF, ids=lambda p: str(p)[:30])
async def test_a_reply_of_json_is_a_value_of_the_type(
    kind: object, text: str, value: object
) -> None:
    async with open_scripted_engine(text) as engine:
        done = await engine.complete("x", into=kind)
    assert done.value == value
    assert type(done.value) is type(value)
    assert done.text == text
    assert done.finish_reason == "stop"


async def test_a_real_model_fills_a_type(engine: Engine) -> None:
    asked = Request("Ada is 36 years old. Describe her as JSON.", max_tokens=40, temperature=0)
    assert isinstance((await engine.complete(asked, into=Person)).value, Person)
    answer = await engine.complete("Is water wet?", into=Literal["yes", "no"], max_tokens=8)
    assert answer.value in ("yes", "no")


WRONG: list[tuple[object, str, str]] = [
    (float, "1e400", "out of range"),
    (Even, '{"number": 3}', "must be even"),
]


@pytest.mark.parametrize(("kind", "text", "reason"), WRONG, ids=["float", "Even"])
async def test_json_that_makes_no_instance_is_the_requests_own_failure(
    kind: object, text: str, reason: str
) -> None:
    async with open_scripted_engine(text) as engine:
        with pytest.raises(InferenceError, match=reason):
            await engine.complete("x", into=kind)


async def test_json_that_ends_just_before_the_limit_is_whole() -> None:
    async with open_scripted_engine("[1]") as engine:
        assert (await engine.complete("x", into=list[int], max_tokens=4)).value == [1]


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (A_NUMBER, '{"a": 1}'),
        ({"type": "integer"}, "0"),
        ({"type": "boolean"}, "false"),
        ({}, "[]"),
    ],
)
async def test_a_json_schema_gives_the_data(schema: dict[str, Any], text: str) -> None:
    async with open_scripted_engine(text) as engine:
        done = await engine.complete("x", json_schema=schema)
        assert done.value == json.loads(text)
        assert type(done.value) is type(json.loads(text))
        # A text that happens to be JSON was not asked to be.
        assert (await engine.complete("x")).value is None


# -- what the model is told -----------------------------------------------------------------


async def test_describe_tells_the_model_what_the_fields_mean() -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return '{"name": "Ada", "age": 36}'

    async with open_scripted_engine(reply) as engine:
        await engine.complete("Who?", into=Person, describe=True)
        await engine.complete("Who?", into=Person)
    described, plain = prompts
    assert "Who?" in described
    assert "what people call them" in described
    assert "in years" in described
    assert "Somebody" in described
    assert "what people call them" not in plain
    # At the end of the user's turn.
    assert described.index("in years") > described.index("Who?")
    assert described.endswith("assistant: ")


@pytest.mark.parametrize(
    "request_", [Request([1, 2]), Request(None, history=[Message("user", "x")])]
)
async def test_describe_needs_a_prompt_to_add_to(request_: Request) -> None:
    async with open_scripted_engine("5") as engine:
        with pytest.raises(ProtocolError, match="describe"):
            await engine.complete(request_, into=int, describe=True)
        assert (await engine.complete(request_, into=int)).value == 5
