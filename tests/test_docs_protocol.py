"""What the documents of the daemon say is what it does, and all that it does.

The examples of `docs/protocol.md` are replayed against a scripted engine, and every name and
text of the code has to be found there.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any, get_type_hints

import attrs
import pytest
import trio

from llamad_trio import EngineConfig, EngineSpec, Request
from llamad_trio.core import errors
from llamad_trio.core.completion import Choice, Completion, TokenLogprob
from llamad_trio.core.config import Limits
from llamad_trio.core.info import DaemonStats, EngineStats, ModelInfo, ModelStats
from llamad_trio.core.request import MAX_INT, Message
from llamad_trio.core.tools import Tool, ToolCall
from llamad_trio.daemon.config import DEFAULT_SOCKET
from llamad_trio.serving.listener import _REFUSALS, MAX_CALLS, serve_unix
from llamad_trio.testing import ScriptedModel, open_scripted_engine
from llamad_trio.wire import calls
from llamad_trio.wire.calls import MAX_ID_CHARS, ORIGINAL_FIELDS, Call
from llamad_trio.wire.replies import (
    CLOSING,
    call_id,
    engine_event_from,
    engine_event_reply,
    error_text,
)

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "llamad_trio"
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()
DAEMON = (ROOT / "docs" / "daemon.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, "" for those of none."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PROTOCOL, re.MULTILINE | re.DOTALL)
    return [text for tag, text in fenced if tag == language]


EXAMPLES = [text for text in blocks("") if text.startswith("→")]
(REASONS,) = [text.splitlines() for text in blocks("") if not text.startswith("→")]


# -- the examples -----------------------------------------------------------------------------

THINKER = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{# <think></think> #}"
)

REPLIES = {
    "2+2?": "4",
    "20+22?": "42",
    "prime": "<think>Only 1 and 7 divide it.</think>Yes.",
    "Oslo": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "to 10.": "1 2 3 4 5 6 7 8 9 10",
    "to 1000.": " ".join(map(str, range(1, 1001))),
}

CALL_ID = "BrDbtHF0K"
"""Stands in the document for what is drawn by lot."""


@asynccontextmanager
async def daemon(path: Path) -> AsyncIterator[None]:
    """The models of the examples, on a socket."""
    small = ScriptedModel(REPLIES, decode_s=0.005)
    thinker = ScriptedModel(REPLIES, chat_template=THINKER)
    small.facts = attrs.evolve(small.facts, description="llama 256M Q4_1")
    thinker.facts = attrs.evolve(thinker.facts, description="qwen3 0.6B Q8_0")
    async with (
        open_scripted_engine(small) as small_engine,
        open_scripted_engine(thinker, n_slots=2) as thinker_engine,
        open_scripted_engine(REPLIES, n_ctx=16) as tiny_engine,
        trio.open_nursery() as nursery,
    ):
        engines = {"small": small_engine, "thinker": thinker_engine, "tiny": tiny_engine}
        await nursery.start(serve_unix, engines, path)
        yield
        nursery.cancel_scope.cancel()


async def replay(path: Path, example: str) -> list[str]:
    """Send an example's requests, each after the replies that stand before it."""
    stream = await trio.open_unix_socket(str(path))
    received = b""
    n_expected = 0
    async with stream:
        for line in example.splitlines():
            if line.startswith("→ "):
                while received.count(b"\n") < n_expected:
                    received += await stream.receive_some()
                await stream.send_all(line.removeprefix("→ ").encode() + b"\n")
            elif line != "← …":
                n_expected += 1
        await stream.send_eof()
        async for data in stream:
            received += data
    assert received.endswith(b"\n")
    return received.decode().split("\n")[:-1]


def joined(lines: list[str]) -> list[str]:
    """Pieces that follow one another as one: how a text is cut is the model's affair."""
    whole: list[str] = []
    for line in lines:
        piece = _PIECE.fullmatch(line)
        if piece and whole and (before := _PIECE.fullmatch(whole[-1])) and before[1] == piece[1]:
            whole[-1] = f"{piece[1]}{before[2]}{piece[2]}{piece[3]}"
        else:
            whole.append(line)
    return whole


_PIECE = re.compile(
    r'(\{"token":"|\{"reasoning":"|\{"tool_call":\{"index":\d+,"arguments":")(.*)("\}+)'
)


def pattern(example: str) -> re.Pattern[str]:
    """What the replies to an example match: numbers by their kind, all else by the byte."""
    replies = [line[2:] for line in example.splitlines() if line.startswith("← ")]
    text = "\n".join(joined(replies))
    parts, end = list[str](), 0
    for varying in _VARYING.finditer(text):
        parts += [re.escape(text[end : varying.start()]), _FORMS[str(varying.lastgroup)]]
        end = varying.end()
    return re.compile("".join(parts) + re.escape(text[end:]))


_NUMBER = r'(?<=[:\[,])(?<!"id":)-?\d+'
_VARYING = re.compile(
    rf"(?P<lines>^…\n)|(?P<part>…)|(?P<word>{CALL_ID})"
    rf"|(?P<float>{_NUMBER}\.\d+)(?=[,\]}}])|(?P<int>{_NUMBER})(?=[,\]}}])",
    re.MULTILINE,
)
_FORMS = {
    "lines": r"(?:.*\n)*?",
    "part": r".*",
    "word": r"\w+",
    "float": r"-?\d+(?:\.\d+|(?=e))(?:e-?\d+)?",
    "int": r"-?\d+",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text[2:50].splitlines()[0])
async def test_example_of_the_protocol_is_what_happens(example: str, tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with trio.fail_after(30):
        async with daemon(path):
            await replay(path, '→ {"prompt":"2+2?"}')  # the examples tell of what was reused
            replies = await replay(path, example)
    told = "\n".join(joined(replies))
    assert pattern(example).fullmatch(told), told


SHELL = [line for text in blocks("sh") for line in text.splitlines()]


@pytest.mark.parametrize("command", SHELL)
async def test_shell_command_of_the_protocol_gets_its_reply(command: str, tmp_path: Path) -> None:
    tool = "socat" if "socat" in command else "nc"
    if shutil.which(tool) is None:
        pytest.skip(f"there is no {tool} here")
    path = tmp_path / "d.sock"
    assert DEFAULT_SOCKET in command
    with trio.fail_after(30):
        async with daemon(path):
            result = await trio.run_process(
                command.replace(DEFAULT_SOCKET, str(path)), shell=True, capture_stdout=True
            )
    end = json.loads(result.stdout.splitlines()[-1])
    assert end["text"] == "4"
    assert ("done" in end) is ('"stream":true' in command)


@pytest.mark.parametrize("name", ["client.py", "client.mjs"])
def test_client_in_the_protocol_is_the_one_that_is_tested(name: str) -> None:
    (shown,) = blocks("python" if name.endswith("py") else "js")
    code = (ROOT / "examples" / name).read_text()
    assert shown.strip() in code
    assert len(code.splitlines()) <= 20


# -- nothing is left out ----------------------------------------------------------------------


def rows(document: str) -> dict[str, list[str]]:
    """The rows of all tables, by what their first column names in backticks."""
    found: dict[str, list[str]] = {}
    for line in document.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for name in re.findall(r"`([^`]+)`", cells[0]):
                found.setdefault(name, cells)
    return found


ROWS = rows(PROTOCOL)
CALLS = [k for k in vars(calls).values() if isinstance(k, type) and issubclass(k, Call)]
NOT_ON_THE_WIRE = {"request", "is_original", "function", "value"}


def names(kind: type[attrs.AttrsInstance]) -> set[str]:
    return {field.name for field in attrs.fields(kind)} - NOT_ON_THE_WIRE


@pytest.mark.parametrize("field", attrs.fields(Request), ids=lambda field: field.name)
def test_field_of_a_request_is_there_with_its_default(field: attrs.Attribute[object]) -> None:
    default = ROWS[field.name][2]
    if field.default is attrs.NOTHING:
        assert default == ""
        return
    value = getattr(Request("x"), field.name)
    assert default == ("none" if value is None else f"`{json.dumps(value)}`")


OF_REQUESTS = attrs.fields(attrs.resolve_types(Request))
NUMBERS = [field.name for field in OF_REQUESTS if field.type in (int, float, int | None)]


@pytest.mark.parametrize("name", NUMBERS)
def test_range_of_a_number_is_there(name: str) -> None:
    extremes: list[dict[str, Any]] = [{name: -(10**12)}, {name: 10**12}]
    low, high = (getattr(Request("x", **extreme), name) for extreme in extremes)
    said = ROWS[name][3]
    assert (f"from {low}" if high == MAX_INT else f"{low:.10g} to {high:.10g}") in said


def test_the_event_that_is_shown_is_one() -> None:
    (shown,) = blocks("json")
    told = json.loads(shown)
    context = copy_context()
    context.run(call_id.set, told["event"]["call"])
    event = engine_event_from(told, 0.0, lambda call: context)
    assert event is not None
    assert engine_event_reply(event, 0.0)["event"] == told["event"]


def test_the_original_fields_are_those_of_the_code() -> None:
    (sentence,) = re.findall(r"The original fields are ([^.]*)\.", PROTOCOL)
    assert set(re.findall(r"`(\w+)`", sentence)) == ORIGINAL_FIELDS


def test_every_op_has_an_example() -> None:
    for kind in CALLS:
        if (op := getattr(kind, "op", None)) is not None:
            assert any(f'→ {{"op":"{op}"' in example for example in EXAMPLES), op


@pytest.mark.parametrize(
    "kind",
    [
        *CALLS,
        *(Completion, Choice, TokenLogprob, Message, Tool, ToolCall),
        *(DaemonStats, ModelStats, EngineStats, ModelInfo),
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_key_of_what_crosses_the_socket_is_there(kind: type[attrs.AttrsInstance]) -> None:
    told_otherwise = {"piece": '"bytes":', "top": "`top`"}
    for name in names(kind):
        told = told_otherwise.get(name, f'"{name}":')
        assert name in ROWS or told in PROTOCOL, name


def test_limits_are_there_with_their_defaults() -> None:
    limits = {cells[2].strip("`"): cells[1] for cells in _table("what | default | setting")}
    for field in attrs.fields(Limits):
        assert limits[field.name] in {f"{field.default:g}", str(field.default)}
    assert str(MAX_CALLS) in [cells[1] for cells in _table("what | default | setting")]
    assert f"at most {MAX_ID_CHARS} printable characters" in PROTOCOL


def _table(headings: str) -> Iterator[list[str]]:
    """The rows of the table with these headings."""
    _, _, rest = PROTOCOL.partition(f"\n| {headings} |\n")
    for line in rest.splitlines()[1:]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.split("|")[1:-1]]


# -- errors -----------------------------------------------------------------------------------

NEVER_SENT = {
    *("ConfigError", "Disconnected", "IncompleteOutput", "RestartsExhausted", "SocketUnavailable")
}
"""What a client's own side raises, and what ends a daemon."""

_EXAMPLES = {int: 1, Sequence[str]: ["TEXT"], Mapping[str, int]: {"NAME": 1}}

_NUMBERS = r"\d+(\.\d+)?"

SENT = sorted(set(errors.__all__) - NEVER_SENT - {"LlamadError"})


@pytest.mark.parametrize("name", SENT)
def test_error_is_there_with_its_details_and_its_text(name: str) -> None:
    kind = getattr(errors, name)
    _, details, text, means = ROWS[name]
    fields = [field.name for field in attrs.fields(kind)]
    assert re.findall(r"`(\w+)`", details) == fields
    types = get_type_hints(kind)
    error = kind(*(_EXAMPLES.get(types[field], field.upper()) for field in fields))
    assert text == f"`{re.sub(_NUMBERS, 'N', error_text(error))}`"
    assert means


def texts_in(path: str, *callables: str) -> Iterator[str]:
    """The texts given to some callables in a file, as patterns: what is put in can be anything."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Call) and node.args:
            func = node.func
            name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            if name in callables and (text := _pattern(node.args[0])):
                yield text


def _pattern(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern(part) or ".+" for part in node.values)
    return None


CLIENT_SIDE = {re.escape(text).replace("…", ".+") for text in ("bad logprobs", "expected …, not …")}
"""Said of replies."""

RAISED = [
    (path, text)
    for path, *callables in (
        ("wire/calls.py", "ProtocolError"),
        ("wire/converter.py", "ProtocolError"),
        ("wire/lines.py", "ProtocolError", "ValueError"),
        ("serving/listener.py", "ProtocolError"),
        ("core/fields.py", "ProtocolError"),
        ("core/engine_spec.py", "ProtocolError"),
        ("core/request.py", "ProtocolError"),
        ("core/tools.py", "ProtocolError"),
    )
    for text in texts_in(path, *callables)
    if text not in CLIENT_SIDE
]


def fits(text: str, reason: str) -> bool:
    """Whether a reason of the document says what a text of the code does."""
    if not text.startswith("not"):
        reason = reason.removeprefix("not JSON: ")
    general = re.sub(r"'?\b[A-Z]{2,}\b'?(?! data)", ".+", reason)
    example = re.sub(r"\\(.)", r"\1", text.replace(".+", "x"))
    return bool(re.fullmatch(text, reason) or re.fullmatch(general, example))


@pytest.mark.parametrize(("path", "text"), RAISED)
def test_reason_of_an_invalid_request_is_there(path: str, text: str) -> None:
    assert any(fits(text, reason) for reason in REASONS)


@pytest.mark.parametrize("reason", REASONS)
def test_reason_that_is_there_is_one_of_the_code(reason: str) -> None:
    assert any(fits(text, reason) for _, text in RAISED)


def test_every_text_of_the_listener_s_own_is_there() -> None:
    told = {*texts_in("serving/listener.py", "_refuse", "InferenceError")}
    told |= {re.escape(text) for text in (CLOSING, *_REFUSALS.values())}
    for node in ast.walk(ast.parse((PACKAGE / "serving" / "listener.py").read_text())):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                is_error = isinstance(key, ast.Constant) and key.value == "error"
                if is_error and (text := _pattern(value)):
                    told.add(text)
    assert len(told) == 7
    told -= {text for text in told if re.search(f"`inference: {text}` is an", PROTOCOL)}
    assert len(told) == 6
    said = [cells[0].strip("`") for cells in _table("`error` | means")]
    for text in told:
        assert any(re.fullmatch(text, row) for row in said), text


# -- docs/daemon.md ---------------------------------------------------------------------------


def test_every_key_of_the_configuration_file_is_there() -> None:
    known = rows(DAEMON)
    settings = (*names(Limits), *names(EngineSpec), *names(EngineConfig))
    for name in ("socket", "default_model", "path", *settings):
        assert name in known or f"`{name}`" in DAEMON, name
