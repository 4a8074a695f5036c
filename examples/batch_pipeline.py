"""Many documents through one model: in bounded memory, with progress, and resumable.

    python examples/batch_pipeline.py OUTPUT.jsonl [N_DOCUMENTS [MODEL]]

Started again with the same output, it goes on where it was stopped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TextIO

import attrs
import trio
from rich.progress import Progress

from llamad_trio import Engine, LlamadError, open_engine

N_SLOTS = 8


@attrs.frozen
class Review:
    """What the customer thinks."""

    sentiment: Literal["good", "bad"]


def documents(n: int) -> Iterator[tuple[int, str]]:
    """Made on demand: there may be more than fit into memory."""
    for number in range(n):
        yield number, f"Review {number}: the food was {'fresh' if number % 3 else 'cold'}."


def already_done(output: Path) -> set[int]:
    if not output.exists():
        return set()
    return {json.loads(line)["number"] for line in output.read_text().splitlines()}


async def worker(
    eng: Engine,
    todo: trio.MemoryReceiveChannel[tuple[int, str]],
    results: TextIO,
    progress: Progress,
) -> None:
    async for number, text in todo:
        result: dict[str, object]
        try:
            review = (await eng.complete(text, into=Review, max_tokens=32, temperature=0)).value
            result = {"number": number, "sentiment": review and review.sentiment}
        except LlamadError as error:  # this document's trouble, nobody else's
            result = {"number": number, "error": str(error)}
        results.write(json.dumps(result) + "\n")
        results.flush()
        progress.advance(progress.task_ids[0])


async def main(output: Path, n_documents: int, model: str) -> None:
    done = already_done(output)
    # As many documents are in memory as there are slots, and as many wait.
    send, receive = trio.open_memory_channel[tuple[int, str]](N_SLOTS)
    with output.open("a") as results, Progress() as progress:
        progress.add_task("documents", total=n_documents, completed=len(done))
        async with open_engine(model, n_slots=N_SLOTS) as eng, trio.open_nursery() as nursery:
            for _ in range(N_SLOTS):
                nursery.start_soon(worker, eng, receive, results, progress)
            async with send:
                for number, text in documents(n_documents):
                    if number not in done:
                        await send.send((number, text))


if __name__ == "__main__":
    defaults = ["reviews.jsonl", "1000", "smollm2-135m"]
    path, count, name = sys.argv[1:] + defaults[len(sys.argv) - 1 :]
    trio.run(main, Path(path), int(count), name)
