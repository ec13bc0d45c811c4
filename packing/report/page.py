"""Pages of one file: figures as JSON, and the styles and scripts that draw them."""

from __future__ import annotations

import json
import os
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajpack.packing.batch.breaks import Decode
from trajpack.packing.durable_files import write_durably
from trajpack.packing.report.figures import figures_of, page_json, rows_of
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
        capacity: Tokens of a micro-batch; ``None``: twice the longest sequence, or more where that
            would make hundreds of micro-batches.
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
        ValueError: If the path does not end with ``.html``, a number is below 1, or the capacity is
            below the longest sequence.
    """
    path = Path(path)
    if path.suffix != ".html":
        raise ValueError(f"report: path must end with .html, got {path}")
    figures = figures_of(batch, capacity=capacity, num_ranks=num_ranks, align=align, decode=decode)
    figures["saved"] = list(rows_of(figures))
    folder, shown = files("trajpack.packing.report"), one_line(title or path.stem)
    style, *scripts = (
        folder.joinpath(name).read_text("utf-8") for name in ("page.css", "charts.js", "batch.js")
    )
    page = _PAGE.format(
        title=escape(shown),
        style=style,
        figures=page_json({"title": shown, **figures}),
        script="\n".join(scripts),
    )
    write_durably(path, page.encode())
    numbers = without_texts(figures)
    write_durably(path.with_suffix(".json"), json.dumps(numbers).encode())
    return numbers


def without_texts(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures without the texts of trajectories."""
    trajectories = figures["trajectories"]
    rows = [
        {name: value for name, value in row.items() if name != "sequences"}
        for row in trajectories["rows"]
    ]
    return {**figures, "trajectories": {**trajectories, "rows": rows}}
