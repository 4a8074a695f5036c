"""What a docstring says of each parameter is found, whatever the style, names and types."""

from __future__ import annotations

import time

import pytest

from llamad_trio.typed.docstrings import read_docstring

NUMPY = """Do it.

Parameters
----------
first, second : int
    Both of these.
*rest, **named
    Others.
\\*more : str
    Escaped.
ñ : str, optional
    Beyond ASCII.
mode : {"a": 1, "b": 2}
    One of them.

Returns
-------
int
    A count.
"""

GOOGLE = """Do it.

Args:
    x: the first.
    y (Optional[Dict[str, (int)]]): has brackets: some
        in others.
    größe (int): beyond ASCII.
    a, b (float): both.
    `q`, **named: marked.
    left (Literal["("]): opens.
    right (Literal[")"]): closes.

Returns:
    n: nothing.
"""

REST = """Do it.

:param ñ: beyond ASCII
:param dict[str, (int)] y: typed
:param *rest: all
    of them
:keyword  z : spaced
:returns: nothing
"""


@pytest.mark.parametrize(
    ("docstring", "parameters"),
    [
        (
            NUMPY,
            {
                "first": "Both of these.",
                "second": "Both of these.",
                "rest": "Others.",
                "named": "Others.",
                "more": "Escaped.",
                "ñ": "Beyond ASCII.",
                "mode": "One of them.",
            },
        ),
        (
            GOOGLE,
            {
                "x": "the first.",
                "y": "has brackets: some in others.",
                "größe": "beyond ASCII.",
                "a": "both.",
                "b": "both.",
                "q": "marked.",
                "named": "marked.",
                "left": "opens.",
                "right": "closes.",
            },
        ),
        (REST, {"ñ": "beyond ASCII", "y": "typed", "rest": "all of them", "z": "spaced"}),
    ],
    ids=["numpy", "google", "rest"],
)
def test_each_parameter_has_what_is_said_of_it(docstring: str, parameters: dict[str, str]) -> None:
    documentation = read_docstring(docstring)
    assert documentation.summary == "Do it."
    assert documentation.parameters == parameters


def test_what_is_no_entry_continues_the_one_above() -> None:
    documentation = read_docstring(
        "Go.\n\nArgs:\n    x: one\n    two and three: four\n    (five): six"
    )
    assert documentation.parameters == {"x": "one two and three: four (five): six"}


@pytest.mark.parametrize(
    "line", ["    x ({})", "    {}x", "    {}", ":param {}", ":param x {}:", ":param:{}"]
)
@pytest.mark.parametrize(
    "filling", [" ", "(", ")", "a", "a,", "a, ", "`", "*", "\\*", ":", " :", "[("]
)
def test_long_lines_are_read_in_linear_time(line: str, filling: str) -> None:
    start = time.process_time()
    read_docstring("Do it.\n\nArgs:\n" + line.format(filling * 50_000))
    read_docstring("Do it.\n\nParameters\n---\n" + line.format(filling * 50_000))

    # A quadratic reading takes minutes.
    assert time.process_time() - start < 2
