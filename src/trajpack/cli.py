"""The entry of the command ``trajpack``: its errors and exit statuses.

The status is 0 for success; 1 after a broken pipe; 2 with one line on standard error for what is
refused, cannot be read or written, or has ended early; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence


def main() -> None:
    """Run the command with the arguments of this program and exit with its status."""
    status = run(sys.argv[1:])
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError:  # nobody reads the rest; Python would try once more and complain
        os._exit(status)
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    from trajpack.agent.errors import SetupError
    from trajpack.commands.terminal import say
    from trajpack.packing.optional import explained

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # any text can be shown
    try:
        from trajpack.commands.app import USAGE_ERROR, app

        try:
            status = app(list(arguments), prog_name="trajpack", standalone_mode=False)
        except USAGE_ERROR as error:
            command = "trajpack" if error.ctx is None else error.ctx.command_path
            problem = f"{error.format_message().rstrip('.')}; see {command} --help"
            raise SetupError(problem) from error
        if sys.stdout is not None:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich and typer exit where a pipe is broken
        return 1
    except (SetupError, OSError, RuntimeError, ModuleNotFoundError) as error:
        refused = explained(error) if isinstance(error, ModuleNotFoundError) else error
        text = " ".join(str(refused).split()) or type(refused).__name__
        if isinstance(refused, OSError) and refused.strerror:
            file = "" if refused.filename is None else f"{refused.filename}: "
            text = f"{file}{refused.strerror}"
        say(f"error: {text}")
        return 2
    return status or 0
