"""Standard output and standard error of a command; a failure of either does not end its work."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from trajpack.agent.errors import SetupError

if TYPE_CHECKING:
    from rich.console import Console


class Outlet:
    """A proxy of a text stream that keeps its first error instead of raising it.

    Text written after an error, or to ``None``, Python's value for a closed stream, is dropped.
    All other attributes are the stream's own.
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
        """Flush the stream if that is possible."""
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
            # Text in the stream's buffer would fail once more at exit: redirect it.
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                try:
                    os.dup2(null, self._stream.fileno())
                finally:
                    os.close(null)
        except RuntimeError:  # a signal interrupted another write
            return
        except ValueError:  # closed
            self._is_open = False


@contextlib.contextmanager
def outlets() -> Iterator[None]:
    """Replace both standard streams by an `Outlet`."""
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
    """Open the null device on closed standard descriptors, so that no later file gets one."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            lowest_free = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(lowest_free, True)


@contextlib.contextmanager
def results() -> Iterator[None]:
    """Flush standard output after the context.

    A broken pipe is no error: the reader, such as ``head``, has seen enough.

    Raises:
        SetupError: If standard output cannot be written to.
    """
    yield
    sys.stdout.flush()
    error = getattr(sys.stdout, "error", None)
    if error is not None and not isinstance(error, BrokenPipeError):
        raise SetupError(f"cannot write standard output: {error.strerror or error}")


def readable(path: Path) -> None:
    """Raise a SetupError if ``path`` cannot be read; what is no file is left to its reader."""
    try:
        if path.is_file() or not path.exists():  # to open a pipe would wait for its writer
            path.open("rb").close()
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an `OSError` while ``path`` is written into a `SetupError`."""
    try:
        yield
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from error


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a rich console that interprets no markup or emoji in text."""
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    return Console(file=file, width=width, highlight=False, emoji=False)


def tell(console: Console, text: str, style: str | None = None) -> None:
    """Print one line without wrapping, so that paths can be copied."""
    from trajpack.packing.text import printable

    console.print(printable(text), style=style, markup=False, soft_wrap=True)


def say(text: str) -> None:
    """Print one line on standard error."""
    from trajpack.packing.text import printable

    sys.stderr.write(f"trajpack: {printable(text)}\n")
    sys.stderr.flush()


def silence_transformers() -> None:
    """Disable the warnings and progress bars of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
