"""What the tests of several rooms draw with Hypothesis: data that a request may hold."""

from __future__ import annotations

from hypothesis import strategies as st

from llamad_trio.core.tools import ToolCall

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
names = st.from_regex(r"x[A-Za-z0-9_.-]{0,10}", fullmatch=True)
"""Of tools."""


def json_values(texts: st.SearchStrategy[str] = texts) -> st.SearchStrategy[object]:
    """Any JSON, with these texts in it."""
    return st.recursive(
        st.none() | st.booleans() | st.integers() | numbers | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=8,
    )


json_objects = st.dictionaries(texts, json_values(), max_size=3)
tool_calls = st.builds(ToolCall, texts, names, json_objects)
