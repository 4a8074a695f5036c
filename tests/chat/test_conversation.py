"""From a request to a prompt, a constraint, and a way to read the reply."""

from __future__ import annotations

import inspect
from functools import partial
from itertools import count
from typing import Any

import attrs
import pytest

from llamad_trio.chat.conversation import RESERVED, ChatFormat, Turn
from llamad_trio.chat.guard import SENTINELS
from llamad_trio.chat.meter import FULL
from llamad_trio.chat.reply import ReplyParser
from llamad_trio.chat.template import ChatTemplate
from llamad_trio.constraints.compiler import Compiler
from llamad_trio.core.errors import ProtocolError, UnsupportedFeature
from llamad_trio.core.request import Message, Request
from llamad_trio.core.tools import Tool, ToolCall
from llamad_trio.testing import ScriptedModel
from tests.chat.byte_vocabulary import ByteVocabulary

S = SENTINELS[0]

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

HERMES = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    + CHATML.replace(
        "message.content",
        "message.content + (message.tool_calls | tojson if message.tool_calls else '')",
    )
    + '{# <tool_call>{"name": #}'
)

THINKS = CHATML.replace("assistant\\n' }}", "assistant\\n' }}{{ think or '' }}") + "{# </think> #}"

TOKENS = {"<|im_start|>": 1, "<|im_end|>": 2}

FACTS = attrs.evolve(ScriptedModel().facts, control_tokens=TOKENS)


def chat(source: str, **facts: Any) -> ChatFormat:
    """A model that has this template."""
    template = ChatTemplate(source, bos_token="", eos_token="")
    return ChatFormat(attrs.evolve(FACTS, chat_template=source, **facts), template)


def turn(source: str, request: Request, **facts: Any) -> Turn:
    """What a request comes to."""
    return chat(source, **facts).turn(request, S, FULL)


def read(asked: Turn, reply: str) -> ReplyParser:
    """A reply, taken apart."""
    parser = asked.parser(map(str, count()).__next__)
    parser.push(reply)
    parser.finish()
    return parser


GET = Tool("get", "Get.", {"properties": {"a": {"type": "integer"}}})
GET_1 = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
CALL = ToolCall("1", "get", {"a": 1})
AFTER_A_CALL = [
    Message("user", "x"),
    Message("assistant", "", tool_calls=[CALL]),
    Message("tool", "5", tool_call_id="1", name="get"),
]


# -- prompts --------------------------------------------------------------------------------


def test_a_conversation_is_what_its_template_makes_of_it() -> None:
    request = Request("c", system="s", history=[Message("user", "a"), Message("assistant", "b")])
    assert turn(CHATML, request).prompt == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_raw_prompt_is_left_alone_even_without_a_template() -> None:
    nothing = ChatFormat(FACTS, ProtocolError("there is no template"))
    text = "<|im_start|>user\n<think>"
    asked = nothing.turn(Request(text, raw=True), S, FULL)
    assert (asked.prompt, asked.reasoning, asked.tool_format) == (text, None, None)
    with pytest.raises(ProtocolError, match="no template") as caught:
        nothing.turn(Request("x"), S, FULL)
    # Each request gets an error of its own: a traceback is not to be shared.
    with pytest.raises(ProtocolError, match="no template") as again:
        nothing.turn(Request("x"), S, FULL)
    assert again.value is not caught.value


def test_only_the_templates_own_tokens_are_whole() -> None:
    prompt = turn(CHATML, Request("<|im_end|>", system="<|im_start|>")).prompt
    assert prompt.replace(S, "") == (
        "<|im_start|>system\n<|im_start|><|im_end|>\n<|im_start|>user\n<|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (prompt.count("<|im_start|>"), prompt.count("<|im_end|>")) == (3, 2)


def test_what_a_template_escapes_has_the_sentinel_all_the_same() -> None:
    for how in ("{{ [messages[0].content] }}", "{{ messages[0] | tojson(ensure_ascii=true) }}"):
        prompt = turn(how, Request("a<|im_end|>b")).prompt
        assert f"a<{S}|im_end|>b" in prompt
        assert "ufdd0" not in prompt


def test_messages_alone_end_open_or_not() -> None:
    messages = [Message("user", "a<|im_end|>")]
    render = partial(chat(CHATML).render_messages, messages, S, FULL)
    closed = f"<|im_start|>user\na<{S}|im_end|>"
    assert render(add_generation_prompt=False).startswith(closed)
    assert not render(add_generation_prompt=False).endswith("assistant\n")
    assert render(add_generation_prompt=True).endswith("assistant\n")


# -- variables ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_variable_that_a_template_gets_from_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match=name):
        turn(CHATML, Request("x", template_vars={name: 1, "b": 2}))


def test_no_name_of_a_variable_breaks_the_rendering() -> None:
    # Those that `ChatTemplate.render` has for itself must all be reserved.
    for name in inspect.signature(ChatTemplate.render).parameters.keys() - RESERVED:
        assert turn(CHATML, Request("x", template_vars={name: "y"})).prompt


def test_variables_reach_the_template_with_their_tokens_broken() -> None:
    source = "{{ a.b[0] }}{{ flag }}{{ n + 1 }}"
    data = {"a": {"b": ["x<|im_end|>"]}, "flag": False, "n": 2}
    assert turn(source, Request("x", template_vars=data)).prompt.startswith(f"x<{S}|im_end|>")
    assert turn(source, Request("x", template_vars=data)).prompt.endswith("False3")


# -- constraints ----------------------------------------------------------------------------

CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "integer"}}, "json_schema"),
    ({"json_schema": {}}, "json_schema"),
    ({"regex": "a+"}, "regex"),
    ({"lark": 'start: "a"'}, "lark"),
    ({"grammar": 'root ::= "a"'}, "lark"),
    ({"grammar": 'top ::= "a"', "grammar_root": "top"}, "lark"),
]


@pytest.mark.parametrize(("fields", "kind"), CONSTRAINTS)
@pytest.mark.parametrize(
    ("think", "more", "after"),
    [
        ("", {}, None),
        ("", {"raw": True}, None),
        ("<think>\n", {}, "</think>"),
        ("<think></think>", {}, None),
        ("<think>", {"raw": True}, None),
    ],
)
def test_a_constraint_begins_after_reasoning_that_the_prompt_leaves_open(
    fields: dict[str, Any], kind: str, think: str, more: dict[str, Any], after: str | None
) -> None:
    if not more:
        more = {"template_vars": {"think": think}}
    asked = turn(THINKS, Request(f"x{think}", **more, **fields))
    assert asked.constraint is not None
    assert (asked.constraint.kind, asked.constraint.after) == (kind, after)
    assert asked.in_reasoning is (after is not None)
    assert (asked.reasoning is not None) is asked.in_reasoning
    if kind == "json_schema":
        assert asked.constraint.source == fields["json_schema"]


@pytest.mark.parametrize(
    ("source", "request_"),
    [
        (CHATML, Request("x")),
        (HERMES, Request("x", tools=[GET], tool_choice="none")),
        (HERMES, Request(None, history=AFTER_A_CALL)),
    ],
    ids=["nothing asked", "no choice of tools", "earlier calls alone"],
)
def test_without_one_a_reply_is_free(source: str, request_: Request) -> None:
    asked = turn(source, request_)
    assert asked == Turn(prompt=asked.prompt)


# -- tools ----------------------------------------------------------------------------------


def test_without_a_choice_of_tools_the_prompt_has_none() -> None:
    asked = turn(HERMES, Request("x", tools=[GET], tool_choice="none"))
    assert asked.prompt == turn(HERMES, Request("x")).prompt


def test_a_template_that_shows_no_tools_needs_a_format() -> None:
    for request in (Request("x", tools=[GET]), Request(None, history=AFTER_A_CALL)):
        with pytest.raises(UnsupportedFeature, match="tool_format"):
            turn(CHATML, request)
        named = attrs.evolve(request, tool_format="hermes")
        assert "get" in turn(CHATML, named).prompt


def test_calls_in_a_conversation_are_never_left_out() -> None:
    more: dict[str, Any] = {"sentinel": S, "limits": FULL, "add_generation_prompt": True}
    for messages in (AFTER_A_CALL, AFTER_A_CALL[1:2], AFTER_A_CALL[2:]):
        assert chat(HERMES).render_messages(messages, **more)
        with pytest.raises(UnsupportedFeature, match="tool_format"):
            chat(CHATML).render_messages(messages, **more)
    assert chat(CHATML).render_messages(AFTER_A_CALL[:1], **more)
    assert '"get"' in chat(HERMES).render_messages(AFTER_A_CALL, **more)


def test_results_and_the_prompt_after_them_are_one_turn_where_calls_are_text() -> None:
    request = Request("and now?", history=AFTER_A_CALL, tool_format="hermes")
    prompt = turn(CHATML, request).prompt
    assert prompt.count("<|im_start|>user") == 2
    assert "5" in prompt.rpartition("<|im_start|>user")[2]
    assert "and now?<|im_end|>" in prompt


@pytest.mark.parametrize(
    "more", [{}, {"tools": [GET]}, {"tools": [GET], "tool_choice": "none"}, {"raw": True}]
)
def test_a_format_that_there_is_not_is_refused_with_tools_and_without(more: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=r"morse.*hermes"):
        turn(HERMES, Request("x", tool_format="morse", **more))


def test_text_of_a_constraint_is_not_taken_for_reasoning() -> None:
    asked = turn(THINKS, Request("x", regex="<think>ab"))
    parser = read(asked, "<think>ab")
    assert (parser.text, parser.reasoning) == ("<think>ab", None)


def test_a_format_that_is_the_templates_own_changes_nothing() -> None:
    for request in (Request("x", tools=[GET]), Request(None, history=AFTER_A_CALL, tools=[GET])):
        named = attrs.evolve(request, tool_format="hermes")
        assert turn(HERMES, named) == turn(HERMES, request)
        other = turn(HERMES, attrs.evolve(request, tool_format="lfm2"))
        assert other.prompt != turn(HERMES, request).prompt


# -- reasoning before calls that are required -------------------------------------------------

THINKS_AND_CALLS = (
    HERMES
    + "{%- if thinking == 'on' %}{{ '<think>\\n' }}{% endif %}"
    + "{%- if thinking == 'off' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
THOUGHT = "Let me see: <tool> or {?"
VOCABULARIES = [
    ByteVocabulary(),
    ByteVocabulary(["<think>", "</think>", "<tool_call>", "</tool_call>"]),
]


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=["text", "tokens"])
@pytest.mark.parametrize("choice", ["required", "get"])
@pytest.mark.parametrize(
    ("thinking", "reply", "reasoning"),
    [
        # The model opens the block itself, or not.
        ("", f"<think>\n{THOUGHT}\n</think>\n\n{GET_1}", THOUGHT),
        ("", f"<think></think>{GET_1}", None),
        ("", GET_1, None),
        ("", f"{THOUGHT}\n</think>\n\n{GET_1}", "refused"),
        ("", f"<think>{THOUGHT}</think>Well. {GET_1}", "refused"),
        ("", f"<think>{THOUGHT}", "refused"),
        ("", THOUGHT, "refused"),
        # The template opens it.
        ("on", f"{THOUGHT}\n</think>\n\n{GET_1}", THOUGHT),
        ("on", f"</think>{GET_1}", None),
        ("on", GET_1, "refused"),
        # The template closes it: the model is told not to think.
        ("off", GET_1, None),
        ("off", f"<think>{THOUGHT}</think>{GET_1}", "refused"),
    ],
)
def test_a_model_that_reasons_may_do_so_before_a_call_that_is_required(
    thinking: str, reply: str, reasoning: str | None, choice: str, vocabulary: ByteVocabulary
) -> None:
    request = Request("x", tools=[GET], tool_choice=choice, template_vars={"thinking": thinking})
    asked = turn(THINKS_AND_CALLS, request, control_tokens=vocabulary.control_tokens)
    assert asked.constraint is not None
    matcher = Compiler(vocabulary).compile(asked.constraint)
    is_allowed = matcher.accept(vocabulary.encode(reply)) and matcher.may_end
    assert is_allowed is (reasoning != "refused")
    if is_allowed:
        parser = read(asked, reply)
        assert (parser.reasoning, parser.text) == (reasoning, "")
        assert parser.tool_calls == (ToolCall("0", "get", {"a": 1}),)


# -- control tokens in a reply --------------------------------------------------------------


def test_markers_that_are_control_tokens_are_part_of_the_replys_text() -> None:
    markers = {"<tool_call>": 7, "</tool_call>": 8, "</think>": 9}
    tokens = {**TOKENS, **markers}
    assert turn(HERMES, Request("x", tools=[GET]), control_tokens=tokens).visible == {7, 8}
    assert turn(HERMES, Request("x"), control_tokens=tokens).visible == frozenset()
    assert turn(THINKS, Request("x"), control_tokens=tokens).visible == {9}
    source = turn(HERMES, Request("x", tools=[GET]), control_tokens=tokens).constraint
    plain = turn(HERMES, Request("x", tools=[GET])).constraint
    assert source is not None
    assert plain is not None
    assert "<[7]>" in source.source
    assert "<[7]>" not in plain.source


def test_added_tokens_that_the_template_uses_are_guarded_but_for_the_assistant() -> None:
    added = frozenset({"<think>", "</think>", "<other>", "\n\n"})
    history = [Message("assistant", "<think>a</think>b")]
    request = Request("<think>c</think><other>\n\n.", history=history)
    prompt = turn(THINKS, request, added_tokens=added).prompt
    assert "<think>a</think>b" in prompt
    assert "c</think>" not in prompt
    assert "<other>\n\n." in prompt
