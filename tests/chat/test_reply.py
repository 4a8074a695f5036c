"""A reply means the same however it was cut, and nothing in it is lost."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence

import attrs
import pytest
from hypothesis import given, strategies as st

from llamad_trio.chat.reply import ReplyParser, new_call_id
from llamad_trio.chat.template import ReasoningTags, detect_reasoning
from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.formats import TOOL_FORMATS
from llamad_trio.core.completion import (
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from llamad_trio.core.tools import ToolCall
from tests.effort import assert_linear

THINK = ReasoningTags("<think>", "</think>")
HERMES = TOOL_FORMATS["hermes"]

# What replies are made of, and what could be mistaken for it.
FRAGMENTS = (
    *("<think>", "</think>", "<thi", "</", "<", ">", "[", "]", "{", "}", " ", "\n", "\t", ";", ","),
    *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>", "<|", "f(", "x=", ")", "f"),
    *('{"name": "f", "arguments": {"a": ', '{"name": "f", "parameters": {}}', '"id": "abc"}', "1"),
    *('{"arguments": {}, "name": "g"}', '"', "'", "\\", "\\u00e", "é", "😀", "[f(), g(x=[True])]"),
    *("f[ARGS]{}", '[{"name": "f", "arguments": {"q": "\\n"}, "id": "abcdefgh1"}', "None", "-0.5e"),
)
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)
formats = st.sampled_from([None, *TOOL_FORMATS.values()])


@attrs.frozen
class Parsed:
    text: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    unfinished: str
    events: tuple[ReplyEvent, ...]


def joined(events: Iterable[ReplyEvent]) -> tuple[ReplyEvent, ...]:
    """The events, those made one that only the cutting made two."""
    result: list[ReplyEvent] = []
    for event in events:
        match (result[-1] if result else None), event:
            case TextDelta(a), TextDelta(b):
                result[-1] = TextDelta(a + b)
            case ReasoningDelta(a), ReasoningDelta(b):
                result[-1] = ReasoningDelta(a + b)
            case ToolCallDelta(i, a), ToolCallDelta(j, b) if i == j:
                result[-1] = ToolCallDelta(i, a + b)
            case _:
                result.append(event)
    return tuple(result)


def parse(
    pieces: Sequence[str],
    tool_format: ToolFormat | None = None,
    reasoning: ReasoningTags | None = None,
    in_reasoning: bool = False,
) -> Parsed:
    ids = map("id{:07}".format, itertools.count())
    parser = ReplyParser(reasoning, in_reasoning, tool_format, lambda: next(ids))
    events: list[ReplyEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    events += parser.finish()
    return Parsed(
        parser.text, parser.reasoning, parser.tool_calls, parser.unfinished, joined(events)
    )


def squeezed(text: str) -> str:
    return re.sub(r"[ \t\r\n]+", "", text)


@given(texts, st.lists(st.integers(0, 60)), formats, st.sampled_from([None, THINK]), st.booleans())
def test_the_cuts_do_not_matter(
    text: str,
    cuts: list[int],
    tool_format: ToolFormat | None,
    reasoning: ReasoningTags | None,
    in_reasoning: bool,
) -> None:
    whole = parse([text], tool_format, reasoning, in_reasoning)
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert parse(pieces, tool_format, reasoning, in_reasoning) == whole
    assert parse(list(text), tool_format, reasoning, in_reasoning) == whole


@given(texts, formats, st.sampled_from([None, THINK]), st.booleans())
def test_the_events_say_what_the_properties_say(
    text: str, tool_format: ToolFormat | None, reasoning: ReasoningTags | None, in_reasoning: bool
) -> None:
    parsed = parse([text], tool_format, reasoning, in_reasoning)
    said = [e.text for e in parsed.events if isinstance(e, TextDelta)]
    thought = [e.text for e in parsed.events if isinstance(e, ReasoningDelta)]
    assert "".join(said) == parsed.text
    assert ("".join(thought) or None) == parsed.reasoning
    calls: dict[int, tuple[str, str, str]] = {}
    for event in parsed.events:
        match event:
            case ToolCallStart(index, id_, name):
                calls[index] = (id_, name, "")
            case ToolCallDelta(index, arguments):
                assert arguments
                id_, name, before = calls[index]
                calls[index] = (id_, name, before + arguments)
            case TextDelta(more) | ReasoningDelta(more):
                assert more
    for index, call in enumerate(parsed.tool_calls):
        id_, name, arguments = calls[index]
        assert (id_, name, json.loads(arguments)) == (call.id, call.name, call.arguments)


@given(texts)
def test_without_formats_the_reply_is_the_text(text: str) -> None:
    parser = ReplyParser()
    for char in text:
        assert parser.push(char) == [TextDelta(char)]
    assert parser.finish() == []
    assert parser.text == text
    assert (parser.reasoning, parser.tool_calls, parser.unfinished) == (None, (), "")


@given(texts, st.sampled_from([*TOOL_FORMATS.values()]))
def test_what_is_no_call_is_text_or_unfinished(text: str, tool_format: ToolFormat) -> None:
    parsed = parse([text], tool_format)
    if not parsed.tool_calls:
        assert squeezed(parsed.text + parsed.unfinished) == squeezed(text)
        assert text.startswith(parsed.text)
        assert text.endswith(parsed.unfinished)
        if not parsed.unfinished:
            assert parsed.text == text


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", "<tool_call>oops</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "no name", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u0000"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1,]}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "more": "x"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 2000 + "1"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 401),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\q"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"; "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"type": "tool", "name": "f", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "' + "f" * 385),
        ("hermes", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("llama3", '{"answer": 42}'),
        ("llama3", 'The call is {"name": "f", "parameters": {}}'),
        ("llama3", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS] nothing to call"),
        ("mistral", '[TOOL_CALLS]f{"a": 1}'),
        ("mistral", "[TOOL_CALLS][[]]"),
        ("mistral", '[TOOL_CALLS][{"arguments": {}, "id": "abcdefgh1"}]'),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]1[END]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]1"),
        ("lfm2", "<|tool_call_start|>f()<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(;"),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x='\\U00110000')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x='\\N{DASH}')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x='\\xfg')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x=g())]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x=1, x=2)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x=__import__)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x='it's')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x={1: 2})]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x=1 + 1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x=().__class__)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x=9**9**9)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x=-True)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(**{'a': 1})]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(x=f'{y}')]<|tool_call_end|>"),
    ],
)
def test_a_malformed_call_is_text_unchanged(tool_format: str, text: str) -> None:
    parsed = parse([f"See: {text}" if text[0] != "{" else text], TOOL_FORMATS[tool_format])
    assert parsed.text.removeprefix("See: ") == text
    assert parsed.tool_calls == ()
    assert parsed.unfinished == ""


def test_a_call_behind_a_malformed_one_counts_and_takes_its_index() -> None:
    good = '<tool_call>{"name": "g", "arguments": {"b": 2}}</tool_call>'
    bad = '<tool_call>{"name": "f", "arguments": {"a": @}}'
    for between in ("", " ", "</tool_call>\n", "<tool_call>"):
        parsed = parse([bad + between + good], HERMES)
        assert parsed.text == (bad + between).rstrip()
        assert [call.name for call in parsed.tool_calls] == ["g"]
        starts = [event for event in parsed.events if isinstance(event, ToolCallStart)]
        assert [(start.index, start.name) for start in starts] == [(0, "f"), (0, "g")]


def test_a_call_whose_tag_is_not_closed_counts() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}'
    parsed = parse([f"{call}\n{call} done"], HERMES)
    assert [call.name for call in parsed.tool_calls] == ["f", "f"]
    assert parsed.text == "done"


def test_whitespace_around_calls_is_dropped_and_between_texts_is_not() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert parse([f"\n{call}\n"], HERMES).text == ""
    assert parse([f"Look. \n{call}\n{call}\n"], HERMES).text == "Look."
    assert parse([f"Look.\n{call}\n{call}\nSo."], HERMES).text == "Look.\nSo."
    assert parse([f"{call}\nSo.\n"], HERMES).text == "So.\n"


@pytest.mark.parametrize(
    ("text", "in_reasoning", "reasoning", "answer"),
    [
        ("<think>\nhm\n\nso\n</think>\n\n42\n", False, "hm\n\nso", "42\n"),
        ("\n<think>hm</think>42", False, "hm", "42"),
        ("hm\n</think>\n\n42", True, "hm", "42"),
        ("<think>\n\n</think>\n\n42", False, None, "42"),
        ("\n</think>\n42", True, None, "42"),
        ("hm", True, "hm", ""),
        ("hm </thi", True, "hm </thi", ""),
        ("<think>hm", False, "hm", ""),
        ("  42", False, None, "  42"),
        ("  ", False, None, "  "),
        ("<thi", False, None, "<thi"),
        ("<tank>", False, None, "<tank>"),
        ("I <think>so</think>", False, None, "I <think>so</think>"),
        ("a</think>b</think>c", True, "a", "b</think>c"),
    ],
)
@pytest.mark.parametrize("tool_format", [None, HERMES])
def test_reasoning_is_what_stands_between_the_tags_at_the_beginning(
    text: str,
    in_reasoning: bool,
    reasoning: str | None,
    answer: str,
    tool_format: ToolFormat | None,
) -> None:
    parsed = parse([text], tool_format, THINK, in_reasoning)
    assert (parsed.reasoning, parsed.text) == (reasoning, answer)


def test_a_call_in_reasoning_is_reasoning_and_one_behind_it_is_a_call() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parsed = parse([f"<think>\n{call}\n</think>\n\n{call}"], HERMES, THINK)
    assert parsed.reasoning == call
    assert [call.name for call in parsed.tool_calls] == ["f"]
    assert parsed.text == ""
    llama = '{"name": "f", "parameters": {}}'
    parsed = parse([f"<think>hm</think>\n{llama}"], TOOL_FORMATS["llama3"], THINK)
    assert [call.name for call in parsed.tool_calls] == ["f"]


def test_only_what_may_be_a_marker_is_withheld() -> None:
    parser = ReplyParser(THINK, tool_format=HERMES)
    assert parser.push("a<") == [TextDelta("a")]
    assert parser.push("tool_cal") == []
    assert parser.push("m> b") == [TextDelta("<tool_calm> b")]
    assert parser.push(" ") == []
    assert parser.push("<<tool") == [TextDelta(" <")]
    assert parser.finish() == [TextDelta("<tool")]


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = ReplyParser(tool_format=HERMES, new_id=lambda: "abcdefghi")
    assert parser.push('<tool_call>\n{"name": "f"') == [ToolCallStart(0, "abcdefghi", "f")]
    assert parser.push(', "arguments": {"a": [1') == [ToolCallDelta(0, '{"a": [')]
    assert parser.push("2]") == [ToolCallDelta(0, "12]")]
    assert parser.finish() == []
    assert parser.tool_calls == ()
    assert parser.unfinished == '<tool_call>\n{"name": "f", "arguments": {"a": [12]'


def test_arguments_that_come_before_the_name_are_told_after_it() -> None:
    parser = ReplyParser(tool_format=HERMES, new_id=lambda: "abcdefghi")
    assert parser.push('<tool_call>{"arguments": {"a": 1}, ') == []
    told = [ToolCallStart(0, "abcdefghi", "f"), ToolCallDelta(0, '{"a": 1}')]
    assert parser.push('"name": "f"}') == told


CALL_BEGUN = '<tool_call>{"name": "f", "arguments": '


@pytest.mark.parametrize("in_pieces", [True, False])
@pytest.mark.parametrize(
    ("begin", "unit"),
    [
        (CALL_BEGUN, "<tool_call>"),
        (CALL_BEGUN, '<tool_call>{"name": "f",<'),
        (CALL_BEGUN, '{"a": "'),
        (CALL_BEGUN, " "),
        ("text", " "),
        ("<think>thought", " "),
    ],
)
def test_the_cost_is_linear(begin: str, unit: str, in_pieces: bool) -> None:
    def pieces(n: int) -> list[str]:
        text = begin + n // len(unit) * unit
        return list(text) if in_pieces else [text]

    def read(pieces: list[str]) -> None:
        parser = ReplyParser(THINK, tool_format=HERMES)
        for piece in pieces:
            parser.push(piece)
        parser.finish()

    assert_linear(read, pieces, 500, copies=True)


def test_ids_are_what_mistral_insists_on() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("[A-Za-z0-9]{9}", id_) for id_ in ids)


# -- the tags of reasoning ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "tags"),
    [
        ("{{ '<think>' ~ message.reasoning_content ~ '</think>' }}", THINK),
        ("{{ message.content.split('</think>')[-1] }}", THINK),
        ("{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}", THINK),
        ("{{ '[THINK]' + block.thinking + '[/THINK]' }}", ReasoningTags("[THINK]", "[/THINK]")),
        ("{{ message.content }}", None),
        ("I think so", None),
    ],
)
def test_the_tags_are_those_in_the_template(source: str, tags: ReasoningTags | None) -> None:
    assert detect_reasoning(source) == tags


@pytest.mark.parametrize(
    ("prompt", "tag"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>"),
        ("<|Assistant|><think>", "<think>"),
        ("<think>\n\n</think>\n\n", "</think>"),
        ("what does <think> mean?<|im_start|>assistant\n", None),
        ("", None),
    ],
)
def test_the_tag_that_a_prompt_ends_in_is_found(prompt: str, tag: str | None) -> None:
    assert THINK.end_of(prompt) == tag
