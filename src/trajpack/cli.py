"""The entry of the command: its streams, signals and exit statuses.

The exit status is

- 0 for success, also after a broken pipe of the results (``trajpack inspect ... | head``);
- 2 for a wrong request, for a file or standard output that cannot be read or written, and for
  an engine that ended before the rollout did, with one line on standard error;
- 130 after Ctrl-C and 143 after SIGTERM.

A rollout that ends with 2 or by a signal names the files that it wrote. If standard error is
closed, full or a broken pipe, its text is lost and the work continues.

This module imports almost nothing at its top, so that Ctrl-C is handled soon after the start.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # typing itself takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

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
            ends = _end_on_interrupt()
            try:
                from trajpack.commands.app import read

                work = read(arguments)  # imports all that the work needs
            finally:
                if ends:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
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


def _end_on_interrupt() -> bool:
    """Make Ctrl-C end the program without an exception; return whether it does now.

    This holds during imports, since extension modules turn an exception in their import into
    others. Another handler, or an ignored signal, does not change.
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
        os.write(2, b"trajpack: interrupted\n")  # other ways to print may be half imported
    finally:
        os._exit(INTERRUPTED)
