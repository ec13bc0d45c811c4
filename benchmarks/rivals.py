"""Packages that may be installed beside: imported quietly, and reported where they are missing."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from benchmarks.contest import Contender


def find(name: str) -> tuple[ModuleType | None, str]:
    """Import a module; return it, or None and why not."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name), ""
    except ModuleNotFoundError as error:
        return None, f"not installed ({error.name})"
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"does not load here: {str(error).strip().splitlines()[0][:60]}"
    finally:
        logging.disable(before)


def contender(module: str, name: str, make: Any, wrote: str, **rest: Any) -> Contender:
    """Return the contender that ``make(module)`` does the work of, or one marked as missing."""
    found, why = find(module)
    if found is None:
        return Contender(name, None, wrote, missing=why)
    try:
        return Contender(name, quietly(quietly(make)(found)), wrote, **rest)
    except Exception as error:  # noqa: BLE001 - a rival that cannot even be made stops no other
        said = str(error).strip().splitlines() or [type(error).__name__]
        return Contender(name, None, wrote, missing=f"failed: {said[0][:60]}")


def quietly(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return the work without its warnings, which are no business of a benchmark."""

    def quiet(*given: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work(*given)

    return quiet
