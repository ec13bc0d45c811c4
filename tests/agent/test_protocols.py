from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trajpack.agent.protocols import SamplingParams


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_new_tokens", 0), ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)],
)
def test_sampling_out_of_range_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} must be .*, got {value}"):
        SamplingParams(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("max_new_tokens", "5", TypeError),
        ("top_k", 1.5, TypeError),
        ("temperature", None, TypeError),
        ("top_p", "x", TypeError),
        ("stop", "</search>", TypeError),
        ("stop", None, TypeError),
        ("stop", (b"a",), TypeError),
        ("stop", ("a", ""), ValueError),
        ("stop_token_ids", 5, TypeError),
        ("stop_token_ids", (1.5,), TypeError),
        ("stop_token_ids", (True,), TypeError),
        ("stop_token_ids", (-1,), ValueError),
        ("stop_token_ids", (2**31,), ValueError),
    ],
)
def test_values_of_the_wrong_kind_are_refused(
    option: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"{option} must "):
        SamplingParams(**{option: value})


def test_ends_may_come_as_lists() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=np.array([3, 4]))  # type: ignore[arg-type]
    assert params == SamplingParams(stop=("a", "b"), stop_token_ids=(3, 4))
    assert hash(params) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=(3, 4)))
