"""Text on standard output and standard error, and errors of files that are written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from trajpack.agent.errors import SetupError
from trajpack.packing.text import printable


def say(text: str) -> None:
    """Print one line on standard error; what cannot be written there is lost."""
    with contextlib.suppress(OSError):
        print(f"trajpack: {printable(text)}", file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of ``path``, and convert an `OSError` while it is written to `SetupError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}") from error
