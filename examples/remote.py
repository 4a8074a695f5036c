"""A daemon's engine in another program: the interface is that of `open_engine`.

    python -m llamad_trio serve &
    python examples/remote.py [SOCKET]

The deadline hangs up, which stops the daemon's work, too.
"""

import sys
from typing import Literal

import attrs
import trio

from llamad_trio import EngineLike, connect

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


async def rate(eng: EngineLike) -> Review | None:
    done = await eng.complete(f"A guest wrote: {REVIEW}", into=Review, describe=True)
    return done.value


async def tell(eng: EngineLike) -> None:
    with trio.move_on_after(2) as scope:
        async with eng.stream("Tell me a long story about a lighthouse.") as tokens:
            async for piece in tokens:
                print(piece, end="", flush=True)
    print("\n-- out of time --" if scope.cancelled_caught else "\n-- done --")


async def main(path: str) -> None:
    async with connect(path) as eng:
        print(eng.info.description)
        print(await rate(eng))
        await tell(eng)


trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "/tmp/llamad.sock")
