"""The command: its streams, signals and exit statuses.

The status is

- 0 for success, also where the reader of the results went away (``trajpack inspect ... | head``);
- 2 for a wrong request, for a file or standard output that cannot be read or written, and for
  an engine that ended before the rollout did, with one line on standard error;
- 130 after Ctrl-C and 143 after SIGTERM.

A rollout that ends with 2 or by a signal says what it left on disk. Standard error may be
closed, full or a broken pipe: what is said there is lost, and the work goes on.

Importing this module loads next to nothing, so that Ctrl-C finds the command in charge almost at
once: what it needs is imported by its functions, and its options are in `trajpack.commands.app`.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # typing itself takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from trajpack.commands.app import Work

REFUSED = 2
INTERRUPTED = 130


def main() -> None:
    """Run the command with the arguments of this program and exit with its status."""
    ends = _end_on_interrupt()
    from trajpack.commands.terminal import occupy_closed_descriptors

    try:
        occupy_closed_descriptors()
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        if ends:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    from trajpack.agent.errors import SetupError
    from trajpack.commands.terminal import outlets, say
    from trajpack.packing.optional import explained

    def refuse(message: str) -> int:
        say(f"error: {' '.join(message.split())}")
        return REFUSED

    with outlets():
        try:
            work = _read(arguments)
            return work if isinstance(work, int) else work()
        except SetupError as error:
            return refuse(str(error))
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("trajpack"):
                raise
            return refuse(str(explained(error)))
        except KeyboardInterrupt:
            say("interrupted")
            return INTERRUPTED


def _read(arguments: Sequence[str]) -> Work | int:
    """Return what the arguments ask for, with all that it needs imported."""
    ends = _end_on_interrupt()
    try:
        from trajpack.commands.app import read

        return read(arguments)
    finally:
        if ends:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_on_interrupt() -> bool:
    """Let Ctrl-C end the program without raising anything; return whether it does.

    So it is while modules are imported: extension modules turn an exception that comes in the
    middle of their import into others. Another handler, or being ignored, stays as it is.
    """
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _end):
        return False
    try:
        signal.signal(signal.SIGINT, _end)
    except ValueError:  # not the main thread
        return False
    return True


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"trajpack: interrupted\n")  # what else there is may be half imported
    finally:
        os._exit(INTERRUPTED)
