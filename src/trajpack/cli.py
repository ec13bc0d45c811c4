"""The entry of the command ``trajpack``: its errors and exit statuses.

The exit status is

- 0 for success;
- 1 after a broken pipe of the results (``trajpack inspect ... | head``), without a word;
- 2 for a wrong request, for a file or standard output that cannot be read or written, and for
  an engine that ended before the rollout did, with one line on standard error;
- 130 after Ctrl-C, and after a SIGTERM that ended a rollout.

A rollout that ends with 2 or by a signal names the files that it wrote.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

UNREAD = 1
REFUSED = 2
INTERRUPTED = 130


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
        from trajpack.commands.app import read

        work = read(arguments)
        status = work if isinstance(work, int) else work()
        if sys.stdout is not None:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich and typer exit where a pipe is broken
        return UNREAD
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except (SetupError, OSError, RuntimeError, ModuleNotFoundError) as error:
        problem: Exception = error
        if isinstance(error, ModuleNotFoundError):
            if (error.name or "").startswith("trajpack"):
                raise
            problem = explained(error)
        say(f"error: {_one_sentence(problem)}")
        return REFUSED
    return status


def _one_sentence(error: Exception) -> str:
    """Return an error's text on one line; that of the system begins with the file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
