"""Scores of trajectories, and values of turns at their tokens, by loops over turns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.credit.turns import Turns, scores_of_trajectories, spread
from trajpack.kernels.runs import RUN_WIDTH, TILE, Run
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
    groups = torch.arange(len(sizes), dtype=torch.int32)
    groups[4::5] = -1  # padding
    return (
        rewards,
        boundaries(rng.integers(0, 9, num).tolist()),
        boundaries(sizes),
        groups,
    )


@pytest.mark.parametrize("clip", [float("inf"), 0.75])
@pytest.mark.parametrize("name", SCORED)
def test_scores_lengths_and_validity_equal_a_loop(name: str, clip: float, impl: str) -> None:
    rewards, cu_generated, cu_turns, groups = inputs = scored_turns(SCORED[name])
    got = scores_of_trajectories(*inputs, clip=clip, impl=impl)
    scores, lengths = [], []
    bounds = cu_turns.tolist()
    for begin, end in itertools.pairwise(bounds):
        total = 0.0
        for reward in rewards[begin:end].tolist():
            total += reward
        scores.append(max(-clip, min(total, clip)))
        lengths.append(int(cu_generated[end] - cu_generated[begin]))
    np.testing.assert_allclose(got.scores, scores, 1e-15, 1e-15)
    assert got.scores.dtype == torch.float64
    assert (got.lengths.tolist(), got.lengths.dtype) == (lengths, torch.int32)
    cut = torch.arange(len(groups)) % 3 == 1
    for truncated in (None, cut):
        shares = scores_of_trajectories(*inputs, clip=clip, truncated=truncated, impl=impl).shares
        counted = groups >= 0 if truncated is None else (groups >= 0) & ~cut
        expected = [int(counted.sum()), int((counted & (got.scores != 0)).sum())]
        assert shares.sum(0).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_are_given_replace_the_sums(dtype: torch.dtype, impl: str) -> None:
    inputs = scored_turns([2, 1, 0, 3])
    given = torch.tensor([0.5, -3.0, 0.25, 0.0], dtype=dtype)
    got = scores_of_trajectories(*inputs, given=given, clip=2.0, impl=impl)
    assert got.scores.tolist() == [0.5, -2.0, 0.25, 0.0]
    assert got.shares.sum(0).tolist() == [4, 3]


def test_scores_have_the_same_bits_alone_and_packed(impl: str) -> None:
    rewards, cu_generated, _, groups = inputs = scored_turns([5, 3, 0, 40])
    together = scores_of_trajectories(*inputs, clip=float("inf"), impl=impl)
    for index, (begin, end) in enumerate(((0, 5), (5, 8), (8, 8), (8, 48))):
        alone = scores_of_trajectories(
            rewards[begin:end], cu_generated[begin : end + 1], boundaries([end - begin]),
            groups[:1], clip=float("inf"), impl=impl,
        )  # fmt: skip
        for whole, one in zip(together[:2], alone[:2], strict=True):
            assert_same_bits(whole[index : index + 1], one)


def test_a_score_that_is_no_number_stays_one(impl: str) -> None:
    inputs = scored_turns([2, 1])
    inputs[0][1] = torch.nan
    for clip in (float("inf"), 1.0):
        scores = scores_of_trajectories(*inputs, clip=clip, impl=impl).scores
        assert scores.isnan().tolist() == [True, False]


"""From turns and trajectories to their tokens: by loops over turns."""


def turns_of(sizes: list[list[int]], gap: int = 2) -> tuple[Turns, torch.Tensor, torch.Tensor]:
    """Turns of each trajectory that generated so many tokens, others before each; owners; spans.

    A turn of more than one token has two runs, as of two policy versions. Padding ends the tokens.
    """
    ids: list[int] = []
    runs, spans, owners = [], [], []
    for owner, trajectory in enumerate(sizes):
        for size in trajectory:
            turn, context = len(spans), len(spans) * gap % 5
            cut = size // 2
            for start, more, own in ((len(ids), context, cut), (0, 0, size - cut)):
                if own or more or not cut:
                    runs.append({Run.START: start or len(ids), Run.GENERATED: more, Run.TURN: turn})
                    ids += [-1] * more + [turn] * own
            spans.append([len(ids) - size, len(ids)])
            owners.append(owner)
    runs.append({Run.START: len(ids), Run.GENERATED: 2**31 - 1, Run.SOURCE: -1})
    ids += [-1] * gap
    table = torch.zeros(len(runs) + 1, RUN_WIDTH, dtype=torch.int32)
    for row, run in zip(table, [*runs, {Run.START: len(ids)}], strict=True):
        for column, number in run.items():
            row[column] = number
    turns = Turns(torch.tensor(ids, dtype=torch.int32), table)
    return turns, torch.tensor(owners).int(), torch.tensor(spans).int().view(-1, 2)


SIZES: dict[str, list[list[int]]] = {
    "nothing": [],
    "a trajectory without turns": [[], [3], []],
    "turns without tokens": [[0, 0], [2, 0, 1], [0]],
    "one token": [[1]],
    "many": [[3, 1, 4], [1, 5], [9, 0, 2, 6], [5], [3, 5, 8], [9, 7]],
    "more than a tile": [[1500, 900], [], [2500], [0, 17]],
    "the edge of a tile": [[TILE - 2], [1]],
    "one before the edge of a tile": [[TILE - 1], [1]],
}


@pytest.mark.parametrize("weight", [None, 0.5])
@pytest.mark.parametrize("name", SIZES)
def test_a_token_gets_its_trajectory_row_plus_its_turn_step(
    name: str, weight: float | None, impl: str
) -> None:
    turns, owners, spans = turns_of(SIZES[name])
    rows = torch.linspace(-2, 3, len(SIZES[name]))
    steps = torch.linspace(-1, 5, len(spans)) if weight else None
    found, others = spread(turns, rows, steps, index=owners, weight=weight or 1.0, impl=impl)
    expected = []
    for turn in turns.turn_ids.tolist():
        number = float(rows[owners[turn]]) if turn >= 0 else 0.0
        if steps is not None and weight and turn >= 0:
            number += weight * float(steps[turn])
        expected.append(number)
    assert found.dtype == torch.float32
    assert others.shape == (0,)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", SIZES)
def test_a_token_gets_the_values_of_its_turns_first_token(name: str, impl: str) -> None:
    """What stands elsewhere is undefined, and never read."""
    turns, _, spans = turns_of(SIZES[name])
    tables = [torch.full((len(turns.turn_ids),), torch.nan) for _ in range(2)]
    firsts = [begin for begin, end in spans.tolist() if end > begin]
    for index, table in enumerate(tables):
        table[firsts] = torch.linspace(-1 - index, 4, len(firsts))
    found = spread(turns, tables[0], index=spans[:, 0], others=tables[1], impl=impl)
    first = dict(enumerate(spans[:, 0].tolist()))
    for table, rows in zip(tables, found, strict=True):
        expected = [float(table[first[t]]) if t >= 0 else 0.0 for t in turns.turn_ids.tolist()]
        assert_same_bits(rows, torch.tensor(expected))


@pytest.mark.parametrize("arch", [80, 90])
def test_a_token_is_written_once_and_its_turn_is_not_read(arch: int) -> None:
    """4 bytes of each are written, in whole sectors; of a run 32 are read, whatever its length."""
    from tests.ptx.executor import on_executor

    turns, owners, _ = turns_of([[4000], [3000, 5000]])
    num = len(turns.turn_ids)
    with on_executor(arch, counts=True) as executor:
        spread(turns, torch.ones(2), index=owners, impl="triton")
    report = executor.reports["spread_kernel"]
    assert report.launches == 1
    assert report.touched["load"] < 32 * (len(turns.runs) + 10)
    assert 0 <= report.touched["store"] / num - 4 < 0.2


def test_the_ops_are_registered_right(impl: str) -> None:
    scores = torch.ops.trajpack.scores_of_trajectories
    for name in ("nothing", "none of them", "some"):
        torch.library.opcheck(scores, (*scored_turns(SCORED[name]), None, None, 1.0, impl))
    turns, owners, spans = turns_of(SIZES["many"])
    rows, steps = torch.ones(6), torch.ones(15)
    table, first = torch.ones(len(turns.turn_ids)), spans[:, 0].contiguous()
    for inputs in ((rows, None, owners, None), (rows, steps, owners, None),
                   (table, None, first, table), (None, steps, None, None)):  # fmt: skip
        torch.library.opcheck(torch.ops.trajpack.spread, (*turns, *inputs, 0.5, impl))
