"""What `importance_weights` and its rules refuse, and what the named rules are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trajpack.kernels.corrections.importance_weights import (
    Correction,
    Rejection,
    importance_weights,
)
from trajpack.testing import boundaries

X, M, CU = torch.zeros(3), torch.ones(3, dtype=torch.bool), boundaries([2, 1])
TIS, MIS = Correction.tis(), Correction.mis()


@pytest.mark.parametrize(
    ("error", "match", "arguments", "options"),
    [
        (TypeError, "^importance_weights: logprobs must be a tensor, got", ([0.0], X, M, TIS), {}),
        (TypeError, "logprobs must be float32 or float64, got int64", (X.long(), X, M, TIS), {}),
        (TypeError, "rollout_logprobs must be float32 or", (X, X.half(), M, TIS), {}),
        (ValueError, r"each of 3 token\(s\), got shape \[2\]", (X, X[:2], M, TIS), {}),
        (ValueError, "rollout_logprobs is on meta", (X, X.to("meta"), M, TIS), {}),
        (TypeError, "loss_mask must be bool, got float32", (X, X, X, TIS), {}),
        (ValueError, r"loss_mask must have one entry .*\[2\]", (X, X, M[:2], TIS), {}),
        (TypeError, "correction must be a Correction, got 'tis'", (X, X, M, "tis"), {}),
        (ValueError, "a level of segments needs segments, got Corr", (X, X, M, MIS), {}),
        (TypeError, "segments must be int32, got", (X, X, M, MIS), {"segments": CU.long()}),
        (TypeError, "segments must be a tensor, got", (X, X, M, MIS), {"segments": [0, 3]}),
        (ValueError, "boundaries, got none", (X, X, M, MIS), {"segments": CU[:0]}),
        (ValueError, r"or spans .*\[1, 3\]", (X, X, M, MIS), {"segments": CU[None]}),
        (ValueError, "segments must have 1 dim", (X, X, M, MIS), {"segments": CU[None, None]}),
        (ValueError, "segments is on meta", (X, X, M, MIS), {"segments": CU.to("meta")}),
        (
            TypeError,
            "segment_ids must be int32 or int64, got float32",
            (X, X, M, MIS),
            {"segments": CU, "segment_ids": X},
        ),
        (
            ValueError,
            "segment_ids must have one entry",
            (X, X, M, MIS),
            {"segments": CU, "segment_ids": CU[:2]},
        ),
    ],
)
def test_wrong_input_is_named(
    error: type[Exception], match: str, arguments: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        importance_weights(*arguments, **options)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (
            ValueError,
            "^Correction: level must be one of 'token', 's.*, got 'turn'",
            {"level": "turn"},
        ),
        (ValueError, "outside must be one of 'truncate', .*, got 'drop'", {"outside": "drop"}),
        (ValueError, "0 <= low <= high, got low=2.0 and high=1.0", {"low": 2.0, "high": 1.0}),
        (ValueError, "0 <= low <= high, got low=-1 ", {"low": -1}),
        (ValueError, "high must be a number that is not NaN, got nan", {"high": math.nan}),
        (ValueError, "0 <= low <= high, got .* high=0", {"high": 0}),
        (TypeError, "high must be a number, got '2'", {"high": "2"}),
        (TypeError, "low must be a number, got True", {"low": True}),
        (TypeError, "normalize must be a bool, got 1", {"normalize": 1}),
        (TypeError, "rejection must be a Rejection or None, got 2.0", {"rejection": 2.0}),
    ],
)
def test_a_wrong_rule_is_named(error: type[Exception], match: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        Correction(**options)


def test_a_rejection_needs_a_level_to_look_at() -> None:
    with pytest.raises(ValueError, match=r"^Rejection: level must be one of .*, got 'none'"):
        Rejection(level="none")


def test_named_rules_say_what_they_do() -> None:
    assert Correction.tis(3.0, "segment") == Correction("segment", "truncate", 0.0, 3.0)
    assert Correction.icepop() == Correction("token", "mask", 0.5, 5.0)
    assert Correction.mis(0.5, 2.0, "geometric") == Correction("geometric", "mask", 0.5, 2.0)
    assert len({Correction.tis(), Correction.tis(), Correction.mis()}) == 2


@pytest.mark.parametrize(
    ("needs", "rule"),
    [
        (False, Correction()),
        (False, Correction(rejection=Rejection(0.5, 2.0, "token"))),
        (True, Correction(level="none", rejection=Rejection())),
        (True, Correction(level="segment")),
        (True, Correction(level="geometric", rejection=Rejection(level="token"))),
    ],
    ids=str,
)
def test_a_rule_knows_whether_it_needs_segments(needs: bool, rule: Correction) -> None:
    assert rule.needs_segments is needs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0.5, 4.0), (0.25, 2.0)),
        ((), (0.0, math.inf)),
        ((0.0, 2.0), (0.5, math.inf)),
        ((0.5,), (0.0, 2.0)),
        ((1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_a_window_of_the_inverse_ratio_is_one_of_the_ratio(given: Any, expected: Any) -> None:
    for level in ("token", "segment", "geometric"):
        found = Rejection.of_inverse(*given, level=level)  # type: ignore[arg-type]
        assert found == Rejection(*expected, level=level)  # type: ignore[arg-type]


def test_a_wrong_window_of_the_inverse_ratio_is_named() -> None:
    with pytest.raises(ValueError, match=r"0 <= low <= high, got low=2.0 and high=1.0"):
        Rejection.of_inverse(2.0, 1.0)
    with pytest.raises(TypeError, match="low must be a number, got '1'"):
        Rejection.of_inverse("1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Rejection: level must be one of .*, got 'none'"):
        Rejection.of_inverse(0.5, 2.0, "none")
