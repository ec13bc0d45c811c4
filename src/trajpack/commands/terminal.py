"""Text on standard output and standard error, and errors of files that are written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trajpack.agent.errors import SetupError
from trajpack.packing.text import printable

if TYPE_CHECKING:
    from rich.console import Console


def say(text: str) -> None:
    """Print one line on standard error; what cannot be written there is lost."""
    with contextlib.suppress(OSError):
        print(f"trajpack: {printable(text)}", file=sys.stderr, flush=True)  # noqa: T201


def make_console() -> Console:
    """Return a console of rich on standard output, of 1000 columns at most."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False)
    console.width = min(console.width, 1000)  # that of the terminal may be anything
    return console


def show(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print pairs of a name and a value as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(Text(name), Text(printable(value)))
    console.print(table)


def tell(console: Console, text: str) -> None:
    """Print one line without wrapping, so that paths can be copied."""
    console.print(printable(text), markup=False, soft_wrap=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an `OSError` while ``path`` is written into a `SetupError`."""
    try:
        yield
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from error
