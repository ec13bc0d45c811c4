"""Scans over chunks, stretches of tokens anywhere in a batch, beside loops over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.kernels.credit.token_loops import (
    OBSERVATIONS,
    Batch,
    Walk,
    assert_rounds,
    batch_of,
    gae_by_loop,
    small_blocks,
)
from tests.support.slow import slow_after
from trajpack.kernels.scan import credit_scan_triton
from trajpack.kernels.scan.credit_scan import credit_scan
from trajpack.kernels.scan.scan_inputs import Limits, Scan
from trajpack.testing import assert_same_bits, boundaries

SEGMENTS = (
    ["..ggg", ".gg", "", "gggg"],  # a turn of nothing in between, which has a reward too
    [],
    ["", "g", "", ""],  # ... before all others, and twice behind
    [""],
    ["." * 9 + "g" * 9, ".g"],
    ["gg"],
)
"""Turns of segments, a letter a token; a ``.`` is context."""
LONGEST = max(len("".join(turns)) for turns in SEGMENTS)
SIZES = ((8, 8, 8), (8, 16, 16), (64, 64, 8), (8, 8, 99), (64, 64, 99))
"""Entries of a block, of a row and of the longest walk: rows of one block and of two, segments side
by side beside the effects of rows; then without rows, one walk over blocks, and side by side."""


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


class Case(NamedTuple):
    """A scan, what stands where, and the rewards of turns."""

    scan: Scan
    batch: Batch
    places: list[list[list[int]]]
    """Tokens of every segment's turns."""
    rewards: list[list[float]]

    def walks(self) -> Iterator[tuple[list[int], Walk]]:
        """Return the tokens of every segment, one behind the other, and what is scanned."""
        values, rates = self.batch.values.tolist(), [rows.tolist() for rows in self.batch[4:7]]
        mask = self.batch.loss_mask.tolist()
        for at, (turns, rewards) in enumerate(zip(self.places, self.rewards, strict=True)):
            on_tokens, tokens = [], []
            for turn, reward in zip(turns, rewards, strict=True):
                tokens += turn
                if any(mask[token] for token in turn):
                    on_tokens += [0.0] * (len(turn) - 1) + [reward]
                    continue
                on_tokens += [0.0] * len(turn)
                before = [place for place, token in enumerate(tokens) if mask[token]]
                if before:
                    on_tokens[before[-1]] += reward
            rows = on_tokens, [values[t] for t in tokens], [mask[t] for t in tokens]
            yield tokens, Walk(*rows, *[rate[at] for rate in rates])


def case_of(segments: Sequence[Sequence[str]] = SEGMENTS, slack: int = 3) -> Case:
    """Scatter the turns over a batch, in any order, with tokens between them."""
    rng = np.random.default_rng(0)
    turns = [turn for segment in segments for turn in segment]
    begins, masks = [0] * len(turns), ""
    for chunk in rng.permutation(len(turns)):
        masks += "." * int(rng.integers(0, 3))
        begins[chunk] = len(masks)
        masks += turns[chunk]
    batch = batch_of([masks])._replace(
        **{name: rows for name, rows in batch_of([""] * len(segments))._asdict().items()
           if name in ("gammas", "lams", "bootstrap")}
    )  # fmt: skip
    rewards = torch.from_numpy(rng.standard_normal(len(turns)))
    spans = [[b + t.count("."), b + len(t)] for b, t in zip(begins, turns, strict=True)]
    table = torch.tensor([begins, begins], dtype=torch.int32).T.contiguous()
    scan = Scan(
        boundaries([len(segment) for segment in segments]), values=batch.values,
        gammas=batch.gammas, lams=batch.lams, bootstrap=batch.bootstrap,
        cu_positions=boundaries([len(turn) for turn in turns]), begins=table[:, 0],
        spans=torch.tensor(spans, dtype=torch.int32).reshape(-1, 2), turn_rewards=rewards,
        num_positions=sum(map(len, turns)) + (slack if turns else 0),
        turn_ids=batch.loss_mask.int() - 1, max_seqlen=LONGEST,
    )  # fmt: skip
    counts = [len(segment) for segment in segments]
    tokens = [list(range(b, b + len(t))) for b, t in zip(begins, turns, strict=True)]
    places = [tokens[a:b] for a, b in pairwise(accumulate([0, *counts]))]
    return Case(scan, batch, places, [part.tolist() for part in rewards.split(counts)])


def expected_of(case: Case, loop: Any) -> tuple[np.ndarray, np.ndarray]:
    """Put each segment's numbers where its tokens stand."""
    rows = np.zeros(case.scan.num_tokens), np.zeros(case.scan.num_tokens)
    for tokens, walk in case.walks():
        for row, numbers in zip(rows, loop(tokens, walk), strict=True):
            for token, number in zip(tokens, numbers, strict=True):
                row[token] = number
    return rows


@pytest.mark.parametrize("observation", slow_after(3, OBSERVATIONS))
def test_it_equals_the_loop(observation: str, impl: str) -> None:
    """Also where turns without generated tokens have a reward, which counts once."""
    for case in (case_of(), case_of([["gg", "...", ".g"], ["..", ".g", "..", "."]])):
        exact = expected_of(case, lambda _, walk: gae_by_loop(walk, observation))
        scan = case.scan._replace(observation=observation)
        for rows, numbers in zip(credit_scan(scan, "gae", impl), exact, strict=True):
            assert_rounds(rows, numbers)


@pytest.mark.parametrize(("observation", "longest"), [("carry", 4), ("carry", 150), ("ignore", 4)])
def test_segments_of_a_chunk_each_have_the_bits_they_have_beside_one_of_two(
    observation: str, longest: int, impl: str
) -> None:
    """A block in which all segments have one chunk reads a number of a chunk once a lane."""
    ones = [["..gg"], ["g"], [".."], [""], [".g"], ["g" * longest], ["." * 2 + "g" * (longest - 2)]]
    case = case_of([*ones, ["g", ".g"]])
    with small_blocks(64):
        scan = case.scan._replace(observation=observation, max_seqlen=longest)
        beside = credit_scan(scan, "gae", impl)
        rows = {"cu_seqlens": 1, "gammas": 1, "lams": 1, "bootstrap": 1}
        rows |= {"cu_positions": 2, "begins": 2, "spans": 2, "turn_rewards": 2}
        fewer = {name: getattr(scan, name)[:-last] for name, last in rows.items()}
        fewer["turn_ids"] = scan.turn_ids.clone()
        fewer["turn_ids"][[token for turn in case.places[-1] for token in turn]] = -1
        alone = credit_scan(scan._replace(**fewer), "gae", impl)
    exact = expected_of(case, lambda _, walk: gae_by_loop(walk, observation))
    of_ones = [token for turns in case.places[:-1] for turn in turns for token in turn]
    for one, other, numbers in zip(alone, beside, exact, strict=True):
        assert_same_bits(one[of_ones], other[of_ones])
        assert_rounds(other, numbers)


ONE_RATE: dict[str, Any] = {"gammas": None, "lams": None, "gamma": 0.9, "lam": 0.8}
OPTIONS: dict[str, dict[str, Any]] = {
    "one rate": ONE_RATE,
    "by turn": ONE_RATE | {"by_turn": True},
    "V-trace": {"kind": "vtrace"},
    "KL": {"estimator": "k3", "limits": Limits(kl_coefficient=0.125, reward_clip=0.75)},
    "rows": {"max_seqlen": 400},
}


@pytest.mark.parametrize("options", slow_after(1, OPTIONS.values()), ids=OPTIONS)
def test_segments_of_a_chunk_each_equal_the_reference(options: dict[str, Any]) -> None:
    """Every token is written."""
    case = case_of([["..gg"], ["g"], ["..g"], [""], [".g"], ["g" * 150], ["gg"], ["ggg"]])
    policies: dict[str, Any] = {}
    if "kind" in options or "estimator" in options:
        other = "rollout_logprobs" if "kind" in options else "ref_logprobs"
        policies = {"logprobs": case.batch.logprobs, other: case.batch.rollout_logprobs}
    fields = {"max_seqlen": 150} | policies | options
    scan = case.scan._replace(**fields)
    with small_blocks(64):
        found, expected = (credit_scan(scan, "gae", impl) for impl in ("triton", "torch"))
    written = torch.ones(scan.num_tokens, dtype=torch.bool)
    if scan.by_turn:  # the others are undefined
        written = torch.zeros_like(written)
        written[[begin for begin, end in scan.spans.tolist() if begin < end]] = True
    for actual, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(actual[written], exact[written], rtol=1e-5, atol=1e-5)


def test_a_reward_that_is_nan_is_not_clipped() -> None:
    case = case_of()
    rewards = case.scan.turn_rewards.clone()
    rewards[0] = math.nan
    scan = case.scan._replace(turn_rewards=rewards, limits=Limits(reward_clip=0.75))
    found, exact = (credit_scan(scan, "gae", impl)[0].isnan() for impl in ("triton", "torch"))
    assert exact.any()
    assert torch.equal(found, exact)


@pytest.mark.parametrize(
    ("kind", "observation", "sizes"),
    slow_after(
        1,
        [
            *(("vtrace", OBSERVATIONS[at], SIZES[at]) for at in (3, 1, 2)),
            *(("gae", one, SIZES[at % len(SIZES)]) for at, one in enumerate(OBSERVATIONS)),
        ],
    ),
)
def test_blocks_of_any_size_equal_the_reference(
    kind: str, observation: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token is written. GAE meets each size, and each observation."""
    case = case_of()
    limits = Limits(reward_clip=0.75, rho_clip=0.875)
    scan = case.scan._replace(kind=kind, observation=observation, limits=limits)
    if kind == "vtrace":
        batch = case.batch
        scan = scan._replace(logprobs=batch.logprobs, rollout_logprobs=batch.rollout_logprobs)
    exact = credit_scan(scan, "gae", "torch")
    for name, size in zip(("BLOCK", "ROW", "LONGEST_WALK"), sizes, strict=True):
        monkeypatch.setattr(credit_scan_triton, name, size)
    for actual, expected in zip(credit_scan(scan, "gae", "triton"), exact, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("segments", [[], [[]], [[], []], [[""], []]])
def test_empty_segments_leave_zeros(segments: list[list[str]], impl: str) -> None:
    case = case_of(segments, slack=0)
    scan = case.scan._replace(
        values=torch.ones(20), turn_ids=torch.full((20,), -1, dtype=torch.int32)
    )
    for rows in credit_scan(scan, "gae", impl):
        assert_same_bits(rows, torch.zeros(20))
