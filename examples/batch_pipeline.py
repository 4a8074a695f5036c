"""Many documents through one model: in bounded memory, with progress, and resumable.

    python examples/batch_pipeline.py OUTPUT.jsonl [N_DOCUMENTS [MODEL]]

Started again with the same output, it goes on where it was stopped.  A document that cannot be
done has its error in the output.  What goes wrong with the engine, or with the disk, ends it
all: the documents it was at are done the next time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TextIO

import attrs
import trio
from rich.progress import Progress

from llamad_trio import (
    ContextOverflow,
    Engine,
    IncompleteOutput,
    InferenceError,
    PromptTooLong,
    ProtocolError,
    open_engine,
)

N_SLOTS = 8

OF_THE_DOCUMENT = (PromptTooLong, ContextOverflow, ProtocolError, IncompleteOutput, InferenceError)


@attrs.frozen
class Review:
    """What the customer thinks."""

    sentiment: Literal["good", "bad"]


def documents(n: int) -> Iterator[tuple[int, str]]:
    """Made on demand: there may be more than fit into memory."""
    for number in range(n):
        yield number, f"Review {number}: the food was {'fresh' if number % 3 else 'cold'}."


def already_done(output: Path) -> set[int]:
    """The numbers in the output.  Cuts off what a full disk or a power cut left of a line."""
    numbers = set()
    with output.open("a+b") as results:
        results.seek(0)
        n_whole_bytes = 0
        for line in results:
            if line.endswith(b"\n"):
                numbers.add(json.loads(line)["number"])
                n_whole_bytes += len(line)
        results.truncate(n_whole_bytes)
    return numbers


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
            result = {"number": number, "sentiment": review.sentiment}
        except OF_THE_DOCUMENT as error:
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
    parser = argparse.ArgumentParser(description="Say of each review whether it is good or bad.")
    parser.add_argument("output", type=Path, help="where to append results, a line of JSON each")
    parser.add_argument("n_documents", type=int, nargs="?", default=1000)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    given = parser.parse_args()
    trio.run(main, given.output, given.n_documents, given.model)
