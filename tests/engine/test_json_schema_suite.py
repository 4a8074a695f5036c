"""What is generated under a schema validates with `jsonschema`; other schemas are refused.

The schemas are those of the public test suite, schemas made at random, and some made to deceive.
Texts come from walks that take any token which may come next, with a liking for ends, and for
some schemas from a model of random weights.
"""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jsonschema
import msgspec
import pydantic
import pytest
import trio

from llamad_trio import Request, open_engine
from llamad_trio.constraints.compiler import Matcher
from llamad_trio.constraints.constraint import Constraint
from llamad_trio.core.errors import ProtocolError
from tests.matching import COMPILER, takes, walks
from tests.schema_suite import Group, read_schema_suite
from tests.support import ONE_THREAD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.models import TinyModels

Validator = jsonschema.Draft202012Validator


def compiled(schema: object) -> Matcher | None:
    """At the beginning of a text; `None` if the schema is refused."""
    try:
        return COMPILER.compile(Constraint("json_schema", json.loads(json.dumps(schema))))
    except ProtocolError:
        return None


def check_walks(schema: Mapping[str, Any], chance: random.Random, n: int) -> int:
    """How many walks came to an end; -1 if the schema is refused."""
    matcher = compiled(schema)
    if matcher is None:
        return -1
    validators = [Validator(schema), jsonschema.validators.validator_for(schema, Validator)(schema)]
    count = 0
    for count, text in enumerate(walks(matcher, chance, n), start=1):  # noqa: B007
        value = json.loads(text)
        assert all(v.is_valid(value) for v in validators), (schema, text)
    return count


@functools.cache
def suite() -> list[Group]:
    return [
        group
        if isinstance(group.schema, dict)
        else Group(group.name, {"allOf": [group.schema]}, group.valid, group.invalid)
        for group in read_schema_suite()
    ]


@pytest.mark.parametrize("n", [8, pytest.param(300, marks=pytest.mark.slow)])
async def test_the_public_suite(n: int) -> None:
    groups = [group for group in suite() if group.valid]
    chance = random.Random(0)
    counts = [check_walks(group.schema, chance, n) for group in groups]
    assert len(groups) > 400
    assert sum(count >= 0 for count in counts) >= 160, "more than a third ought to be taken"
    assert [g.name for g, count in zip(groups, counts, strict=True) if count == 0] == []


async def test_what_the_public_suite_says_is_invalid_cannot_be_generated() -> None:
    n_tried = 0
    for group in suite():
        # A format is an annotation: the suite's assertions of them are stricter.
        matcher = None if "format" in group.schema else compiled(group.schema)
        if matcher is None:
            continue
        for value in group.invalid:
            if not Validator(group.schema).is_valid(value):
                n_tried += 1
                assert not takes(matcher, json.dumps(value, ensure_ascii=False)), group
    assert n_tried > 200


async def test_valid_values_of_the_public_suite_can_be_generated() -> None:
    """All but those written in another way: with other numbers, or their keys in another order."""
    groups = [(group, compiled(group.schema)) for group in suite() if "format" not in group.schema]
    told = [
        takes(matcher, json.dumps(value, ensure_ascii=False))
        for group, matcher in groups
        if matcher is not None
        for value in group.valid
    ]
    assert sum(told) / len(told) > 0.9


@pytest.mark.parametrize("n", [50, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("format_", ["date", "email", "ipv4", "ipv6", "uuid"])
async def test_a_format_is_asserted(format_: str, n: int) -> None:
    schema = {"type": "string", "format": format_}
    matcher = compiled(schema)
    assert matcher is not None
    checked = Validator(schema, format_checker=Validator.FORMAT_CHECKER)
    texts = list(walks(matcher, random.Random(format_), n))
    assert texts
    for text in texts:
        # Python knows no year 0, and which years have a 29th of February.
        is_odd_day = format_ == "date" and (b"-02-29" in text or text.startswith(b'"0000'))
        assert is_odd_day or checked.is_valid(json.loads(text)), text


async def test_a_model_of_random_weights(tiny_model: TinyModels) -> None:
    # A request holds no NUL, which llama.cpp would take for the end of a text.
    groups = [
        group
        for group in suite()
        if group.valid and "\\u0000" not in json.dumps(group.schema) and compiled(group.schema)
    ]
    finished: Counter[str] = Counter()
    path = tiny_model("attention", can_end=True, n_ctx_train=8192)
    async with open_engine(path, ONE_THREAD, n_slots=8, n_ctx=4096) as engine:

        async def generate(group: Group, seed: int, limit: trio.Semaphore) -> None:
            async with limit:
                request = Request(
                    group.name, raw=True, json_schema=group.schema, max_tokens=48, seed=seed,
                    temperature=2.0, top_k=0, top_p=1.0, repeat_penalty=1.0,
                )  # fmt: skip
                done = await engine.complete(request)
            if done.finish_reason == "stop":
                finished[group.name] += 1
                assert Validator(group.schema).is_valid(done.value), (group.schema, done.text)

        limit = trio.Semaphore(16)
        async with trio.open_nursery() as nursery:
            for group in groups:
                for seed in range(2):
                    nursery.start_soon(generate, group, seed, limit)
    assert len(finished) > 0.8 * len(groups)


# -- Schemas at random ------------------------------------------------------------------------


class Maker:
    """Makes schemas: mostly sensible ones, whose keywords meet."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def number(self) -> float:
        chance = self.chance
        return chance.choice(
            [
                chance.randint(-20, 20),
                chance.choice([0, 1, -1, 10, 99, 100, -100, 999, 1000, 0.1, 0.5, -0.5, 1e-7]),
                round(chance.uniform(-3, 3), chance.randint(1, 6)),
                chance.randint(-(2**53), 2**53),
            ]
        )

    def of_numbers(self) -> dict[str, Any]:
        chance = self.chance
        schema: dict[str, Any] = {
            "type": chance.choice(["number", "integer", ["integer", "string"]])
        }
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if chance.random() < 0.35:
                is_zero = name.startswith("ex") and schema["type"] == "number"
                schema[name] = 0 if is_zero else self.number()
        if chance.random() < 0.3:
            schema["multipleOf"] = chance.choice([1, 2, 3, 7, 0.5, 0.25, 2.0, 0.125, 12])
        if chance.random() < 0.3:
            schema["allOf"] = [{chance.choice(["minimum", "maximum"]): self.number()}]
        return schema

    def pattern(self, depth: int = 0) -> str:
        chance = self.chance
        kind = chance.random()
        if depth > 3 or kind < 0.4:
            return chance.choice(ATOMS)
        inner = self.pattern(depth + 1)
        if kind < 0.65:
            return inner + self.pattern(depth + 1)
        if kind < 0.75:
            return f"({inner})"
        if kind < 0.9:
            return f"(?:{inner}){chance.choice(['*', '+', '?', '{2}', '{0,2}', '*?', '{1,2}?'])}"
        return f"{inner}|{self.pattern(depth + 1)}"

    def of_texts(self) -> dict[str, Any]:
        chance = self.chance
        start, end = chance.choice(["", "^"]), chance.choice(["", "$"])
        pattern = f"{start}{self.pattern()}{end}"
        schema: dict[str, Any] = {"type": "string", "pattern": pattern}
        if chance.random() < 0.3:
            schema["minLength"] = chance.randint(0, 4)
        if chance.random() < 0.3:
            schema["maxLength"] = chance.randint(0, 6)
        if chance.random() < 0.25:
            return {
                "patternProperties": {pattern: schema},
                "additionalProperties": {"type": "null"},
            }
        return schema

    def of_all(self) -> dict[str, Any]:
        schema = self.part()
        while not isinstance(schema, dict):
            schema = self.part()
        return {"$defs": {"x": self.part(1), "y": self.part(1)}, **schema}

    def part(self, depth: int = 0) -> Any:
        chance = self.chance
        if depth > 2 or chance.random() < 0.25:
            return chance.choice(LEAVES)
        names = chance.choice(FIELDS)
        makers: dict[str, Callable[[], Any]] = {
            "type": lambda: chance.choice(["object", "array", ["object", "null"], "string"]),
            "properties": lambda: {k: self.part(depth + 1) for k in chance.sample(KEYS, 2)},
            "required": lambda: chance.sample(KEYS, chance.randint(1, 2)),
            "patternProperties": lambda: {
                p: self.part(depth + 1) for p in chance.sample(["^a", "^b", "^é", "^$"], 2)
            },
            "enum": lambda: chance.sample(VALUES, chance.randint(1, 4)),
            "const": lambda: chance.choice(VALUES),
            "$ref": lambda: chance.choice(["#", "#/$defs/x", "#/$defs/y"]),
            **dict.fromkeys(
                ("additionalProperties", "items"),
                lambda: chance.choice([False, self.part(depth + 1)]),
            ),
            **dict.fromkeys(
                ("prefixItems", "allOf", "anyOf", "oneOf"),
                lambda: [self.part(depth + 1) for _ in range(chance.randint(1, 3))],
            ),
            **dict.fromkeys(
                ("minItems", "maxItems", "minProperties", "maxProperties", "maxLength"),
                lambda: chance.randint(0, 3),
            ),
        }
        chosen = chance.sample(names, chance.randint(1, min(5, len(names))))
        return {name: makers[name]() for name in chosen}


ATOMS = [
    *("a", "b", "0", "_", "-", "é", "😀", "٣", r"\d", r"\w", r"\s", ".", "[a-c]", "[^a]", r"[\d_]"),
    *(r"[\w-]", r"\.", r"\n", r"\t", r"\u00e9", r"\x41", "/", '"', r"\\", "[é-ü]", "[.]", "[a^]"),
    *("[$]", "}", "]", "#", "&&", "~", r"\@", r"[\]\[]", r"\^", r"\$"),
]
KEYS = ["a", "b", "c", "a\n", "é", "", '"', "$ref", "\x01", "\x7f", "😀"]
VALUES = [1, "a", None, True, False, 0, 0.5, [1], {"a": 1}, {"a": "b", "b": 1}, [], {}, 1.0]
LEAVES: list[Any] = [
    *({"type": name} for name in ("string", "integer", "null", "boolean", "number")),
    *(True, False, {}, {"const": 1}, {"const": 1.0}, {"enum": ["a", "b", 1, None, True]}),
    *({"minimum": 3}, {"maxLength": 2}, {"required": ["a"]}, {"maxItems": 1}, {"multipleOf": 2}),
    *({"const": {"k": [1, {}]}}, {"enum": [0, False, [0], ""]}, {"type": ["string", "integer"]}),
]
OF_OBJECTS = ["type", "properties", "required", "additionalProperties", "patternProperties"]
FIELDS = [
    [*OF_OBJECTS, "minProperties", "maxProperties", "allOf", "anyOf"],
    ["type", "items", "prefixItems", "minItems", "maxItems", "allOf", "anyOf"],
    ["allOf", "anyOf", "oneOf", "$ref", "enum", *OF_OBJECTS],
    ["type", "enum", "const", "anyOf", "maxLength", "minItems", "properties", "$ref"],
]


@pytest.mark.parametrize(
    ("seed", "n"), [(1, 40), *(pytest.param(s, 400, marks=pytest.mark.slow) for s in range(2, 12))]
)
@pytest.mark.parametrize("make", [Maker.of_numbers, Maker.of_texts, Maker.of_all])
async def test_schemas_made_at_random(
    make: Callable[[Maker], dict[str, Any]], seed: int, n: int
) -> None:
    maker = Maker(seed)
    counts = [check_walks(make(maker), maker.chance, 12) for _ in range(n)]
    assert sum(count > 0 for count in counts) > n / 4


# -- Schemas made to deceive ------------------------------------------------------------------

NUMBER = {"type": "number"}

DECEPTIONS: list[tuple[dict[str, Any], str]] = [
    # Bounds of which llguidance takes what lies on them, or which reading rounds.
    ({**NUMBER, "exclusiveMinimum": 0, "maximum": 0.5}, "0"),
    ({"allOf": [{**NUMBER, "exclusiveMinimum": 0}, {"maximum": 0.5}]}, "0"),
    ({**NUMBER, "exclusiveMinimum": 1, "maximum": 1.5}, "1"),
    ({**NUMBER, "exclusiveMaximum": 0, "minimum": -0.5}, "-0"),
    ({**NUMBER, "exclusiveMaximum": 1}, "0.99999999999999999999"),
    ({**NUMBER, "minimum": 1.5e-10, "maximum": 1.5000000000000002e-10}, "0"),
    ({"const": 2**53 + 1}, str(2**53)),
    ({"enum": [{"a": [2**53 + 1]}]}, '{"a": [9007199254740992]}'),
    ({"type": "integer", "maximum": 2**53 + 3}, str(2**53 + 4)),
    ({"type": "integer", "minimum": 1e300}, "9223372036854775807"),
    ({**NUMBER, "multipleOf": 0.1}, "0.3"),
    ({**NUMBER, "multipleOf": 0.30000000000000004}, "0.3"),
    ({"type": "integer", "multipleOf": 2.5}, "-9813271211993745"),
    ({**NUMBER, "allOf": [{"multipleOf": 0.0078125}, {"multipleOf": 3}]}, "0.5"),
    # Keys that are one key to a reader.
    ({"type": "object", "minProperties": 2}, '{"a": 1, "a": 2}'),
    ({"type": "object", "required": ["a"], "minProperties": 3}, '{"a": 1, "b": 1, "b": 1}'),
    # Keywords that llguidance passes over.
    ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}, "1"),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [False]}, "[1]"),
    ({"$schema": "http://json-schema.org/draft-06/schema#", "if": True, "then": False}, "1"),
    ({"items": {"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}}, "[1]"),
    ({"minimun": 3}, "1"),
    ({"type": "integer", "format": "int32"}, "9999999999"),
    ({"type": "string", "contentEncoding": "base64"}, '"?"'),
    ({"type": "string", "format": "unknown"}, '"a"'),
    ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "[1, 1]"),
    # Patterns that mean something else in Python.
    ({"type": "string", "pattern": r"\D"}, '"٣"'),
    ({"type": "string", "pattern": r"^[^\d]$"}, '"٣"'),
    ({"type": "string", "pattern": r"^\W$"}, '"é"'),
    ({"type": "string", "pattern": "^[[:alpha:]]$"}, '"a"'),
    ({"type": "string", "pattern": "^[a-z&&[^a]]$"}, '"b"'),
    ({"type": "string", "pattern": "^a*+a$"}, '"aa"'),
    ({"type": "string", "pattern": "^(?U)a$"}, '"a"'),
    ({"type": "string", "pattern": "^(?i)\u017f$"}, '"s"'),
    ({"type": "string", "pattern": r"^\p{L}$"}, '"a"'),
    ({"type": "string", "pattern": r"^\b{start}a$"}, '"a"'),
    ({"patternProperties": {r"^\W$": False}}, '{"٣": 1}'),
    ({"patternProperties": {r"^\w$": False}}, '{"é": 1}'),
    ({"patternProperties": {r"^\d$": {"type": "null"}}, "properties": {"٣": {}}}, '{"٣": 1}'),
    # Control characters, which llguidance leaves out when it must not write them as \\u.
    ({"const": "a\x01b"}, '"ab"'),
    ({"type": "string", "pattern": r"^a\x01b$"}, '"ab"'),
    ({"type": "string", "pattern": r"^a[^\x00-\x1f]b$"}, '"ab"'),
    ({"properties": {"a\x01": {"type": "integer"}}}, r'{"a\u0001": "x"}'),
    # References to what is no schema, or elsewhere.
    ({"$ref": "#/default", "default": {"minimun": 3}}, "1"),
    ({"$ref": "#a", "$defs": {"a": {"$anchor": "a", "type": "string"}}}, "1"),
    ({"$ref": "http://localhost/a"}, "1"),
    ({"$defs": {"a": {"$id": "b:c", "items": {"$ref": "#/$defs/x"}}}, "$ref": "#/$defs/a"}, "[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text"), DECEPTIONS, ids=lambda v: json.dumps(v)[:60])
async def test_a_deception_fails(schema: dict[str, Any], text: str) -> None:
    matcher = compiled(schema)
    assert matcher is None or not takes(matcher, text)


INTEGER_A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (INTEGER_A, r'{"\u0061": "x"}'),
        (INTEGER_A, r'{"a": 1, "\u0061": "x"}'),
        ({"required": ["a"], **INTEGER_A}, r'{"a": 1, "\u0061": "x"}'),
        ({"patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061b": "x"}'),
        ({"patternProperties": {"^a": False}}, r'{"\u0061b": "x"}'),
        # White space to Python, not to llguidance.
        ({"type": "string", "pattern": r"^\S$"}, r'"\u001c"'),
        ({"type": "string", "pattern": r"^[^\s]$"}, r'"\u001f"'),
    ],
)
async def test_escapes_hide_nothing(schema: dict[str, Any], text: str) -> None:
    assert not Validator(schema).is_valid(json.loads(text))
    matcher = compiled(schema)
    assert matcher is None or not takes(matcher, text)


# -- Schemas that others write ----------------------------------------------------------------


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pydantic.Field(ge=0, le=9)] = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, pydantic.Field(pattern=r"^[A-Z]\w*$", max_length=10)]
    weight: pydantic.PositiveFloat = pydantic.Field(5.0, examples=[3.5], description="in kg")


class Owner(pydantic.BaseModel):
    """Who has pets."""

    pets: list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]]
    friend: Owner | None = None
    notes: dict[str, int] = {}


class Leaf(msgspec.Struct, tag=True):
    size: Annotated[int, msgspec.Meta(ge=1, description="in cm")]


class Flower(msgspec.Struct, tag=True):
    color: Literal["red", "blue"]


class Branch(msgspec.Struct):
    parts: list[Leaf | Flower]
    branches: list[Branch] = []
    label: str | None = None


@pytest.mark.parametrize(
    "schema",
    [
        Owner.model_json_schema(),
        Dog.model_json_schema(),
        {**msgspec.json.schema(Branch), "$schema": "https://json-schema.org/draft/2020-12/schema"},
        msgspec.json.schema(Leaf),
    ],
    ids=["Owner", "Dog", "Branch", "Leaf"],
)
async def test_schemas_of_pydantic_and_msgspec_are_taken(schema: dict[str, Any]) -> None:
    assert check_walks(schema, random.Random(0), 40) > 0
