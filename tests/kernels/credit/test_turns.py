"""Scores of trajectories, and values of turns at their tokens, by loops over turns."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.credit.turns import (
    Turns,
    scores_of_trajectories,
    spread_of_trajectories,
    spread_of_turns,
)
from trajpack.kernels.reduce.whiten import whiten_by
from trajpack.kernels.reduce.whiten_triton import CHUNK
from trajpack.testing import assert_same_bits, boundaries

"""What trajectories have as a whole, by loops over their turns."""

BLOCK = block_shape("scores_kernel", DEFAULT).block
SCORED = {
    "nothing": [],
    "one": [1],
    "none of them": [0, 0, 0],
    "some": [3, 0, 1, 7, 0, 2],
    "a block": [1, 2] * (BLOCK // 2),
    "more than a block": [2, 0, 1] * (BLOCK // 3 + 1),
}


def scored_turns(sizes: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(seed)
    num = sum(sizes)
    rewards = torch.from_numpy(rng.standard_normal(num))
    truncated = torch.from_numpy(rng.random(num) < 0.5)
    return rewards, truncated, boundaries(rng.integers(0, 9, num).tolist()), boundaries(sizes)


@pytest.mark.parametrize("clip", [float("inf"), 0.75])
@pytest.mark.parametrize("name", SCORED)
def test_scores_lengths_and_validity_equal_a_loop(name: str, clip: float, impl: str) -> None:
    rewards, truncated, cu_generated, cu_turns = inputs = scored_turns(SCORED[name])
    got = scores_of_trajectories(*inputs, clip=clip, impl=impl)
    scores, lengths, valid = [], [], []
    bounds = cu_turns.tolist()
    for begin, end in itertools.pairwise(bounds):
        total = 0.0
        for reward in rewards[begin:end].tolist():
            total += reward
        scores.append(max(-clip, min(total, clip)))
        lengths.append(int(cu_generated[end] - cu_generated[begin]))
        valid.append(begin == end or not bool(truncated[end - 1]))
    np.testing.assert_allclose(got.scores, scores, 1e-15, 1e-15)
    assert got.scores.dtype == torch.float64
    assert (got.lengths.tolist(), got.lengths.dtype) == (lengths, torch.int32)
    assert (got.valid.tolist(), got.valid.dtype) == (valid, torch.bool)


def test_scores_have_the_same_bits_alone_and_packed(impl: str) -> None:
    rewards, truncated, cu_generated, cu_turns = scored_turns([5, 3, 0, 40])
    together = scores_of_trajectories(
        rewards, truncated, cu_generated, cu_turns, clip=float("inf"), impl=impl
    )
    for index, (begin, end) in enumerate(((0, 5), (5, 8), (8, 8), (8, 48))):
        alone = scores_of_trajectories(
            rewards[begin:end], truncated[begin:end], cu_generated[begin : end + 1],
            boundaries([end - begin]), clip=float("inf"), impl=impl,
        )  # fmt: skip
        for whole, one in zip(together, alone, strict=True):
            assert_same_bits(whole[index : index + 1], one)


def test_a_score_that_is_no_number_stays_one(impl: str) -> None:
    inputs = scored_turns([2, 1])
    inputs[0][1] = torch.nan
    for clip in (float("inf"), 1.0):
        scores = scores_of_trajectories(*inputs, clip=clip, impl=impl).scores
        assert scores.isnan().tolist() == [True, False]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", SCORED)
def test_scores_read_no_value(name: str, impl: str) -> None:
    on_meta = (tensor.to("meta") for tensor in scored_turns(SCORED[name]))
    got = scores_of_trajectories(*on_meta, clip=1.0, impl=impl)
    for tensor, dtype in zip(got, (torch.float64, torch.int32, torch.bool), strict=True):
        assert (tensor.shape[0], tensor.dtype) == (len(SCORED[name]), dtype)


"""From turns and trajectories to their tokens: by loops over turns, with moments of the result."""


def turns_of(sizes: list[list[int]], gap: int = 2) -> Turns:
    """Turns of each trajectory that generated so many tokens, with others before each."""
    flat = [size for trajectory in sizes for size in trajectory]
    ids, spans = [], []
    for turn, size in enumerate(flat):
        ids += [-1] * (turn * gap % 5)
        spans.append([len(ids), len(ids) + size])
        ids += [turn] * size
    ids += [-1] * gap
    return Turns(
        torch.tensor(ids, dtype=torch.int32),
        boundaries([len(trajectory) for trajectory in sizes]),
        torch.tensor(spans, dtype=torch.int32).view(-1, 2),
    )


SIZES: dict[str, list[list[int]]] = {
    "nothing": [],
    "a trajectory without turns": [[], [3], []],
    "turns without tokens": [[0, 0], [2, 0, 1], [0]],
    "one token": [[1]],
    "many": [[3, 1, 4], [1, 5], [9, 0, 2, 6], [5], [3, 5, 8], [9, 7]],
    "more than a chunk": [[1500, 900], [], [2500], [0, 17]],
    "the edge of a chunk": [[CHUNK - 2], [1]],
}


def owner_of(turns: Turns) -> list[int]:
    """Trajectory of each turn."""
    sizes = turns.cu_turns.diff().tolist()
    return [index for index, size in enumerate(sizes) for _ in range(size)]


def check_moments(spread: Any, turns: Turns, impl: str) -> None:
    mask = turns.turn_ids >= 0
    own = spread.rows[mask].double().numpy()
    expected = [0, 0, 0, np.inf, -np.inf]
    if own.size:
        expected = [own.size, own.mean(), own.size * own.var(), own.min(), own.max()]
    np.testing.assert_allclose(spread.moments[:5], expected, 1e-9, 1e-12)
    sums = [own.size, own.sum(), np.square(own).sum()]
    np.testing.assert_allclose(spread.moments[5:], sums, 1e-9, 1e-12)
    for ddof in (0, 1):
        whitened = whiten_by(spread.rows, mask, spread.moments, ddof=ddof, impl=impl)
        scale = own.std(ddof=ddof) if len(set(own.tolist())) > 1 else 1.0
        exact = (own - own.mean()) / scale if own.size else own
        np.testing.assert_allclose(whitened[mask], exact, 1e-5, 1e-5)
        assert not whitened[~mask].any()


@pytest.mark.parametrize("weight", [None, 0.5])
@pytest.mark.parametrize("name", SIZES)
def test_a_token_gets_its_trajectory_row_plus_its_turn_step(
    name: str, weight: float | None, impl: str
) -> None:
    turns = turns_of(SIZES[name])
    rows = torch.linspace(-2, 3, len(SIZES[name]))
    steps = torch.linspace(-1, 5, len(turns.spans)) if weight else None
    spread = spread_of_trajectories(turns, rows, steps, weight=weight or 0.0, impl=impl)
    owner, expected = owner_of(turns), []
    for turn in turns.turn_ids.tolist():
        number = float(rows[owner[turn]]) if turn >= 0 else 0.0
        if steps is not None and weight and turn >= 0:
            number += weight * float(steps[turn])
        expected.append(number)
    assert spread.rows.dtype == torch.float32
    assert spread.others.shape == (0,)
    torch.testing.assert_close(spread.rows, torch.tensor(expected), rtol=1e-6, atol=1e-7)
    check_moments(spread, turns, impl)


@pytest.mark.parametrize("name", SIZES)
def test_a_token_gets_the_values_of_its_turns_first_token(name: str, impl: str) -> None:
    """What stands elsewhere is undefined, and never read."""
    turns = turns_of(SIZES[name])
    tables = [torch.full((len(turns.turn_ids),), torch.nan) for _ in range(2)]
    firsts = [begin for begin, end in turns.spans.tolist() if end > begin]
    for index, table in enumerate(tables):
        table[firsts] = torch.linspace(-1 - index, 4, len(firsts))
    spread = spread_of_turns(turns, *tables, impl)
    first = dict(enumerate(turns.spans[:, 0].tolist()))
    for table, rows in zip(tables, (spread.rows, spread.others), strict=True):
        expected = [float(table[first[t]]) if t >= 0 else 0.0 for t in turns.turn_ids.tolist()]
        assert_same_bits(rows, torch.tensor(expected))
    check_moments(spread, turns, impl)


def test_both_implementations_move_the_same_bits() -> None:
    turns = turns_of(SIZES["more than a chunk"])
    rows = torch.tensor([0.1, 0.2, 1e-30, -7.0])
    pair = [
        spread_of_trajectories(turns, rows, None, weight=0.0, impl=i).rows
        for i in ("torch", "triton")
    ]
    assert_same_bits(*pair)


def test_padding_turns_change_no_token(impl: str) -> None:
    """The padding of a batch of fixed size: its turns have no tokens, its trajectories no turns."""
    turns = turns_of([[2, 1], [3]])
    more = Turns(
        turns.turn_ids,
        torch.cat([turns.cu_turns, torch.tensor([5, 5], dtype=torch.int32)]),
        torch.cat([turns.spans, torch.full((2, 2), len(turns.turn_ids), dtype=torch.int32)]),
    )
    rows = torch.tensor([1.0, 2.0, torch.nan, torch.nan])
    expected = spread_of_trajectories(turns, rows[:2], None, weight=0.0, impl=impl).rows
    assert_same_bits(spread_of_trajectories(more, rows, None, weight=0.0, impl=impl).rows, expected)
    table = torch.linspace(1, 2, len(turns.turn_ids))
    pair = [spread_of_turns(these, table, table, impl).rows for these in (turns, more)]
    assert_same_bits(*pair)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_no_value_is_read_from_the_device(impl: str) -> None:
    turns = Turns(*(tensor.to("meta") for tensor in turns_of(SIZES["many"])))
    rows = torch.ones(6, device="meta")
    spread = spread_of_trajectories(turns, rows, None, weight=0.0, impl=impl)
    assert spread.rows.shape == turns.turn_ids.shape
    mask = turns.turn_ids >= 0
    assert spread.moments.shape == (8,)
    table = torch.ones(len(mask), device="meta")
    assert spread_of_turns(turns, table, table, impl).others.shape == mask.shape


def test_the_ops_are_registered_right(impl: str) -> None:
    scores = torch.ops.trajpack.scores_of_trajectories
    for name in ("nothing", "none of them", "some"):
        torch.library.opcheck(scores, (*scored_turns(SCORED[name]), 1.0, impl))
    turns = turns_of(SIZES["many"])
    rows, steps = torch.ones(6), torch.ones(15)
    table = torch.ones(len(turns.turn_ids))
    for inputs in ((rows, None, None), (rows, steps, None), (table, None, table)):
        torch.library.opcheck(torch.ops.trajpack.spread, (*turns, *inputs, 0.5, impl))
