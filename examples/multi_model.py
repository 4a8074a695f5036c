"""A small model routes each question, and a larger one answers the hard ones.

    python examples/multi_model.py [ROUTER [THINKER]]

Both arguments are paths of GGUF files or names of known models.
"""

from __future__ import annotations

import sys

import trio

from llamad_trio import EngineSpec, Message, Models, open_models

QUESTIONS = ["What is 2+2?", "Why do empires fall?", "Say hello."]

SHOWN = [
    Message("user", "What is 1+1?"),
    Message("assistant", "easy"),
    Message("user", "Why do wars begin?"),
    Message("assistant", "hard"),
]


async def answer(models: Models, question: str) -> None:
    # No sampling, no parsing: which of the two words is likelier.
    route = await models["router"].choose(question, ["easy", "hard"], history=SHOWN)
    model = "router" if route.text == "easy" else "thinker"
    reply = await models.complete(question, model=model, max_tokens=32, temperature=0)
    print(f"{question}  [{route.text} {max(route.probabilities):.0%}, {model}]  {reply.text!r}")


async def main(router: str, thinker: str) -> None:
    specs = {
        "router": EngineSpec(router, n_ctx=1024),
        # Loaded when it is first asked, closed when nobody has asked for ten minutes.
        "thinker": EngineSpec(thinker, n_ctx=4096, load="lazy", unload_after_s=600),
    }
    async with open_models(specs, default="router") as models, trio.open_nursery() as nursery:
        for question in QUESTIONS:
            nursery.start_soon(answer, models, question)


if __name__ == "__main__":
    names = [*sys.argv[1:], "smollm2-135m", "smollm2-135m"]
    trio.run(main, names[0], names[1])
