"""Recipes of group advantages: numbers to check by hand; pairs of a group and a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from trajpack.kernels import group_advantages
from trajpack.kernels.groups.group_advantages import RECIPES, number_pairs

SCORES = torch.tensor([2.0, 1.0, 0.0, 1.0, 3.0, 3.0, 1.0, 4.0, -1.0, -3.0])
GROUPS = torch.tensor([0, 2, 0, 2, 3, 3, 3, 1, 4, 4])
LENGTHS = torch.tensor([10, 1, 30, 1, 1, 1, 2, 5, 1, 3])
HALF = 0.5**0.5
THIRD = 1 / 3**0.5
BY_HAND = {
    "grpo": [HALF, 0, -HALF, 0, THIRD, THIRD, -2 * THIRD, 4, HALF, -HALF],
    "dr_grpo": [1, 0, -1, 0, 2 / 3, 2 / 3, -4 / 3, 4, 1, -1],
    "rloo": [2, 0, -2, 0, 1, 1, -2, 4, 2, -2],
    "opo": [1.5, 0, -0.5, 0, 1, 1, -1, 4, 1.5, -0.5],
    "reinforce_plus_plus_baseline": [1, 0, -1, 0, 2 / 3, 2 / 3, -4 / 3, 4, 1, -1],
    "max_rl": [1, 0, -1, 0, 2 / 7, 2 / 7, -4 / 7, 0, 0, 0],
    "gpg": [10 / 9, 0, -10 / 9, 0, 20 / 27, 20 / 27, -40 / 27, 40 / 9, 10 / 9, -10 / 9],
    "pass_at_k": [2, 0, 0, 0, 0, 0, 0, 0, 2, 0],
}
OF_TWO = {
    "grpo": [HALF, -HALF],
    "rloo": [2, -2],
    "opo": [3 - 5 / 3, 1 - 5 / 3],
    "max_rl": [0.5, -0.5],
    "gpg": [10 / 9, -10 / 9],
    "pass_at_k": [2, 0],
}
"""The group of three without its second member; that of others is 1 and -1."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_small_batch_by_hand(impl: Any, recipe: Any) -> None:
    expected = BY_HAND[recipe]

    def near(expected: list[float], **options: Any) -> None:
        lengths = LENGTHS if recipe == "opo" else None
        found = group_advantages(
            SCORES, GROUPS, recipe, num_groups=5, lengths=lengths, impl=impl, **options
        )
        torch.testing.assert_close(found, torch.tensor(expected).float(), rtol=2e-6, atol=1e-6)

    near(expected)
    alone = SCORES[7].item() * (10 / 9 if recipe == "gpg" else 1)
    near([*expected[:7], 0, *expected[8:]], singleton="zero")
    if recipe != "pass_at_k":
        near([*expected[:7], alone, *expected[8:]], singleton="raw")
    factor = (9 / 8) / (10 / 9) if recipe == "gpg" else 1  # one member less counts
    first, last = OF_TWO.get(recipe, [1, -1])
    fewer = [*expected[:4], first, 0, last, *expected[7:]]
    near([factor * value for value in fewer], valid=torch.arange(10) != 5)


@pytest.mark.parametrize(
    ("recipe", "options", "scores", "expected"),
    [
        ("gpg", {}, [0.0, 0.0, 0.0], [0, 0, 0]),
        ("grpo", {"eps": 2.0}, [0.0, 2.0], [-1 / (2 + 2**0.5), 1 / (2 + 2**0.5)]),
        ("pass_at_k", {"scale": "std", "eps": 0.5}, [3.0, 1.0, -1.0], [2 / 2.5, 0, 0]),
        ("max_rl", {"scale": "signed_mean", "eps": 1.0}, [-4.0, -2.0], [0.5, -0.5]),
    ],
)
def test_options_change_a_recipe(
    impl: Any, recipe: Any, options: dict[str, Any], scores: list[float], expected: list[float]
) -> None:
    ids = torch.zeros(len(scores), dtype=torch.int32)
    found = group_advantages(torch.tensor(scores), ids, recipe, num_groups=1, impl=impl, **options)
    torch.testing.assert_close(found, torch.tensor(expected).float(), rtol=2e-6, atol=1e-6)


IDS = st.sampled_from([-(2**63), -1, 0, 1, 2, 2**31, 2**32 + 1, 2**63 - 1])


@given(st.lists(st.tuples(IDS, IDS), max_size=30))
@settings(max_examples=50)
def test_pairs_are_numbered_in_ascending_order(pairs: list[tuple[int, int]]) -> None:
    ids = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    places = {pair: place for place, pair in enumerate(sorted(set(pairs)))}
    expected = [places[pair] if pair[1] >= 0 else -1 for pair in pairs]
    assert number_pairs(ids[:, 0], ids[:, 1]).tolist() == expected
