"""A typed function becomes a tool, and a model's arguments become the function's."""

from __future__ import annotations

import datetime as dt
import enum
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Literal

import attrs
import msgspec
import pydantic
import pytest

from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.tools import Tool
from llamad_trio.typed.function_tool import call_arguments, tool_from
from tests.matching import compiled


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


@attrs.frozen
class Place:
    """Somewhere.

    Args:
        city: its name.
    """

    city: str
    country: str | None = None


def forecast(place: Place, days: int = 3, *, unit: Unit = Unit.CELSIUS) -> str:
    """Forecast the weather
    of a place.

    Asks a service.

    Args:
        place: where.
        days (int): how many days,
            from today.
        unit: of temperatures.

    Returns:
        the: forecast.
    """
    return f"{place} {days} {unit}"


async def later(when: dt.datetime, note: Annotated[str, "what to say"]) -> None:
    """Remind.

    :param datetime when: the time,
        with its zone
    :param note: is overruled
    :returns: nothing
    """


def find(words: list[str], limit: Annotated[int, msgspec.Meta(ge=1, description="most")]) -> None:
    """Find.

    Parameters
    ----------
    words : list of str
        All of these.
    limit
        Is overruled.

    Returns
    -------
    nothing : None
    """


class Shop:
    def buy(self, item: str, count: int = 1) -> str:
        """Buy something.

        Args:
            item: which.
        """
        return item * count

    @classmethod
    def close(cls, hard: bool) -> None:
        """Close."""


class Search:
    """Searches the web."""

    def __call__(self, query: str) -> str:
        return query


def properties(tool: Tool) -> Any:
    compiled(tool.schema)
    assert tool.schema["type"] == "object"
    assert tool.schema["additionalProperties"] is False
    return tool.schema["properties"]


def test_a_function_is_a_tool_and_its_arguments_are_structured() -> None:
    tool = tool_from(forecast)
    assert (tool.name, tool.function) == ("forecast", forecast)
    assert tool.description == "Forecast the weather of a place."
    assert tool.schema == {
        "type": "object",
        "properties": {
            "place": {
                "description": "where.",
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name."},
                    "country": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
            "days": {"type": "integer", "description": "how many days, from today."},
            "unit": {"enum": ["celsius", "kelvin"], "description": "of temperatures."},
        },
        "required": ["place"],
        "additionalProperties": False,
    }
    properties(tool)
    made = call_arguments(tool, {"place": {"city": "Oslo"}, "unit": "kelvin"})
    assert made == {"place": Place("Oslo"), "unit": Unit.KELVIN}


def test_a_tool_stays_itself() -> None:
    tool = Tool("t", "", {"type": "object"})
    assert tool_from(tool) is tool


@pytest.mark.parametrize(
    ("function", "summary", "described"),
    [
        (later, "Remind.", {"when": "the time, with its zone", "note": "what to say"}),
        (find, "Find.", {"words": "All of these.", "limit": "most"}),
    ],
)
def test_docstrings_and_annotations_describe(
    function: Callable[..., object], summary: str, described: dict[str, str]
) -> None:
    tool = tool_from(function)
    assert tool.description == summary
    assert {name: part["description"] for name, part in properties(tool).items()} == described


def test_methods_lose_self() -> None:
    shop = Shop()
    tool = tool_from(shop.buy)
    arguments: Any = call_arguments(tool, {"item": "x", "count": 2})
    assert tool.name == "buy"
    assert properties(tool).keys() == {"item", "count"}
    assert shop.buy(**arguments) == "xx"
    assert properties(tool_from(Shop.close)).keys() == {"hard"}


def test_what_a_partial_binds_is_no_parameter() -> None:
    by_name = tool_from(functools.partial(Shop().buy, item="y"))
    by_position = tool_from(functools.partial(functools.partial(Shop.buy, Shop()), "z"))
    for tool in (by_name, by_position):
        assert tool.name == "buy"
        assert tool.description == "Buy something."
        assert properties(tool).keys() == {"count"}
    assert by_name.function is not None
    assert by_name.function(**call_arguments(by_name, {"count": 2})) == "yy"
    with pytest.raises(ValueError, match="unknown argument 'item': it takes count"):
        call_arguments(by_name, {"item": "q"})


def test_objects_with_call_are_tools() -> None:
    tool = tool_from(Search())
    assert (tool.name, tool.description) == ("Search", "Searches the web.")
    assert properties(tool) == {"query": {"type": "string"}}


def test_wrapped_functions_keep_their_parameters() -> None:
    def traced(function: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> str:
            return function(*args, **kwargs)

        return wrapper

    assert properties(tool_from(traced(forecast))).keys() == {"place", "days", "unit"}


def test_recursive_types_have_definitions() -> None:
    @attrs.frozen
    class Node:
        children: list[Node]

    def visit(tree: object) -> None: ...

    visit.__annotations__ = {"tree": Node}
    tool = tool_from(visit)
    assert properties(tool) == {"tree": {"$ref": "#/$defs/Node"}}
    assert call_arguments(tool, {"tree": {"children": []}}) == {"tree": Node([])}


def unhinted(x, y: int) -> None: ...  # type: ignore[no-untyped-def]


def starred(*args: int) -> None: ...


def keywords(**kwargs: int) -> None: ...


def positional(x: int, /) -> None: ...


def counting(n: int) -> Iterator[int]:
    yield n


async def arriving(n: int) -> AsyncIterator[int]:
    yield n


class Feed:
    def read(self, n: int) -> Iterator[int]:
        yield n

    def __call__(self, n: int) -> Iterator[int]:
        yield n


def schemaless(x: Callable[[], int]) -> None: ...


def nowhere(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (unhinted, "unhinted: parameter 'x' has no type hint"),
        (starred, "starred: a tool cannot take *args"),
        (keywords, "keywords: a tool cannot take *kwargs"),
        (positional, "positional: 'x' is positional-only"),
        (schemaless, "schemaless.x: the type Callable"),
        (nowhere, "nowhere: its type hints cannot be read: name 'Nowhere' is not defined"),
        (counting, "counting is a generator function"),
        (arriving, "arriving is a generator function"),
        (functools.partial(counting, n=1), "counting is a generator function"),
        (Feed().read, "read is a generator function"),
        (Feed(), "Feed is a generator function"),
        (lambda: 1, "a lambda has no type hints"),
        (Place, "Place is a class"),
        (print, "print: "),
        (3, "a tool must be callable, not int"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_by_name(item: Any, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        tool_from(item)

    assert message in caught.value.reason


def test_what_a_function_returns_may_have_a_name_unknown_when_it_runs() -> None:
    def known(a: int) -> Unknown:  # type: ignore[name-defined]  # noqa: F821
        return a

    class Known:
        def __call__(self, a: int) -> Unknown:  # type: ignore[name-defined]  # noqa: F821
            return a

    @functools.wraps(known)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return known(*args, **kwargs)

    for item in (known, wrapped, Known(), Known().__call__, functools.partial(known)):
        tool = tool_from(item)
        assert properties(tool) == {"a": {"type": "integer"}}
        assert call_arguments(tool, {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "forecast: missing argument 'place'"),
        ({"place": {"city": 1}}, "forecast: place.city: expected str, got int"),
        ({"place": {"city": "a"}, "days": "3"}, "forecast: days: expected int, got str"),
        (
            {"day": 3, "unit": "x"},
            "forecast: missing argument 'place'; unknown argument 'day': it takes place, days, "
            'unit; unit: expected one of "celsius", "kelvin"',
        ),
    ],
)
def test_wrong_arguments_are_all_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call_arguments(tool_from(forecast), arguments)

    assert str(caught.value) == message


def test_a_hand_written_tool_may_be_loose() -> None:
    def loose(a, b: Literal[1] = 1, **rest: int) -> None: ...  # type: ignore[no-untyped-def]

    tool = Tool("loose", "", {"type": "object"}, loose)
    assert call_arguments(tool, {"a": [1], "c": "x"}) == {"a": [1], "c": "x"}
    with pytest.raises(ValueError, match="loose: b: expected one of 1"):
        call_arguments(tool, {"a": 1, "b": 2})


def test_a_tool_without_a_function_cannot_be_called() -> None:
    with pytest.raises(ProtocolError, match="has no function"):
        call_arguments(Tool("t", "", {"type": "object"}), {})


def test_pydantic_parameters() -> None:
    model: Any = pydantic.create_model("Order", count=(int, ...))

    def order(what: object) -> None: ...

    order.__annotations__ = {"what": model}
    tool = tool_from(order)
    assert properties(tool)["what"]["properties"] == {"count": {"type": "integer"}}
    assert call_arguments(tool, {"what": {"count": 2}}) == {"what": model(count=2)}
    with pytest.raises(ValueError, match=r"order: what\.count: Input should be a valid integer"):
        call_arguments(tool, {"what": {"count": "2"}})
