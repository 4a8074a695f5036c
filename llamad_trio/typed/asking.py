"""A type as what a request shall come to, and its completion's text as an instance."""

from __future__ import annotations

import attrs

from llamad_trio.core.completion import Completion, is_cut_off
from llamad_trio.core.errors import IncompleteOutput, InferenceError, ProtocolError
from llamad_trio.core.request import Request
from llamad_trio.typed.structure import describe as description_of
from llamad_trio.typed.structure import schema_of, structure


def typed_request(request: Request, kind: object, *, describe: bool) -> Request:
    """The request, constrained to JSON of a type.

    Args:
        request: must have no constraint.
        kind: the type; `None` leaves the request as it is.
        describe: tell the model, at the end of the prompt, what to write.

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
        value = structure(completion.value, kind)
    except ValueError as error:
        raise InferenceError(f"the text makes no {kind}: {error}") from error
    return attrs.evolve(completion, value=value)
