"""Where the tool calls in a reply go to, and the pieces that formats share."""

from __future__ import annotations

import json
from collections.abc import Callable

from llamad_trio.chat.tools.literal import JSON, Malformed, Scan, literal, skip_space
from llamad_trio.core.completion import ReplyEvent, ToolCallDelta, ToolCallStart
from llamad_trio.core.errors import ProtocolError
from llamad_trio.core.tools import JsonObject, ToolCall


class CallSink:
    """Where a format puts the calls it finds, in whatever order their parts come.

    Has those that are complete in `calls`; `is_open` is true from a call's first character, the
    opening marker's when it is the first, to its last, and `id` the one that the model gives it,
    if any.  Each call is told to `tell` while it comes.
    """

    def __init__(self, new_id: Callable[[], str], tell: Callable[[ReplyEvent], None]) -> None:
        self._new_id = new_id
        self._tell = tell
        self.calls: list[ToolCall] = []
        self.begin()
        self.is_open = False

    def begin(self, *, late_id: bool = False) -> None:
        """A call begins.  With `late_id` it is told only at its end, when the id is known."""
        self.id: str | None = None
        self.is_open = True
        self._late_id = late_id
        self._name: str | None = None
        self._arguments: list[str] = []
        self._is_told = False

    def set_name(self, name: str) -> None:
        """The call's name is complete.  Raises `Malformed` when no tool can have it."""
        self._name = name
        if not self._late_id:
            self._tell_start()

    def write(self, text: str) -> None:
        """More of the call's arguments, as JSON text."""
        self._arguments.append(text)
        if self._is_told:
            self._tell(ToolCallDelta(len(self.calls), text))

    def end(self) -> None:
        """The call is complete.  Raises `Malformed` when it has no name, or cannot be kept."""
        if not self._is_told:
            self._tell_start()
        try:
            arguments = json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            raise Malformed from None
        self.calls.append(self._call(arguments))
        self.is_open = False

    def _tell_start(self) -> None:
        if self.id is None:
            self.id = self._new_id()
        call = self._call({})
        self._is_told = True
        self._tell(ToolCallStart(len(self.calls), call.id, call.name))
        if self._arguments:
            self._tell(ToolCallDelta(len(self.calls), "".join(self._arguments)))

    def _call(self, arguments: JsonObject) -> ToolCall:
        if self.id is None or self._name is None:
            raise Malformed
        try:
            return ToolCall(self.id, self._name, arguments)
        except ProtocolError:
            raise Malformed from None


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


def take_while(is_part: Callable[[str], object], char: str, most: int) -> Scan[tuple[str, str]]:
    """Return what begins with `char`, of at most so many characters, and the one behind it."""
    chars: list[str] = []
    while is_part(char) and len(chars) < most:
        chars.append(char)
        char = yield
    return "".join(chars), char


def listed(item: Callable[[str], Scan[None]]) -> Scan[None]:
    """Follow items with commas between them, up to a closing bracket.

    `item` follows one of which the first character is given.
    """
    char = ","
    while char == ",":
        yield from item((yield from skip_space()))
        char = yield from skip_space()
    if char != "]":
        raise Malformed


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
        match key, (yield from skip_space()):
            case "arguments", "{":
                yield from literal(JSON, "{", sink.write)
            case "name", '"':
                sink.set_name((yield from _text()))
            case "id", '"' if late_id:
                sink.id = yield from _text()
            case "type", '"':
                if (yield from _text()) != "function":
                    raise Malformed
            case _:
                raise Malformed
        char = yield from skip_space()
        if char == "}":
            break
        if char != ",":
            raise Malformed
    if "arguments" not in seen:
        raise Malformed
    sink.end()


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
