"""Types of every sort, and what their values are as JSON."""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import datetime as dt
import decimal
import enum
import typing
import uuid
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict

import attrs
import msgspec

from llamad_trio.typed.schema import schema_of
from tests.matching import compiled, takes

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
    (Tree, Tree((Leaf(1), Tree(()))), {"children": [{"leaf": 1}, {"children": []}]}),
    (
        Document,
        Document(
            [Point(1)], Size(1), {"title": "t"}, Pair(1), Circle(1.0), {Color.RED: {1}}, Leaf(3)
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


def can_write(kind: object, text: str) -> bool:
    """Whether a model could write this JSON for the type."""
    return takes(compiled(schema_of(kind)), text)


def case_name(value: object) -> str | None:
    return str(value)[:40] if isinstance(value, type) or typing.get_origin(value) else None
