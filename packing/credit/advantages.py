"""From rewards to advantages: what an estimator makes of a packed batch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trajpack.kernels.credit.credit_of_turns import TokenInputs, credit_of_turns
from trajpack.kernels.credit.scores import Scores, scores_of_trajectories
from trajpack.kernels.credit.spread import (
    TokenSpread,
    finish_spread,
    spread_of_trajectories,
    spread_of_turns,
)
from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.groups import group_recipes
from trajpack.kernels.groups.group_advantages import group_advantages
from trajpack.kernels.groups.step_groups import step_advantages
from trajpack.kernels.reduce.moments import masked_moments, moment_sums
from trajpack.kernels.reduce.whiten import whiten, whiten_with_moments
from trajpack.packing.credit import estimators, group_estimators
from trajpack.packing.credit.inputs import (
    OP,
    Inputs,
    checked_inputs,
    chunks_of,
    conventions_of,
    num_groups_of,
    turns_of,
)

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch

METRICS = (
    "advantage_count",
    "advantage_mean",
    "advantage_squared_deviations",
    "advantage_min",
    "advantage_max",
)
"""What `PackedBatch.metrics` has after `with_advantages`: of the advantages of tokens that count,
before they are whitened. The first three of several batches can be merged, by Chan's formula."""


class Credit(NamedTuple):
    """What an estimator gives."""

    advantages: torch.Tensor
    returns: torch.Tensor
    moments: torch.Tensor


AllReduce = Callable[[torch.Tensor], object]
BASES = (estimators.Estimator, estimators.TokenEstimator, group_estimators.GroupEstimator)
"""What estimators have in common, and no estimators themselves."""


def with_advantages(
    batch: PackedBatch,
    estimator: estimators.Estimator,
    inputs: Inputs,
    all_reduce: AllReduce | None,
    impl: Impl,
) -> PackedBatch:
    """Do what `PackedBatch.with_advantages` says."""
    if not isinstance(estimator, estimators.Estimator) or type(estimator) in BASES:
        raise TypeError(f"{OP}: estimator must be an Estimator, got {estimator!r}")
    inputs = checked_inputs(batch, estimator, inputs)
    chosen = resolve_impl(OP, impl, batch.input_ids)
    if isinstance(estimator, estimators.TokenEstimator):
        credit = _of_tokens(batch, estimator, inputs, all_reduce, chosen)
    elif isinstance(estimator, group_estimators.GroupEstimator):
        _warn_of_singletons(batch, estimator)
        credit = _of_groups(batch, estimator, inputs, all_reduce, chosen)
    elif isinstance(estimator, estimators.TurnReturns):
        credit = _of_turn_returns(batch, estimator, all_reduce, chosen)
    else:
        raise TypeError(f"{OP}: estimator must be one of trajpack's, got {estimator!r}")
    return dataclasses.replace(
        batch,
        advantages=credit.advantages,
        returns=credit.returns,
        metrics=credit.moments,
        metric_names=METRICS,
    )


def _of_tokens(
    batch: PackedBatch,
    estimator: estimators.TokenEstimator,
    inputs: Inputs,
    all_reduce: AllReduce | None,
    impl: str,
) -> Credit:
    """Walk the tokens of each trajectory from its end."""
    conventions = conventions_of(estimator)
    sampled = batch.rollout_logprobs if inputs.logprobs is None else inputs.logprobs
    by_weight = isinstance(estimator, estimators.VTrace)
    given = TokenInputs(
        values=inputs.values if hasattr(estimator, "lam") else None,
        bootstrap=inputs.bootstrap,
        weights=(sampled, batch.rollout_logprobs) if by_weight else None,
        kl=None if inputs.ref_logprobs is None else (sampled, inputs.ref_logprobs),
    )
    chunks, num_positions = chunks_of(batch, estimator)
    advantages, returns = credit_of_turns(
        chunks,
        batch.cu_turns,
        batch.turn_ids,
        inputs=given,
        conventions=conventions,
        num_positions=num_positions,
        impl=impl,
    )
    counted = _counted(batch, estimator, impl)
    if conventions.by_turn:
        spread = spread_of_turns(turns_of(batch), advantages, returns, impl)
        returns = spread.others
        if counted is None and all_reduce is None:
            advantages, moments = finish_spread(spread, batch.loss_mask, estimator.whitening, impl)
            return Credit(advantages, returns, moments)
        advantages = spread.rows
    if counted is not None:
        advantages = torch.where(counted, advantages, 0.0)
    found = advantages, returns, batch.loss_mask
    return _finish(found, counted, estimator.whitening, all_reduce, impl)


def _warn_of_singletons(batch: PackedBatch, estimator: group_estimators.GroupEstimator) -> None:
    """Warn where no trajectory has another one to be compared with; the host knows the groups."""
    num_trajectories = len(batch.groups)  # without the padding of a `StaticBatch`
    if num_trajectories < 2 or batch.num_groups < num_trajectories:
        return
    unnamed = [
        task for group, task in zip(batch.groups, batch.task_ids, strict=True) if group is None
    ]
    tasks = [task for task in unnamed if task is not None]
    if len(set(tasks)) < len(tasks):
        remedy = "pass group=... to Trajectory; several have the same task_id and no group"
    elif unnamed:
        remedy = "pass group=... to Trajectory, the same for all trajectories of a task"
    else:
        remedy = "all of Trajectory.group differ; name them alike within a task"
    warnings.warn(
        f"{OP}: every group has one member, so {estimator.name} compares nothing: {remedy}",
        stacklevel=4,  # the caller of PackedBatch.with_advantages
    )


def _of_groups(
    batch: PackedBatch,
    estimator: group_estimators.GroupEstimator,
    inputs: Inputs,
    all_reduce: AllReduce | None,
    impl: str,
) -> Credit:
    """Compare the trajectories of each group."""
    clip = float("inf") if estimator.reward_clip is None else float(estimator.reward_clip)
    drops = estimator.truncated == "mask"
    members = _members(batch, impl, clip)
    if inputs.scores is not None:
        members = members._replace(scores=inputs.scores.double().clamp(-clip, clip))
    rows = _group_advantages(batch, estimator, members, impl)
    steps, weight = None, 0.0
    if isinstance(estimator, group_estimators.GPG) and all_reduce is not None:
        raise ValueError(f"{OP}: GPG takes no all_reduce: its factor counts this batch alone")
    if isinstance(estimator, group_estimators.GiGPO):
        steps, weight = _step_advantages(batch, estimator, inputs, impl), estimator.step_weight
    spread = spread_of_trajectories(turns_of(batch), rows, steps, weight=weight, impl=impl)
    fresh = batch.advantages is None
    returns = batch.returns if fresh else _turn_returns(batch, impl).rows
    whitening = estimator.whitening
    counted = _counted(batch, estimator, impl, members) if drops else None
    if counted is None and (all_reduce is None or whitening is None):
        advantages, moments = finish_spread(spread, batch.loss_mask, whitening, impl)
        return Credit(advantages, returns, moments)
    given = spread.rows, returns, batch.loss_mask
    return _finish(given, counted, whitening, all_reduce, impl)


def _of_turn_returns(
    batch: PackedBatch,
    estimator: estimators.TurnReturns,
    all_reduce: AllReduce | None,
    impl: str,
) -> Credit:
    spread = _turn_returns(batch, impl)
    counted = _counted(batch, estimator, impl)
    if counted is None and not estimator.whiten:
        advantages, moments = finish_spread(spread, batch.loss_mask, None, impl)
        return Credit(advantages, advantages.clone(), moments)
    if counted is None and all_reduce is None:
        advantages, moments = finish_spread(spread, batch.loss_mask, estimator.ddof, impl)
        return Credit(advantages, spread.rows, moments)
    advantages = spread.rows if counted is None else torch.where(counted, spread.rows, 0.0)
    found = advantages, spread.rows, batch.loss_mask
    return _finish(found, counted, estimator.whitening, all_reduce, impl)


def _turn_returns(batch: PackedBatch, impl: str) -> TokenSpread:
    """Return the turns' returns at their tokens, whatever the batch was credited with before."""
    return spread_of_trajectories(turns_of(batch), None, batch.turn_returns, weight=1.0, impl=impl)


def _finish(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    counted: torch.Tensor | None,
    whitening: int | None,
    all_reduce: AllReduce | None,
    impl: Any,
) -> Credit:
    """Whiten, over all ranks if there are several, and measure; ``given`` ends with the mask."""
    advantages, returns, mask = given
    mask = mask if counted is None else counted
    if whitening is None:
        return Credit(advantages, returns, masked_moments(advantages, mask, impl=impl))
    if all_reduce is None:
        whitened, moments = whiten_with_moments(advantages, mask, whitening, 0.0, True, impl)
        return Credit(whitened, returns, moments)
    moments = masked_moments(advantages, mask, impl=impl)
    sums = moment_sums(advantages, mask, impl=impl)
    all_reduce(sums)
    whitened = whiten(advantages, mask, sums=sums, ddof=whitening, impl=impl)
    return Credit(whitened, returns, moments)


def _group_advantages(
    batch: PackedBatch, estimator: group_estimators.GroupEstimator, members: Scores, impl: str
) -> torch.Tensor:
    """Return each trajectory's advantage in its group."""
    valid = members.valid if estimator.truncated == "mask" else None
    common: dict[str, Any] = {
        "num_groups": num_groups_of(batch), "valid": valid, "impl": impl
    }  # fmt: skip
    given = members.scores, batch.group_ids
    if isinstance(estimator, (group_estimators.GRPO, group_estimators.MaxRL)):
        for name in ("baseline", "scale", "ddof", "eps", "singleton"):
            if hasattr(estimator, name):
                common[name] = getattr(estimator, name)
        return group_advantages(*given, **common)
    if isinstance(estimator, group_estimators.GiGPO):
        if estimator.scale == "none":
            return group_recipes.dr_grpo(*given, singleton="zero", **common)
        return group_recipes.grpo(*given, eps=estimator.eps, singleton="zero", **common)
    if isinstance(estimator, group_estimators.PassAtK):
        return group_recipes.grpo_pass_at_k(
            *given, scale=estimator.scale, eps=estimator.eps, **common
        )
    common["singleton"] = estimator.singleton  # type: ignore[attr-defined]
    if isinstance(estimator, group_estimators.OPO):
        return group_recipes.opo(*given, members.lengths, **common)
    return RECIPES[type(estimator)](*given, **common)


def _step_advantages(
    batch: PackedBatch, estimator: group_estimators.GiGPO, inputs: Inputs, impl: Any
) -> torch.Tensor:
    """Return each turn's advantage among the turns from its state."""
    assert inputs.state_ids is not None
    turn = torch.arange(batch.num_turns, device=batch.device)
    trajectory = torch.searchsorted(batch.cu_turns[1:].long(), turn, right=True)
    groups = torch.cat([batch.group_ids, batch.group_ids.new_full((1,), -1)])[trajectory]
    valid = None
    if estimator.truncated == "mask":
        counts = _members(batch, impl).valid
        valid = torch.cat([counts, counts.new_zeros(1)])[trajectory]
    return step_advantages(
        batch.turn_returns, groups, inputs.state_ids,
        scale=estimator.scale, eps=estimator.eps, valid=valid, impl=impl,
    )  # fmt: skip


def _members(batch: PackedBatch, impl: str, clip: float = float("inf")) -> Scores:
    """Return what trajectories have as a whole; those cut off are not valid."""
    return scores_of_trajectories(
        batch.turn_rewards,
        batch.turn_truncated,
        batch.cu_generated,
        batch.cu_turns,
        clip=clip,
        impl=impl,
    )


def _counted(
    batch: PackedBatch, estimator: estimators.Estimator, impl: str, members: Scores | None = None
) -> torch.Tensor | None:
    """Return which tokens count, or ``None`` if all that were generated do."""
    if estimator.truncated != "mask":
        return None
    valid = (_members(batch, impl) if members is None else members).valid.float()
    return spread_of_trajectories(turns_of(batch), valid, None, weight=0.0, impl=impl).rows > 0


RECIPES: dict[type[group_estimators.GroupEstimator], Callable[..., torch.Tensor]] = {
    group_estimators.DrGRPO: group_recipes.dr_grpo,
    group_estimators.RLOO: group_recipes.rloo,
    group_estimators.ReinforcePlusPlusBaseline: group_recipes.reinforce_plus_plus_baseline,
    group_estimators.GPG: group_recipes.gpg,
}
