"""Pydantic's models are schemas and instances, by themselves and in other types."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import json
import types
import uuid
from typing import Annotated, Any, Literal

import attrs
import jsonschema
import pydantic
import pytest

from llamad_trio.core.errors import ProtocolError
from llamad_trio.typed.instances import instance_of_type
from llamad_trio.typed.schema import schema_of
from llamad_trio.typed.text import description_of
from tests.typed.kinds import Color, can_write


class Cat(pydantic.BaseModel):
    """A cat."""

    kind: Literal["cat"]
    lives: int = pydantic.Field(9, ge=1, description="left")


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


class Node(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    when: dt.datetime | None = None
    tags: set[str] = set()
    price: decimal.Decimal = decimal.Decimal(1)
    counts: dict[Color, int] = {}


class Ring(pydantic.BaseModel):
    next: Ring | None = None


class Times(pydantic.BaseModel):
    a: dt.datetime
    b: dt.date
    c: dt.time
    d: dt.timedelta


@attrs.frozen
class Owner:
    node: Node
    cats: list[Cat] = attrs.field(factory=list)


CAT = {"kind": "cat", "lives": 3}
NODE = {"pet": CAT, "when": "2024-01-02T03:04:05Z", "tags": ["a"], "counts": {"red": 1}}
RING = {"next": {"next": None}}
TIMES = {"a": "0001-01-01T00:00:00+23:59", "b": "2000-02-29", "c": "23:59:59Z", "d": "-P1DT2.5S"}


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        *((Cat, CAT), (list[Cat], [CAT]), (Cat | None, CAT), (Cat | Dog, {"kind": "dog"})),
        *((Node, NODE), (Owner, {"node": NODE, "cats": [CAT]}), (Times, TIMES)),
        *((Ring, RING), (list[Ring], [RING]), (tuple[Ring, Ring | None], [RING, None])),
    ],
    ids=str,
)
def test_models_are_schemas_and_instances_at_any_depth(kind: object, data: object) -> None:
    jsonschema.validate(data, schema_of(kind))
    assert can_write(kind, json.dumps(data))
    instance_of_type(data, kind)


def test_an_instance_holds_instances() -> None:
    made = instance_of_type({"node": NODE, "cats": [CAT]}, Owner)
    assert made.node.pet == Cat(kind="cat", lives=3)
    assert (made.node.tags, made.node.counts) == ({"a"}, {Color.RED: 1})
    (ring,) = instance_of_type([RING], list[Ring])
    assert ring.next is not None
    assert ring.next.next is None


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (
            Owner,
            {"node": NODE, "cats": [{"kind": "cat", "lives": "3"}]},
            r"^cats\[0\]\.lives: Input should be a valid integer",
        ),
        (Times, {**TIMES, "a": "2024-05-01T12:30:60Z"}, "^a: "),
        (Times, {**TIMES, "b": "0000-01-01"}, "^b: "),
        (Times, {**TIMES, "c": "12:30:60Z"}, "^c: "),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_cannot_be_written(
    kind: object, data: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        instance_of_type(data, kind)
    assert not can_write(kind, json.dumps(data))


def test_a_number_too_large_for_a_float_is_an_error() -> None:
    model = pydantic.create_model("Weight", grams=(float, ...))
    with pytest.raises(ValueError, match=r"(?i)out of range"):
        instance_of_type({"grams": json.loads("1e400")}, model)


def test_a_model_is_described_and_closed() -> None:
    assert description_of(Cat) == (
        'A cat.\n{\n  "kind": "cat",\n  "lives": integer (at least 1)  // optional: left\n}'
    )
    assert not can_write(Cat, '{"kind": "cat", "extra": 1}')


def of_keys(key: object) -> Any:
    return types.GenericAlias(dict, (key, int))


@pytest.mark.parametrize(
    ("key", "data"),
    [
        *((str, {"a": 1}), (Any, {"a": 1}), (Literal["a", "b"], {"b": 1}), (Color, {"red": 1})),
        (Annotated[str, pydantic.AfterValidator(str.strip)], {"a": 1}),
        (dt.date, {"2024-02-29": 1}),
    ],
    ids=str,
)
def test_keys_are_constrained(key: object, data: object) -> None:
    model = pydantic.create_model("Counts", x=(of_keys(key), ...))
    assert can_write(model, json.dumps({"x": data}))
    instance_of_type({"x": data}, model)
    assert can_write(model, '{"x": {"2023-02-29": 1}}') == (data == {"a": 1})


SHORT = Annotated[str, pydantic.StringConstraints(max_length=2)]
NUMBER = enum.IntEnum("NUMBER", {"ONE": 1})


@pytest.mark.parametrize("key", [int, float, bool, str | int, SHORT, NUMBER, uuid.UUID], ids=str)
def test_keys_of_which_pydantics_schema_says_too_little_are_refused(key: object) -> None:
    inner: Any = pydantic.create_model("Inner", x=(of_keys(key), ...))
    outer: Any = pydantic.create_model("Outer", y=(list[inner] | None, None))
    root: Any = pydantic.RootModel
    for kind in (inner, outer, list[inner], root[of_keys(key)]):
        with pytest.raises(ProtocolError, match="keys of"):
            schema_of(kind)
