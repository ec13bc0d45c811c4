"""What `with_advantages` asks of the device beyond a pack: launches, of Triton and of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.kernels.test_launches import RecordedOps
from tests.packing.credit.credit_cases import (
    EVERY,
    OBSERVATIONS,
    given_beside,
    inputs_of,
    small_scans,
    some_trajectories,
)
from trajpack import GAE, GRPO, TurnGAE, TurnReturns, pack
from trajpack.kernels import validation
from trajpack.packing.credit import advantages as credit
from trajpack.packing.credit.advantages import chunks_of
from trajpack.packing.credit.estimators import KLPenalty

SCAN = ["effects_kernel", "scan_kernel"]
"""Of trajectories of more than 4,096 tokens; else it is one launch."""
WALK = ["scan_kernel"]
MEASURE = ["moments_kernel"]
WHITEN = ["whiten_kernel"]
"""Of more than 4,096 entries ``MEASURE`` comes before it."""
GROUP = ["scores_kernel", "group_advantages_kernel"]
SPREAD = ["spread_kernel"]
LAUNCHES = {
    "GAE": SCAN + MEASURE,
    **{f"GAE, {observation}": SCAN + MEASURE for observation in OBSERVATIONS[1:]},
    "GAE, whitened": SCAN + WHITEN,
    "TurnGAE": SCAN + SPREAD + MEASURE,
    "TurnGAE, whitened": SCAN + SPREAD + WHITEN,
    **{f"VTrace, {observation}": SCAN + MEASURE for observation in OBSERVATIONS},
    "ReinforcePlusPlus": SCAN + WHITEN,
    "TurnReturns": MEASURE + SPREAD + ["aten::diff"],
    "TurnReturns, whitened": WHITEN + SPREAD + ["aten::diff"],
    "reinforce_plus_plus_baseline": GROUP + WHITEN + SPREAD,
    "reinforce_plus_plus_baseline by n": GROUP + WHITEN + SPREAD,
    "GAE, whitened by n": SCAN + WHITEN,
    "TurnReturns, whitened by n": WHITEN + SPREAD + ["aten::diff"],
}
GROUPS = [
    "GRPO", "GRPO, zero", "GRPO, others", "GRPO, about others", "dr_grpo", "RLOO", "opo", "max_rl",
    "max_rl, signed", "gpg", "pass_at_k", "pass_at_k, std",
]  # fmt: skip
LAUNCHES |= dict.fromkeys(GROUPS, GROUP + MEASURE + SPREAD)
QUIET = {
    "aten::as_strided", "aten::detach", "aten::empty", "aten::empty_like", "aten::new_empty",
    "aten::expand", "aten::select", "aten::slice", "aten::unbind", "aten::view", "aten::alias",
    "aten::reshape", "aten::contiguous", "aten::resolve_conj", "aten::empty_strided",
    "aten::set_", "aten::unsqueeze", "aten::lift_fresh", "aten::view_as", "aten::t", "aten::zeros",
}  # fmt: skip
"""What launches nothing, and the counters of moments, which are made for many launches."""


@contextmanager
def unexecuted() -> Iterator[list[str]]:
    """Note the kernels that are launched, and let them do nothing."""
    from triton.runtime import driver

    executor = driver.active
    executor.launched.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "is_running", False)
        patch.setattr(validation, "HOSTS", ())  # tensors are taken for those of a device
        yield executor.launched


def torch_ops(profiled: profile) -> list[str]:
    """Return what torch did by itself, or inside an op of trajpack."""
    return [
        event.name
        for event in profiled.events()
        if event.name.startswith("aten::")
        and event.name not in QUIET
        and (event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::"))
    ]


def launches_of(estimator: Any, layout: Any = "merged", **more: Any) -> list[str]:
    """Return kernels and torch ops, each a launch where the batch lives on a device."""
    trajectories = some_trajectories(8)
    batch = pack(trajectories, layout, device="cpu")
    inputs = inputs_of(batch, estimator, given_beside(trajectories))
    with unexecuted() as launched, profile(activities=[ProfilerActivity.CPU]) as profiled:
        batch.with_advantages(estimator, impl="triton", **inputs, **more)
    assert launched, estimator
    return launched + torch_ops(profiled)


def test_states_of_steps_are_sorted_by_torch() -> None:
    with small_scans():
        launched = launches_of(EVERY["GiGPO"], "merged")
    kernels = [*GROUP, *2 * GROUP[1:], *MEASURE, *SPREAD]
    assert launched[: len(kernels)] == kernels
    assert len(launched) <= len(kernels) + 30


@pytest.mark.parametrize("layout", ["merged", "turns"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_an_estimator_takes_few_launches(name: str, layout: str) -> None:
    with small_scans():
        launched = launches_of(EVERY[name], layout)
    assert launched == LAUNCHES[name]
    assert len(launched) <= 4


@pytest.mark.parametrize("name", [name for name in LAUNCHES if LAUNCHES[name][:2] == SCAN])
def test_short_trajectories_are_scanned_in_one_launch(name: str) -> None:
    """The batch may be longer: the host knows the longest trajectory, also of a loaded batch."""
    estimator, trajectories = EVERY[name], some_trajectories(8)
    scanned = chunks_of(pack(trajectories, device="cpu"), estimator)
    bound = scanned.max_seqlen
    assert bound is not None
    assert bound < scanned.num_positions
    with small_scans(bound):
        launched = launches_of(estimator)
    assert launched == [*WALK, *LAUNCHES[name][2:]]
    assert len(launched) <= 3
    with small_scans(bound - 1):
        assert launches_of(estimator) == LAUNCHES[name]


def test_a_penalty_and_a_clip_add_no_launch_and_a_bootstrap_one() -> None:
    more = {"kl": KLPenalty(0.1), "reward_clip": 1.0, "truncated": "bootstrap"}
    with small_scans():
        launched = launches_of(dataclasses.replace(EVERY["GAE"], **more))
        assert launched == [*LAUNCHES["GAE"], "aten::where"]
        assert len(launches_of(GRPO(reward_clip=1.0))) == 4


MORE = {
    "groups, cut-off masked": (GRPO(truncated="mask"), 6),
    "turn returns, cut-off masked": (TurnReturns(truncated="mask"), 7),
    "a scan, cut-off masked": (GAE(truncated="mask"), 8),
    "turns, cut-off masked": (TurnGAE(truncated="mask"), 9),
}


@pytest.mark.parametrize("name", MORE)
def test_costlier_estimators_stay_within_their_launches(name: str) -> None:
    estimator, most = MORE[name]
    with small_scans():
        assert len(launches_of(estimator)) == most


def test_whitening_over_ranks_is_a_dozen_small_operations_more() -> None:
    with small_scans():
        launched = launches_of(EVERY["GAE, whitened"], all_reduce=lambda sums: sums)
    assert launched[:4] == [*SCAN, *MEASURE, *WHITEN]
    assert len(launched) <= 4 + 12


def test_a_launch_by_torch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = credit.scores_of_trajectories

    def adding(rewards: torch.Tensor, *rest: Any, **settings: Any) -> Any:
        return scores(rewards + 1, *rest, **settings)

    monkeypatch.setattr(credit, "scores_of_trajectories", adding)
    assert launches_of(GRPO()) == [*LAUNCHES["GRPO"], "aten::add"]


def test_with_advantages_on_meta_runs_only_own_ops() -> None:
    """A batch on the meta device, of which no op looks into another."""
    trajectories = some_trajectories(8)
    for name in LAUNCHES:
        batch = pack(trajectories, device="meta")
        host = pack(trajectories, device="cpu")
        inputs = inputs_of(host, EVERY[name], given_beside(trajectories))
        on_meta = {key: tensor.to("meta") for key, tensor in inputs.items()}
        with RecordedOps("meta") as recorded:
            batch.with_advantages(EVERY[name], impl="triton", **on_meta)
        launching = {op for op in recorded.counts if op.startswith("trajpack.")}
        quiet = {"aten.select.int", "aten.detach.default", "aten.slice.Tensor"}
        known = {"aten.sub.Tensor"} if "aten::diff" in LAUNCHES[name] else set()
        if name == "GiGPO":
            known |= {"aten.index.Tensor", "aten.mul.Tensor", "aten.add.Tensor"}
        assert set(recorded.counts) - launching - quiet == known, name
