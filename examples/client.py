"""Ask a daemon, with the standard library alone: python examples/client.py SOCKET PROMPT"""

import json
import socket
import sys
from collections.abc import Iterator


def ask(path: str, **request: object) -> Iterator[dict[str, object]]:
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.connect(path)
        daemon.sendall(json.dumps(request).encode() + b"\n")
        for reply in map(json.loads, daemon.makefile("rb")):
            if "error" in reply:
                sys.exit(reply["error"])
            yield reply


for reply in ask(sys.argv[1], prompt=sys.argv[2], stream=True):
    print(reply.get("token", "\n"), end="", flush=True)
