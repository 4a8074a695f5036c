"""A type in words."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Annotated, Any

import attrs
import pytest

from llamad_trio.typed.schema import schema_of
from llamad_trio.typed.text import description_of
from tests.typed.kinds import META, Age, Color, Leaf, Pair, Person, Size, case_name


@attrs.frozen
class Nothing:
    pass


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
        (tuple[()], "[]"),
        (Nothing, "{}"),
        (dict, "{<key>: any JSON, ...}"),
        (uuid.UUID, "string (uuid)"),
        (Annotated[str, META(pattern="^a$")], "string (matches ^a$)"),
        (
            Annotated[list[int], META(min_length=2, max_length=2)],
            "[integer, ...] (exactly 2 items)",
        ),
        (Pair, "[integer, string (optional)]"),
        (Color | None, '"red" | "blue" | null'),
        (dt.date, "string (date)"),
        (dt.timedelta, "string (ISO 8601 duration, like P1DT2H30M)"),
        (Any, "any JSON"),
        (Annotated[Age, "of a tree"], "of a tree\ninteger"),
        (list[Leaf], '[{\n  "leaf": integer\n}, ...]'),
        (tuple[Leaf, Leaf], '[Leaf, Leaf]\n\nLeaf: {\n  "leaf": integer\n}'),
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
