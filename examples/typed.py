"""A text as data: a typed result, and a choice between labels.

    python examples/typed.py [MODEL]

The form is always right.  What a small model puts in it is another matter.
"""

import sys
from typing import Literal

import attrs
import trio

from llamad_trio import open_engine

REVIEW = "The room was lovely and the breakfast huge. We will come back!"


@attrs.frozen
class Review:
    """What a guest thinks.

    Attributes:
        sentiment: whether the guest liked it.
        stars: how many, from 1 to 5.
    """

    sentiment: Literal["good", "bad", "mixed"]
    stars: Literal[1, 2, 3, 4, 5]


async def main(model: str) -> None:
    async with open_engine(model) as eng:
        done = await eng.complete(f"A guest wrote: {REVIEW}", into=Review, describe=True)
        print(done.value)
        choice = await eng.choose(f"Happy or angry? {REVIEW}", ["Happy", "Angry"])
        print(choice.text, [f"{p:.2f}" for p in choice.probabilities])


trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
