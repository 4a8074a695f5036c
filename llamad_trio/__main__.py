"""`python -m llamad_trio`."""

from llamad_trio.cli import main

if __name__ == "__main__":
    main()
