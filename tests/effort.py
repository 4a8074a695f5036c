"""How much work a call is, in a number that does not depend on how fast the machine is."""

from __future__ import annotations

import sys
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

T = TypeVar("T")

LINES = 8
"""After so many lines it is looked at what they allocated: that takes longer than they do."""

FREE_BYTES = 1024
"""What so many lines may allocate for small objects."""


def effort_of(function: Callable[[], object], *, copies: bool = False) -> int:
    """Call a function, and count the lines of Python that this thread runs for it.

    Args:
        function: what is called.
        copies: count what C copies as well: for each byte that a few lines allocate and free
            again, beyond what small objects need, one more.  Large lists and dicts that grow
            are copied too.
    """
    n_lines = n_bytes = before = 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal n_lines
        n_lines += 1
        if copies and n_lines % LINES == 0:
            weigh()
        return count

    def weigh() -> None:
        nonlocal n_bytes, before
        now, peak = tracemalloc.get_traced_memory()
        n_bytes += max(0, peak - max(before, now) - FREE_BYTES)
        before = now
        tracemalloc.reset_peak()

    previous = sys.gettrace()
    if copies:
        tracemalloc.start()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(previous)
        if copies:
            tracemalloc.stop()
    return n_lines + n_bytes


def assert_linear(
    function: Callable[[T], object], of_size: Callable[[int], T], n: int, *, copies: bool = False
) -> None:
    """Fail if what is four times as large takes clearly more than four times the effort."""
    function(of_size(n // 2))  # what is made once is there now; what is kept is of another size
    small, large = (
        effort_of(partial(function, of_size(size)), copies=copies) for size in (n, 4 * n)
    )
    assert large <= 4.5 * small, (
        f"{large / small:.1f} times the effort for what is 4 times as large"
    )
