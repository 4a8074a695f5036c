"""Many requests at once: they share the model's slots and its KV pool.

    python examples/many_at_once.py [MODEL]

Each answer is printed when it is complete; the stats tell what the shared beginning of
the prompts saved.
"""

import sys

import trio

from llamad_trio import Engine, open_engine

SYSTEM = "You are a geography teacher. Answer in one short sentence."
COUNTRIES = ["France", "Japan", "Kenya", "Peru", "Norway", "India"]


async def ask(eng: Engine, country: str) -> None:
    completion = await eng.complete(
        f"What is the capital of {country}?", system=SYSTEM, max_tokens=24, temperature=0
    )
    print(f"{country}: {completion.text} ({completion.duration_s:.1f} s)")


async def main(model: str) -> None:
    async with open_engine(model, n_slots=3) as eng:
        async with trio.open_nursery() as nursery:
            for country in COUNTRIES:
                nursery.start_soon(ask, eng, country)
        stats = eng.stats()
        print(f"{stats.prefill_tokens} prompt tokens computed, {stats.cached_tokens} reused")


trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
