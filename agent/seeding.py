"""Seeds derived from one seed and names."""

from __future__ import annotations

import hashlib
import operator


def derive_seed(seed: int, *names: str | int) -> int:
    """Return the seed of a named part, in [0, 2**31), the same on every platform.

    ``names`` are strings or integers, from the outside in; ``1`` and ``"1"`` differ. Others raise a
    `TypeError`.

    Example:
        >>> derive_seed(0, "a", "bc") == derive_seed(0, "ab", "c")
        False
    """
    text = "".join(_spelled(part) for part in (seed, *names))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**31


def _spelled(part: str | int) -> str:
    """Return a name with its type and length, so that different names never join alike."""
    kind, text = ("str", part) if isinstance(part, str) else ("int", str(operator.index(part)))
    return f"{kind}{len(text)}:{text}"
