"""Public names by the folder that defines them, and what a dotted path leads to."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

PUBLIC_MODULES = {
    "trajpack.packing": "trajpack",
    "trajpack.kernels": "trajpack.kernels",
    "trajpack.agent": "trajpack.agent",
}
"""Module from which the names of each layer are imported."""


def exports(module: str) -> dict[str, list[str]]:
    """Return the public names of a layer by the package of the module that defines them."""
    found: dict[str, list[str]] = {}
    for name in import_module(module).__all__:
        value = getattr(import_module(module), name)
        if not inspect.ismodule(value):
            package = value.__module__.rpartition(".")[0]
            home = value.__module__ if package == module else package
            found.setdefault(home, []).append(name)
    return dict(sorted(found.items()))


def value_of(path: str) -> Any:
    """Return what a dotted path leads to, or None."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            value = getattr(value, part, None)
        return value
    return None
