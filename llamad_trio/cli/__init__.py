"""The `llamad-trio` command line: what the library does, from a terminal.

Errors are one line on stderr with exit status 1 (2 for usage); Ctrl-C is 130.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

import click

from llamad_trio.cli.bench import bench_command
from llamad_trio.cli.examine import doctor_command, inspect_command
from llamad_trio.cli.generate import chat_command, complete_command
from llamad_trio.cli.options import flat
from llamad_trio.cli.pull import models_command, pull_command
from llamad_trio.cli.serve import serve_command
from llamad_trio.cli.top import top_command

INTERRUPTED = 130

# Raised for a command line without a command; click 8.1 shows the help by itself.
HELP_INSTEAD = getattr(click.exceptions, "NoArgsIsHelpError", ())


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="llamad-trio")
def command_line() -> None:
    """GGUF models in your terminal, on llama.cpp and Trio."""


for _command in (
    complete_command,
    chat_command,
    serve_command,
    top_command,
    pull_command,
    models_command,
    inspect_command,
    bench_command,
    doctor_command,
):
    command_line.add_command(_command)


def main() -> NoReturn:
    """Run the command line and exit."""
    _show_warnings()
    try:
        command_line(standalone_mode=False)
    except HELP_INSTEAD as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"error: {flat(error.format_message())}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader has gone, as in `... | head`.  Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:  # whatever it is, a command line answers in one line
        if os.environ.get("LLAMAD_DEBUG"):
            raise
        text = flat(str(error)) or "failed"
        if not isinstance(error, OSError) and not type(error).__module__.startswith("llamad_trio."):
            text = f"{type(error).__name__}: {text}"
        click.echo(f"error: {text}", err=True)
        sys.exit(1)
    sys.exit(0)


def _show_warnings() -> None:
    """What the preflight has found, on stderr; who has set up a log reads it there."""
    logger = logging.getLogger("llamad_trio.preflight")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    logger.addHandler(handler)
