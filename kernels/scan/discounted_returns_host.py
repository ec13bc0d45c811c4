"""Discounted returns on the host: the rows of all segments walked side by side.

A segment is cut from its end into rows of ``ROW`` entries. Step j takes the j-th entry from the
end of every row that has one, so a few dozen vector operations serve any number of rows. Where
segments have several rows, the rows' sums come first: the returns of those sums, discounted
``ROW`` times as much, are what is carried into the rows, and finding them is the same problem,
``ROW`` times smaller. Rows do not meet in any operation: a segment's bits depend on itself alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ROW = 64
ROWS_AT_ONCE = 8192
"""Rows that are walked together: what they touch stays in the cache from step to step."""

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]


def discounted_returns_on_host(
    rewards: torch.Tensor, cu_seqlens: torch.Tensor, discount: torch.Tensor
) -> torch.Tensor:
    """Return what `discounted_returns_reference` does, for tensors on the host."""
    returns = np.empty(rewards.shape[0], np.float32)
    if returns.size:
        values = np.add(rewards.detach().numpy(), 0.0, dtype=np.float64)  # makes 0 of -0
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            _fill(returns, values, cu_seqlens.numpy().astype(np.int64), discount.numpy())
    return torch.from_numpy(returns)


def _fill(returns: Floats, rewards: Floats, cu_seqlens: Ints, discount: Floats) -> None:
    """Write the returns of float64 ``rewards``; ``discount`` may be more precise than that."""
    top, lengths = cu_seqlens[1:], np.diff(cu_seqlens)
    gain = discount.astype(np.float64)
    carry = np.zeros(len(top))
    if lengths.max() > ROW:
        num_rows = -(-lengths // ROW)
        segment = np.repeat(np.arange(len(top)), num_rows)
        behind = np.cumsum(num_rows)[segment] - np.arange(1, len(segment) + 1)
        top, gain = top[segment] - behind * ROW, gain[segment]
        lengths = np.minimum(top - cu_seqlens[segment], ROW)
        carry = np.zeros(len(top))
        full = behind < num_rows[segment] - 1  # has another row before it
        sums = _walk(rewards, top[full], lengths[full], gain[full], carry[full])
        several = num_rows > 1
        cu_sums = np.append(0, np.cumsum(num_rows[several] - 1))
        carried = np.empty(len(sums))
        _fill(carried, sums, cu_sums, _power_of_row(discount[several]))
        carry[behind > 0] = carried
    # a row that ends goes out at the back, so that the rows which go on stay side by side
    order = np.argsort((ROW - lengths).astype(np.uint8), kind="stable")
    _walk(rewards, top[order], lengths[order], gain[order], carry[order], returns)


def _power_of_row(discount: Floats) -> Floats:
    """Return ``discount`` to the power of ``ROW``, which is one of 2, as precisely as numpy can."""
    power = discount.astype(np.longdouble)
    for _ in range(ROW.bit_length() - 1):
        power = power * power
    return power


def _walk(
    rewards: Floats,
    top: Ints,
    lengths: Ints,
    gain: Floats,
    carry: Floats,
    returns: Floats | None = None,
) -> Floats:
    """Walk rows [top - length, top), longest first, from their ends; return where they arrive.

    ``carry`` is the return of the entry at ``top``. What is met on the way goes to ``returns``.
    """
    arrived = carry.copy()
    for begin in range(0, len(top), ROWS_AT_ONCE):
        chunk = slice(begin, begin + ROWS_AT_ONCE)
        index, gains, sums = top[chunk] - 1, gain[chunk], arrived[chunk]
        may_overflow = not np.isfinite(gains).all()
        steps = np.arange(lengths[begin])
        for active in np.searchsorted(-lengths[chunk], -steps):  # rows longer than the step
            entry, total = index[:active], sums[:active]
            if may_overflow:  # keep 0 * inf out
                total *= np.where(total == 0, 0.0, gains[:active])
            else:
                total *= gains[:active]
            total += rewards[entry]
            if returns is not None:
                returns[entry] = total
            entry -= 1
    return arrived
