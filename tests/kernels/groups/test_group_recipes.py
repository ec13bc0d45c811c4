"""Group advantages by name: numbers to check by hand, and what each recipe fixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trajpack.kernels.groups.group_recipes import (
    dr_grpo,
    gpg,
    grpo,
    grpo_pass_at_k,
    max_rl,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)

SCORES = torch.tensor([2.0, 1.0, 0.0, 1.0, 3.0, 3.0, 1.0, 4.0, -1.0, -3.0])
GROUPS = torch.tensor([0, 2, 0, 2, 3, 3, 3, 1, 4, 4])
LENGTHS = torch.tensor([10, 1, 30, 1, 1, 1, 2, 5, 1, 3])
HALF = 0.5**0.5
THIRD = 1 / 3**0.5

BY_HAND = {
    grpo: [HALF, 0, -HALF, 0, THIRD, THIRD, -2 * THIRD, 4, HALF, -HALF],
    dr_grpo: [1, 0, -1, 0, 2 / 3, 2 / 3, -4 / 3, 4, 1, -1],
    rloo: [2, 0, -2, 0, 1, 1, -2, 4, 2, -2],
    opo: [1.5, 0, -0.5, 0, 1, 1, -1, 4, 1.5, -0.5],
    reinforce_plus_plus_baseline: [1, 0, -1, 0, 2 / 3, 2 / 3, -4 / 3, 4, 1, -1],
    max_rl: [1, 0, -1, 0, 2 / 7, 2 / 7, -4 / 7, 0, 0, 0],
    gpg: [10 / 9, 0, -10 / 9, 0, 20 / 27, 20 / 27, -40 / 27, 40 / 9, 10 / 9, -10 / 9],
    grpo_pass_at_k: [2, 0, 0, 0, 0, 0, 0, 0, 2, 0],
}
OF_ONE = {recipe: 0.0 if recipe is max_rl else 4.0 for recipe in BY_HAND if recipe != gpg}
OF_ONE |= {gpg: 40 / 9, grpo_pass_at_k: 0.0}
WITH_SINGLETON = [recipe for recipe in BY_HAND if recipe is not grpo_pass_at_k]


def call(recipe: Any, **options: Any) -> torch.Tensor:
    lengths = (LENGTHS,) if recipe is opo else ()
    result: torch.Tensor = recipe(SCORES, GROUPS, *lengths, num_groups=5, **options)
    return result


def near(found: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected).float(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("recipe", BY_HAND, ids=lambda recipe: recipe.__name__)
def test_a_small_batch_by_hand(impl: Any, recipe: Any) -> None:
    near(call(recipe, impl=impl), BY_HAND[recipe])


@pytest.mark.parametrize("recipe", BY_HAND, ids=lambda recipe: recipe.__name__)
def test_the_group_of_one_is_as_the_source_has_it(impl: Any, recipe: Any) -> None:
    near(call(recipe, impl=impl)[7:8], [OF_ONE[recipe]])


@pytest.mark.parametrize("recipe", WITH_SINGLETON, ids=lambda recipe: recipe.__name__)
def test_the_group_of_one_may_be_chosen(impl: Any, recipe: Any) -> None:
    alpha = 10 / 9 if recipe is gpg else 1
    near(
        call(recipe, impl=impl, singleton="raw"),
        [*BY_HAND[recipe][:7], 4 * alpha, *BY_HAND[recipe][8:]],
    )
    near(call(recipe, impl=impl, singleton="zero"), [*BY_HAND[recipe][:7], 0, *BY_HAND[recipe][8:]])


@pytest.mark.parametrize("recipe", BY_HAND, ids=lambda recipe: recipe.__name__)
def test_members_that_are_not_valid_are_left_out(impl: Any, recipe: Any) -> None:
    """Without the sixth member its group is one of two; gpg counts one member less."""
    valid = torch.arange(10) != 5
    alpha = (9 / 8) / (10 / 9) if recipe is gpg else 1
    of_two = {
        grpo: [HALF, -HALF],
        rloo: [2, -2],
        opo: [3 - 5 / 3, 1 - 5 / 3],
        max_rl: [0.5, -0.5],
        gpg: [10 / 9, -10 / 9],
        grpo_pass_at_k: [2, 0],
    }.get(recipe, [1, -1])
    expected = [*BY_HAND[recipe][:4], of_two[0], 0, of_two[1], *BY_HAND[recipe][7:]]
    near(call(recipe, impl=impl, valid=valid), [alpha * value for value in expected])


def test_gpg_of_a_batch_without_rewards_is_zero(impl: Any) -> None:
    found = gpg(torch.zeros(4), torch.tensor([0, 0, 1, 2]), num_groups=3, impl=impl)
    assert found.tolist() == [0, 0, 0, 0]


def test_pass_at_k_may_be_divided_by_the_deviation(impl: Any) -> None:
    scores = torch.tensor([3.0, 1.0, -1.0, 5.0, 5.0])
    ids = torch.tensor([0, 0, 0, 1, 1])
    found = grpo_pass_at_k(scores, ids, num_groups=2, scale="std", eps=0.5, impl=impl)
    near(found, [2 / 2.5, 0, 0, 0, 0])


def test_eps_reaches_the_divisor(impl: Any) -> None:
    found = grpo(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), num_groups=1, eps=2.0, impl=impl)
    near(found, [-1 / (2 + 2**0.5), 1 / (2 + 2**0.5)])
