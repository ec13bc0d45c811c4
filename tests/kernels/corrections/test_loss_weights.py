"""`loss_weights` against each aggregation, written as the loop that it stands for."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from trajpack.kernels.corrections import slots_triton
from trajpack.kernels.corrections.loss_weights import (
    AGGREGATIONS,
    loss_weights,
    shares_of,
)
from trajpack.kernels.corrections.slots import Places
from trajpack.testing import assert_same_bits, boundaries

NUM_SEQUENCES, NUM_GROUPS, CONSTANT = 12, 5, 77.0


class Case:
    """Tokens of sequences in any order; some sequences and groups are without any."""

    def __init__(self, num: int = 300, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        ids = random.integers(-1, NUM_SEQUENCES - 2, num)
        self.sequence_ids = torch.from_numpy(ids).int()
        # sequence 3 has tokens, but generated none of them
        self.loss_mask = torch.from_numpy((random.random(num) < 0.6) & (ids != 3))
        self.group_ids = torch.tensor([0, 3, 0, 1, 0, 3, -1, 3, 0, 0, 4, 4], dtype=torch.int32)
        self.losses = torch.from_numpy(random.standard_normal(num))

    def weights(self, aggregation: Any, **options: Any) -> torch.Tensor:
        if aggregation == "constant":
            options.setdefault("denominator", CONSTANT)
        return loss_weights(aggregation, self.loss_mask, **self.options(), **options)

    def options(self) -> dict[str, Any]:
        return {
            "sequence_ids": self.sequence_ids,
            "num_sequences": NUM_SEQUENCES,
            "group_ids": self.group_ids,
            "num_groups": NUM_GROUPS,
        }

    def rows(self) -> list[tuple[float, int, int]]:
        """Return loss, sequence and group (-1: none) of each generated token."""
        groups = self.group_ids.tolist()
        return [
            (loss, sequence, groups[sequence] if sequence >= 0 else -1)
            for loss, sequence, generated in zip(
                self.losses.tolist(),
                self.sequence_ids.tolist(),
                self.loss_mask.tolist(),
                strict=True,
            )
            if generated
        ]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def aggregate(rows: list[tuple[float, int, int]], aggregation: str) -> float:
    """Say what the aggregated loss is, without weights."""
    losses = [loss for loss, _, _ in rows]
    if aggregation == "token_mean":
        return mean(losses)
    if aggregation == "constant":
        return math.fsum(losses) / CONSTANT
    parts = defaultdict(list)
    for loss, sequence, group in rows:
        part = group if aggregation == "prompt_mean" else sequence
        if part >= 0:
            parts[part].append(loss)
    whole = math.fsum if aggregation == "sequence_mean_token_sum" else mean
    return mean([whole(part) for part in parts.values()])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_weighted_sum_is_the_aggregated_loss(aggregation: Any, seed: int) -> None:
    case = Case(seed=seed)
    weights = case.weights(aggregation)
    assert weights.dtype == torch.float32
    assert not weights[~case.loss_mask].any()
    found = (weights.double() * case.losses).sum().item()
    assert found == pytest.approx(aggregate(case.rows(), aggregation), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("num", [0, 1, 300, 1024, 2500])
def test_kernels_give_the_bits_of_the_reference_in_every_run(aggregation: Any, num: int) -> None:
    """With every kind of denominator; tokens of a sequence apart, and side by side."""
    case = Case(num)
    for denominator in (7.0, None, torch.tensor(5), torch.tensor(5.5)):
        if denominator is None and aggregation == "constant":
            continue
        expected = case.weights(aggregation, denominator=denominator, impl="torch")
        for _ in range(3):
            found = case.weights(aggregation, denominator=denominator, impl="triton")
            assert_same_bits(found, expected)
        case.sequence_ids = case.sequence_ids.sort().values.long()


@pytest.mark.parametrize("arch", [80, 90])
def test_ids_and_masks_are_read_twice_and_weights_written_once(arch: int) -> None:
    """5 bytes of a token are read to count, 5 to write 4, in whole sectors."""
    from tests.ptx.executor import on_executor

    case = Case(4096)
    expected = case.weights("sequence_mean_token_mean")
    case.sequence_ids = case.sequence_ids.sort().values
    with on_executor(arch, counts=True) as executor:
        for _ in range(20):
            found = case.weights("sequence_mean_token_mean", impl="triton")
    assert_same_bits(found, case.weights("sequence_mean_token_mean"))
    assert not torch.equal(found, expected)
    reports = executor.reports
    assert list(reports) == ["sum_slots_kernel", "slot_shares_kernel", "share_kernel"]
    for name, stored in (("sum_slots_kernel", 0), ("share_kernel", 4)):
        assert reports[name].launches == 20
        assert 0 <= reports[name].touched["load"] / 20 / 4096 - 5 < 0.2
        assert reports[name].touched["store"] / 20 / 4096 == stored


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("length", "most_additions"), [(256, 2), (8, 2), (1, 9)])
def test_short_sequences_cost_a_tile_no_addition_of_their_own(
    arch: int, length: int, most_additions: int
) -> None:
    """Those of 32 slots are one instruction, and new slots one more, at one of many addresses."""
    from tests.ptx.executor import on_executor

    tokens, tile = 8192, 256
    ids = torch.arange(tokens, dtype=torch.int32) // length
    mask, num = torch.ones(tokens, dtype=torch.bool), tokens // length
    options: Any = {"sequence_ids": ids, "num_sequences": num}
    expected = loss_weights("sequence_mean_token_mean", mask, **options)
    with on_executor(arch, counts=True) as executor:
        found = loss_weights("sequence_mean_token_mean", mask, **options, impl="triton")
    assert_same_bits(found, expected)
    report = executor.reports["sum_slots_kernel"]
    assert report.programs == tokens // tile
    additions = report.traffic["global", "atomic"]
    assert additions.requests == most_additions * report.programs
    # a sector holds four slots, or two counters
    assert additions.sectors <= report.programs * (-(-tile // length // 4) + 1)


@pytest.mark.parametrize("programs", [1, 3])
def test_a_program_takes_several_tiles_where_there_are_many(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_triton, "PROGRAMS", programs)
    case = Case(2000)
    found = case.weights("sequence_mean_token_mean", impl="triton")
    assert_same_bits(found, case.weights("sequence_mean_token_mean"))


@pytest.mark.parametrize("each", [1, 3])
def test_the_work_of_a_program_is_bounded_where_each_entry_is_a_sequence(each: int) -> None:
    """A warp takes 32 of them, one after another, not those of a tile of tokens."""
    from tests.ptx.executor import on_executor

    num = 2000
    counts = boundaries(np.arange(num) % 5)
    owners = torch.arange(num) // each if each > 1 else None
    places = Places(None, None, owners, num, -(-num // each))
    expected = shares_of("sequence_mean_token_mean", counts, places, None, "torch")
    with on_executor(90, counts=True) as executor:
        found = shares_of("sequence_mean_token_mean", counts, places, None, "triton")
    assert_same_bits(found, expected)
    report = executor.reports["sum_slots_kernel"]
    assert report.programs == -(-num // 32)
    assert report.traffic["global", "atomic"].requests <= 2 * report.programs
    assert report.warp_instructions < 800 * report.programs


@pytest.mark.slow
def test_many_sequences_of_a_tile_give_the_bits_of_the_reference_in_any_order() -> None:
    """Of a tile of 256 tokens up to 256 sequences, some of them seen by every tile."""
    draw = torch.Generator().manual_seed(3)
    for num, tokens in ((1500, 1200), (300, 800), (40, 800)):
        ids = torch.randint(-1, num + 1, (tokens,), generator=draw)
        mask = torch.rand(tokens, generator=draw) < 0.8
        options: Any = {"sequence_ids": ids, "num_sequences": num}
        for aggregation in ("sequence_mean_token_mean", "sequence_mean_token_sum"):
            expected = loss_weights(aggregation, mask, **options)
            for _ in range(20):
                found = loss_weights(aggregation, mask, **options, impl="triton")
                assert_same_bits(found, expected)


def test_the_op_is_registered_as_torch_wants_it() -> None:
    ids = torch.zeros(4, dtype=torch.int32, device="meta")
    inputs = ids.bool(), ids, None, None, 0.0, [3, 3], True
    found = torch.ops.trajpack.loss_weights(*inputs)
    assert (found.shape, found.dtype) == ((4,), torch.float32)
    mask = torch.ones(4, dtype=torch.bool, device="meta")
    weights = loss_weights("constant", mask, denominator=2.0, impl="triton")
    assert (weights.shape, weights.dtype) == ((4,), torch.float32)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_follow_their_tokens(aggregation: Any) -> None:
    case, expected = Case(), Case().weights(aggregation)
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(case.losses)))
    case.sequence_ids, case.loss_mask = case.sequence_ids[order], case.loss_mask[order]
    assert_same_bits(case.weights(aggregation), expected[order])
    # and sequences, their numbers
    renumbered = torch.from_numpy(np.random.default_rng(2).permutation(NUM_SEQUENCES)).int()
    owned = case.sequence_ids >= 0
    case.sequence_ids[owned] = renumbered[case.sequence_ids[owned].long()]
    case.group_ids[renumbered.long()] = case.group_ids.clone()
    assert_same_bits(case.weights(aggregation), expected[order])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("num", "num_sequences"), [(0, 0), (0, 3), (4, 0), (4, 3), (1, 1)])
def test_without_generated_tokens_weights_are_0(
    aggregation: Any, num: int, num_sequences: int
) -> None:
    options: Any = {
        "sequence_ids": torch.zeros(num, dtype=torch.int32),
        "num_sequences": num_sequences,
        "group_ids": torch.zeros(num_sequences, dtype=torch.int32),
        "num_groups": 1,
    }
    mask = torch.zeros(num, dtype=torch.bool)
    denominator = 3 if aggregation == "constant" else None
    found = loss_weights(aggregation, mask, **options, denominator=denominator)
    assert_same_bits(found, torch.zeros(num))


def test_ids_out_of_range_belong_to_no_sequence() -> None:
    mask, ids = torch.ones(4, dtype=torch.bool), torch.tensor([0, 5, -7, 2**40])
    found = loss_weights("sequence_mean_token_mean", mask, ids, num_sequences=2)
    assert found.tolist() == [1.0, 0.0, 0.0, 0.0]


"""What `loss_weights` refuses."""

M, IDS, GROUPS = torch.ones(3, dtype=torch.bool), torch.zeros(3).int(), torch.zeros(2).int()
RIGHT = {"sequence_ids": IDS, "num_sequences": 2, "group_ids": GROUPS, "num_groups": 1}
SUM, MEAN = "sequence_mean_token_sum", "sequence_mean_token_mean"
GRADIENT = torch.tensor(3.0, requires_grad=True)


@pytest.mark.parametrize(
    ("aggregation", "error", "words", "changed"),
    [
        ("sum", ValueError, "aggregation must be one of 'token_mean', .*got 'sum'", {}),
        ("constant", ValueError, "aggregation='constant' needs denominator", {}),
        ("token_mean", TypeError, "loss_mask must be a tensor, got list", {"loss_mask": [True]}),
        ("token_mean", TypeError, "loss_mask must be bool, got int32", {"loss_mask": M.int()}),
        ("token_mean", ValueError, r"loss_mask must have 1 dim.*\[1, 3\]", {"loss_mask": M[None]}),
        (SUM, ValueError, f"aggregation='{SUM}' needs sequence_ids", {"num_sequences": None}),
        (MEAN, ValueError, ".* needs sequence_ids and num_s", {"sequence_ids": None}),
        (SUM, ValueError, r".*for each of 3 token\(s\), .* \[2\]", {"sequence_ids": IDS[:2]}),
        ("prompt_mean", ValueError, ".*'prompt_mean' needs group_ids", {"group_ids": None}),
        ("prompt_mean", ValueError, ".* needs group_ids and num_groups", {"num_groups": None}),
        ("prompt_mean", TypeError, "sequence_ids must be int32 or int64", {"sequence_ids": M}),
        ("prompt_mean", ValueError, "sequence_ids is on meta", {"sequence_ids": IDS.to("meta")}),
        ("prompt_mean", TypeError, "num_sequences must be an int, got 2", {"num_sequences": 2.0}),
        ("prompt_mean", ValueError, "num_sequences must not be neg", {"num_sequences": -1}),
        ("prompt_mean", TypeError, "group_ids must be a tensor, got list", {"group_ids": [0, 0]}),
        ("prompt_mean", ValueError, r".*each of 2 sequence\(s\), .*\[3\]", {"group_ids": IDS}),
        ("prompt_mean", TypeError, "num_groups must be an int, got True", {"num_groups": True}),
        ("token_mean", TypeError, "denominator must be a number, got '3'", {"denominator": "3"}),
        ("token_mean", TypeError, "denominator must be a number, got T", {"denominator": True}),
        ("token_mean", ValueError, "denominator must be finite .*, got 0", {"denominator": 0}),
        ("token_mean", ValueError, "denominator .*, got nan", {"denominator": math.nan}),
        ("token_mean", TypeError, "denominator .*, got bool", {"denominator": torch.tensor(True)}),
        ("token_mean", ValueError, r"denominator must have 0 dim.*\[3\]", {"denominator": IDS}),
        ("token_mean", ValueError, "denom.* is on meta", {"denominator": IDS[0].to("meta")}),
        ("token_mean", ValueError, "no gradient flows to denom", {"denominator": GRADIENT}),
    ],
)
def test_wrong_input_is_named(
    aggregation: Any, error: type[Exception], words: str, changed: dict[str, Any]
) -> None:
    with pytest.raises(error, match=f"^loss_weights: {words}"):
        loss_weights(aggregation, **({"loss_mask": M} | RIGHT | changed))
