"""Pages of one file: figures as JSON, and the styles and scripts that draw them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajpack.packing.batch.inspection import Decode, describe
from trajpack.packing.durable_files import write_durably
from trajpack.packing.report.figures import (
    KINDS,
    ReportOptions,
    figures_of,
    kinds_of,
    page_json,
    rows_of,
    shared_prefixes,
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
_COLOURS = {"prompt": "#4477aa", "observation": "#ccbb44", "generated": "#228833", "shared": "#999"}


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
    path: Path,
    options: ReportOptions,
    *,
    decode: Decode | None = None,
    title: str = "",
) -> dict[str, Any]:
    """Write the page of a batch, and its figures as JSON beside it; return the numbers."""
    if path.suffix != ".html":
        raise ValueError(f"report: path must end with .html, got {path}")
    figures = figures_of(batch, options, decode)
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


def short_html(batch: PackedBatch) -> str:
    """Return a table and a bar of a batch for a notebook, without scripts."""
    host = batch.to("cpu")
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in describe(host)
    )
    counts = dict(zip(KINDS, kinds_of(host, shared_prefixes(host)).sum(1).tolist(), strict=True))
    total = max(sum(counts.values()), 1)
    bar = "".join(
        f"<span title='{kind}: {count:,} tokens' style='background:{_COLOURS[kind]};"
        f"width:{100 * count / total:.3f}%'></span>"
        for kind, count in counts.items()
        if count
    )
    legend = ", ".join(
        f"<span style='color:{_COLOURS[kind]}'>■</span> {kind} {count / total:.0%}"
        for kind, count in counts.items()
        if count
    )
    return (
        f"<div style='max-width:42em'><table>{rows}</table>"
        f"<div style='display:flex;height:1em'>{bar}</div><small>{legend}</small></div>"
    )
