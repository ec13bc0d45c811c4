"""Cost against size as a plot for the documents.

``python -m benchmarks.plots RESULTS.json FOLDER``. It needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import SIZES

Series = dict[str, tuple[list[int], list[float]]]
TITLE = "Milliseconds to pack, against tokens"
LIMITS = ("copy of as many bytes", "copy to the device")


def series(results: dict[str, Any]) -> Series:
    """Return tokens and best milliseconds of each contender."""
    found: Series = {}
    for record in results["contests"]:
        if record["job"] == SIZES:
            for entry in record["entries"]:
                if entry["best_ms"] is not None:
                    sizes, times = found.setdefault(entry["contender"], ([], []))
                    sizes.append(record["tokens"])
                    times.append(entry["best_ms"])
    return found


def write_png(results: dict[str, Any], path: Path) -> None:
    """Write the plot as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for name, (sizes, times) in series(results).items():
        style = {"linestyle": "--", "color": "black"} if name in LIMITS else {"marker": "."}
        axes.loglog(sizes, times, label=name, **style)
    axes.set(xlabel="tokens", ylabel="milliseconds, best round", title=TITLE)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Software": None})


def main(arguments: Sequence[str]) -> int:
    """Write the plot of one results file."""
    if len(arguments) != 2:
        raise SystemExit("usage: python -m benchmarks.plots RESULTS.json FOLDER")
    source, folder = map(Path, arguments)
    results = json.loads(source.read_text())
    if not series(results):
        raise SystemExit(f"{source} holds no record of {SIZES!r}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sizes_{source.stem}.png"
    try:
        write_png(results, path)
    except ModuleNotFoundError as error:
        print(f"no {path.name}: {error.name} is not installed")
    else:
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
