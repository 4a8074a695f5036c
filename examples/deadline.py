"""A deadline is a cancel scope.

    python examples/deadline.py [MODEL]

Streams for two seconds, then leaves; the model stops at once, and what was said so far
is kept.
"""

import sys

import trio

from llamad_trio import open_engine


async def main(model: str) -> None:
    async with open_engine(model) as eng:
        with trio.move_on_after(2) as scope:
            async with eng.stream("Tell me a long story about a lighthouse.") as tokens:
                async for piece in tokens:
                    print(piece, end="", flush=True)
        print("\n-- out of time --" if scope.cancelled_caught else "\n-- done --")
        print(f"cancelled: {eng.stats().requests['cancelled']}")


trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
