"""The command: its streams, signals and exit statuses.

The status is

- 0 for success, also where the reader of the results went away (``trajpack inspect ... | head``);
- 2 for a wrong request, for a file or standard output that cannot be read or written, and for
  an engine that ended before the rollout did, with one line on standard error;
- 130 after Ctrl-C and 143 after SIGTERM.

A rollout that ends with 2 or by a signal says what it left on disk. Standard error may be
closed, full or a broken pipe: what is said there is lost, and the work goes on.

Importing this module loads next to nothing, so that Ctrl-C finds the command in charge almost at
once; `trajpack.commands` has the options.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from trajpack.agent.errors import SetupError
from trajpack.packing.optional import explained
from trajpack.terminal import occupy_closed_descriptors, outlets, say

REFUSED = 2
INTERRUPTED = 130


def main() -> None:
    """Run the command with the arguments of this program and exit with its status."""
    status = INTERRUPTED
    with contextlib.suppress(KeyboardInterrupt):
        occupy_closed_descriptors()
        status = run(sys.argv[1:])
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    with outlets():
        try:
            with _ending_at_once():
                from trajpack.commands import read

                work = read(arguments)
            return work if isinstance(work, int) else work()
        except SetupError as error:
            return _refuse(str(error))
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("trajpack"):
                raise
            return _refuse(str(explained(error)))
        except KeyboardInterrupt:
            say("interrupted")
            return INTERRUPTED


def _refuse(message: str) -> int:
    say(f"error: {' '.join(message.split())}")
    return REFUSED


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the program without raising anything while it imports what it needs.

    Extension modules turn an exception that comes in the middle of their import into others.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"trajpack: interrupted\n")  # nothing is imported here
    os._exit(INTERRUPTED)
