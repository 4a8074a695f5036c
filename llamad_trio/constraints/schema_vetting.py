"""Which JSON Schemas are taken: those that llguidance enforces to the letter, and survives.

Text of a schema that passes validates with the library `jsonschema`.  llguidance 1.9 compiles
more than this; what it gets wrong is refused, each with its reason.  It compiles by recursion,
through references, too, so there is a bound on how deep a schema may lead it.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from math import prod
from typing import Any

from llamad_trio.constraints.schema_keywords import (
    OF_THE_WHOLE,
    Place,
    as_list,
    fault_of_keyword,
    nodes_within,
    parts_of,
    resolve,
    shortened,
)
from llamad_trio.core.errors import ProtocolError

MAX_DEPTH = 500
"""llguidance follows nesting and references by recursion.  On a thread's usual stack of 8 MiB
it survives 1,200 levels and not 4,000."""

MAX_PATTERNS = 30
"""In `patternProperties`, all together: llguidance compares each with each.  A hundred take it a
quarter of a second, four hundred a minute."""

MAX_PATTERN_CHARS = 32_000
"""Of all patterns together.  Python takes 8 µs for each to see whether they are any."""

MAX_MULTIPLE = 100_000
"""`multipleOf` becomes an automaton of as many states; combined ones multiply.  This many
take a third of a second, ten times as many eight."""

MAX_COMMON_MULTIPLE = 2**32
"""llguidance computes it in 32 bits, and goes on with what is left when it is more."""

DRAFTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}


def vet_schema(schema: Mapping[str, Any], *, in_lark: bool = False) -> None:
    """Refuse a schema that llguidance would not enforce, or not survive.

    Args:
        schema: JSON data of which no container occurs twice, as `json.loads` gives it.
        in_lark: it stands in a grammar, and may say in `x-guidance` how its JSON is written.

    Raises:
        ProtocolError: with the keyword, its place, and the reason.
    """
    draft = _check_whole(schema, in_lark=in_lark)
    parts: list[Mapping[str, Any]] = []
    n_chars = 0
    for part, place in parts_of(schema):
        parts.append(part)
        of_keys = part.get("patternProperties")
        patterns = [part.get("pattern"), *(of_keys if isinstance(of_keys, Mapping) else ())]
        n_chars += sum(len(pattern) for pattern in patterns if isinstance(pattern, str))
        if n_chars > MAX_PATTERN_CHARS:
            raise ProtocolError(
                f"json_schema: its patterns have more than {MAX_PATTERN_CHARS} characters"
            )
        for keyword, value in part.items():
            if place is None and in_lark and keyword == "x-guidance":
                continue
            fault = fault_of_keyword(keyword, value, draft)
            if fault is None and place is not None and keyword in OF_THE_WHOLE:
                fault = "only the whole schema may have it"
            if fault is None and keyword == "$ref" and resolve(value, schema) is None:
                fault = f"{shortened(value)} leads to no schema"
            if fault is not None:
                raise _refusal(place, keyword, fault)
        _check_neighbours(part, place)
    _check_combinations(parts)
    _check_progress(parts, schema)
    if depth_bound(schema) > MAX_DEPTH:
        raise ProtocolError(
            f"json_schema is nested more than {MAX_DEPTH} deep, references included"
        )


def _check_whole(schema: Mapping[str, Any], *, in_lark: bool) -> int:
    """What only the whole schema may say; return its draft."""
    for name in ("$id", "id"):
        if not isinstance(schema.get(name, ""), str):
            raise _refusal(None, name, "it must be a text")
    style = schema.get("x-guidance", {})
    if in_lark and (
        not isinstance(style, Mapping) or style.get("lenient") or style.get("coerce_one_of")
    ):
        raise _refusal(None, "x-guidance", "what is not supported must not be ignored")
    name = schema.get("$schema", "https://json-schema.org/draft/2020-12/schema")
    draft = DRAFTS.get(name.removesuffix("#")) if isinstance(name, str) else None
    if draft is None:
        raise _refusal(None, "$schema", f"{shortened(name)} is no draft of JSON Schema we know")
    return draft


def _refusal(place: Place, keyword: str, fault: str) -> ProtocolError:
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(str(name))
    path = "/".join(("#", *reversed(names)))
    if len(path) > 120:
        path = f"{path[:80]}...{path[-37:]}"
    return ProtocolError(f"json_schema: {shortened(keyword)} at {path} is refused: {fault}")


# -- What keywords say together ---------------------------------------------------------------


def _check_neighbours(part: Mapping[str, Any], place: Place) -> None:
    """What keywords of one schema must not say."""
    required = len(set(part.get("required", ())))
    if part.get("minProperties", 0) > required + 1:
        # A key may come twice; to whoever reads the text that is one.
        raise _refusal(
            place,
            "minProperties",
            f"at most {required + 1}, one more than 'required' has: other keys may repeat",
        )
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if part.get(name) and _may_be_fraction(part):
            raise _refusal(
                place,
                name,
                "of numbers that need not be whole only 0 is taken: 0.9999999999999999999 is "
                "less than 1, and read as 1.0",
            )


def _may_be_fraction(part: Mapping[str, Any]) -> bool:
    return "number" in as_list(part.get("type", "number"))


def _check_combinations(parts: list[Mapping[str, Any]]) -> None:
    """What keywords must not say wherever they are, for their schemas may be combined."""
    if sum(len(part.get("patternProperties", ())) for part in parts) > MAX_PATTERNS:
        raise ProtocolError(
            f"json_schema: 'patternProperties' has more than {MAX_PATTERNS} patterns in all"
        )
    bounds = [part[name] for part in parts for name in ("minimum", "maximum") if name in part]
    for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        of_0 = any(part.get(name) == 0 and _may_be_fraction(part) for part in parts)
        if of_0 and any(0 < sign * bound < 1 for bound in bounds):
            raise ProtocolError(
                "json_schema: an exclusive bound of 0 together with a bound between 0 and 1 "
                "is refused: llguidance takes 0 for within both"
            )
    _check_multiples({Decimal(str(part["multipleOf"])) for part in parts if "multipleOf" in part})


def _check_multiples(multiples: set[Decimal]) -> None:
    # 0.25 counts in steps of 25 hundredths; together, all count in steps of the finest.
    alone = prod(int("".join(map(str, multiple.as_tuple().digits))) for multiple in multiples)
    n_decimals = max((Fraction(m).denominator.bit_length() - 1 for m in multiples), default=0)
    together = prod(multiple * 10**n_decimals for multiple in multiples)
    if alone > MAX_MULTIPLE or together >= MAX_COMMON_MULTIPLE:
        raise ProtocolError(f"json_schema: multipleOf above {MAX_MULTIPLE}, all of them multiplied")


def _check_progress(parts: list[Mapping[str, Any]], schema: Mapping[str, Any]) -> None:
    """Refuse a schema of a value that comes back to itself for the same value: no end to that."""
    same_value: dict[int, list[int]] = {}
    for part in parts:
        nexts = [each for name in ("allOf", "anyOf", "oneOf") for each in part.get(name, ())]
        if "$ref" in part:
            nexts.append(resolve(part["$ref"], schema))
        same_value[id(part)] = [id(each) for each in nexts]
    try:
        graphlib.TopologicalSorter(same_value).prepare()
    except graphlib.CycleError:
        raise ProtocolError(
            "json_schema: a schema refers to itself for one and the same value"
        ) from None


# -- Depth ------------------------------------------------------------------------------------


def depth_bound(schema: Mapping[str, Any]) -> int:
    """The most containers that may lie within one another, what is referred to included.

    llguidance compiles what a reference leads to where it first meets it, and only once.  In
    which order it meets them we do not follow: what is counted is the most that any may take.
    """
    nodes = [node for node in nodes_within(schema) if isinstance(node, Mapping | list)]
    number = {id(node): i for i, node in enumerate(nodes)}
    edges: list[list[int]] = []
    inside: dict[int, int] = {}
    referred: set[int] = set()
    for i, node in enumerate(nodes):
        held = node.values() if isinstance(node, Mapping) else node
        edges.append([number[id(each)] for each in held if id(each) in number])
        inside.update(dict.fromkeys(edges[i], i))
        if isinstance(node, Mapping) and isinstance(ref := node.get("$ref"), str):
            target = number.get(id(resolve(ref, schema)))
            if target is not None:
                edges[i].append(target)
                referred.add(target)

    depth: dict[int, int] = {}
    for group in _cycles(edges):
        # How deep each goes below itself, without references.
        below = dict.fromkeys(sorted(group, reverse=True), 1)
        for i, levels in below.items():
            if inside.get(i) in below:
                below[inside[i]] = max(below[inside[i]], 1 + levels)
        # Within a cycle one goes down from where one enters, and once from all that is referred to.
        own = max(below.values())
        if len(group) > 1 or group[0] in edges[group[0]]:
            own += sum(below[i] for i in referred.intersection(group))
        under = max((depth[j] for i in group for j in edges[i] if j not in below), default=0)
        depth.update(dict.fromkeys(group, own + under))
    return depth[0]


def _cycles(edges: list[list[int]]) -> list[list[int]]:
    """The strongly connected components, after those they lead to: Kosaraju's algorithm."""
    back: list[list[int]] = [[] for _ in edges]
    for node, targets in enumerate(edges):
        for target in targets:
            back[target].append(node)
    seen: set[int] = set()
    order = [node for start in range(len(edges)) for node in _reached_from(back, start, seen)]
    seen.clear()
    groups = (list(_reached_from(edges, start, seen)) for start in reversed(order))
    return [group for group in groups if group]


def _reached_from(edges: list[list[int]], start: int, seen: set[int]) -> Iterator[int]:
    """What a node leads to and was not seen, itself included, each after all it leads to."""
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node < 0:
            yield ~node
        elif node not in seen:
            seen.add(node)
            waiting += [~node, *edges[node]]
