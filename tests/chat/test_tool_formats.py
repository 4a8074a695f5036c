"""What a format writes it reads, and its grammar allows that and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from llamad_trio.chat.messages import message_dict, plain_messages, reads_tool_calls
from llamad_trio.chat.reply import ReplyParser
from llamad_trio.chat.template import ChatTemplate, ReasoningTags
from llamad_trio.chat.tools.base import ToolFormat
from llamad_trio.chat.tools.formats import TOOL_FORMATS, Mistral, detect_tool_format
from llamad_trio.chat.tools.lark import tool_dict
from llamad_trio.core.errors import ProtocolError, UnsupportedFeature
from llamad_trio.core.request import Message
from llamad_trio.core.tools import Tool, ToolCall
from tests.chat.byte_vocabulary import ByteVocabulary, accepted, allows
from tests.strategies import json_values, names, texts

CHATML_HERMES = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{% endfor %}
{{- '\\nAnswer with <tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args>}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}{%- if tools is not none %}
{{- 'Respond with {"name": function name, "parameters": dictionary of names and values}.' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for message in messages %}{{- '<|start|>' + message.role + '<|end|>' }}
{%- if 'tool_calls' in message %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}
{{- call.arguments | tojson }}{{- '}' }}
{%- else %}{{- message.content }}{% endif %}{{- '<|im_end|>' }}
{%- endfor %}"""

MISTRAL = """\
{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none %}{{- '[AVAILABLE_TOOLS]' + tools | tojson }}{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined %}
{{- message.content }}CALLS{{- '<|im_end|>' }}
{%- else %}{{- message.content }}{% endif %}
{%- endfor %}"""

MISTRAL_LIST = MISTRAL.replace(
    "CALLS",
    """{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('an id has nine characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']' }}
{%- endfor %}""",
)

MISTRAL_ARGS = MISTRAL.replace(
    "CALLS",
    """{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + ID + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}""",
)

PLAIN = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}"""

LFM2 = (
    """\
{%- if tools %}{{- '<|im_start|>system\\nList of tools: <|tool_list_start|>[' }}
{%- for tool in tools %}{{- tool | tojson }}{% endfor %}
{{- ']<|tool_list_end|><|im_end|>\\n' }}{% endif %}"""
    + PLAIN
)

HERMES, LLAMA, LIQUID = TOOL_FORMATS["hermes"], TOOL_FORMATS["llama3"], TOOL_FORMATS["lfm2"]
FORMATS: dict[str, tuple[ToolFormat, str]] = {
    "hermes": (HERMES, CHATML_HERMES),
    "llama3": (LLAMA, LLAMA3),
    "mistral list": (Mistral("list"), MISTRAL_LIST),
    "mistral args": (Mistral("args"), MISTRAL_ARGS.replace("ID", "''")),
    "mistral args with id": (
        Mistral("args with id"),
        MISTRAL_ARGS.replace("ID", "'[CALL_ID]' + call.id"),
    ),
    "lfm2": (LIQUID, LFM2),
}
every_format = pytest.mark.parametrize("tool_format", [f for f, _ in FORMATS.values()], ids=FORMATS)

GET = Tool(
    "get",
    "Get something.",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a"],
    },
)
GET_TIME = Tool("get_time", "Tell the time.", {"type": "object"})
TREE = Tool(
    "tree",
    "Plant a tree.",
    {
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "ripe": {"type": "boolean"},
                    "twigs": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
                },
                "required": ["ripe"],
                "additionalProperties": False,
            }
        },
        "type": "object",
        "properties": {
            "root": {"$ref": "#/$defs/Node"},
            "label": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
            "kind": {"enum": ["oak", "elm", None]},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            "heights": {"type": "object", "additionalProperties": {"type": "number"}},
            "other": {},
        },
        "required": ["root"],
    },
)
TOOLS = (GET, GET_TIME, TREE)
CALLS = (
    ToolCall("abcdefgh1", "get", {"a": -1, "b": "ü \"quoted\" 'so' \\ /\n\t 😀"}),
    ToolCall("abcdefgh2", "get_time", {}),
    ToolCall(
        "abcdefgh3",
        "tree",
        {
            "root": {"ripe": True, "twigs": [{"ripe": False, "twigs": []}, {"ripe": True}]},
            "label": None,
            "kind": "elm",
            "flags": [True, False],
            "heights": {"a b": 1.5, "": 2},
            "other": [None, {"k": [True, 1e-07, "z"]}, ""],
        },
    ),
)

MARKERS = ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "<|tool_call_end|>", "}; {"]
any_json = json_values(texts | st.sampled_from(MARKERS))
any_call = st.builds(
    ToolCall,
    st.from_regex("[A-Za-z0-9]{9}", fullmatch=True),
    names,
    st.dictionaries(st.from_regex("[a-z_]{1,5}", fullmatch=True), any_json, max_size=3),
)


def parse(tool_format: ToolFormat, *pieces: str) -> ReplyParser:
    parser = ReplyParser(tool_format=tool_format)
    for piece in pieces:
        parser.push(piece)
    parser.finish()
    return parser


def meant(calls: Sequence[ToolCall]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(call.name, call.arguments) for call in calls]


def render(source: str, messages: Sequence[Message], calls_as: ToolFormat | None = None) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    return template.render(
        [message_dict(message, calls_as=calls_as) for message in messages],
        add_generation_prompt=False,
        tools=[tool_dict(tool) for tool in TOOLS],
    )


# Reading and writing


@every_format
@given(
    calls=st.lists(any_call, min_size=1, max_size=3),
    before=st.sampled_from(["", "Look.", "Look:\n"]),
    cut=st.integers(0, 99),
)
def test_what_is_written_is_read(
    tool_format: ToolFormat, calls: list[ToolCall], before: str, cut: int
) -> None:
    if tool_format is LLAMA and before:
        before += "<|python_tag|>"
    text = before + tool_format.write_calls(calls) + "\nDone."
    for parser in (parse(tool_format, text), parse(tool_format, text[:cut], text[cut:])):
        assert meant(parser.tool_calls) == meant(calls)
        assert parser.text.replace("\n", "") == f"{before[:5]}Done."
        if tool_format in (Mistral("list"), Mistral("args with id")):
            assert parser.tool_calls == tuple(calls)


@every_format
def test_a_call_cut_off_anywhere_is_unfinished_and_kept(tool_format: ToolFormat) -> None:
    before = "Hi.\n<|python_tag|>" if tool_format is LLAMA else "Hi.\n"
    text = before + tool_format.write_calls(CALLS)
    n_seen = set()
    for cut in range(len(text) + 1):
        parser = parse(tool_format, text[:cut])
        n_calls = len(parser.tool_calls)
        n_seen.add(n_calls)
        assert meant(parser.tool_calls) == meant(CALLS)[:n_calls]
        assert text[:cut].endswith(parser.unfinished)
        if not n_calls:
            rest = parser.text + parser.unfinished
            assert rest.replace("\n", "") == text[:cut].replace("\n", "")
        else:
            # What may have become a marker is text when nothing follows.
            assert parser.text.startswith("Hi.")
            assert tool_format.opener.startswith(parser.text.removeprefix("Hi.").lstrip())
    assert n_seen == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>\n{"name": "\\u0066", "parameters": {}}\n', [("f", {})]),
        (
            "hermes",
            '<tool_call>{"type": "function", "name": "f", "arguments": { "a" : [ ] } } </tool_call>',
            [("f", {"a": []})],
        ),
        ("llama3", '\n\n{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        (
            "llama3",
            '<|python_tag|>{"name": "f", "parameters": {}};{"name": "g", "parameters": {}}',
            [("f", {}), ("g", {})],
        ),
        ("mistral list", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', [("f", {"a": 1})]),
        ("mistral list", '[TOOL_CALLS]f[ARGS]{"a": 1}', [("f", {"a": 1})]),
        ("mistral args", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', [("f", {"a": 1})]),
        (
            "lfm2",
            "<|tool_call_start|>[f(x='a\"b\\'c\\n\\x41\\u00e9\\U0001F600\\d', y=true, z=None,)]",
            [("f", {"x": "a\"b'c\nAé😀\\d", "y": True, "z": None})],
        ),
        (
            "lfm2",
            "<|tool_call_start|>[ f( x = [1, 'b',] , größe={'k': {}} ) , n.s-g() ]<|tool_call_end|>",
            [("f", {"x": [1, "b"], "größe": {"k": {}}}), ("n.s-g", {})],
        ),
        (
            "lfm2",
            "<|tool_call_start|>[f(s='two\nlines', u='\\ud83d\\ude00')]<|tool_call_end|>",
            [("f", {"s": "two\nlines", "u": "😀"})],
        ),
    ],
)
def test_other_ways_of_writing_are_read(
    name: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    parser = parse(FORMATS[name][0], text)
    assert meant(parser.tool_calls) == calls
    assert (parser.text, parser.unfinished) == ("", "")


def test_what_python_cannot_name_is_not_written() -> None:
    with pytest.raises(UnsupportedFeature, match="no-name"):
        LIQUID.write_calls([ToolCall("abcdefgh1", "f", {"no-name": 1})])


# Templates


@pytest.mark.parametrize(
    ("source", "tool_format"),
    [
        *((source, tool_format) for tool_format, source in FORMATS.values()),
        (PLAIN, None),
        ("{{ 'Use your tools: <tool_call>\\n{\"name\": f}\\n</tool_call>' }}", None),
        ("{% if tools %}{{ '<tool_call>\\n<function=' + tool.name + '>' }}{% endif %}", None),
        ("{% if tools %}{{ '<tool_call>' + tool.name + '<arg_key>' }}{% endif %}", None),
        ("{% for tool in tools %}{{ '<|tool_calls_section_begin|>' }}{% endfor %}", None),
        ("{% for tool in tools %}{{ '<|python_tag|> }}{% endfor %}", None),
    ],
)
def test_the_format_is_detected_in_the_template(
    source: str, tool_format: ToolFormat | None
) -> None:
    assert detect_tool_format(source) == tool_format


@pytest.mark.parametrize(("tool_format", "source"), FORMATS.values(), ids=FORMATS)
def test_what_a_template_makes_of_a_call_is_read_back(tool_format: ToolFormat, source: str) -> None:
    calls = CALLS[2:] if tool_format is LLAMA else CALLS
    messages = [
        Message("user", "Do."),
        Message("assistant", "", tool_calls=calls),
        *(Message("tool", "ok", tool_call_id=call.id, name=call.name) for call in calls),
    ]
    calls_as = None if reads_tool_calls(source) else tool_format
    prompt = render(source, messages, calls_as)
    assert prompt.startswith(render(source, messages[:1]))
    turn = prompt.removeprefix(render(source, messages[:1])).partition("<|im_end|>")[0]
    if tool_format is LLAMA:
        turn = turn.partition("<|end|>")[2]
    turn = turn.removeprefix("<|im_start|>assistant\n")
    assert meant(parse(tool_format, turn).tool_calls) == meant(calls)


def test_messages_say_what_they_have_and_nothing_else() -> None:
    assert message_dict(Message("user", "Hi")) == {"role": "user", "content": "Hi"}
    function = {"name": "get", "arguments": dict(CALLS[0].arguments)}
    said = Message("assistant", "Hm.", tool_calls=CALLS[:1], reasoning="Let me see.")
    assert message_dict(said) == {
        "role": "assistant",
        "content": "Hm.",
        "reasoning_content": "Let me see.",
        "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": function}],
    }
    fields: dict[str, Any] = {"content": "42", "tool_call_id": "abcdefgh1", "name": "get"}
    assert message_dict(Message("tool", **fields)) == {"role": "tool", **fields}
    function = {"name": "get", "description": "Get something.", "parameters": GET.schema}
    assert tool_dict(GET) == {"type": "function", "function": function}


@pytest.mark.parametrize("tool_format", TOOL_FORMATS.values(), ids=str)
def test_a_template_without_tools_gets_them_as_text(tool_format: ToolFormat) -> None:
    results = [Message("tool", f"result {call.id}", tool_call_id=call.id) for call in CALLS]
    conversation = [
        Message("user", "Do."),
        Message("assistant", "Well.", tool_calls=CALLS),
        *results,
        Message("assistant", "Done."),
    ]
    for system in ((), (Message("system", "Be kind."),)):
        turns = plain_messages([*system, *conversation], TOOLS, tool_format)
        roles = " ".join(str(turn["role"]) for turn in turns)
        assert roles == "system user assistant user assistant"
        told = str(turns[0]["content"])
        assert told.startswith("Be kind.\n\n" if system else "You can call tools.")
        for tool in TOOLS:
            assert json.dumps(tool_dict(tool)) in told
        assert tool_format.write_calls(CALLS) in str(turns[2]["content"])
        for call in CALLS:
            assert f"result {call.id}" in str(turns[3]["content"])
        ChatTemplate(PLAIN, bos_token="", eos_token="").render(turns)
    assert plain_messages(conversation[:1], (), tool_format) == [{"role": "user", "content": "Do."}]


# Grammars


SPELT = ByteVocabulary()


def grammar_of(
    tool_format: ToolFormat,
    vocabulary: ByteVocabulary = SPELT,
    tools: Sequence[Tool] = TOOLS,
    *,
    choice: str = "auto",
    parallel: bool = True,
    **more: Any,
) -> str:
    return tool_format.grammar(
        tools, choice=choice, parallel=parallel, marker=vocabulary.marker, **more
    )


def vocabularies(tool_format: ToolFormat) -> list[ByteVocabulary]:
    return [SPELT, ByteVocabulary((*tool_format.markers, "<think>", "</think>"))]


@every_format
@pytest.mark.parametrize("parallel", [True, False])
def test_the_grammar_allows_what_is_written(tool_format: ToolFormat, parallel: bool) -> None:
    for vocabulary in vocabularies(tool_format):
        text = vocabulary.encode
        for choice in ("required", "auto"):
            grammar = grammar_of(tool_format, vocabulary, choice=choice, parallel=parallel)
            for call in CALLS:
                assert allows(grammar, text(tool_format.write_calls([call])))
            assert allows(grammar, text(tool_format.write_calls(CALLS))) is parallel
            before = "Hm {1} <tool: " + ("<|python_tag|>" if tool_format is LLAMA else "")
            in_text = text(before + tool_format.write_calls(CALLS[:1]))
            assert allows(grammar, in_text) is (choice == "auto")
            assert allows(grammar, text("Hello, {world}!")) is (choice == "auto")
            assert allows(grammar, []) is (choice == "auto")
        for call in CALLS:
            grammar = grammar_of(tool_format, vocabulary, choice=call.name, parallel=parallel)
            for other in CALLS:
                written = text(tool_format.write_calls([other]))
                assert allows(grammar, written) is (other == call)


def without_control_characters(value: object) -> bool:
    """JSON writes those as `\\u…`, which no constraint allows."""
    written = json.dumps(value, ensure_ascii=False)
    return "\\u" not in written and "\x7f" not in written


@every_format
@given(any_json.filter(without_control_characters))
def test_the_grammar_allows_any_json_where_the_schema_does(
    tool_format: ToolFormat, value: object
) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"x": {}}})
    grammar = grammar_of(tool_format, tools=[tool], choice="required")
    call = ToolCall("abcdefgh1", "f", {"x": value})
    assert allows(grammar, SPELT.encode(tool_format.write_calls([call])))


@every_format
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("got", {"a": 1}),
        ("get", {}),
        ("get", {"a": "1"}),
        ("get", {"a": 1.5}),
        ("get", {"a": True}),
        ("get", {"a": 1, "b": None}),
        ("get", {"b": "", "a": 1}),
        ("get", {"a": 1, "c": 1}),
        ("get_time", {"a": 1}),
        ("tree", {"root": {}}),
        ("tree", {"root": {"ripe": 1}}),
        ("tree", {"root": {"ripe": True, "twigs": [{}]}}),
        ("tree", {"root": {"ripe": True}, "label": "oaks"}),
        ("tree", {"root": {"ripe": True}, "kind": "ash"}),
        ("tree", {"root": {"ripe": True}, "flags": [True, True, True]}),
        ("tree", {"root": {"ripe": True}, "heights": {"a": "1"}}),
    ],
)
def test_the_grammar_allows_no_other_call(
    tool_format: ToolFormat, tool: str, arguments: dict[str, object]
) -> None:
    for vocabulary in vocabularies(tool_format):
        wrong = vocabulary.encode(tool_format.write_calls([ToolCall("abcdefgh1", tool, arguments)]))
        for choice in ("required", "auto"):
            grammar = grammar_of(tool_format, vocabulary, choice=choice)
            assert accepted(grammar, wrong)[0] < len(wrong)


@every_format
def test_a_marker_that_is_spelt_out_binds_like_its_token(tool_format: ToolFormat) -> None:
    vocabulary = vocabularies(tool_format)[1]
    grammar = grammar_of(tool_format, vocabulary)
    spelt = list(f"Hi {tool_format.opener}".encode())
    assert accepted(grammar, [*spelt, *b"oops"])[0] == len(spelt)


@every_format
def test_text_may_hold_the_given_control_tokens_and_no_others(tool_format: ToolFormat) -> None:
    vocabulary = vocabularies(tool_format)[1]
    free = [vocabulary.marker(text) for text in ("<think>", "</think>")]
    call = tool_format.write_calls(CALLS[:1])
    for parallel in (True, False):
        grammar = grammar_of(tool_format, vocabulary, parallel=parallel, free=free)
        assert allows(grammar, vocabulary.encode("<think>Hm {</think>Hello"))
        assert allows(grammar, vocabulary.encode(f"<think>Hm {{</think>{call}"))
        other = ByteVocabulary(["<other>"]).encode("<other>")[0]
        assert accepted(grammar, [*b"Hi", other])[0] == 2


@every_format
def test_reasoning_may_come_before_a_call_that_is_required(tool_format: ToolFormat) -> None:
    call = tool_format.write_calls(CALLS[:1])
    for vocabulary in vocabularies(tool_format):
        tags = ReasoningTags("<think>", "</think>")
        grammar = grammar_of(tool_format, vocabulary, choice="required", reasoning=tags)
        for thought in ("", "\nHm, < {\n", "</", "<</thin", "x</thin </"):
            assert allows(grammar, vocabulary.encode(f"<think>{thought}</think>\n\n{call}"))
            for wrong in (f"{thought}</think>{call}", f"<think>{thought}</think>Hm.{call}"):
                assert not allows(grammar, vocabulary.encode(wrong))
        assert allows(grammar, vocabulary.encode(call))
        assert not allows(grammar, vocabulary.encode(f"<think>Hm.\n\n{call}"))
        # Reasoning ends where a closing tag is spelt out, too.
        begun = [*vocabulary.encode("<think>"), *b"</think>"]
        assert accepted(grammar, [*begun, *b"Hm."])[0] == len(begun)


@every_format
def test_a_choice_that_is_no_tool_is_refused(tool_format: ToolFormat) -> None:
    for tools, choice in (((), "auto"), (TOOLS, "nothing"), (TOOLS, "none")):
        with pytest.raises(ProtocolError):
            grammar_of(tool_format, tools=tools, choice=choice)
    with pytest.raises(ProtocolError, match="array"):
        grammar_of(tool_format, tools=[Tool("f", "", {"type": "array"})])
