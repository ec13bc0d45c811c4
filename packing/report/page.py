"""Pages of one file: figures as JSON, and the styles and scripts that draw them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajpack.packing.batch.description import Decode
from trajpack.packing.durable_files import write_durably
from trajpack.packing.report.figures import (
    ReportOptions,
    figures_of,
    page_json,
    rows_of,
)
from trajpack.packing.text import one_line

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main><noscript>This page draws its pictures with JavaScript.</noscript></main>
<script type="application/json" id="figures">{figures}</script>
<script>{script}</script>
</body>
</html>
"""


def page_of(title: str, figures: dict[str, Any], scripts: Sequence[str]) -> str:
    """Return a page that loads nothing: figures, styles and scripts are in it.

    Args:
        title: Title of the page.
        figures: Numbers and texts. Text is shown as text, whatever is in it: the scripts make
            elements and never markup.
        scripts: Files of this folder, which read the element ``#figures``.
    """
    folder, title = files("trajpack.packing.report"), one_line(title)
    return _PAGE.format(
        title=escape(title),
        style=folder.joinpath("page.css").read_text("utf-8"),
        figures=page_json({"title": title, **figures}),
        script="\n".join(folder.joinpath(name).read_text("utf-8") for name in scripts),
    )


def write_report(
    batch: PackedBatch,
    path: str | os.PathLike[str],
    *,
    capacity: int | None = None,
    num_ranks: int = 8,
    align: int = 1,
    decode: Decode | None = None,
    title: str = "",
) -> dict[str, Any]:
    """Write a page that shows a batch in a browser, and its numbers as JSON beside it.

    The page is one file that loads nothing. It shows micro-batches by kind of token and cause of
    padding, attention cost by rank, lengths, rewards by group, prefix breaks, and the text of
    trajectories. A large batch is shown in part: the page says what is left out.

    Args:
        batch: Batch of any layout.
        path: File that ends with ``.html``; the numbers go to the same name with ``.json``.
        capacity: Tokens of a micro-batch to show first; ``None``: twice the longest sequence.
        num_ranks: Number of data-parallel ranks.
        align: Each sequence takes a multiple of this many tokens.
        decode: Function from token ids to text, such as ``tokenizer.decode``; ``None`` shows the
            ids.
        title: Title of the page; the name of the file by default.

    Returns:
        The numbers.

    Raises:
        OSError: If a file cannot be written.
        TypeError: If a number is not an integer.
        ValueError: If the batch is padded, the path does not end with ``.html``, or the capacity is
            below the longest sequence.

    Cost: copies the batch to the host (synchronises). Seconds for 100,000 sequences.
    """
    path = Path(path)
    if path.suffix != ".html":
        raise ValueError(f"report: path must end with .html, got {path}")
    figures = figures_of(batch, ReportOptions(capacity, num_ranks, align), decode)
    figures["saved"] = list(rows_of(figures))
    page = page_of(title or path.stem, figures, ("charts.js", "batch.js"))
    write_durably(path, page.encode())
    numbers = without_texts(figures)
    write_durably(path.with_suffix(".json"), json.dumps(numbers).encode())
    return numbers


def numbers_of(batch: PackedBatch) -> dict[str, Any]:
    """Return the figures of a batch without the texts of trajectories."""
    return without_texts(figures_of(batch, ReportOptions()))


def without_texts(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures without the texts of trajectories."""
    trajectories = figures["trajectories"]
    rows = [
        {name: value for name, value in row.items() if name != "sequences"}
        for row in trajectories["rows"]
    ]
    return {**figures, "trajectories": {**trajectories, "rows": rows}}
