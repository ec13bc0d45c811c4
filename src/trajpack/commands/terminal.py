"""Text on standard output and standard error, and errors of files that are written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trajpack.agent.errors import SetupError

if TYPE_CHECKING:
    from rich.console import Console

_MAX_WIDTH = 1000


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

    console = Console(stderr=stderr, width=width, highlight=False, emoji=False)
    console.width = min(console.width, width or _MAX_WIDTH)  # that of the terminal may be anything
    return console


def tell(console: Console, text: str, style: str | None = None) -> None:
    """Print one line without wrapping, so that paths can be copied."""
    from trajpack.packing.text import printable

    console.print(printable(text), style=style, markup=False, soft_wrap=True)


def say(text: str) -> None:
    """Print one line on standard error; what cannot be written there is lost."""
    from trajpack.packing.text import printable

    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"trajpack: {printable(text)}", file=sys.stderr, flush=True)  # noqa: T201


def silence_transformers() -> None:
    """Disable the warnings and progress bars of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
