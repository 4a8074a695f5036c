"""Reasoning is found by the tags of the model's own template."""

from __future__ import annotations

import pytest

from llamad_trio.chat.reasoning import ReasoningTags, detect_reasoning

THINK = ReasoningTags("<think>", "</think>")
MAGISTRAL = ReasoningTags("[THINK]", "[/THINK]")


@pytest.mark.parametrize(
    ("source", "tags"),
    [
        ("{{ '<think>' ~ message.reasoning_content ~ '</think>' }}", THINK),
        ("{{ message.content.split('</think>')[-1] }}", THINK),
        ("{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}", THINK),
        ("{{ '[THINK]' + block.thinking + '[/THINK]' }}", MAGISTRAL),
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
