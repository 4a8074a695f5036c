"""Without an event loop: calls that block, from as many threads as there are.

    python examples/blocking.py [MODEL]

Ctrl-C, or leaving the loop, stops the model at once.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from llamad_trio import blocking


def main(model: str) -> None:
    with blocking.open_engine(model) as eng:
        for n, piece in enumerate(eng.stream("Tell me a long story about a lighthouse.")):
            print(piece, end="", flush=True)
            if n == 40:
                break
        print("\n-- that will do --")

        def capital(country: str) -> str:
            question = f"What is the capital of {country}? Answer in one word."
            return eng.complete_text(question, max_tokens=16, temperature=0, timeout=60)

        with ThreadPoolExecutor() as pool:
            for answer in pool.map(capital, ["France", "Japan", "Kenya"]):
                print(answer)


main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
