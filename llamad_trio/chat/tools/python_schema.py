"""JSON Schema as a grammar of Python literals.

The two languages agree on numbers, brackets and strings in double quotes, so
llguidance's own `%json` does for every schema that leaves no room for true,
false and null.  The others are written out here, as far as their keywords are
known; a keyword that is not is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamad_trio.chat.tools.lark import LarkRules, json_expr, json_text, python_text, quoted
from llamad_trio.constraints.constraint import MAX_SOURCE_BYTES
from llamad_trio.constraints.schema_keywords import (
    SUPPORTED,
    nodes_within,
    resolve,
    says_nothing,
    standing_alone,
)
from llamad_trio.constraints.schema_vetting import vet_schema
from llamad_trio.core.errors import ProtocolError, UnsupportedFeature
from llamad_trio.core.tools import JsonObject

_WRITABLE = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
"""The keywords that can be written out, by the type they are about."""

_WORDS = {"boolean": '("True" | "False")', "null": '"None"'}


class PythonSchema:
    """The schema of a tool's arguments, written as rules with names of a prefix of its own."""

    def __init__(self, rules: LarkRules, prefix: str, tool: str, schema: JsonObject) -> None:
        self._rules = rules
        self._prefix = prefix
        self._tool = tool
        self._schema = schema
        self._n_rules = 0
        self._n_json_chars = 0
        self._referred: dict[str, str] = {}

    def arguments(self) -> str:
        """The expression of keyword arguments, without the parentheses.

        They come in the schema's order; those not required may be left out.

        Raises `UnsupportedFeature` for what llguidance, Python calls or this module cannot
        express.
        """
        try:
            vet_schema(self._schema)
            return self._arguments(self._schema)
        except ProtocolError as error:
            raise self._refusal("arguments", error.reason) from error
        except RecursionError:
            raise self._refusal("arguments", "it is nested too deeply") from None

    def _arguments(self, schema: JsonObject) -> str:
        told = _telling(schema)
        if told.keys() - {"type"} == {"$ref"}:
            target = resolve(schema["$ref"], self._schema)
            if isinstance(target, Mapping):
                return self._arguments(target)
        self._check_writable(told, "object", "arguments")
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
        if isinstance(schema, bool):
            if not schema:
                raise self._refusal(where, "it allows nothing")
            return self._any()
        told = _telling(schema)
        match told:
            case {"$ref": str(name)} if len(told) == 1:
                if name not in self._referred:
                    rule = self._referred[name] = self._new_name()
                    self._rules.rule(rule, self._value(resolve(name, self._schema), where))
                return self._referred[name]
            case _ if not self._has_words(schema, set()):
                # It is written alike in both languages.
                expression = json_expr(standing_alone(schema, self._schema))
                self._n_json_chars += len(expression)
                if self._n_json_chars > MAX_SOURCE_BYTES:
                    reason = f"it comes to more than {MAX_SOURCE_BYTES} bytes"
                    raise self._refusal(where, reason)
                return expression
            case {"enum": [*values]} if told.keys() <= {"enum", "type"}:
                return _one_of([quoted(python_text(value)) for value in values])
            case {"const": value} if told.keys() <= {"const", "type"}:
                return quoted(python_text(value))
            case {"anyOf": [*options]} | {"oneOf": [*options]} if len(told) == 1:
                return _one_of([self._value(option, where) for option in options])
            case {"type": [*types]}:
                return _one_of([self._value(_of_type(told, type_), where) for type_ in types])
            case {"type": str(type_)}:
                self._check_writable(told, type_, where)
                return self._typed(told, type_, where)
            case _ if told:
                raise self._refusal(where, f"{', '.join(sorted(told))} without a type")
        return self._any()

    def _typed(self, schema: JsonObject, type_: str, where: str) -> str:
        if type_ in _WORDS:
            return _WORDS[type_]
        if type_ == "array":
            item = self._rule(self._value(schema.get("items", True), f"{where}[]"))
            return f'"[" {self._list(item, schema)} "]"'
        if "properties" not in schema:
            more = schema.get("additionalProperties", True)
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

    def _has_words(self, schema: Any, seen: set[str]) -> bool:
        """Whether true, false or null can be in a value of the schema, as far as can be told."""
        match schema:
            case bool():
                return schema
            case {"enum": values} | {"const": values}:
                return any(leaf is None or isinstance(leaf, bool) for leaf in nodes_within(values))
            case {"$ref": str(name)}:
                # One that was seen has been, or is being, looked into elsewhere.
                if name in seen:
                    return False
                seen.add(name)
                return self._has_words(resolve(name, self._schema), seen)
            case {"anyOf": parts} | {"oneOf": parts}:
                pass
            case {"type": [*types]}:
                parts = [_of_type(schema, type_) for type_ in types]
            case {"type": "array"}:
                parts = [schema.get("items", True), *schema.get("prefixItems", ())]
            case {"type": "object"}:
                parts = [
                    schema.get("additionalProperties", True),
                    *schema.get("properties", {}).values(),
                    *schema.get("patternProperties", {}).values(),
                ]
            case _:
                return schema.get("type") not in ("string", "number", "integer")
        return any(self._has_words(part, seen) for part in parts)

    def _check_writable(self, told: JsonObject, type_: str, where: str) -> None:
        if type_ not in _WRITABLE or told.get("type", type_) != type_:
            raise self._refusal(where, f"the type {told.get('type')!r} here")
        unknown = told.keys() - _WRITABLE[type_] - {"type"}
        if unknown:
            raise self._refusal(where, f"the keywords {', '.join(sorted(unknown))}")

    def _refusal(self, where: str, reason: str) -> UnsupportedFeature:
        return UnsupportedFeature(f"the schema of {where} of tool {self._tool!r} in Python", reason)

    def _rule(self, body: str) -> str:
        return self._rules.rule(self._new_name(), body)

    def _new_name(self) -> str:
        self._n_rules += 1
        return f"{self._prefix}_{self._n_rules}"


def _one_of(options: Sequence[str]) -> str:
    return f"({' | '.join(options)})"


def _telling(schema: JsonObject) -> JsonObject:
    """The schema without what says nothing of its values."""
    return {name: value for name, value in schema.items() if not says_nothing(name)}


def _of_type(schema: JsonObject, type_: str) -> JsonObject:
    """The schema for one of its types, without the keywords that say nothing of that."""
    limiting = {None, "number" if type_ == "integer" else type_}
    left = {
        k: v for k, v in schema.items() if k not in SUPPORTED or SUPPORTED[k].limits in limiting
    }
    return {**left, "type": type_}
