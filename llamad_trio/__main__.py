"""`python -m llamad_trio`, which is also what the script `llamad-trio` runs.

Decides what Ctrl-C is until the command line is there: its imports take a moment.
"""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit."""
    try:
        from llamad_trio import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
