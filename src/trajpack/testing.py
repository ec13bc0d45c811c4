"""What tests of packed batches need: bitwise comparison, plain loops, random run tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.runs import RUN_WIDTH, Run


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, name: str = "tensor") -> None:
    """Raise unless both tensors have the same dtype, shape and bits; NaN equals the same NaN.

    Example:
        >>> assert_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
        Traceback (most recent call last):
        AssertionError: tensor: 1 of 1 entries differ, first at [0]: 0.0 instead of -0.0
    """
    got, want = (f"{t.dtype} {list(t.shape)}" for t in (actual, expected))
    if got != want:
        raise AssertionError(f"{name}: expected {want}, got {got}")
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    differ = (_bytes(actual) != _bytes(expected)).any(1).reshape(actual.shape)
    if differ.any():
        first = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(differ.sum())} of {differ.numel()} entries differ, first at "
            f"{list(first)}: {actual[first].item()} instead of {expected[first].item()}"
        )


def returns_by_loop(
    rewards: Sequence[float] | npt.NDArray[np.floating],
    lengths: Sequence[int],
    discounts: Sequence[float] | npt.NDArray[np.floating],
) -> npt.NDArray[np.float64]:
    """Discount each segment's rewards backward, one entry at a time, in float64.

    Example:
        >>> returns_by_loop([1.0, 2.0, 4.0], [2, 1], [0.5, 0.5])
        array([2., 2., 4.])
    """
    returns = [float(reward) for reward in rewards]
    start = 0
    for length, discount in zip(lengths, discounts, strict=True):
        for index in range(start + length - 2, start - 1, -1):
            returns[index] += float(discount) * returns[index + 1]
        start += length
    return np.array(returns, np.float64)


def boundaries(lengths: Sequence[int]) -> torch.Tensor:
    """Return int32 boundaries of segments of these lengths.

    Example:
        >>> boundaries([2, 0, 1])
        tensor([0, 2, 2, 3], dtype=torch.int32)
    """
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


def random_build_inputs(
    rng: np.random.Generator, lengths: Sequence[int], num_turns: int = 7
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return arguments of `trajpack.kernels.build.build` for runs of these lengths.

    The words are arbitrary bits, every kind of NaN among them. Sources may overlap; about half
    of the runs go on where the one before ends, in the stream, in their sequence or in both.
    """
    words = rng.integers(-(2**31), 2**31, sum(lengths) + 1000, dtype=np.int32)
    count = len(lengths)
    runs = rng.integers(0, 1000, (count + 1, RUN_WIDTH), dtype=np.int32)
    runs[:, Run.START] = np.cumsum([0, *lengths])
    for column in (Run.SOURCE, Run.POSITION):
        for row in np.flatnonzero(rng.random(count) < 0.7)[1:]:
            runs[row, column] = runs[row - 1, column] + lengths[row - 1]
    generated = rng.random(count + 1) < (0.6 if num_turns else 0.0)
    runs[:, Run.TURN] = np.where(generated, rng.integers(0, max(num_turns, 1), count + 1), -1)
    runs[:, Run.VERSION] = np.where(generated, runs[:, Run.VERSION], -1)
    runs[~generated, Run.LOGPROB] = 0
    runs[-1, Run.SOURCE :] = 0
    turn_returns = rng.standard_normal(num_turns).astype(np.float32)
    tensors = (torch.from_numpy(array) for array in (words, runs, turn_returns))
    return (*tensors, int(runs[-1, Run.START]))  # type: ignore[return-value]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    raw = torch.from_numpy(flat.numpy().view(np.uint8))
    return raw.reshape(flat.shape[0], tensor.element_size())
