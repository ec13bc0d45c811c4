"""Values of options: what a command accepts, and what it says of anything else."""

from __future__ import annotations

import math
from typing import Any, get_args

import typer


def whole(least: int, most: int) -> dict[str, Any]:
    """Return arguments of an option that takes an integer in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise typer.BadParameter(
                f"must be a whole number from {least:,} to {most:,}, got {text!r}"
            )
        return value

    return {"parser": parse, "metavar": "N"}


def number(*, positive: bool = False) -> dict[str, Any]:
    """Return arguments of an option that takes a finite number."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (positive and value <= 0):
            kind = "a number above 0" if positive else "a finite number"
            raise typer.BadParameter(f"must be {kind}, got {text!r}")
        return value

    return {"parser": parse, "metavar": "X"}


def one_of(names: Any) -> dict[str, Any]:
    """Return arguments of an option that takes one of the strings of a ``Literal``."""
    known = get_args(names)

    def parse(text: str) -> str:
        if text not in known:
            raise typer.BadParameter(
                f"must be {', '.join(known[:-1])} or {known[-1]}, got {text!r}"
            )
        return text

    def complete(incomplete: str) -> list[str]:
        return [name for name in known if name.startswith(incomplete)]

    return {"parser": parse, "metavar": "|".join(known), "autocompletion": complete}
