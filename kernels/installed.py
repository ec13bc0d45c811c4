"""Whether an optional package is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def is_there(module: str) -> bool:
    """Return whether a module can be imported; it is not.

    A finder of ``sys.meta_path`` that raises ``ModuleNotFoundError`` hides it, as ``None`` in
    ``sys.modules`` does.

    Cost: under a millisecond.

    Example:
        >>> is_there("torch"), is_there("no_such_module")
        (True, False)
    """
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
