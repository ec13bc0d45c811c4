"""Ages of tokens, masks and weights by age, one token at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trajpack.kernels.corrections.staleness import policy_age, staleness_mask, staleness_weights

CURRENT = 7
VERSIONS = torch.from_numpy(np.random.default_rng(0).integers(-1, CURRENT + 1, 200)).int()


@pytest.fixture(params=["number", "int32", "int64"])
def current(request: pytest.FixtureRequest) -> int | torch.Tensor:
    """The current version, in every form it may have."""
    if request.param == "number":
        return CURRENT
    return torch.tensor(CURRENT, dtype=getattr(torch, request.param))


def test_an_age_counts_versions(current: int | torch.Tensor) -> None:
    expected = [CURRENT - version if version >= 0 else 0 for version in VERSIONS.tolist()]
    found = policy_age(VERSIONS, current)
    assert found.dtype == torch.int32
    assert found.tolist() == expected


@pytest.mark.parametrize("max_age", [0, 1, 3, 100])
def test_the_mask_keeps_ages_up_to_the_limit(current: int | torch.Tensor, max_age: int) -> None:
    expected = [version >= 0 and CURRENT - version <= max_age for version in VERSIONS.tolist()]
    found = staleness_mask(VERSIONS, current, max_age)
    assert found.dtype == torch.bool
    assert found.tolist() == expected


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.5, 0, 1])
def test_weights_shrink_with_age(current: int | torch.Tensor, decay: float) -> None:
    expected = [
        decay ** (CURRENT - version) if version >= 0 else 0.0 for version in VERSIONS.tolist()
    ]
    found = staleness_weights(VERSIONS, current, decay=decay)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_later_versions_have_negative_ages_and_weight_1() -> None:
    versions = torch.tensor([9, 8, 7], dtype=torch.int32)
    assert policy_age(versions, CURRENT).tolist() == [-2, -1, 0]
    assert staleness_mask(versions, CURRENT, 0).tolist() == [True, True, True]
    assert staleness_weights(versions, CURRENT, decay=0.5).tolist() == [1.0, 1.0, 1.0]


def test_versions_may_be_large() -> None:
    versions = torch.tensor([0, 2**31 - 1, -1], dtype=torch.int32)
    assert policy_age(versions, 2**31 - 1).tolist() == [2**31 - 1, 0, 0]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("num", [0, 1, 5])
def test_shapes_alone_are_enough(num: int, device: str) -> None:
    versions = torch.zeros(num, dtype=torch.int32, device=device)
    for current in (3, torch.tensor(3, device=device)):
        for found, dtype in (
            (policy_age(versions, current), torch.int32),
            (staleness_mask(versions, current, 1), torch.bool),
            (staleness_weights(versions, current, decay=0.5), torch.float32),
        ):
            assert (found.shape, found.dtype, found.device.type) == ((num,), dtype, device)


V = VERSIONS[:3]


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "policy_versions must be a tensor, got list", ([1], 7)),
        (TypeError, "policy_versions must be int32, got int64", (V.long(), 7)),
        (ValueError, r"policy_versions must have 1 dim.*\[1, 3\]", (V[None], 7)),
        (TypeError, "current_version must be an int, got 7.0", (V, 7.0)),
        (TypeError, "current_version must be an int, got True", (V, True)),
        (ValueError, r"current_version must be in \[0, 2147483647\], got -1", (V, -1)),
        (ValueError, r"current_version must be in \[0, 2147483647\], got 2147483648", (V, 2**31)),
        (TypeError, "current_version must be int32 or int64, got float32", (V, torch.tensor(7.0))),
        (ValueError, "current_version must have 0 dim", (V, torch.tensor([7]))),
        (ValueError, "current_version is on meta but", (V, torch.tensor(7, device="meta"))),
    ],
)
def test_wrong_input_is_named(
    error: type[Exception], match: str, arguments: tuple[Any, Any]
) -> None:
    with pytest.raises(error, match=f"^policy_age: {match}"):
        policy_age(*arguments)
    with pytest.raises(error, match=f"^staleness_mask: {match}"):
        staleness_mask(*arguments, 1)
    with pytest.raises(error, match=f"^staleness_weights: {match}"):
        staleness_weights(*arguments, decay=0.5)


def test_a_wrong_limit_is_named() -> None:
    with pytest.raises(TypeError, match=r"^staleness_mask: max_age must be an int, got 1\.5"):
        staleness_mask(V, 7, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_age must not be negative, got -1"):
        staleness_mask(V, 7, -1)
    with pytest.raises(TypeError, match=r"^staleness_weights: decay must be a number, got None"):
        staleness_weights(V, 7, decay=None)  # type: ignore[arg-type]
    for decay in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="decay must be not negative and at most 1, got"):
            staleness_weights(V, 7, decay=decay)
