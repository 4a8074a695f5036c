"""A type asked for is a value got, or an error that says what there is instead."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, assert_type, cast

import attrs
import msgspec
import pydantic
import pytest

from llamad_trio import (
    Completion,
    Done,
    IncompleteOutput,
    InferenceError,
    Message,
    ProtocolError,
    Request,
    TextDelta,
    open_engine,
)
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from llamad_trio.typed.instances import instance_of_type
from tests.support import ONE_THREAD, until_idle

if TYPE_CHECKING:
    from llamad_trio import Engine
    from tests.models import TinyModels


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
class Sized:
    """Small enough to be written by a model that makes no sense."""

    mood: Mood
    size: Literal[1, 2]
    is_new: bool


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Row(TypedDict):
    id: int
    tag: Literal["a", "b"]


class Struct(msgspec.Struct):
    x: int
    tags: list[str] = []


class Model(pydantic.BaseModel):
    x: int
    mood: Mood


JSON_OF: list[tuple[object, str, object]] = [
    (Person, '{"name": "Ada", "age": 36}', Person("Ada", 36)),
    (Point, '{"x": 1, "y": 2}', Point(1, 2)),
    (Row, '{"id": 1, "tag": "b"}', {"id": 1, "tag": "b"}),
    (Struct, '{"x": 1, "tags": ["a"]}', Struct(1, ["a"])),
    (Model, '{"x": 1, "mood": "bad"}', Model(x=1, mood=Mood.BAD)),
    (Mood, '"good"', Mood.GOOD),
    (Literal["yes", "no"], '"no"', "no"),
    (int, "-5", -5),
    (dt.datetime, '"2024-05-01T12:30:59Z"', dt.datetime(2024, 5, 1, 12, 30, 59, tzinfo=dt.UTC)),
    (Whole, "2", Whole.TWO),
    (float, "2.5", 2.5),
    (bool, "true", True),
    (str, '"caf\u00e9 \U0001f408"', "caf\u00e9 \U0001f408"),
    (int | str, '"a"', "a"),
    (Person | Point, '{"x": 1, "y": 0}', Point(1, 0)),
    (Person | None, "null", None),
    (list[Point], '[{"x": 1, "y": 2}, {"x": 3, "y": 4}]', [Point(1, 2), Point(3, 4)]),
    (dict[str, int], '{"a": 1}', {"a": 1}),
    (tuple[int, str], '[1, "a"]', (1, "a")),
]


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


async def test_a_type_checker_knows_the_values_type() -> None:
    async with open_scripted_engine('{"name": "Ada", "age": 36}') as engine:
        done = await engine.complete("x", into=Person)
        assert_type(done, Completion[Person])
        assert_type(done.value, Person)
        assert done.value.name == "Ada"
        plain = await engine.complete("x")
        assert_type(plain, Completion[Any])
        assert plain.value is None


# -- real and random models -----------------------------------------------------------------

ASKED = Request("Ada is 36 years old. Describe her as JSON.", max_tokens=40, temperature=0)


@pytest.mark.parametrize("kind", [Sized, Row, Literal["yes", "no"], Model, list[bool] | None])
async def test_a_model_that_makes_no_sense_writes_values(
    tiny_model: TinyModels, kind: object
) -> None:
    async with open_engine(tiny_model("attention"), ONE_THREAD, n_ctx=512) as engine:
        n_whole = 0
        for seed in range(4):
            with suppress(IncompleteOutput):
                done = await engine.complete(
                    "the cat", into=kind, temperature=1.5, seed=seed, max_tokens=60
                )
                n_whole += 1
                assert done.finish_reason == "stop"
                assert done.value == instance_of_type(json.loads(done.text), kind)
        assert n_whole


async def test_a_small_model_writes_what_it_was_told(engine: Engine) -> None:
    done = await engine.complete(ASKED, into=Person)
    assert isinstance(done.value, Person)
    assert done.text == json.dumps(attrs.asdict(done.value), ensure_ascii=False)
    assert done.generated_tokens <= 40
    mood = await engine.complete("Is a sunny day good or bad?", into=Mood, max_tokens=8)
    assert isinstance(mood.value, Mood)
    # Greedy: how many digits a number has is nobody's choice otherwise, on any machine.
    row = await engine.complete(
        "What is 1 + 1? Answer in JSON.", into=Row, max_tokens=40, temperature=0
    )
    assert row.value is not None
    assert row.value["tag"] in ("a", "b")


# -- what is cut off ------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"max_tokens": 10}, {"stop": ["Ada"]}, {"max_tokens": 1}])
async def test_what_is_cut_off_is_told_with_its_text(fields: dict[str, Any]) -> None:
    text = '{"name": "Ada", "age": 36}'
    async with open_scripted_engine(text) as engine:
        with pytest.raises(IncompleteOutput) as caught:
            await engine.complete("x", into=Person, **fields)
        assert caught.value.text == text[: fields.get("max_tokens", text.index("Ada"))]
        # The request itself was completed.
        assert engine.stats().requests == {"completed": 1, "failed": 0, "cancelled": 0}


async def test_a_real_model_that_is_cut_off_says_so(engine: Engine) -> None:
    with pytest.raises(IncompleteOutput) as caught:
        await engine.complete(ASKED, into=Person, max_tokens=4)
    assert caught.value.text.startswith('{"name"')
    with pytest.raises(IncompleteOutput) as caught:
        await engine.complete(ASKED, into=Person, stop=['"age"'])
    assert caught.value.text.endswith(", ")


async def test_json_that_ends_just_before_the_limit_is_whole() -> None:
    async with open_scripted_engine("[1]") as engine:
        assert (await engine.complete("x", into=list[int], max_tokens=4)).value == [1]


async def test_a_number_beyond_floats_is_the_requests_own_failure() -> None:
    async with open_scripted_engine("1e400") as engine:
        with pytest.raises(InferenceError, match="out of range"):
            await engine.complete("x", into=float)


async def test_json_that_makes_no_instance_is_the_requests_own_failure() -> None:
    @attrs.frozen
    class Even:
        number: int = attrs.field()

        @number.validator
        def _check(self, _attribute: object, value: int) -> None:
            if value % 2:
                raise ValueError("must be even")

    async with open_scripted_engine('{"number": 3}') as engine:
        with pytest.raises(InferenceError, match="must be even"):
            await engine.complete("x", into=Even)


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


# -- refusals -------------------------------------------------------------------------------


def get(a: int) -> int:
    """Get something."""
    return a


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": {"type": "integer"}},
        {"json_schema": {}},
        {"regex": "5"},
        {"lark": 'start: "5"'},
        {"grammar": 'root ::= "5"'},
        {"tools": [get]},
    ],
    ids=lambda f: next(iter(f)),
)
async def test_a_type_is_a_constraint_like_any_other(fields: dict[str, Any]) -> None:
    async with open_scripted_engine("5") as engine:
        with pytest.raises(ProtocolError, match="only one of"):
            await engine.complete("x", into=int, **fields)


@pytest.mark.parametrize("kind", [bytes, get, lambda: 1, object(), "Person", complex, list[bytes]])
async def test_a_type_without_a_schema_is_refused_before_anything_runs(kind: object) -> None:
    model = ScriptedModel("5")
    async with open_scripted_engine(model) as engine:
        with pytest.raises(ProtocolError):
            await engine.complete("x", into=kind)
        assert model.plans == []
        assert engine.stats().requests == {"completed": 0, "failed": 0, "cancelled": 0}


async def test_a_type_that_no_text_satisfies_is_refused(tiny: Engine) -> None:
    Nothing = Annotated[int, msgspec.Meta(ge=5, le=4)]  # noqa: N806
    with pytest.raises(ProtocolError):
        await tiny.complete("x", into=Nothing)
    await until_idle(tiny)
    assert tiny.stats().steps == 0


# -- JSON Schema, which gives data ----------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            '{"a": 1}',
        ),
        ({"type": "integer"}, "0"),
        ({"type": "boolean"}, "false"),
        ({}, '{"any": ["thing"]}'),
    ],
)
async def test_a_json_schema_gives_the_data(schema: dict[str, Any], text: str) -> None:
    async with open_scripted_engine(text) as engine:
        done = await engine.complete("x", json_schema=schema)
        assert done.value == json.loads(text)
        assert type(done.value) is type(json.loads(text))
        async with engine.stream_events("x", json_schema=schema) as events:
            all_events = [event async for event in events]
        last = all_events[-1]
        assert isinstance(last, Done)
        assert last.completion.value == json.loads(text)
        deltas = [event.text for event in all_events if isinstance(event, TextDelta)]
        assert "".join(deltas) == text


async def test_json_that_is_cut_off_is_no_data() -> None:
    async with open_scripted_engine('{"a": 12}') as engine:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        for fields in cast("list[dict[str, Any]]", [{"max_tokens": 7}, {"stop": ["2"]}]):
            done = await engine.complete("x", json_schema=schema, **fields)
            assert done.value is None
            assert '{"a": 12}'.startswith(done.text)
        # A text that happens to be JSON was not asked to be.
        assert (await engine.complete("x")).value is None


async def test_a_model_of_random_weights_keeps_to_a_schema(tiny: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    for seed in range(5):
        done = await tiny.complete(
            "Hi", json_schema=schema, temperature=1.5, seed=seed, max_tokens=60
        )
        assert done.value == json.loads(done.text)
        assert set(done.value) == {"n", "ok"}
