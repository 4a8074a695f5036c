"""A type in words, for a prompt: what JSON the model shall write.

A person of the register.
{
  "name": string,  // full name
  "age": integer (0 to 150),
  "mood": "good" | "bad" | null,  // optional: today
  "friends": [Person, ...]
}
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from llamad_trio.core.tools import JsonObject
from llamad_trio.typed.schema import WRITTEN_AS, reference, schema_of


def description_of(kind: object) -> str:
    """What a value of this type looks like as JSON, in a few lines of plain text.

    Every field is there with its type, and with its description where there is one: in the
    docstring of the class, in `metadata["description"]`, or in `Annotated`.

    Raises:
        ProtocolError: the type has no schema.
    """
    schema = schema_of(kind)
    definitions: Mapping[str, JsonObject] = schema.get("$defs", {})
    root = reference(schema)
    # A class that holds itself is said first, under its own name.
    first = {"": schema} if root is None else {root: definitions[root]}
    texts: list[str] = []
    for name, part in {**first, **definitions}.items():
        head = f"{name}: " if name else ""
        if part.get("description"):
            head += f"{part['description']}\n"
        texts.append(head + _text(part, ""))
    return "\n\n".join(texts)


def _text(schema: JsonObject | bool, margin: str) -> str:
    if isinstance(schema, bool):
        return "any JSON"
    name = reference(schema)
    if name is not None:
        return name
    if "anyOf" in schema:
        texts = (_text(each, margin) for each in schema["anyOf"])
        return " | ".join(dict.fromkeys(texts))
    if "allOf" in schema:
        return " & ".join(_text(each, margin) for each in schema["allOf"])
    if "enum" in schema:
        return " | ".join(_json(value) for value in schema["enum"])
    if "const" in schema:
        return _json(schema["const"])
    match schema.get("type"):
        case "object":
            return _object(schema, margin)
        case "array":
            return _array(schema, margin)
        case str() as name:
            return name + _limits(schema)
        case list() as names:
            return " | ".join(map(str, names))
    return "any JSON"


def _object(schema: JsonObject, margin: str) -> str:
    deeper = margin + "  "
    required = schema.get("required", ())
    rows: list[tuple[str, str]] = []
    for name, part in schema.get("properties", {}).items():
        words = ["" if name in required else "optional", part.get("description")]
        said = ": ".join(filter(None, words))
        comment = f"  // {said}" if said else ""
        rows.append((f"{_json(name)}: {_text(part, deeper)}", comment))
    rows += [
        (f"<key: {_pattern(pattern)}>: {_text(part, deeper)}, ...", "")
        for pattern, part in schema.get("patternProperties", {}).items()
    ]
    others = schema.get("additionalProperties", True)
    if others is not False:
        rows.append((f"<key>: {_text(others, deeper)}, ...", ""))
    if not rows:
        return "{}"
    if len(rows) == 1 and "properties" not in schema:
        return f"{{{rows[0][0]}}}{_limits(schema)}"
    lines = [
        f"{deeper}{text}{',' if index < len(rows) else ''}{comment}"
        for index, (text, comment) in enumerate(rows, 1)
    ]
    return "\n".join(["{", *lines, f"{margin}}}"])


def _array(schema: JsonObject, margin: str) -> str:
    fixed = [_text(item, margin) for item in schema.get("prefixItems", ())]
    if fixed:
        least = schema.get("minItems", 0)
        marked = (t if i < least else f"{t} (optional)" for i, t in enumerate(fixed))
        return f"[{', '.join(marked)}]"
    if schema.get("maxItems") == 0:
        return "[]"
    return f"[{_text(schema.get('items', True), margin)}, ...]{_limits(schema)}"


_RANGES = (
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " items"),
    ("minProperties", "maxProperties", " keys"),
    ("minimum", "maximum", ""),
)
_LIMITS = {
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
    "multipleOf": "a multiple of",
}


def _limits(schema: JsonObject) -> str:
    ranges = ((schema.get(low), schema.get(high), noun) for low, high, noun in _RANGES)
    words = [_range(low, high) + noun for low, high, noun in ranges if (low, high) != (None, None)]
    words += [f"{text} {schema[keyword]}" for keyword, text in _LIMITS.items() if keyword in schema]
    if "format" in schema:
        words.append(schema["format"])
    if "pattern" in schema:
        words.append(_pattern(schema["pattern"]))
    return f" ({', '.join(words)})" if words else ""


def _range(low: object, high: object) -> str:
    if low == high:
        return f"exactly {low}"
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low is None else f"{low} to {high}"


def _pattern(pattern: str) -> str:
    return WRITTEN_AS.get(pattern, f"matches {pattern}")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
