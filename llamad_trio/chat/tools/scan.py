"""What following a tool call in a reply yields, and the pieces that formats share."""

from __future__ import annotations

import json

import attrs

from llamad_trio.chat.tools.literal import JSON, Malformed, Scan, literal, skip_space


@attrs.frozen
class CallStart:
    """A call's name is known; its id is `None` when the model gives none."""

    name: str
    id: str | None


@attrs.frozen
class CallArguments:
    """More of a call's arguments, as JSON text."""

    text: str


@attrs.frozen
class CallEnd:
    """The call is complete."""


CallPart = CallStart | CallArguments | CallEnd


class CallSink:
    """Where a format puts the calls it finds, in whatever order their parts come.

    `open` is true from a call's first character, the opening marker's when it
    is the first, to its last.
    """

    __slots__ = ("_early", "_late_id", "_started", "id", "name", "open", "parts")

    def __init__(self) -> None:
        self.parts: list[CallPart] = []
        self.open = True
        self._clear()

    def _clear(self) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self._early: list[str] = []
        self._started = False
        self._late_id = False

    def begin(self, *, late_id: bool = False) -> None:
        """A call begins.  With `late_id` it is told only at its end, when the id is known."""
        self._clear()
        self._late_id = late_id
        self.open = True

    def named(self, name: str) -> None:
        """The call's name is complete."""
        self.name = name
        if not self._late_id:
            self._start()

    def write(self, text: str) -> None:
        """More of the call's arguments, as JSON text."""
        if self._started:
            self.parts.append(CallArguments(text))
        else:
            self._early.append(text)

    def end(self) -> None:
        """The call is complete.  Raises `Malformed` when it has no name or no arguments."""
        if not self._started:
            self._start()
        self.parts.append(CallEnd())
        self.open = False

    def _start(self) -> None:
        if self.name is None:
            raise Malformed
        self._started = True
        self.parts.append(CallStart(self.name, self.id))
        if self._early:
            self.parts.append(CallArguments("".join(self._early)))


def expect(text: str) -> Scan[None]:
    """Follow exactly `text`."""
    for wanted in text:
        if (yield) != wanted:
            raise Malformed


def expect_after_space(text: str) -> Scan[None]:
    """Follow whitespace, if any, and then exactly `text`."""
    if (yield from skip_space()) != text[0]:
        raise Malformed
    yield from expect(text[1:])


def json_call(char: str, sink: CallSink, *, late_id: bool = False) -> Scan[None]:
    """Follow a call that is a JSON object, `char` being what should be its brace.

    The object has a `name` and its `arguments` (or `parameters`), in any order,
    perhaps a `type`, and with `late_id` perhaps an `id`.  Anything else in it
    could not be kept, so it is no call.
    """
    if char != "{":
        raise Malformed
    sink.begin(late_id=late_id)
    seen: set[str] = set()
    while True:
        if (yield from skip_space()) != '"':
            raise Malformed
        key = yield from _text()
        key = "arguments" if key == "parameters" else key
        if key in seen:
            raise Malformed
        seen.add(key)
        yield from expect_after_space(":")
        char = yield from skip_space()
        if key == "arguments":
            if char != "{":
                raise Malformed
            yield from literal(JSON, char, sink.write)
        else:
            if char != '"':
                raise Malformed
            yield from _field(key, sink, late_id)
        char = yield from skip_space()
        if char == "}":
            break
        if char != ",":
            raise Malformed
    if "arguments" not in seen:
        raise Malformed
    sink.end()


def _field(key: str, sink: CallSink, late_id: bool) -> Scan[None]:
    if key not in ("name", "type") and not (key == "id" and late_id):
        raise Malformed
    value = yield from _text()
    match key:
        case "name":
            sink.named(value)
        case "id":
            sink.id = value
        case _ if value != "function":
            raise Malformed


# Names have at most 64 characters and escapes at most 6 for one.
_MAX_TEXT_CHARS = 64 * 6


def _text() -> Scan[str]:
    """Follow a short JSON string whose opening quote has come; return what it says."""
    chars: list[str] = []

    def write(text: str) -> None:
        if len(chars) == _MAX_TEXT_CHARS:
            raise Malformed
        chars.append(text)

    yield from JSON.string('"', write)
    text: str = json.loads(f'"{"".join(chars)}"')
    return text
