"""Lower bounds: how many micro-batches there must be, whoever plans."""

from __future__ import annotations

import numpy as np

from trajpack.packing.plan.units import Ints

DUAL_FUNCTIONS = range(1, 21)


def lower_bound(sizes: Ints, capacity: int) -> int:
    """Return a number of bins that no packing of these sizes can do without.

    The greatest of: all tokens over the capacity; Martello and Toth's L2, in which large sizes
    stand alone and small ones fill what is left; and Fekete and Schepers' dual feasible functions,
    by which sizes just above a k-th of the capacity count as a k-th.

    Args:
        sizes: ``[sequences]``, each at most ``capacity``.
        capacity: Greatest sum of a bin.

    Reference:
        Martello and Toth, *Lower bounds and reduction procedures for the bin packing problem*,
        1990; Fekete and Schepers, *New classes of fast lower bounds for bin packing problems*,
        2001.

    Example:
        >>> lower_bound(np.array([6, 6, 6, 4]), 10)
        3
        >>> lower_bound(np.array([4, 4, 4, 4]), 11)
        2
    """
    if len(sizes) == 0:
        return 0
    distinct, repeats = np.unique(sizes, return_counts=True)
    by_sum = -(-int((distinct * repeats).sum()) // capacity)
    return max(
        1, by_sum, _martello_toth(distinct, repeats, capacity), _dual(distinct, repeats, capacity)
    )


def _martello_toth(distinct: Ints, repeats: Ints, capacity: int) -> int:
    """Return L2: the best bound over every size of at most half the capacity as threshold."""
    count = np.concatenate([[0], np.cumsum(repeats)])
    total = np.concatenate([[0], np.cumsum(distinct * repeats)])
    half = int(np.searchsorted(distinct, capacity // 2, side="right"))
    thresholds = np.append(distinct[:half], 0) if half else np.zeros(1, np.int64)
    begin = np.searchsorted(distinct, thresholds)
    alone = np.searchsorted(distinct, capacity - thresholds, side="right")
    above_half = count[-1] - count[half]
    free = (count[alone] - count[half]) * capacity - (total[alone] - total[half])
    rest = np.maximum(total[half] - total[begin] - free, 0)
    return int((above_half + -(-rest // capacity)).max())


def _dual(distinct: Ints, repeats: Ints, capacity: int) -> int:
    """Return the best bound of the functions u_k, which round (k + 1) x down to a k-th.

    Where (k + 1) x / capacity is whole, x stays as it is.
    """
    best = 0
    for k in DUAL_FUNCTIONS:
        whole, rest = np.divmod((k + 1) * distinct, capacity)
        scaled = np.where(rest == 0, k * distinct, whole * capacity)  # times k and the capacity
        best = max(best, -(-int((scaled * repeats).sum()) // (k * capacity)))
    return best
