"""What the schema of a type allows becomes a value of the type, and nothing else does."""

from __future__ import annotations

import collections.abc as abc
import datetime as dt
import enum
import json
import random
import re
import sys
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import attrs
import jsonschema
import pytest
import typing_extensions

from llamad_trio.core.errors import ProtocolError
from llamad_trio.typed.instances import instance_of_type
from llamad_trio.typed.schema import schema_of
from tests.matching import compiled, walks
from tests.typed.kinds import (
    CASES,
    KINDS,
    META,
    Age,
    Box,
    Circle,
    Color,
    Expr,
    Leaf,
    Multiply,
    Name,
    Pair,
    Person,
    Point,
    Size,
    Square,
    T,
    Tree,
    can_write,
    case_name,
)


@pytest.mark.parametrize(("kind", "value", "data"), CASES, ids=case_name)
def test_a_value_is_described_by_its_types_schema_and_comes_back(
    kind: object, value: object, data: object
) -> None:
    schema = schema_of(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, schema)
    assert can_write(kind, json.dumps(data, ensure_ascii=False))
    made = instance_of_type(data, kind)
    assert made == value
    assert type(made) is type(value)


@pytest.mark.parametrize("n", [20, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS, ids=case_name)
def test_all_that_can_be_written_makes_an_instance(kind: object, n: int) -> None:
    schema = schema_of(kind)
    texts = [text.decode() for text in walks(compiled(schema), random.Random(str(kind)), n)]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
        try:
            instance_of_type(json.loads(text), kind)
        except ValueError as error:
            assert "number out of range" in str(error)  # noqa: PT017  (1e999)


NAIVE = Annotated[dt.datetime, META(tz=False)]
ZONED_TIME = Annotated[dt.time, META(tz=True)]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            dt.datetime,
            [
                *("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59.999999-23:59"),
                "2024-05-01T12:30:59.5Z",
            ],
            [
                *("2024-05-01T12:30:60Z", "0000-01-01T00:00:00Z", "2023-02-29T00:00:00Z"),
                *("2024-05-01T24:00:00Z", "2024-05-01T12:30:00+24:00"),
                "9999-12-31T23:59:59.9999999Z",
            ],
        ),
        (NAIVE, ["0001-01-01T00:00:00"], ["0000-01-01T00:00:00", "1900-02-29T00:00:00"]),
        (dt.date, ["2024-02-29"], ["0000-01-01", "2023-02-29"]),
        (ZONED_TIME, ["23:59:59.123456+05:30", "00:00:00Z"], ["12:30:60Z", "12:30:00+24:00"]),
        (dt.time, ["23:59:59"], ["12:30:60"]),
    ],
    ids=case_name,
)
def test_dates_and_times_that_can_be_written_are_those_that_python_has(
    kind: object, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert can_write(kind, json.dumps(text))
        assert str(instance_of_type(text, kind)).startswith(text[:4])
    for text in bad:
        with pytest.raises(ValueError, match="RFC3339"):
            instance_of_type(text, kind)
        assert not can_write(kind, json.dumps(text))


def is_a_date(text: str) -> bool:
    try:
        dt.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_the_pattern_of_dates_is_the_calendar() -> None:
    schema: Any = schema_of(dt.date)
    days = [f"{year:04}-02-{day}" for year in range(10_000) for day in (28, 29)]
    for year in (0, 1, 1999, 2000):
        days += [f"{year:04}-{m:02}-{d:02}" for m in range(20) for d in range(40)]

    pattern = re.compile(schema["pattern"])
    assert [day for day in days if bool(pattern.search(day)) != is_a_date(day)] == []


@pytest.mark.parametrize("text", ["1e400", "-1e400", "1" * 310])
@pytest.mark.parametrize("kind", [float, Annotated[float, "how much"], float | None])
def test_a_number_too_large_for_a_float_is_an_error_and_not_infinite(
    kind: object, text: str
) -> None:
    assert can_write(kind, text)
    with pytest.raises(ValueError, match=r"^\[x\]: .*number out of range"):
        instance_of_type({"x": json.loads(text)}, dict[str, kind])  # type: ignore[valid-type]


class Sign(enum.Enum):
    MINUS = -0.0
    TWO = 2.0
    HALF = 0.5


@attrs.frozen
class Doubled:
    factor: Literal[Sign.TWO]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Sign, "-0", Sign.MINUS),
        (Sign, "2", Sign.TWO),
        (Sign, "0.5", Sign.HALF),
        (Doubled | Leaf, '{"factor": 2}', Doubled(Sign.TWO)),
    ],
    ids=case_name,
)
def test_floats_of_enums_are_found_as_they_are_written(
    kind: object, text: str, value: object
) -> None:
    assert can_write(kind, text)
    assert instance_of_type(json.loads(text), kind) == value


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (int, "5", "expected int, got str"),
        (int, True, "expected int, got bool"),
        (int, 1.5, "expected int, got float"),
        (str, 5, "expected str, got int"),
        (bool, 1, "expected bool, got int"),
        (float, "1", "expected float, got str"),
        (list[int], "12", "expected array, got str"),
        (list[str], "ab", "expected array, got str"),
        (list[int], [1, "a"], "[1]: expected int, got str"),
        (set[int], {"a": 1}, "expected array, got object"),
        (tuple[int, str], [1], "expected 2 items, got 1"),
        (dict[str, int], {"a": "b"}, "[a]: expected int, got str"),
        (dict[int, int], {"a": 1}, "[a]: expected a whole number for a key"),
        (Literal[1], True, "expected one of 1"),
        (Color, "green", 'expected one of "red", "blue"'),
        (Name, "bob", 'expected one of "ann"'),
        (Point, [1], "expected object, got array"),
        (Point, {}, "x: is missing"),
        (Point, {"x": 1, "z": 2}, "unknown 'z'"),
        (Point | None, {"x": "a"}, "x: expected int, got str"),
        (Person, {"name": "a", "friends": [{"name": 1}]}, "friends[0].name: expected str, got int"),
        (Pair, [], "expected 1 to 2 items, got 0"),
        (Circle, {"type": "Square", "radius": 1}, 'type: expected one of "Circle"'),
        (Circle | Square, {"type": "Square", "radius": 1}, "side: is missing; unknown 'radius'"),
        (Expr, {"kind": "add", "left": 1}, "right: is missing"),
        (Point | Size, {"q": 1}, "expected Point or Size"),
        (
            dict[str, str] | dict[str, int],
            {"a": None},
            "expected dict[str, str] or dict[str, int] "
            "(as dict[str, str]: [a]: expected str, got null; "
            "as dict[str, int]: [a]: expected int, got null)",
        ),
        (list[int] | dict[str, int], {"a": "b"}, "[a]: expected int, got str"),
        (
            str | dt.date | list[int],
            5,
            "expected date or list[int] or str (as date: expected date, got int; "
            "as list[int]: expected array, got int; as str: expected str, got int)",
        ),
        (Annotated[int, META(ge=1)], 0, "expected int >= 1"),
        (Annotated[list[int], META(min_length=2)], [1], "expected array of length >= 2"),
        (dt.date, "2023-02-29", "invalid RFC3339 encoded date"),
    ],
    ids=case_name,
)
def test_what_is_wrong_is_said_with_its_place(kind: object, data: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        instance_of_type(data, kind)

    assert str(caught.value) == message


def test_a_validator_of_the_class_is_heard() -> None:
    @attrs.frozen
    class Even:
        number: int = attrs.field(validator=lambda _self, _field, value: check_even(value))

    def check_even(value: int) -> None:
        if value % 2:
            raise ValueError("must be even")

    assert instance_of_type({"number": 2}, Even) == Even(2)
    with pytest.raises(ValueError, match=r"^\[0\]: must be even$"):
        instance_of_type([{"number": 3}], list[Even])


def test_a_model_that_got_everything_wrong_is_told_briefly() -> None:
    with pytest.raises(ValueError, match=r"and 92 more$"):
        instance_of_type(["a"] * 100, list[int])


def test_deep_unions_take_linear_time() -> None:
    data: object = 1
    for _ in range(60):
        data = {"kind": "multiply", "left": data, "right": 1}

    made = instance_of_type(data, Expr)
    assert isinstance(made, Multiply)


def test_data_nested_too_deeply_is_a_value_error() -> None:
    data: object = {"leaf": 1}
    for _ in range(5000):
        data = {"children": [data]}

    with pytest.raises(ValueError):
        instance_of_type(data, Tree)


def function(x: int) -> int:
    return x


@attrs.frozen
class HoldsAFunction:
    call: abc.Callable[[int], int]


@attrs.frozen
class HoldsAnother:
    inner: list[HoldsAFunction]


class Open:
    def __init__(self, x: int) -> None:
        self.x = x


class Empty(enum.Enum):
    pass


class Tuples(enum.Enum):
    A = (1, 2)


@attrs.frozen
class Unresolved:
    x: Nowhere  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (function, "which is no type, has no JSON schema"),
        (Open, "Open: the type Open has no JSON schema"),
        (list[Open], "list[Open][]: the type Open has no JSON schema"),
        (HoldsAnother, "HoldsAnother.inner[] (HoldsAFunction).call: the type Callable"),
        (bytes, "the type bytes has no JSON schema"),
        (complex, "the type complex has no JSON schema"),
        (type, "the type type has no JSON schema"),
        (Box, "Box.value: the open type variable T has no JSON schema"),
        (Empty, "an enum without members"),
        (Tuples, "cannot be written as a JSON scalar"),
        (Unresolved, "Unresolved: its type hints cannot be read: name 'Nowhere' is not defined"),
        (set[list[int]], "list[int] cannot stand in a set"),
        (dict[float, int], "keys of an object"),
        (Annotated[Point, META(ge=1)], "constraints on Point are not supported"),
        (Annotated[str, META(ge=1)], "Can only set `ge` on a numeric type"),
        ("Point", "the unresolved name 'Point'"),
    ],
    ids=case_name,
)
def test_a_type_without_a_schema_is_refused_by_name_and_place(kind: object, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        schema_of(kind)
    assert message in caught.value.reason
    with pytest.raises(ProtocolError):
        instance_of_type({}, kind)


def test_classes_are_closed_and_need_what_has_no_default() -> None:
    assert schema_of(Point) == {
        "description": "A place on the map.",
        "type": "object",
        "properties": {
            "x": {"type": "integer", "description": "to the east, in metres."},
            "y": {"type": "number", "description": "to the north."},
        },
        "required": ["x"],
        "additionalProperties": False,
    }


def test_a_union_keeps_its_order() -> None:
    assert schema_of(int | str) == {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    assert schema_of(str | int) == {"anyOf": [{"type": "string"}, {"type": "integer"}]}


def test_classes_of_one_name_stay_apart() -> None:
    def make(kind: type) -> type:
        return attrs.make_class("Same", {"a": attrs.field(type=kind)}, frozen=True)

    one, other = make(int), make(str)
    kind = tuple[one, one, other, other]  # type: ignore[valid-type]
    schema: Any = schema_of(kind)
    assert schema["$defs"].keys() == {"Same", "Same_2"}
    data = [{"a": 1}, {"a": 1}, {"a": "x"}, {"a": "x"}]
    assert instance_of_type(data, kind) == (one(1), one(1), other("x"), other("x"))


make_alias: Any = typing_extensions.TypeAliasType


def test_aliases_stand_for_their_values() -> None:
    numbers = make_alias("Numbers", list[int])
    both = make_alias("Both", tuple[T, T], type_params=(T,))  # type: ignore[valid-type]
    point = make_alias("AnotherName", Point)
    assert schema_of(point) == schema_of(make_alias("YetAnother", point)) == schema_of(Point)
    assert instance_of_type([1], numbers) == [1]
    assert instance_of_type(["a", "b"], both[str]) == ("a", "b")
    with pytest.raises(ValueError, match=r"^\[1\]: expected int, got str$"):
        instance_of_type([1, "b"], both[int])


class Grown(TypedDict):
    age: Age
    height: NotRequired[Age]


def test_the_fields_of_a_typed_dict_may_have_new_types() -> None:
    assert instance_of_type({"age": 3}, Grown) == Grown(age=Age(3))
    assert dict(schema_of(Grown))["required"] == ["age"]
    with pytest.raises(ValueError, match=r"^height: expected int, got str$"):
        instance_of_type({"age": 3, "height": "x"}, Grown)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the `type` statement")
def test_aliases_may_hold_themselves() -> None:
    names: dict[str, Any] = {}
    exec("type Nested = list[Nested] | int", names)
    assert can_write(names["Nested"], "[1, [2]]")
    assert instance_of_type([1, [2]], names["Nested"]) == [1, [2]]
