"""Group advantages by name and by step: numbers to check by hand, and a loop over pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.ptx.executor import on_executor
from trajpack.kernels import group_advantages
from trajpack.kernels.groups.group_recipes import (
    dr_grpo,
    gpg,
    grpo,
    grpo_pass_at_k,
    max_rl,
    number_pairs,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
    step_advantages,
)
from trajpack.testing import assert_same_bits

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


"""Step groups: pairs numbered without being dense, and advantages against a loop over pairs."""

IDS = st.sampled_from([-(2**63), -1, 0, 1, 2, 2**31, 2**32 + 1, 2**63 - 1])


def random_steps(num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores, tasks and states of steps; tasks are any numbers, some states are none."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal(num).astype(np.float32)
    tasks = rng.choice(np.array([-(2**63), -5, 0, 2**40, 2**63 - 1]), num)
    states = rng.choice(np.array([-7, -1, 0, 1, 2**32, 2**62, 2**63 - 1]), num)
    return torch.from_numpy(scores), torch.from_numpy(tasks), torch.from_numpy(states)


def steps_by_loop(
    scores: torch.Tensor, tasks: torch.Tensor, states: torch.Tensor, scale: str, eps: float
) -> torch.Tensor:
    groups: dict[tuple[int, int], list[int]] = {}
    for step, pair in enumerate(zip(tasks.tolist(), states.tolist(), strict=True)):
        if pair[1] >= 0:
            groups.setdefault(pair, []).append(step)
    out = np.zeros(len(scores))
    for steps in groups.values():
        r = scores.numpy()[steps].astype(np.float64)
        if len(r) > 1 and r.max() > r.min():
            out[steps] = (r - r.mean()) / (r.std(ddof=1) + eps if scale == "std" else 1)
    return torch.from_numpy(out)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("num", [0, 1, 2, 17, 65, 200])
def test_it_equals_a_loop_over_pairs(impl: Any, num: int, scale: Any) -> None:
    steps = random_steps(num, seed=num)
    found = step_advantages(*steps, scale=scale, eps=1e-3, impl=impl)
    expected = steps_by_loop(*steps, scale, 1e-3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)


def test_two_trajectories_by_hand(impl: Any) -> None:
    """Both begin in state 4; the first comes back to it; only they were in their other states."""
    states = torch.tensor([4, 6, 4, 4, 5], dtype=torch.int32)
    tasks = torch.zeros(5, dtype=torch.int32)
    scores = torch.tensor([1.0, 2.0, 4.0, 7.0, 8.0])
    found = step_advantages(scores, tasks, states, scale="none", impl=impl)
    assert found.tolist() == [-3, 0, 0, 3, 0]
    found = step_advantages(scores, tasks, states, scale="none", singleton="raw", impl=impl)
    assert found.tolist() == [-3, 2, 0, 3, 8]


def test_a_step_that_is_not_valid_counts_nowhere(impl: Any) -> None:
    scores, tasks = torch.tensor([1.0, torch.nan, 5.0]), torch.zeros(3, dtype=torch.int64)
    valid = torch.tensor([True, False, True])
    found = step_advantages(scores, tasks, tasks, scale="none", valid=valid, impl=impl)
    assert found.tolist() == [-2, 0, 2]


@given(st.lists(st.tuples(IDS, IDS), max_size=30))
@settings(max_examples=50)
def test_pairs_are_numbered_in_ascending_order(pairs: list[tuple[int, int]]) -> None:
    ids = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    places = {pair: place for place, pair in enumerate(sorted(set(pairs)))}
    expected = [places[pair] if pair[1] >= 0 else -1 for pair in pairs]
    assert number_pairs(ids[:, 0], ids[:, 1]).tolist() == expected


def test_order_of_the_steps_changes_no_bit(impl: Any) -> None:
    scores, tasks, states = random_steps(90, seed=8)
    scores = (scores * 256).round() / 256
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    found = step_advantages(scores, tasks, states, impl=impl)
    mixed = step_advantages(scores[order], tasks[order], states[order], impl=impl)
    assert_same_bits(mixed, found[order])


def test_twenty_orders_of_programs_give_the_same_bits() -> None:
    scores, tasks, states = random_steps(500, seed=4)
    ids = tasks.clamp(0, 3).int()
    found = []
    for order in range(20):
        with on_executor(order=order):
            of_groups = group_advantages(scores, ids, num_groups=4, impl="triton")
            found.append(
                torch.stack([of_groups, step_advantages(scores, tasks, states, impl="triton")])
            )
    for again in found[1:]:
        assert_same_bits(again, found[0])


@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
def test_no_value_is_read(impl: Any) -> None:
    ids = torch.empty(7, dtype=torch.int64, device="meta")
    found = step_advantages(torch.empty(7, device="meta"), ids, ids, valid=ids.bool(), impl=impl)
    assert (found.shape, found.dtype, found.device.type) == ((7,), torch.float32, "meta")


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(dynamic: bool) -> None:
    compiled = torch.compile(step_advantages, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for num in (9, 12):
        assert_same_bits(compiled(*random_steps(num)), step_advantages(*random_steps(num)))


ONES = torch.ones(3)
TASKS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "match", "arguments", "options"),
    [
        (TypeError, "^step_advantages: step_scores must be a tensor", ([1.0], TASKS, TASKS), {}),
        (TypeError, "step_scores must be float32 or float64", (TASKS, TASKS, TASKS), {}),
        (TypeError, "task_ids must be int32 or int64, got float32", (ONES, ONES, TASKS), {}),
        (TypeError, "state_ids must be int32 or int64, got bool", (ONES, TASKS, ONES.bool()), {}),
        (
            ValueError,
            r"state_ids must have one .* 3 step\(s\).*\[2\]",
            (ONES, TASKS, TASKS[1:]),
            {},
        ),
        (ValueError, "task_ids is on meta", (ONES, TASKS.to("meta"), TASKS), {}),
        (
            ValueError,
            "scale must be one of 'std', 'none', got 'mean'",
            (ONES, TASKS, TASKS),
            {"scale": "mean"},
        ),
        (ValueError, "impl must be", (ONES, TASKS, TASKS), {"impl": "numpy"}),
    ],
)
def test_wrong_input_is_named(error: Any, match: str, arguments: Any, options: Any) -> None:
    with pytest.raises(error, match=match):
        step_advantages(*arguments, **options)
