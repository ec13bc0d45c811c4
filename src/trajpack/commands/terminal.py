"""Standard output and standard error, as a command needs them: neither can end its work."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, cast

from trajpack.agent.errors import SetupError

if TYPE_CHECKING:
    from rich.console import Console


class Outlet:
    """A text stream that remembers its first error instead of raising it.

    What is written after an error goes nowhere. Everything else is the stream's own.

    Args:
        stream: What to write to; ``None``, which Python has for a closed one, is nowhere.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream: Any = io.StringIO() if stream is None else stream
        self._is_open = stream is not None
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write ``text`` if that is possible."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush what was written if that is possible."""
        self._try("flush")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: str, *arguments: str) -> None:
        if not self._is_open:
            return
        try:
            getattr(self._stream, action)(*arguments)
        except OSError as error:
            self.error, self._is_open = error, False
            _drain(self._stream)
        except RuntimeError:  # a signal came in the middle of another write
            return
        except ValueError:  # closed
            self._is_open = False


def _drain(stream: IO[str]) -> None:
    """Let what still waits in the stream's buffer go nowhere, or it fails once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


@contextlib.contextmanager
def outlets() -> Iterator[None]:
    """Put an `Outlet` in the place of either standard stream."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # any text can be shown
    sys.stdout, sys.stderr = (cast("Any", Outlet(stream)) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def occupy_closed_descriptors() -> None:
    """Keep files opened later from becoming the standard streams of this program and its own."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            lowest_free = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(lowest_free, True)


@contextlib.contextmanager
def results() -> Iterator[None]:
    """Have standard output take what is written in this context.

    A reader that goes away, such as ``head``, has seen what it wanted: that is no error.

    Raises:
        SetupError: If standard output cannot be written to.
    """
    yield
    sys.stdout.flush()
    error = getattr(sys.stdout, "error", None)
    if error is not None and not isinstance(error, BrokenPipeError):
        raise SetupError(f"cannot write standard output: {error.strerror or error}")


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a rich console in which text is never markup or emoji by accident."""
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    return Console(file=file, width=width, highlight=False, emoji=False)


def tell(console: Console, text: str, style: str | None = None) -> None:
    """Print one line that is never wrapped, so that paths can be copied."""
    from trajpack.packing.text import printable

    console.print(printable(text), style=style, markup=False, soft_wrap=True)


def say(text: str) -> None:
    """Print one line about what is going on, apart from the result."""
    from trajpack.packing.text import printable

    sys.stderr.write(f"trajpack: {printable(text)}\n")
    sys.stderr.flush()
