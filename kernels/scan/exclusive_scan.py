"""The state a first-order recurrence arrives with at each entry, in plain torch and on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

ROW = 64
ROWS_AT_ONCE = 8192
"""Rows that are walked together: what they touch stays in the cache from step to step."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Places(NamedTuple):
    """Where the entries of packed segments are: ``[entries]`` each."""

    segment: torch.Tensor
    is_last: torch.Tensor


def places_of(cu_seqlens: torch.Tensor, num_entries: int) -> Places:
    """Return each entry's segment, and whether it is the segment's last entry.

    Entries behind the last segment are taken for its own.
    """
    ends = cu_seqlens[1:].long()
    index = torch.arange(num_entries, device=cu_seqlens.device)
    segment = torch.searchsorted(ends, index, right=True).clamp(max=max(ends.shape[0] - 1, 0))
    return Places(segment, index + 1 == ends[segment])


def exclusive_scan_reference(
    gain: torch.Tensor, gift: torch.Tensor, start: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Return ``x`` behind each entry, where ``x`` before an entry is ``gain·x + gift``.

    ``gain`` and ``gift`` are float64 ``[entries]``; ``start`` ``[segments]`` is ``x`` behind the
    last entry. Doubling: after round k an entry holds what the 2ᵏ entries behind it do to ``x``.
    """
    entries = longest = gain.shape[0]
    if not entries:
        return gain
    if cu_seqlens.device.type == "cpu":
        longest = int(cu_seqlens.diff().max())
    segment, is_last = places_of(cu_seqlens, entries)
    gain = torch.where(is_last, 1.0, gain.roll(-1))  # of the entry behind
    gift = torch.where(is_last, 0.0, gift.roll(-1))
    index = torch.arange(entries, device=gain.device)
    end = cu_seqlens[1:].long()[segment]
    reach = 1
    while reach < longest:
        inside = index[:-reach] + reach < end[:-reach]
        later_gain = torch.where(inside, gain[reach:], 1.0)
        later_gift = torch.where(inside, gift[reach:], 0.0)
        gift = torch.cat([gift[:-reach] + _times(gain[:-reach], later_gift), gift[-reach:]])
        gain = torch.cat([gain[:-reach] * later_gain, gain[-reach:]])
        reach *= 2
    return gift + _times(gain, start.double()[segment])


def _times(gain: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the product, 0 where ``state`` is, though ``gain`` may have overflowed."""
    return torch.where(state == 0, 0.0, gain * state)


def exclusive_scan_on_host(
    gain: torch.Tensor, gift: torch.Tensor, start: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Do the same for tensors on the host, the rows of all segments walked side by side.

    A segment is cut from its end into rows of ``ROW`` entries. Step j takes the j-th entry from
    the end of every row, so a few dozen vector operations serve any number of rows. What the
    rows do as a whole is the same problem, ``ROW`` times smaller. Rows meet in no operation: a
    segment's bits depend on itself alone.
    """
    states = np.empty(gain.shape[0])
    if states.size:
        bounds = cu_seqlens.numpy().astype(np.int64)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            _fill(states, gain.numpy(), gift.numpy(), start.double().numpy(), bounds)
    return torch.from_numpy(states)


def _fill(states: Floats, gain: Floats, gift: Floats, start: Floats, bounds: Ints) -> None:
    """Write the state behind each entry; ``start`` is the one behind each segment."""
    top, lengths, state = bounds[1:], np.diff(bounds), start
    if lengths.max() > ROW:
        num_rows = -(-lengths // ROW)
        segment = np.repeat(np.arange(len(top)), num_rows)
        behind = np.cumsum(num_rows)[segment] - np.arange(1, len(segment) + 1)
        top = top[segment] - behind * ROW
        lengths = np.minimum(top - bounds[segment], ROW)
        state = start[segment]
        several = (num_rows > 1)[segment]
        row_gain, row_gift = np.ones(len(top)), np.zeros(len(top))
        full = behind < num_rows[segment] - 1  # has another row before it
        row_gain[full], row_gift[full] = _whole_rows(gain, gift, top[full])
        inner = np.empty(int(several.sum()))
        inner_bounds = np.append(0, np.cumsum(num_rows[num_rows > 1]))
        _fill(inner, row_gain[several], row_gift[several], start[num_rows > 1], inner_bounds)
        state[several] = inner
    # a row that ends goes out at the back, so that the rows which go on stay side by side
    order = np.argsort((ROW - lengths).astype(np.uint8), kind="stable")
    for begin in range(0, len(order), ROWS_AT_ONCE):
        rows = order[begin : begin + ROWS_AT_ONCE]
        _walk(states, gain, gift, top[rows], lengths[rows], state[rows])


def _whole_rows(gain: Floats, gift: Floats, top: Ints) -> tuple[Floats, Floats]:
    """Return gain and gift of rows of ``ROW`` entries each, which end before ``top``."""
    gains, gifts = np.ones(len(top)), np.zeros(len(top))
    for begin in range(0, len(top), ROWS_AT_ONCE):
        chunk = slice(begin, begin + ROWS_AT_ONCE)
        total_gain, total_gift, entry = gains[chunk], gifts[chunk], top[chunk] - 1
        for _ in range(ROW):
            step = gain[entry]
            _pass(step, total_gift)
            total_gift += gift[entry]
            total_gain *= step
            entry -= 1
    return gains, gifts


def _walk(
    states: Floats, gain: Floats, gift: Floats, top: Ints, lengths: Ints, state: Floats
) -> None:
    """Walk rows [top - length, top), longest first, and write the state behind each entry."""
    entries = top - 1
    steps = np.arange(lengths[0]) if len(lengths) else ()
    for active in np.searchsorted(-lengths, -np.asarray(steps)):  # rows longer than the step
        entry, current = entries[:active], state[:active]
        states[entry] = current
        _pass(gain[entry], current)
        current += gift[entry]
        entry -= 1


def _pass(gain: Floats, state: Floats) -> None:
    """Multiply ``state`` in place; a gain that overflowed leaves a state of 0 as it is."""
    if np.isinf(gain).any():
        gain = np.where(state == 0, 0.0, gain)
    state *= gain
