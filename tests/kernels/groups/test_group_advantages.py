"""`group_advantages`: every rule against a loop over groups, edges, laws, other systems."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.kernels.groups.score_loops import (
    COMBINATIONS,
    assert_near,
    by_loop,
    expected_of,
    random_groups,
)
from trajpack.kernels.groups.group_advantages import (
    Baseline,
    Rule,
    advantages_of,
    group_advantages,
    members_of,
)
from trajpack.kernels.groups.group_advantages_triton import LONG
from trajpack.testing import assert_same_bits

ORACLE = Path(__file__).parents[4] / "shared" / "oracles" / "credit.json.gz"
BASELINES = get_args(Baseline)


@pytest.mark.parametrize("singleton", ["raw", "zero"])
@pytest.mark.parametrize(("baseline", "scale"), COMBINATIONS)
def test_every_rule_equals_a_loop_over_groups(
    impl: Any, baseline: Any, scale: Any, singleton: Any
) -> None:
    inputs = random_groups(90, 35)
    if baseline != "length_weighted":
        del inputs["lengths"]
    rule = {"baseline": baseline, "scale": scale, "singleton": singleton}
    expected = expected_of(inputs, **rule)
    assert expected.count_nonzero() > 10
    assert_near(group_advantages(**inputs, **rule, impl=impl), expected)


@pytest.mark.parametrize("num_groups", [1, 3, 17])
@pytest.mark.parametrize("members", [1, 127, 128, 129, 600])
def test_members_and_groups_may_end_anywhere(impl: Any, members: int, num_groups: int) -> None:
    inputs = random_groups(members, num_groups, seed=members)
    rule = {"baseline": "length_weighted", "scale": "std"}
    assert_near(group_advantages(**inputs, **rule, impl=impl), expected_of(inputs, **rule))


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"baseline": "leave_one_out", "scale": "leave_one_out_std"},
        {"baseline": "leave_one_out", "scale": "std_about_baseline"},
        {"baseline": "none", "scale": "std_about_baseline"},
        {"scale": "signed_mean"},
    ],
)
@pytest.mark.parametrize(("ddof", "eps"), [(0, 0.0), (1, 0.5), (2, 1e-4), (5, 0.0)])
def test_ddof_and_eps_change_the_divisor(impl: Any, ddof: int, eps: float, kind: Any) -> None:
    inputs = random_groups(60, 16, seed=3)
    del inputs["lengths"]
    rule = {"ddof": ddof, "eps": eps} | kind
    assert_near(group_advantages(**inputs, **rule, impl=impl), expected_of(inputs, **rule))


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [torch.int32, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("scores", [torch.float32, torch.float64])
def test_any_dtype_and_stride_is_taken(
    impl: Any, scores: torch.dtype, lengths: torch.dtype, ids: torch.dtype
) -> None:
    inputs = random_groups(70, 9, dtype=scores)
    expected = expected_of(inputs, baseline="length_weighted")
    inputs["group_ids"], inputs["lengths"] = (
        inputs["group_ids"].to(ids),
        inputs["lengths"].to(lengths),
    )
    for name, tensor in inputs.items():
        if isinstance(tensor, torch.Tensor):
            inputs[name] = torch.stack([tensor, tensor], 1)[:, 1]
    assert_near(group_advantages(**inputs, baseline="length_weighted", impl=impl), expected)


@given(
    ids=st.lists(st.integers(-2, 20), max_size=70),
    num_groups=st.integers(0, 19),
    combination=st.sampled_from(COMBINATIONS),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_any_groups_equal_a_loop(
    impl: Any, ids: list[int], num_groups: int, combination: Any, seed: int
) -> None:
    baseline, scale = combination
    inputs = random_groups(len(ids), 20, seed)
    inputs |= {"group_ids": torch.tensor(ids, dtype=torch.int64), "num_groups": num_groups}
    if baseline != "length_weighted":
        del inputs["lengths"]
    rule = {"baseline": baseline, "scale": scale}
    assert_near(group_advantages(**inputs, **rule, impl=impl), expected_of(inputs, **rule))


def test_ids_out_of_range_count_nowhere_and_are_not_wrapped(impl: Any) -> None:
    ids = torch.tensor([0, -1, 1, 2**32, 0, 1 + 2**32, 2, -(2**63), 2**63 - 1])
    scores = torch.tensor([1.0, torch.nan, 5.0, 99.0, 2.0, 99.0, 99.0, torch.inf, 99.0])
    found = group_advantages(scores, ids, num_groups=2, scale="none", impl=impl)
    assert found.tolist() == [-0.5, 0, 5, 0, 0.5, 0, 0, 0, 0]


@pytest.mark.parametrize("baseline", BASELINES)
def test_an_invalid_member_changes_no_other(impl: Any, baseline: Any) -> None:
    scores = torch.tensor([1.0, torch.nan, 3.0, 4.0, torch.inf, 7.0])
    ids, valid = torch.tensor([0, 0, 0, 0, 0, 1]), torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    lengths = torch.tensor([1.0, torch.nan, 2.0, 3.0, 9.0, 0.0])
    options = {"num_groups": 2, "baseline": baseline, "impl": impl}
    kept = {"lengths": lengths[valid]} if baseline == "length_weighted" else {}
    marked = {"lengths": lengths} if baseline == "length_weighted" else {}
    found = group_advantages(scores, ids, valid=valid, **marked, **options)
    assert found[~valid].tolist() == [0, 0]
    assert_same_bits(found[valid], group_advantages(scores[valid], ids[valid], **kept, **options))


@pytest.mark.parametrize("value", [0.1, -3e30])
@pytest.mark.parametrize(("baseline", "scale"), COMBINATIONS)
def test_a_group_of_one_score_gets_exactly_zero(
    impl: Any, baseline: Any, scale: Any, value: float
) -> None:
    scores, ids = torch.full((37,), value), torch.zeros(37, dtype=torch.int32)
    scores[5], ids[5] = 8.0, 1
    lengths = torch.arange(37) if baseline == "length_weighted" else None
    found = group_advantages(
        scores, ids, num_groups=2, baseline=baseline, scale=scale, lengths=lengths, impl=impl
    )
    group = found[ids == 0]
    if baseline != "none" or scale == "std":
        assert_same_bits(group, torch.zeros(36))  # nor -0
    elif scale == "none":
        assert_same_bits(group, scores[ids == 0])


def test_groups_of_low_variance_are_not_shrunk(impl: Any) -> None:
    near = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    scores = torch.tensor([1.0, near, 1.0, near, 1e8, 1e8 + 8, 1e8 + 16])
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    found = group_advantages(scores, ids, num_groups=2, eps=0.0, impl=impl)
    half = 0.75**0.5
    assert_near(found, torch.tensor([-half, half, -half, half, -1, 0, 1]))


@pytest.mark.parametrize("outlier", [-(2.0**20), 2.0**20, 1e30])
@pytest.mark.parametrize(
    ("baseline", "scale"),
    [("leave_one_out", "leave_one_out_std"), ("leave_one_out", "std_about_baseline"),
     ("mean", "std")],
)  # fmt: skip
def test_an_outlier_does_not_hide_how_the_others_differ(
    impl: Any, baseline: Any, scale: Any, outlier: float
) -> None:
    """The others of the outlier differ by thousandths, of which a sum with it keeps nothing."""
    scores = torch.randn(40, generator=torch.Generator().manual_seed(0)) / 1000
    scores[17] = outlier
    ids = torch.zeros(40, dtype=torch.int64)
    rule: dict[str, Any] = {"baseline": baseline, "scale": scale, "eps": 0.0}
    found = group_advantages(scores, ids, num_groups=1, impl=impl, **rule)
    expected = torch.from_numpy(by_loop(scores.numpy(), ids.numpy(), 1, **rule))
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("baseline", "scale"), [c for c in COMBINATIONS if c[1] != "nonzero"])
def test_a_singleton_keeps_the_bits_of_its_score(impl: Any, baseline: Any, scale: Any) -> None:
    scores = torch.randn(40, generator=torch.Generator().manual_seed(1))
    ids = torch.randperm(40)
    lengths = torch.ones(40) if baseline == "length_weighted" else None
    options = {"num_groups": 40, "baseline": baseline, "scale": scale, "lengths": lengths}
    found = group_advantages(scores, ids, **options, impl=impl)  # type: ignore[arg-type]
    assert_same_bits(found, scores)
    found = group_advantages(scores, ids, **options, singleton="zero", impl=impl)  # type: ignore[arg-type]
    assert_same_bits(found, torch.zeros(40))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("baseline", "scale"),
    [*((baseline, "std") for baseline in BASELINES), ("leave_one_out", "leave_one_out_std"),
     ("none", "std_about_baseline"), ("mean", "signed_mean")],
)  # fmt: skip
def test_a_score_that_is_not_finite_spoils_its_own_group_alone(
    impl: Any, baseline: Any, scale: Any, odd: float
) -> None:
    ids = torch.tensor([0, 1, 0, 1, 2, 2, 1, 2, 0, 3])
    scores = torch.arange(10.0)
    lengths = torch.ones(10) if baseline == "length_weighted" else None
    options: dict[str, Any] = {"num_groups": 4, "baseline": baseline, "scale": scale}
    options |= {"lengths": lengths, "impl": impl}
    clean = group_advantages(scores, ids, **options)
    scores[3] = odd
    found = group_advantages(scores, ids, **options)
    assert found[ids == 1].isnan().all()
    assert_same_bits(found[ids != 1], clean[ids != 1])
    alone = torch.full((2,), odd)
    for same in (torch.tensor([0, 0]), torch.tensor([0, 1])):
        options["lengths"] = None if lengths is None else lengths[:2]
        assert group_advantages(alone, same, **options).isnan().all()


def test_lengths_that_sum_to_zero_weigh_alike(impl: Any) -> None:
    scores, ids = torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([0, 0, 0, 1])
    found = group_advantages(
        scores, ids, num_groups=2, baseline="length_weighted", scale="none",
        lengths=torch.zeros(4, dtype=torch.int32), impl=impl,
    )  # fmt: skip
    assert found.tolist() == [-2, -1, 3, 5]


@pytest.mark.parametrize(("baseline", "scale"), [c for c in COMBINATIONS if c[1] != "nonzero"])
def test_order_and_company_of_a_group_change_no_bit(impl: Any, baseline: Any, scale: Any) -> None:
    """Rewards of ten bits: all sums are exact, so that no order can show."""
    rng = np.random.default_rng(5)
    scores = torch.from_numpy(rng.integers(-512, 512, 150) / 256).float()
    ids = torch.from_numpy(rng.integers(0, 40, 150))
    lengths = torch.from_numpy(rng.integers(0, 64, 150)) if baseline == "length_weighted" else None
    options = {"num_groups": 40, "baseline": baseline, "scale": scale, "impl": impl}
    found = group_advantages(scores, ids, lengths=lengths, **options)
    order = torch.from_numpy(rng.permutation(150))
    rename = torch.from_numpy(rng.permutation(40))
    mixed = group_advantages(
        scores[order], rename[ids[order]],
        lengths=None if lengths is None else lengths[order], **options,
    )  # fmt: skip
    assert_same_bits(mixed, found[order])
    some = ids < 7
    fewer = None if lengths is None else lengths[some]
    alone = group_advantages(
        scores[some], ids[some], lengths=fewer, **(options | {"num_groups": 7})
    )
    assert_same_bits(alone, found[some])


RULES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"scale": "none"},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "opo": {"baseline": "length_weighted", "scale": "none"},
}


@pytest.mark.skipif(not ORACLE.exists(), reason="the outputs of other systems are not here")
@pytest.mark.parametrize("name", RULES)
def test_it_equals_verl(impl: Any, name: str) -> None:
    cases = json.loads(gzip.decompress(ORACLE.read_bytes()))["groups"]
    assert len(cases) >= 20
    for case in cases[:: 1 if impl == "torch" else 3]:
        lengths = torch.tensor(case["lengths"]) if name == "opo" else None
        found = group_advantages(
            torch.tensor(case["scores"]), torch.tensor(case["group_ids"]), impl=impl,
            num_groups=max(case["group_ids"]) + 1, lengths=lengths, **RULES[name],
        )  # fmt: skip
        expected = torch.tensor(case["expected"][name])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


"""`group_advantages` as an operator: registered, traced, without values, refusing wrong input."""

OP = torch.ops.trajpack.group_advantages.default
SCORES = torch.tensor([1.0, 2.0, 4.0])
IDS = torch.tensor([0, 0, 1])
LEAF = SCORES.clone().requires_grad_()
WEIGHTED = {"baseline": "length_weighted"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operator_is_registered_right(impl: str, dtype: torch.dtype) -> None:
    for lengths, valid in ((None, None), (IDS, IDS == 0)):
        arguments = 2, "mean", "std", 1, 1e-6, "raw", lengths, valid, None, 3
        members: Any = (IDS, None)
        if impl == "triton":
            members = torch.tensor([0, 2, 3], dtype=torch.int32), torch.arange(3)
        torch.library.opcheck(OP, (SCORES.to(dtype), *members, *arguments))


@pytest.mark.parametrize(
    ("error", "match", "changed"),
    [
        (TypeError, "^group_advantages: scores must be a tensor, got list", {"scores": [1.0]}),
        (TypeError, "scores must be float32 or float64, got int64", {"scores": IDS}),
        (ValueError, r"scores must have 1 dim.*\[1, 3\]", {"scores": SCORES[None]}),
        (ValueError, "no gradient flows to scores", {"scores": LEAF}),
        (TypeError, "group_ids must be int32 or int64, got bool", {"group_ids": IDS.bool()}),
        (ValueError, r"each of 3 member\(s\), got shape \[2\]", {"group_ids": IDS[1:]}),
        (ValueError, "group_ids is on meta", {"group_ids": IDS.to("meta")}),
        (TypeError, "num_groups must be an int, got 2.0", {"num_groups": 2.0}),
        (TypeError, "num_groups must be an int, got True", {"num_groups": True}),
        (ValueError, "num_groups must be in .*, got -1", {"num_groups": -1}),
        (ValueError, "num_groups must be in .*, got 4294967296", {"num_groups": 2**32}),
        (ValueError, "baseline must be one of 'mean', .*, got 'median'", {"baseline": "median"}),
        (ValueError, "scale must be one of 'std', .*, got 'median'", {"scale": "median"}),
        (ValueError, "recipe must be one of 'grpo', .*, got 'dapo'", {"recipe": "dapo"}),
        (ValueError, "needs baseline='leave_one_out', got 'mean'", {"scale": "leave_one_out_std"}),
        (ValueError, "no meaning with baseline='second_best'",
         {"scale": "std_about_baseline", "baseline": "second_best"}),
        (ValueError, "singleton must be one of 'raw', 'zero', got 0", {"singleton": 0}),
        (TypeError, "ddof must be an int, got 1.0", {"ddof": 1.0}),
        (ValueError, "ddof must be in .*, got -1", {"ddof": -1}),
        (TypeError, "eps must be a number, got '1'", {"eps": "1"}),
        (ValueError, "eps must be finite and not negative, got -1", {"eps": -1}),
        (ValueError, "eps must be finite and not negative, got nan", {"eps": float("nan")}),
        (ValueError, "'length_weighted' needs lengths", WEIGHTED),
        (ValueError, "lengths are for .*, got 'mean'", {"lengths": IDS}),
        (TypeError, "lengths must be .*, got bool", WEIGHTED | {"lengths": IDS.bool()}),
        (ValueError, r"lengths must have one .*\[2\]", WEIGHTED | {"lengths": IDS[1:]}),
        (ValueError, "lengths is on meta", WEIGHTED | {"lengths": IDS.to("meta")}),
        (ValueError, "no gradient flows to lengths", WEIGHTED | {"lengths": LEAF}),
        (TypeError, "valid must be bool, got int64", {"valid": IDS}),
        (ValueError, r"valid must have one .*\[2\]", {"valid": IDS[1:].bool()}),
        (ValueError, "impl must be .*, got 'nonsense'", {"impl": "nonsense"}),
    ],
)  # fmt: skip
def test_wrong_input_is_named(error: type[Exception], match: str, changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"scores": SCORES, "group_ids": IDS, "num_groups": 2} | changed
    with pytest.raises(error, match=match):
        group_advantages(**arguments)


@pytest.mark.parametrize("members", [LONG - 1, LONG, LONG + 1])
def test_a_group_as_large_as_a_small_program_takes(members: int) -> None:
    ids = (torch.arange(members + 3) >= members).long()
    scores = torch.linspace(0, 1, members + 3).square()
    found, exact = (
        group_advantages(scores, ids, num_groups=2, impl=impl) for impl in ("triton", "torch")
    )
    torch.testing.assert_close(found, exact)


def test_more_parts_of_the_shares_than_are_added_at_once() -> None:
    ids, scores = torch.arange(10) % 3, torch.arange(10.0)
    shares = torch.stack((torch.full((300,), 5), torch.arange(300) % 5), 1).int()
    rule = Rule("mean", "nonzero", 1, 0.0, "zero")
    found = advantages_of(scores, members_of(ids, 3, "triton"), rule, impl="triton", shares=shares)
    means = torch.stack([scores[ids == group].mean() for group in range(3)])
    torch.testing.assert_close(found, 1500 / int(shares[:, 1].sum()) * (scores - means[ids]))
