"""`group_advantages` as an operator: registered, traced, without values, refusing wrong input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trajpack.kernels.groups.group_advantages import (
    Rule,
    group_advantages,
    group_advantages_reference,
)
from trajpack.testing import assert_same_bits

OP = torch.ops.trajpack.group_advantages.default
SCORES = torch.tensor([1.0, 2.0, 4.0])
IDS = torch.tensor([0, 0, 1])
META = torch.empty(3, device="meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operator_is_registered_right(impl: str, dtype: torch.dtype) -> None:
    for lengths, valid in ((None, None), (IDS, IDS == 0)):
        arguments = ("mean", "std", 1, 1e-6, "raw", lengths, valid, impl)
        torch.library.opcheck(OP, (SCORES.to(dtype), IDS, 2, *arguments))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(dynamic: bool) -> None:
    def advantages(scores: torch.Tensor, ids: torch.Tensor, num_groups: int) -> torch.Tensor:
        return group_advantages(scores * 2, ids, num_groups=num_groups) + 1

    compiled = torch.compile(advantages, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for num in (5, 8):
        inputs = torch.arange(float(num)), torch.arange(num) % 3, num - 1
        assert_same_bits(compiled(*inputs), advantages(*inputs))


@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
@pytest.mark.parametrize("num_groups", [0, 5])
def test_shapes_alone_are_enough_on_the_meta_device(impl: Any, num_groups: int) -> None:
    ids = torch.empty(3, dtype=torch.int64, device="meta")
    found = group_advantages(
        META.double(), ids, num_groups=num_groups, valid=ids.bool(), lengths=ids,
        baseline="length_weighted", impl=impl,
    )  # fmt: skip
    assert (found.shape, found.dtype, found.device.type) == ((3,), torch.float32, "meta")


@pytest.mark.parametrize(
    ("baseline", "scale"),
    [("mean", "nonzero"), ("second_best", "nonzero"), ("length_weighted", "nonzero"),
     ("leave_one_out", "leave_one_out_std"), ("none", "std_about_baseline")],
)  # fmt: skip
def test_the_reference_reads_no_value(baseline: str, scale: str) -> None:
    ids = torch.empty(3, dtype=torch.int64, device="meta")
    rule = Rule(baseline, scale, 1, 0.0, "raw")
    assert group_advantages_reference(META, ids, 2, rule, ids, ids.bool()).shape == (3,)


@pytest.mark.parametrize(
    ("error", "match", "changed"),
    [
        (TypeError, "^group_advantages: scores must be a tensor, got list", {"scores": [1.0]}),
        (TypeError, "scores must be float32 or float64, got int64", {"scores": IDS}),
        (ValueError, r"scores must have 1 dim.*\[1, 3\]", {"scores": SCORES[None]}),
        (ValueError, "no gradient flows to scores", {"scores": SCORES.clone().requires_grad_()}),
        (TypeError, "group_ids must be int32 or int64, got bool", {"group_ids": IDS.bool()}),
        (ValueError, r"each of 3 member\(s\), got shape \[2\]", {"group_ids": IDS[1:]}),
        (ValueError, "group_ids is on meta", {"group_ids": IDS.to("meta")}),
        (TypeError, "num_groups must be an int, got 2.0", {"num_groups": 2.0}),
        (TypeError, "num_groups must be an int, got True", {"num_groups": True}),
        (ValueError, "num_groups must be in .*, got -1", {"num_groups": -1}),
        (ValueError, "num_groups must be in .*, got 4294967296", {"num_groups": 2**32}),
        (ValueError, "baseline must be one of 'mean', .*, got 'median'", {"baseline": "median"}),
        (ValueError, "scale must be one of 'std', .*, got None", {"scale": None}),
        (ValueError, "needs baseline='leave_one_out', got 'mean'", {"scale": "leave_one_out_std"}),
        (
            ValueError,
            "has no meaning with baseline='second_best'",
            {"scale": "std_about_baseline", "baseline": "second_best"},
        ),
        (ValueError, "singleton must be one of 'raw', 'zero', got 0", {"singleton": 0}),
        (TypeError, "ddof must be an int, got 1.0", {"ddof": 1.0}),
        (ValueError, "ddof must be in .*, got -1", {"ddof": -1}),
        (TypeError, "eps must be a number, got '1'", {"eps": "1"}),
        (ValueError, "eps must be finite and not negative, got -1", {"eps": -1}),
        (ValueError, "eps must be finite and not negative, got nan", {"eps": float("nan")}),
        (ValueError, "'length_weighted' needs lengths", {"baseline": "length_weighted"}),
        (ValueError, "lengths are for .*, got 'mean'", {"lengths": IDS}),
        (TypeError, "valid must be bool, got int64", {"valid": IDS}),
        (ValueError, r"valid must have one .*\[2\]", {"valid": IDS[1:].bool()}),
        (ValueError, "impl must be .*, got 'nonsense'", {"impl": "nonsense"}),
    ],
)
def test_wrong_input_is_named(error: type[Exception], match: str, changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"scores": SCORES, "group_ids": IDS, "num_groups": 2} | changed
    with pytest.raises(error, match=match):
        group_advantages(**arguments)


@pytest.mark.parametrize(
    ("error", "match", "lengths"),
    [
        (TypeError, "lengths must be int32 or .*, got bool", IDS.bool()),
        (ValueError, r"lengths must have one .*\[2\]", IDS[1:]),
        (ValueError, "lengths is on meta", IDS.to("meta")),
        (ValueError, "no gradient flows to lengths", SCORES.clone().requires_grad_()),
    ],
)
def test_wrong_lengths_are_named(error: type[Exception], match: str, lengths: Any) -> None:
    with pytest.raises(error, match=match):
        group_advantages(SCORES, IDS, num_groups=2, baseline="length_weighted", lengths=lengths)
