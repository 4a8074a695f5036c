"""What the schema of a type allows becomes a value of the type, and nothing else does."""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import datetime as dt
import decimal
import enum
import json
import re
import sys
import types
import typing
import uuid
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict

import attrs
import jsonschema
import llguidance
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from llamad_trio.constraints.schema_vetting import vet_schema
from llamad_trio.core.errors import ProtocolError
from llamad_trio.typed.instances import instance_of_type
from llamad_trio.typed.schema import schema_of
from llamad_trio.typed.text import description_of

T = typing.TypeVar("T")
U = typing.TypeVar("U")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Name(str, enum.Enum):  # noqa: UP042  (the older spelling, which is its own case)
    ANN = "ann"


class Mixed(enum.Enum):
    A = "a"
    ONE = 1
    NOTHING = None


@attrs.frozen
class Point:
    """A place on the map.

    Args:
        x: to the east,
            in metres.
        y: to the north.
    """

    x: int
    y: float = 0.0


@attrs.define
class Person:
    name: str = attrs.field(metadata={"description": "full name"})
    home: Point | None = None
    _secret: int = 0
    friends: list[Person] = attrs.field(factory=list)
    cached: int = attrs.field(default=3, init=False)


@dataclasses.dataclass
class Size:
    width: int
    height: int = dataclasses.field(default=1, metadata={"description": "in pixels"})


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Loose(TypedDict, total=False):
    a: int


class Pair(NamedTuple):
    left: int
    right: str = "r"


class Plain(msgspec.Struct, rename="camel"):
    first_name: str
    born: dt.date | None = None
    note: str | msgspec.UnsetType = msgspec.UNSET


class Circle(msgspec.Struct, tag=True):
    radius: float


class Square(msgspec.Struct, tag=True):
    side: float


class Row(msgspec.Struct, array_like=True):
    a: int
    b: str = "x"


@attrs.frozen
class Box(Generic[T]):
    value: T


@attrs.frozen
class Twice(Box[T], Generic[T, U]):
    other: U


@attrs.frozen
class IntBox(Box[int]):
    pass


@attrs.frozen
class Add:
    kind: Literal["add"]
    left: Expr
    right: Expr


@attrs.frozen
class Multiply:
    kind: Literal["multiply"]
    left: Expr
    right: Expr


Expr = Add | Multiply | int


@attrs.frozen
class Leaf:
    leaf: int


@attrs.frozen
class Tree:
    children: tuple[Tree | Leaf, ...]


@attrs.frozen
class Document:
    """Everything at once."""

    points: list[Point]
    size: Size
    movie: Movie
    pair: Pair
    shape: Circle | Square
    colors: dict[Color, set[int]]
    either: Point | Size | Leaf


Age = NewType("Age", int)
META = msgspec.Meta

SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

UUID = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"

# A type, a value of it, and the value's JSON.
CASES: list[tuple[object, object, object]] = [
    (int, 3, 3),
    (float, 2.5, 2.5),
    (float, 2.0, 2),
    (bool, True, True),
    (str, "a", "a"),
    (None, None, None),
    (Any, {"a": [1, None]}, {"a": [1, None]}),
    (dict, {"a": 1}, {"a": 1}),
    (list, [1, "a"], [1, "a"]),
    (list[int], [1, 2], [1, 2]),
    (abc.Sequence[int], [1, 2], [1, 2]),
    (set[int], {1, 2}, [1, 2]),
    (frozenset[str], frozenset({"a"}), ["a"]),
    (tuple[int, str], (1, "a"), [1, "a"]),
    (tuple[int, ...], (1, 2, 3), [1, 2, 3]),
    (tuple[()], (), []),
    (dict[str, int], {"a": 1}, {"a": 1}),
    (abc.Mapping[str, int], {"a": 1}, {"a": 1}),
    (dict[int, str], {-1: "a"}, {"-1": "a"}),
    (dict[Color, int], {Color.RED: 1}, {"red": 1}),
    (dict[dt.date, int], {dt.date(2024, 2, 29): 1}, {"2024-02-29": 1}),
    (dict[Literal["a", "b"], int], {"b": 1}, {"b": 1}),
    (dict[Annotated[str, META(pattern="^[a-z]$")], int], {"b": 1}, {"b": 1}),
    (Literal["a", 1, None, True], True, True),  # noqa: PYI061
    (Color, Color.BLUE, "blue"),
    (Level, Level.HIGH, 2),
    (Name, Name.ANN, "ann"),
    (Mixed, Mixed.NOTHING, None),
    (Mixed, Mixed.ONE, 1),
    (Literal[Color.RED], Color.RED, "red"),
    (int | None, None, None),
    (int | str, "5", "5"),
    (str | int, 5, 5),
    (float | int, 5, 5),
    (str | dt.date, dt.date(2024, 2, 29), "2024-02-29"),
    (str | dt.date, "soon", "soon"),
    (str | Color, Color.RED, "red"),
    (list[int] | dict[str, int], {"a": 1}, {"a": 1}),
    (dt.datetime, dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC), "2024-01-02T03:04:05Z"),
    (Annotated[dt.datetime, META(tz=False)], dt.datetime(2024, 1, 2, 3), "2024-01-02T03:00:00"),
    (dt.date, dt.date(2024, 1, 2), "2024-01-02"),
    (dt.time, dt.time(10, 30), "10:30:00"),
    (dt.timedelta, dt.timedelta(days=1, hours=2, minutes=30), "P1DT2H30M"),
    (uuid.UUID, uuid.UUID(UUID), UUID),
    (decimal.Decimal, decimal.Decimal("1.50"), "1.50"),
    (Annotated[int, META(ge=1, le=5)], 5, 5),
    (Annotated[float, META(gt=0)], 1.5, 1.5),
    (Annotated[str, META(pattern="^a+$", max_length=3)], "aa", "aa"),
    (Annotated[list[int], META(min_length=1, max_length=3)], [1], [1]),
    (Annotated[dict[str, int], META(min_length=1)], {"a": 1}, {"a": 1}),
    (Annotated[int | None, META(ge=1)], 1, 1),
    (Annotated[int, "an age"], 3, 3),
    (Age, 3, 3),
    (Point, Point(1, 2.0), {"x": 1, "y": 2}),
    (Point, Point(1), {"x": 1}),
    (
        Person,
        Person("a", Point(1), 7, [Person("b")]),
        {"name": "a", "home": {"x": 1}, "secret": 7, "friends": [{"name": "b"}]},
    ),
    (Size, Size(1, 2), {"width": 1, "height": 2}),
    (Movie, {"title": "a"}, {"title": "a"}),
    (Movie, {"title": "a", "year": 1}, {"title": "a", "year": 1}),
    (Loose, {}, {}),
    (Pair, Pair(1, "a"), [1, "a"]),
    (Pair, Pair(1), [1]),
    (
        Plain,
        Plain("a", dt.date(2024, 1, 2), "n"),
        {"firstName": "a", "born": "2024-01-02", "note": "n"},
    ),
    (Plain, Plain("a"), {"firstName": "a"}),
    (Circle | Square, Square(2.0), {"type": "Square", "side": 2}),
    (Circle, Circle(2.0), {"type": "Circle", "radius": 2.0}),
    (Row, Row(1), [1]),
    (Box[int], Box(3), {"value": 3}),
    (Box[list[Point]], Box([Point(1)]), {"value": [{"x": 1}]}),
    (Twice[int, str], Twice(1, "a"), {"value": 1, "other": "a"}),
    (IntBox, IntBox(3), {"value": 3}),
    (Point | Size | Leaf, Size(1), {"width": 1}),
    (set[Point], {Point(1, 2.0)}, [{"x": 1, "y": 2}]),
    (
        Expr,
        Add("add", 1, Multiply("multiply", 2, 3)),
        {"kind": "add", "left": 1, "right": {"kind": "multiply", "left": 2, "right": 3}},
    ),
    (
        Tree,
        Tree((Leaf(1), Tree(()))),
        {"children": [{"leaf": 1}, {"children": []}]},
    ),
    (
        Document,
        Document(
            [Point(1)],
            Size(1),
            {"title": "t"},
            Pair(1),
            Circle(1.0),
            {Color.RED: {1}},
            Leaf(3),
        ),
        {
            "points": [{"x": 1}],
            "size": {"width": 1},
            "movie": {"title": "t"},
            "pair": [1],
            "shape": {"type": "Circle", "radius": 1},
            "colors": {"red": [1]},
            "either": {"leaf": 3},
        },
    ),
]
KINDS = list({repr(kind): kind for kind, _, _ in CASES}.values())


class _Bytes:
    """A vocabulary of the 256 bytes and an end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [*(bytes([i]) for i in range(256)), b"<end>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def grammar(schema: object) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


def can_write(schema: object, data: object) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, grammar(schema))
    assert not matcher.is_error(), matcher.get_error()
    text = list(json.dumps(data, ensure_ascii=False).encode())
    return matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()


def instances(schema: Any, definitions: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """JSON data that a schema of ours allows."""

    def inner(part: Any) -> st.SearchStrategy[Any]:
        return instances(part, definitions, depth + 1)

    if schema is True or not (schema.keys() - {"description"}):
        return st.none() | st.integers() | st.lists(st.text(max_size=3), max_size=2)
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        return st.deferred(lambda: inner(definitions[name]))
    if "anyOf" in schema:
        choices = schema["anyOf"]
        if depth > 8:
            choices = [c for c in choices if "$ref" not in c and c.get("type") != "object"]
        return st.one_of([inner(each) for each in choices or schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    low, high = schema.get("minItems", 0), schema.get("maxItems", 2 if depth < 6 else 0)
    match schema["type"]:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            return st.floats(0.5, 99) | st.integers(1, 99)
        case "array" if "prefixItems" in schema:
            items = [inner(item) for item in schema["prefixItems"]]
            return st.integers(low, high).flatmap(lambda n: st.tuples(*items[:n]).map(list))
        case "array":
            return st.lists(inner(schema.get("items", True)), min_size=low, max_size=high)
        case "object" if schema.get("properties"):
            fields = {name: inner(part) for name, part in schema["properties"].items()}
            needed = schema.get("required", [])
            return st.fixed_dictionaries(
                {name: fields[name] for name in needed},
                optional={name: part for name, part in fields.items() if name not in needed},
            )
        case "object":
            keys, values = st.text(min_size=1), schema.get("additionalProperties", True)
            for pattern, part in schema.get("patternProperties", {}).items():
                keys, values = st.from_regex(pattern.replace("$", r"\Z")), part
            least = schema.get("minProperties", 0)
            return st.dictionaries(keys, inner(values), min_size=least, max_size=2)
    assert schema["type"] == "string"
    match schema:
        case {"format": "uuid"}:
            return st.uuids().map(str)
        case {"pattern": pattern}:
            texts = st.from_regex(pattern.replace("$", r"\Z"))
            return texts.filter(lambda t: len(t) <= schema.get("maxLength", 99))
    return st.text(min_size=schema.get("minLength", 0), max_size=schema.get("maxLength", 9))


def case_name(value: object) -> str | None:
    return str(value)[:40] if isinstance(value, type) or typing.get_origin(value) else None


@pytest.mark.parametrize(("kind", "value", "data"), CASES, ids=case_name)
def test_a_value_is_described_by_its_types_schema_and_comes_back(
    kind: object, value: object, data: object
) -> None:
    schema = schema_of(kind)

    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, schema)
    assert can_write(schema, data)
    made = instance_of_type(data, kind)
    assert made == value
    assert type(made) is type(value)


def check_instance(kind: object, chosen: st.DataObject) -> None:
    schema: Any = schema_of(kind)
    data = chosen.draw(instances(schema, schema.get("$defs", {})))

    jsonschema.validate(data, schema)
    instance_of_type(data, kind)


@pytest.mark.parametrize("kind", KINDS, ids=case_name)
@settings(max_examples=7, deadline=None, suppress_health_check=SLOW_TO_DRAW)
@given(chosen=st.data())
def test_all_that_a_schema_allows_can_be_structured(kind: object, chosen: st.DataObject) -> None:
    check_instance(kind, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=case_name)
@settings(max_examples=300, deadline=None, suppress_health_check=SLOW_TO_DRAW)
@given(chosen=st.data())
def test_all_that_a_schema_allows_can_be_structured_at_length(
    kind: object, chosen: st.DataObject
) -> None:
    check_instance(kind, chosen)


def allows(kind: object, text: str) -> bool:
    """Whether a model could write this JSON for the type."""
    matcher = llguidance.LLMatcher(TOKENIZER, grammar(schema_of(kind)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


NAIVE = Annotated[dt.datetime, META(tz=False)]
ZONED_TIME = Annotated[dt.time, META(tz=True)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (dt.datetime, "0001-01-01T00:00:00+23:59"),
        (dt.datetime, "9999-12-31T23:59:59.999999-23:59"),
        (dt.datetime, "2024-05-01T12:30:59.5Z"),
        (NAIVE, "0001-01-01T00:00:00"),
        (dt.date, "2024-02-29"),
        (ZONED_TIME, "23:59:59.123456+05:30"),
        (ZONED_TIME, "00:00:00Z"),
        (dt.time, "23:59:59"),
    ],
    ids=case_name,
)
def test_dates_and_times_that_python_has_can_be_written(kind: object, text: str) -> None:
    assert allows(kind, json.dumps(text))
    assert str(instance_of_type(text, kind)).startswith(text[:4])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (dt.datetime, "2024-05-01T12:30:60Z"),
        (dt.datetime, "0000-01-01T00:00:00Z"),
        (dt.datetime, "2023-02-29T00:00:00Z"),
        (dt.datetime, "2024-05-01T24:00:00Z"),
        (dt.datetime, "2024-05-01T12:30:00+24:00"),
        (dt.datetime, "9999-12-31T23:59:59.9999999Z"),
        (NAIVE, "0000-01-01T00:00:00"),
        (NAIVE, "1900-02-29T00:00:00"),
        (dt.date, "0000-01-01"),
        (dt.date, "2023-02-29"),
        (ZONED_TIME, "12:30:60Z"),
        (ZONED_TIME, "12:30:00+24:00"),
        (dt.time, "12:30:60"),
    ],
    ids=case_name,
)
def test_dates_and_times_that_python_lacks_cannot_be_written(kind: object, text: str) -> None:
    with pytest.raises(ValueError, match="RFC3339"):
        instance_of_type(text, kind)
    assert not allows(kind, json.dumps(text))


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


def test_pydantic_dates_are_of_the_calendar() -> None:
    pydantic = pytest.importorskip("pydantic")
    model: Any = pydantic.create_model(
        "When", a=(dt.datetime, ...), b=(dt.date, ...), c=(dt.time, ...), d=(dt.timedelta, ...)
    )
    good = {"a": "0001-01-01T00:00:00+23:59", "b": "2000-02-29", "c": "23:59:59Z", "d": "-P1DT2.5S"}

    assert allows(model, json.dumps(good))
    instance_of_type(good, model)
    for key, text in {
        "a": "2024-05-01T12:30:60Z",
        "b": "0000-01-01",
        "c": "12:30:60Z",
    }.items():
        data = {**good, key: text}
        with pytest.raises(ValueError, match=f"^{key}: "):
            instance_of_type(data, model)
        assert not allows(model, json.dumps(data))


@pytest.mark.parametrize("text", ["1e400", "-1e400", "1" * 310])
@pytest.mark.parametrize("kind", [float, Annotated[float, "how much"], float | None])
def test_a_number_too_large_for_a_float_is_an_error_and_not_infinite(
    kind: object, text: str
) -> None:
    assert allows(kind, text)
    with pytest.raises(ValueError, match=r"^\[x\]: .*number out of range"):
        instance_of_type({"x": json.loads(text)}, dict[str, kind])  # type: ignore[valid-type]


def test_a_number_too_large_for_a_float_is_an_error_in_pydantic_models() -> None:
    pydantic = pytest.importorskip("pydantic")
    model: Any = pydantic.create_model("Weight", grams=(float, ...))

    with pytest.raises(ValueError, match=r"(?i)out of range"):
        instance_of_type({"grams": json.loads("1e400")}, model)


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
    assert allows(kind, text)
    assert instance_of_type(json.loads(text), kind) == value


@pytest.mark.parametrize("kind", KINDS, ids=case_name)
def test_a_schema_is_one_that_llguidance_compiles(kind: object) -> None:
    assert llguidance.LLMatcher.validate_grammar(grammar(schema_of(kind)), TOKENIZER) == ""
    vet_schema(schema_of(kind))


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


def test_aliases_stand_for_their_values() -> None:
    alias = pytest.importorskip("typing_extensions").TypeAliasType
    numbers = alias("Numbers", list[int])
    both = alias("Both", tuple[T, T], type_params=(T,))  # type: ignore[valid-type]

    assert instance_of_type([1], numbers) == [1]
    assert instance_of_type(["a", "b"], both[str]) == ("a", "b")
    with pytest.raises(ValueError, match=r"^\[1\]: expected int, got str$"):
        instance_of_type([1, "b"], both[int])


def test_an_alias_of_a_class_has_the_schema_of_the_class() -> None:
    alias = pytest.importorskip("typing_extensions").TypeAliasType
    point = alias("AnotherName", Point)

    assert schema_of(point) == schema_of(Point)
    assert schema_of(alias("YetAnother", point)) == schema_of(Point)


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

    assert llguidance.LLMatcher.validate_grammar(grammar(schema_of(names["Nested"]))) == ""
    assert instance_of_type([1, [2]], names["Nested"]) == [1, [2]]


def test_description_is_compact_and_complete() -> None:
    assert description_of(Person) == (
        "Person: {\n"
        '  "name": string,  // full name\n'
        '  "home": {\n'
        '    "x": integer,  // to the east, in metres.\n'
        '    "y": number  // optional: to the north.\n'
        "  } | null,  // optional\n"
        '  "secret": integer,  // optional\n'
        '  "friends": [Person, ...]  // optional\n'
        "}"
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "integer"),
        (Annotated[int, META(ge=1, le=5)], "integer (1 to 5)"),
        (Annotated[int, META(multiple_of=2, gt=0)], "integer (more than 0, a multiple of 2)"),
        (Annotated[str, META(max_length=5)], "string (at most 5 characters)"),
        (Annotated[list[int], META(min_length=2)], "[integer, ...] (at least 2 items)"),
        (dict[str, int], "{<key>: integer, ...}"),
        (dict[int, str], "{<key: integer>: string, ...}"),
        (tuple[int, str], "[integer, string]"),
        (Pair, "[integer, string (optional)]"),
        (Color | None, '"red" | "blue" | null'),
        (dt.date, "string (date)"),
        (dt.timedelta, "string (ISO 8601 duration, like P1DT2H30M)"),
        (Any, "any JSON"),
        (Annotated[Age, "of a tree"], "of a tree\ninteger"),
        (list[Leaf], '[{\n  "leaf": integer\n}, ...]'),
        (
            tuple[Leaf, Leaf],
            '[Leaf, Leaf]\n\nLeaf: {\n  "leaf": integer\n}',
        ),
        (Size, '{\n  "width": integer,\n  "height": integer  // optional: in pixels\n}'),
    ],
    ids=case_name,
)
def test_description_of(kind: object, text: str) -> None:
    assert description_of(kind) == text


def test_doc_objects_describe() -> None:
    @attrs.frozen
    class Doc:
        documentation: str

    kind = Annotated[int, Doc("how many")]
    assert schema_of(kind) == {"description": "how many", "type": "integer"}


def test_pydantic_models_are_schemas_and_values_at_any_depth() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Cat(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        """A cat."""

        kind: Literal["cat"]
        lives: int = pydantic.Field(9, ge=1, description="left")

    class Dog(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        kind: Literal["dog"]

    class Node(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
        when: dt.datetime | None = None
        tags: set[str] = set()  # noqa: RUF012
        price: decimal.Decimal = decimal.Decimal(1)
        counts: dict[Color, int] = {}  # noqa: RUF012

    Node.model_rebuild(_types_namespace={**globals(), "Cat": Cat, "Dog": Dog, "pydantic": pydantic})
    owner = attrs.make_class(
        "Owner",
        {"node": attrs.field(type=Node), "cats": attrs.field(type=list[Cat], factory=list)},
    )

    cat = {"kind": "cat", "lives": 3}
    node = {"pet": cat, "when": "2024-01-02T03:04:05Z", "tags": ["a"], "counts": {"red": 1}}
    for kind, data in [
        (Cat, cat),
        (list[Cat], [cat]),
        (Cat | None, cat),
        (Cat | Dog, {"kind": "dog"}),
        (Node, node),
        (owner, {"node": node, "cats": [cat]}),
    ]:
        schema = schema_of(kind)
        assert llguidance.LLMatcher.validate_grammar(grammar(schema), TOKENIZER) == "", kind
        jsonschema.validate(data, schema)
        assert can_write(schema, data), kind
        instance_of_type(data, kind)

    made: Any = instance_of_type({"node": node, "cats": [cat]}, owner)
    assert made.node.pet == Cat(kind="cat", lives=3)
    assert made.node.tags == {"a"}
    assert made.node.counts == {Color.RED: 1}
    with pytest.raises(ValueError, match=r"^cats\[0\]\.lives: Input should be a valid integer"):
        instance_of_type({"node": node, "cats": [{"kind": "cat", "lives": "3"}]}, owner)
    assert description_of(Cat) == (
        'A cat.\n{\n  "kind": "cat",\n  "lives": integer (at least 1)  // optional: left\n}'
    )
    assert not can_write(schema_of(Cat), {"kind": "cat", "extra": 1})


def test_pydantic_models_may_hold_themselves() -> None:
    pydantic = pytest.importorskip("pydantic")
    model: Any = pydantic.create_model("Ring", next=("Ring | None", None))
    model.model_rebuild(_types_namespace={"Ring": model})

    for kind in (model, list[model], tuple[model, model | None]):
        assert llguidance.LLMatcher.validate_grammar(grammar(schema_of(kind)), TOKENIZER) == ""
    made: Any = instance_of_type([{"next": {"next": None}}], list[model])
    assert made[0].next.next is None


def test_pydantic_keys_are_constrained_or_refused() -> None:
    pydantic = pytest.importorskip("pydantic")
    text = Annotated[str, pydantic.AfterValidator(str.strip)]
    short = Annotated[str, pydantic.StringConstraints(max_length=2)]
    number = enum.IntEnum("number", {"ONE": 1})

    for key, data in [
        (str, {"a": 1}),
        (text, {"a": 1}),
        (Any, {"a": 1}),
        (Literal["a", "b"], {"b": 1}),
        (Color, {"red": 1}),
        (dt.date, {"2024-02-29": 1}),
    ]:
        model: Any = pydantic.create_model("Counts", x=(types.GenericAlias(dict, (key, int)), ...))
        assert allows(model, json.dumps({"x": data})), key
        instance_of_type({"x": data}, model)
    assert not allows(
        pydantic.create_model("Days", x=(dict[dt.date, int], ...)), '{"x": {"2023-02-29": 1}}'
    )

    for key in (int, float, bool, str | int, short, number, uuid.UUID):
        inner: Any = pydantic.create_model("Inner", x=(types.GenericAlias(dict, (key, int)), ...))
        outer: Any = pydantic.create_model("Outer", y=(list[inner] | None, None))
        for kind in (
            inner,
            outer,
            list[inner],
            pydantic.RootModel[types.GenericAlias(dict, (key, int))],
        ):
            with pytest.raises(ProtocolError, match="keys of"):
                schema_of(kind)
