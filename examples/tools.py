"""A model that calls functions.

    python examples/tools.py [MODEL]

The default model has no tools in its template and is small: the syntax is named, and a
call is required, or it would rather chat.
"""

import sys

import trio

from llamad_trio import Request, open_engine, run_tools


async def population(city: str) -> int:
    """Look up how many people live in a city.

    Args:
        city: the name of a city.
    """
    await trio.sleep(0.1)  # as if it were asked of a server
    return {"Oslo": 717_710, "Bergen": 291_940}.get(city, 100_000)


async def main(model: str) -> None:
    request = Request(
        "How many people live in Oslo?",
        tools=[population],
        tool_choice="required",
        tool_format="hermes",
        temperature=0,
        parallel_tool_calls=False,
        max_tokens=48,
    )
    async with open_engine(model) as eng:
        run = await run_tools(eng, request, max_rounds=1)
    for message in run.history:
        calls = [f"{call.name}({dict(call.arguments)})" for call in message.tool_calls]
        print(f"{message.role}: {message.content} {' '.join(calls)}".rstrip())


trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
