"""What a caller writes, as a request; what a type asks for, and the reply as its instance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from llamad_trio.core.completion import Completion, is_cut_off
from llamad_trio.core.errors import IncompleteOutput, InferenceError, ProtocolError
from llamad_trio.core.fields import text, unknown_names
from llamad_trio.core.request import Request
from llamad_trio.typed.function_tool import tool_from
from llamad_trio.typed.instances import instance_of_type
from llamad_trio.typed.schema import schema_of
from llamad_trio.typed.text import description_of


def as_request(request: Request | str, fields: Mapping[str, Any]) -> Request:
    """A request with some of its fields set, and its tools as `Tool`s.

    Raises `ProtocolError` for unknown fields, wrong types, a function that makes no tool, and
    two tools of one name.
    """
    known = {field.name for field in attrs.fields(Request)}
    if unknown := fields.keys() - known:
        raise ProtocolError(f"unknown field {unknown_names(unknown, known)}")
    if not isinstance(request, Request):
        if "prompt" in fields:
            raise ProtocolError("the prompt is given twice")
        request = Request(request, **fields)
    elif fields:
        request = attrs.evolve(request, **fields)
    if not request.tools:
        return request
    tools = [tool_from(tool) for tool in request.tools]
    if len({tool.name for tool in tools}) < len(tools):
        raise ProtocolError("two tools have the same name")
    return attrs.evolve(request, tools=tools)


def checked_texts(name: str, texts: Iterable[str]) -> list[str]:
    """Texts as a list.  Raises `ProtocolError` if they are something else."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ProtocolError(f"{name} must be a list of texts, not {type(texts).__name__}")
    return [text(item, name) for item in texts]


def typed_request(request: Request, kind: object, *, describe: bool) -> Request:
    """The request, which must have no constraint, constrained to JSON of a type.

    `None` leaves it as it is.  With `describe`, the end of the prompt tells what to write.

    Raises:
        ProtocolError: a type that has no schema, a constraint, no prompt of text to add to,
            no type to describe.
    """
    if kind is None:
        if describe:
            raise ProtocolError("describe tells of a type: it needs into")
        return request
    if request.json_schema is not None:
        raise ProtocolError("only one of into and json_schema can be given")
    prompt = request.prompt
    if describe:
        if not isinstance(prompt, str):
            raise ProtocolError("describe needs a prompt of text to add to")
        prompt = f"{prompt}\n\nAnswer with JSON:\n{description_of(kind)}"
    return attrs.evolve(request, prompt=prompt, json_schema=schema_of(kind))


def with_value(completion: Completion, kind: object) -> Completion:
    """The completion of a typed request, its value an instance of the type.

    Raises:
        IncompleteOutput: the text was cut off.
        InferenceError: it is JSON of the schema, and yet no instance.
    """
    if is_cut_off(completion):
        raise IncompleteOutput(completion.text)
    try:
        value = instance_of_type(completion.value, kind)
    except ValueError as error:
        raise InferenceError(f"the text makes no {kind}: {error}") from error
    return attrs.evolve(completion, value=value)
