"""JSON Schema as a grammar of Python literals.

The two languages agree on numbers, brackets and strings in double quotes, so
llguidance's own `%json` does for every schema that leaves no room for true,
false and null.  The others are written out here, as far as their keywords are
known; a keyword that is not is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamad_trio.chat.tools.lark import LarkRules, json_expr, quoted
from llamad_trio.chat.tools.writing import json_text, python_text
from llamad_trio.core.errors import UnsupportedFeature
from llamad_trio.core.tools import JsonObject

_SAYS_NOTHING = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$defs", "definitions", "$schema"}
)
_KNOWN = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_WORDS = {"boolean": '("True" | "False")', "null": '"None"'}
_AGREED = frozenset({"string", "number", "integer"})


class PythonSchema:
    """One tool's schema.

    Args:
        rules: where the rules go.
        prefix: what their names begin with, one of its own for every schema.
        tool: the tool's name, for errors.
        schema: of its arguments.
    """

    def __init__(self, rules: LarkRules, prefix: str, tool: str, schema: JsonObject) -> None:
        self._rules = rules
        self._prefix = prefix
        self._tool = tool
        self._schema = schema
        self._n_rules = 0
        self._referred: dict[str, str] = {}

    def arguments(self) -> str:
        """The expression of keyword arguments, without the parentheses.

        They come in the schema's order; those not required may be left out.

        Raises `UnsupportedFeature` for what Python calls or this module cannot express.
        """
        schema = self._schema
        for _ in range(len(_refs(schema))):
            if set(schema) - _SAYS_NOTHING - {"type"} == {"$ref"}:
                schema = self._resolve(schema["$ref"], "arguments")
        self._check_keywords(schema, "object", "arguments")
        if schema.get("additionalProperties", False) is not False:
            raise self._refusal("arguments", "they can only be those that the schema names")
        for name in schema.get("properties", {}):
            if not name.isidentifier():
                raise self._refusal(f"argument {name!r}", "it is no Python name")
        return self._members(schema, "arguments", lambda name: f"{name}=")

    def _members(self, schema: JsonObject, where: str, write_name: Callable[[str], str]) -> str:
        """What an object's brackets hold: named values, commas only between them."""
        properties: JsonObject = schema.get("properties", {})
        required: Sequence[str] = schema.get("required", ())
        for name in required:
            if name not in properties:
                raise self._refusal(where, f"{name!r} is required but has no schema")
        # From the last to the first: what may follow when nothing has been written yet, and
        # what may follow a value.
        first, rest = '""', '""'
        for name, value in reversed(list(properties.items())):
            member = f"{quoted(write_name(name))} {self._value(value, f'{where}.{name}')}"
            member = self._rule(member)
            if name in required:
                first, rest = f"{member} {rest}", f"{quoted(', ')} {member} {rest}"
            else:
                first = f"{member} {rest} | {first}"
                rest = f"({quoted(', ')} {member})? {rest}"
            first, rest = self._rule(first), self._rule(rest)
        return first

    def _value(self, schema: Any, where: str) -> str:
        if not isinstance(schema, Mapping):
            if schema is not True:
                raise self._refusal(where, "it allows nothing")
            return self._any()
        if not self._has_words(schema, set()):
            return json_expr({**schema, **_shared(self._schema, schema)})
        told = {key: schema[key] for key in schema if key not in _SAYS_NOTHING}
        match told:
            case {"enum": [_, *_]} if set(told) <= {"enum", "type"}:
                return self._one_of([quoted(python_text(value)) for value in told["enum"]])
            case {"const": value} if set(told) <= {"const", "type"}:
                return quoted(python_text(value))
            case {"anyOf": [*options]} | {"oneOf": [*options]} if len(told) == 1:
                return self._one_of([self._value(option, where) for option in options])
            case {"$ref": str(name)} if len(told) == 1:
                return self._refer(name, where)
            case {"type": [*types]}:
                options = [_of_type(told, type_) for type_ in types]
                return self._one_of([self._value(option, where) for option in options])
            case {"type": str(type_)}:
                self._check_keywords(told, type_, where)
                return self._typed(told, type_, where)
            case {}:
                if told:
                    raise self._refusal(where, f"{', '.join(sorted(told))} without a type")
                return self._any()
            case _:
                raise self._refusal(where, f"the keywords {', '.join(sorted(told))} together")

    def _typed(self, schema: JsonObject, type_: str, where: str) -> str:
        if type_ in _WORDS:
            return _WORDS[type_]
        if type_ == "array":
            item = self._rule(self._value(schema.get("items", True), f"{where}[]"))
            return f'"[" {self._list(item, schema)} "]"'
        if "properties" not in schema:
            more = schema.get("additionalProperties", True)
            if more is False:
                return '"{}"'
            if schema.get("required"):
                raise self._refusal(where, "it requires keys that have no schema")
            value = self._value(more, f"{where}.*")
            self._rules.rule("KEY", 'PY_STRING ": "')
            self._any()
            return f'"{{" {self._list(self._rule(f"KEY {value}"), {})} "}}"'
        if schema.get("additionalProperties", False) is not False:
            raise self._refusal(where, "properties together with additionalProperties")
        members = self._members(schema, where, lambda name: f"{json_text(name)}: ")
        return f'"{{" {members} "}}"'

    def _list(self, item: str, schema: JsonObject) -> str:
        least: int = schema.get("minItems", 0)
        most: int | None = schema.get("maxItems")
        if most == 0:
            return '""'
        counts = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        listed = f"{item} ({quoted(', ')} {item}){counts}"
        return self._rule(listed if least else f'{listed} | ""')

    def _any(self) -> str:
        rule = self._rules.rule
        rule("PY_STRING", r'/"([^"\\\x00-\x1f\x7f]|\\(["\\bfnrt]|u00[0-9a-fA-F]{2}))*"/')
        rule("PY_NUMBER", r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/")
        rule("py_list", '"[" (py_any (", " py_any)*)? "]"')
        rule("py_item", 'PY_STRING ": " py_any')
        rule("py_dict", '"{" (py_item (", " py_item)*)? "}"')
        words = '"True" | "False" | "None"'
        return rule("py_any", f"PY_STRING | PY_NUMBER | {words} | py_list | py_dict")

    def _one_of(self, options: Sequence[str]) -> str:
        return f"({' | '.join(options)})"

    def _refer(self, name: str, where: str) -> str:
        if name not in self._referred:
            rule = self._referred[name] = self._new_name()
            self._rules.rule(rule, self._value(self._resolve(name, where), name))
        return self._referred[name]

    def _resolve(self, name: str, where: str) -> JsonObject:
        found: Any = self._schema
        for step in name.removeprefix("#/").split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        if not name.startswith("#/") or not isinstance(found, Mapping):
            raise self._refusal(where, f"{name!r} refers to no schema of its own")
        return found

    def _has_words(self, schema: Any, seen: set[str]) -> bool:
        """Whether true, false or null can be in a value of the schema, as far as can be told."""
        match schema:
            case bool():
                return schema
            case {"enum": [*values]}:
                return any(map(_holds_word, values))
            case {"const": value}:
                return _holds_word(value)
            case {"$ref": str(name)}:
                # One that was seen has been, or is being, looked into elsewhere.
                if name in seen:
                    return False
                seen.add(name)
                return self._has_words(self._resolve(name, name), seen)
            case {"anyOf": [*options]} | {"oneOf": [*options]}:
                return any(self._has_words(option, seen) for option in options)
            case {"type": [*types]}:
                return any(self._has_words(_of_type(schema, type_), seen) for type_ in types)
            case {"type": "array"}:
                items = [schema.get("items", True), *schema.get("prefixItems", ())]
                return any(self._has_words(item, seen) for item in items)
            case {"type": "object"}:
                values = [
                    schema.get("additionalProperties", True),
                    *schema.get("properties", {}).values(),
                    *schema.get("patternProperties", {}).values(),
                ]
                return any(self._has_words(value, seen) for value in values)
            case {"type": str(type_)}:
                return type_ not in _AGREED
            case _:
                return True

    def _check_keywords(self, schema: JsonObject, type_: str, where: str) -> None:
        if type_ not in _KNOWN:
            raise self._refusal(where, f"the type {type_!r} here")
        unknown = set(schema) - _SAYS_NOTHING - _KNOWN[type_] - {"type"}
        if unknown:
            raise self._refusal(where, f"the keywords {', '.join(sorted(unknown))}")

    def _refusal(self, where: str, reason: str) -> UnsupportedFeature:
        return UnsupportedFeature(f"the schema of {where} of tool {self._tool!r} in Python", reason)

    def _rule(self, body: str) -> str:
        return self._rules.rule(self._new_name(), body)

    def _new_name(self) -> str:
        self._n_rules += 1
        return f"{self._prefix}_{self._n_rules}"


def _of_type(schema: Mapping[str, Any], type_: str) -> JsonObject:
    """The schema for one of its types, with the keywords that say nothing of the others."""
    alien = frozenset[str]().union(*(_KNOWN[t] for t in _KNOWN if t != type_))
    own = _KNOWN.get(type_, frozenset())
    left = {k: v for k, v in schema.items() if k not in alien or k in own}
    if type_ in _WORDS:
        left = {k: v for k, v in left.items() if k not in _OF_TEXT_AND_NUMBERS}
    return {**left, "type": type_}


_OF_TEXT_AND_NUMBERS = frozenset(
    {
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)


def _holds_word(value: object) -> bool:
    match value:
        case None | bool():
            return True
        case list():
            return any(map(_holds_word, value))
        case dict():
            return any(map(_holds_word, value.values()))
        case _:
            return False


def _shared(document: JsonObject, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a part of the document needs beside it for its references to resolve."""
    if '"$ref"' not in json.dumps(schema):
        return {}
    return {key: document[key] for key in ("$defs", "definitions") if key in document}


def _refs(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas that others of the same document may refer to."""
    return {**schema.get("definitions", {}), **schema.get("$defs", {})}
