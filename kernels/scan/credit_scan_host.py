"""Advantages of packed tokens on the host: rows of all segments walked side by side.

A segment is cut from its end into rows of ``ROW`` tokens; its first may be shorter, and then holds
what stands before the segment too, which is walked last and thrown away. Rows are laid side by
side, time after time, so that a step of the recurrence is a vector operation on memory in the
cache. What full rows do as a whole comes first, and what is carried into each row is then the same
problem, ``ROW`` times smaller. Rows meet in no operation: a segment's bits depend on itself alone.
They are those of `trajpack.kernels.scan.credit_scan.credit_scan_reference`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view as windows_of

from trajpack.kernels.scan.exclusive_scan import ROW, Floats, Ints, exclusive_scan_on_host
from trajpack.kernels.scan.observations import PASSING

if TYPE_CHECKING:
    from trajpack.kernels.scan.credit_scan import Scan

ROWS_AT_ONCE = 1024
"""Rows that are walked together: half a megabyte for each number of a token."""


class Rows(NamedTuple):
    """Where rows are, and what holds for all tokens of each: ``[rows]``."""

    top: Ints
    """One past the last token."""
    of_gift: Floats
    """What a value is multiplied by on its way to the state: (1 - λ) discounted."""
    gain: Floats
    """What a reward and the state behind are multiplied by, γλ."""
    is_tail: npt.NDArray[np.bool_]
    """Whether it ends its segment."""

    def some(self, which: Any) -> Rows:
        """Return some of them."""
        return Rows(*(each[which] for each in self))


class Tokens(NamedTuple):
    """What is scanned: the ``ROW`` tokens before each place, ``[tokens + 1, ROW]``."""

    rewards: npt.NDArray[np.floating[Any]]
    values: npt.NDArray[np.floating[Any]] | None
    generated: npt.NDArray[np.bool_] | None
    observation: str


class Block(NamedTuple):
    """The steps of rows side by side, the last token's first: float64 ``[ROW, rows]``."""

    gain: Floats
    gift: Floats
    reward: Floats
    value: Floats
    generated: npt.NDArray[np.bool_] | None


def advantages_on_host(scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `credit_scan_reference` does of a scan of ``kind`` "gae" without pieces."""
    assert scan.rewards is not None
    outputs = tuple(np.zeros(scan.num_tokens, np.float32) for _ in range(2))
    if scan.num_tokens:
        rewards = _before(scan.rewards)
        values, generated = (
            None if tensor is None else _before(tensor) for tensor in (scan.values, scan.loss_mask)
        )
        tokens = Tokens(rewards, values, generated, scan.observation)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            _write(scan, tokens, outputs)
    return torch.from_numpy(outputs[0]), torch.from_numpy(outputs[1])


def _before(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the ``ROW`` entries before each place, where zeros stand before the first."""
    entries = tensor.detach().numpy()
    return windows_of(np.concatenate([np.zeros(ROW, entries.dtype), entries]), ROW)


def _write(scan: Scan, tokens: Tokens, outputs: tuple[npt.NDArray[np.float32], ...]) -> None:
    bounds = scan.cu_seqlens.numpy().astype(np.int64)
    num_rows = -(-np.diff(bounds) // ROW)
    segment = np.repeat(np.arange(len(num_rows)), num_rows)
    behind = np.cumsum(num_rows)[segment] - np.arange(1, len(segment) + 1)
    start = np.zeros(len(num_rows))
    gamma, lam = (
        np.full(len(num_rows), rate) if each is None else each.double().numpy()
        for rate, each in ((scan.gamma, scan.gammas), (scan.lam, scan.lams))
    )
    if scan.bootstrap is not None:
        start = gamma * scan.bootstrap.detach().double().numpy()
    top = bounds[1:][segment] - behind * ROW
    lengths = np.minimum(top - bounds[segment], ROW)
    rows = Rows(top, (gamma * (1 - lam))[segment], (gamma * lam)[segment], behind == 0)
    state = start[segment]
    chunks = [slice(begin, begin + ROWS_AT_ONCE) for begin in range(0, len(top), ROWS_AT_ONCE)]
    blocks = [_block(tokens, rows.some(chunk)) for chunk in chunks]
    if len(top) > np.count_nonzero(num_rows):  # a segment has several
        row_gain, row_gift = _whole_rows(blocks, len(top))
        cu_rows = np.append(0, np.cumsum(num_rows)).astype(np.int32)
        inner = row_gain, row_gift, start, cu_rows
        state = exclusive_scan_on_host(*(torch.from_numpy(each) for each in inner)).numpy()
    for chunk, block in zip(chunks, blocks, strict=True):
        results = _results(block, _walk(block, state[chunk]))
        for output, result in zip(outputs, results, strict=True):
            _put(output, result, top[chunk], lengths[chunk])


def _block(tokens: Tokens, rows: Rows) -> Block:
    """Return the steps of some rows, as `observations.steps_of_tokens` does."""
    reward = _side_by_side(tokens.rewards, rows.top).astype(np.float64, copy=False)
    value, generated, observation = np.zeros(()), None, tokens.observation
    if tokens.values is not None:
        value = _side_by_side(tokens.values, rows.top).astype(np.float64, copy=False)
    if tokens.generated is not None:
        generated = _side_by_side(tokens.generated, rows.top)
        if observation == "multiply":
            reward = np.where(generated, reward, 0.0)
            value = np.where(generated, value, 0.0)
    gift = rows.gain * reward
    gift += rows.of_gift * value
    gain = np.broadcast_to(rows.gain, gift.shape)
    if generated is not None and observation == "reset":
        gain = np.where(generated, gain, 0.0)
    elif generated is not None and observation in PASSING:
        gain = np.where(generated, gain, 1.0)
        passed: Floats | float = reward if observation == "carry" else 0.0
        if observation == "compact":
            passed = np.zeros_like(reward)
            passed[0] = np.where(rows.is_tail, reward[0], 0.0)
        gift = np.where(generated, gift, passed)
    return Block(gain, gift, reward, value, generated)


def _side_by_side(entries: npt.NDArray[Any], top: Ints) -> npt.NDArray[Any]:
    """Return the entries before each ``top``, the last first: ``[ROW, rows]``."""
    return entries[top][:, ::-1].T.copy()


def _whole_rows(blocks: list[Block], num_rows: int) -> tuple[Floats, Floats]:
    """Return gain and gift of each row; those of a segment's first are not asked for."""
    gains, gifts, begin = np.ones(num_rows), np.zeros(num_rows), 0
    for block in blocks:
        end = begin + block.gift.shape[1]
        total_gain, total_gift = gains[begin:end], gifts[begin:end]
        for gain, gift in zip(block.gain, block.gift, strict=True):
            total_gift *= gain
            total_gift += gift
            total_gain *= gain
        begin = end
    return gains, gifts


def _walk(block: Block, state: Floats) -> Floats:
    """Return the state behind each entry."""
    states = np.empty(block.gift.shape)
    states[0] = state
    for here, before, gain, gift in zip(states, states[1:], block.gain, block.gift, strict=False):
        np.add(np.multiply(here, gain, out=before), gift, out=before)
    return states


def _results(block: Block, states: Floats) -> list[npt.NDArray[np.float32]]:
    """Return advantages and returns, 0 where nothing was generated."""
    advantages = block.reward - block.value
    advantages += states
    states += block.reward
    results = [advantages.astype(np.float32), states.astype(np.float32)]
    if block.generated is not None:
        for result in results:
            bits = result.view(np.int32)
            bits *= block.generated  # whatever they are; a masked store waits for branches
    return results


def _put(
    output: npt.NDArray[np.float32], result: npt.NDArray[np.float32], top: Ints, lengths: Ints
) -> None:
    """Write rows that lie side by side to where they belong, without what is none of theirs."""
    rows = result.T[:, ::-1].copy()
    full = lengths == ROW
    if output.size >= ROW:
        windows_of(output, ROW, writeable=True)[top[full] - ROW] = rows[full]
    short = ~full
    if short.any():
        place = np.arange(ROW)
        kept = place >= ROW - lengths[short, None]
        output[(top[short, None] - ROW + place)[kept]] = rows[short][kept]
