"""What `loss_weights` and `loss_denominator` refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trajpack.kernels.corrections.loss_weights import loss_denominator, loss_weights

M, IDS, GROUPS = torch.ones(3, dtype=torch.bool), torch.zeros(3).int(), torch.zeros(2).int()
GIVEN = {"sequence_ids": IDS, "num_sequences": 2, "group_ids": GROUPS, "num_groups": 1}

REFUSED: list[tuple[type[Exception], str, str, Any, dict[str, Any]]] = [
    (ValueError, "aggregation must be one of 'token_mean', .*got 'sum'", "sum", M, {}),
    (TypeError, "loss_mask must be a tensor, got list", "token_mean", [True], {}),
    (TypeError, "loss_mask must be bool, got int32", "token_mean", M.int(), {}),
    (ValueError, r"loss_mask must have 1 dim.*\[1, 3\]", "token_mean", M[None], {}),
    (
        ValueError,
        "aggregation='sequence_mean_token_sum' needs sequence_ids and num_sequences",
        "sequence_mean_token_sum",
        M,
        {"num_sequences": None},
    ),
    (
        ValueError,
        "needs sequence_ids and num_s",
        "sequence_mean_token_mean",
        M,
        {"sequence_ids": None},
    ),
    (
        ValueError,
        "aggregation='prompt_mean' needs group_ids and num_groups",
        "prompt_mean",
        M,
        {"group_ids": None},
    ),
    (ValueError, "needs group_ids and num_groups", "prompt_mean", M, {"num_groups": None}),
    (TypeError, "sequence_ids must be int32 or int64", "prompt_mean", M, {"sequence_ids": M}),
    (
        ValueError,
        r"sequence_ids must have one entry for each of 3 token\(s\), got shape \[2\]",
        "sequence_mean_token_sum",
        M,
        {"sequence_ids": IDS[:2]},
    ),
    (ValueError, "sequence_ids is on meta", "prompt_mean", M, {"sequence_ids": IDS.to("meta")}),
    (TypeError, "num_sequences must be an int, got 2.0", "prompt_mean", M, {"num_sequences": 2.0}),
    (ValueError, "num_sequences must not be negative", "prompt_mean", M, {"num_sequences": -1}),
    (TypeError, "group_ids must be a tensor, got list", "prompt_mean", M, {"group_ids": [0, 0]}),
    (
        ValueError,
        r"group_ids must have one entry for each of 2 sequence\(s\), got shape \[3\]",
        "prompt_mean",
        M,
        {"group_ids": IDS},
    ),
    (TypeError, "num_groups must be an int, got True", "prompt_mean", M, {"num_groups": True}),
]


@pytest.mark.parametrize(("error", "match", "aggregation", "mask", "options"), REFUSED)
def test_wrong_input_is_named(
    error: type[Exception], match: str, aggregation: Any, mask: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=f"^loss_weights: .*{match}"):
        loss_weights(aggregation, mask, **(GIVEN | options))
    with pytest.raises(error, match=f"^loss_denominator: .*{match}"):
        loss_denominator(aggregation, mask, **(GIVEN | options))


@pytest.mark.parametrize(
    ("error", "match", "denominator"),
    [
        (TypeError, "denominator must be a number, got '3'", "3"),
        (TypeError, "denominator must be a number, got True", True),
        (ValueError, "denominator must be finite and above 0, got 0", 0),
        (ValueError, "denominator must be finite and above 0, got nan", math.nan),
        (TypeError, "denominator must be int32 or .*, got bool", torch.tensor(True)),
        (ValueError, r"denominator must have 0 dim.*\[1\]", torch.tensor([3])),
        (ValueError, "denominator is on meta", torch.tensor(3, device="meta")),
        (ValueError, "no gradient flows to denom", torch.tensor(3.0, requires_grad=True)),
    ],
)
def test_a_wrong_denominator_is_named(error: type[Exception], match: str, denominator: Any) -> None:
    with pytest.raises(error, match=f"^loss_weights: {match}"):
        loss_weights("token_mean", M, denominator=denominator)


def test_a_constant_is_given_and_not_counted() -> None:
    with pytest.raises(
        ValueError, match=r"^loss_weights: aggregation='constant' needs denominator"
    ):
        loss_weights("constant", M)
    with pytest.raises(ValueError, match=r"^loss_denominator: aggregation='constant' has the"):
        loss_denominator("constant", M)
