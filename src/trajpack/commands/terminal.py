"""Text on standard output and standard error, and errors of files that are written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from trajpack.agent.errors import SetupError
from trajpack.packing.text import printable


def say(text: str) -> None:
    """Print one line on standard error; what cannot be written there is lost."""
    with contextlib.suppress(OSError):
        print(f"trajpack: {printable(text)}", file=sys.stderr, flush=True)  # noqa: T201


def show(title: str, rows: Iterable[tuple[str, str]], *others: object) -> None:
    """Print pairs of a name and a value as a table; then what rich draws, and lines of text."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(printable(value)))
    console = Console(highlight=False, emoji=False)
    console.width = min(console.width, 1000)  # that of the terminal may be anything
    console.print(table)
    for other in others:
        if isinstance(other, str):  # not wrapped, so that paths can be copied
            console.print(Text(printable(other)), soft_wrap=True)
        else:
            console.print(other)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of ``path``, and convert an `OSError` while it is written to `SetupError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from error
