"""Advantages of a packed batch: the inputs of an estimator, checked, and its result."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trajpack.kernels.credit.credit_of_turns import Conventions, TokenInputs, credit_of_turns
from trajpack.kernels.credit.scores import Scores, scores_of_trajectories
from trajpack.kernels.credit.spread import (
    TokenSpread,
    Turns,
    finish_spread,
    spread_of_trajectories,
    spread_of_turns,
)
from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.groups import group_recipes
from trajpack.kernels.groups.group_advantages import group_advantages
from trajpack.kernels.groups.group_recipes import step_advantages
from trajpack.kernels.reduce.whiten import (
    masked_moments,
    moment_sums,
    whiten,
    whiten_with_moments,
)
from trajpack.kernels.scan.observations import PASSING
from trajpack.kernels.scan.scan_inputs import Limits, ScanChunks
from trajpack.kernels.validation import check_device, check_tensor
from trajpack.packing.credit import estimators

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch

OP = "with_advantages"
FLOATS = (torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)


class Inputs(NamedTuple):
    """Tensors that estimators may need beside the batch; see `PackedBatch.with_advantages`."""

    values: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    bootstrap: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    state_ids: torch.Tensor | None = None


def checked_inputs(batch: PackedBatch, estimator: estimators.Estimator, inputs: Inputs) -> Inputs:
    """Return the inputs, contiguous.

    Raises:
        TypeError: If one is of a wrong type.
        ValueError: If one has a wrong shape or device, lacks, or would go unnoticed.
    """
    sizes = {
        "values": (batch.num_tokens, "token"),
        "logprobs": (batch.num_tokens, "token"),
        "ref_logprobs": (batch.num_tokens, "token"),
        "bootstrap": (batch.cu_turns.shape[0] - 1, "trajectory"),
        "scores": (batch.cu_turns.shape[0] - 1, "trajectory"),
        "state_ids": (batch.num_turns, "turn"),
    }
    _check_needs(estimator, inputs)
    for name, tensor in inputs._asdict().items():
        if tensor is None:
            continue
        size, thing = sizes[name]
        check_tensor(OP, name, tensor, ndim=1, dtypes=INTS if name == "state_ids" else FLOATS)
        check_device(OP, name, tensor, batch.device)
        if tensor.shape[0] != size:
            got = list(tensor.shape)
            raise ValueError(
                f"{OP}: {name} must have one entry for each {thing}, {size}, got {got}"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{OP}: no gradient flows to {name}; pass {name}.detach()")
    return Inputs(*(None if tensor is None else tensor.contiguous() for tensor in inputs))


def _check_needs(estimator: estimators.Estimator, inputs: Inputs) -> None:
    over_values = (estimators.GAE, estimators.TurnGAE, estimators.VTrace)
    penalized = isinstance(estimator, estimators.TokenEstimator) and estimator.kl is not None
    needs = {
        "values": isinstance(estimator, over_values),
        "logprobs": isinstance(estimator, estimators.VTrace),
        "ref_logprobs": penalized,
        "bootstrap": estimator.truncated == "bootstrap",
        "state_ids": isinstance(estimator, estimators.GiGPO),
    }
    for name, needed in needs.items():
        if needed and getattr(inputs, name) is None:
            raise ValueError(f"{OP}: {estimator.name} needs {name}, got None")
    takes_scores = isinstance(estimator, estimators.GroupEstimator)
    for name, taken, why in (
        ("ref_logprobs", penalized, "it has no kl"),
        ("bootstrap", needs["bootstrap"], "its truncated is not 'bootstrap'"),
        ("state_ids", needs["state_ids"], "it has no step groups"),
        ("scores", takes_scores, "it does not compare trajectories"),
    ):
        if getattr(inputs, name) is not None and not taken:
            raise ValueError(f"{OP}: {estimator.name} takes no {name}: {why}")


def turns_of(batch: PackedBatch) -> Turns:
    """Return where the turns of a batch are."""
    return Turns(batch.turn_ids, batch.cu_turns, batch.turn_spans)


def num_groups_of(batch: PackedBatch) -> int:
    """Return a bound of the batch's groups that does not change with what it is filled with."""
    return batch.cu_turns.shape[0] - 1 if batch.is_padded else batch.num_groups


def chunks_of(batch: PackedBatch, estimator: estimators.TokenEstimator) -> tuple[ScanChunks, int]:
    """Return what is scanned of each turn, and how many tokens that is at most.

    Where tokens that were not generated are steps too, a turn brings those that are new with it:
    then three small launches sum up how many they are.
    """
    spans, begins, cu_positions = batch.turn_spans, batch.turn_spans[:, 0], batch.cu_generated
    num_positions = batch.num_tokens if batch.is_padded else batch.num_generated
    if observation_of(estimator) not in PASSING:
        begins, num_positions = batch.turn_begin, batch.num_tokens
        cu_positions = torch.zeros_like(batch.cu_generated)
        torch.cumsum(spans[:, 1] - begins, 0, dtype=torch.int32, out=cu_positions[1:])
    truncated = batch.turn_truncated if estimator.truncated == "bootstrap" else None
    return ScanChunks(cu_positions, begins, spans, batch.turn_rewards, truncated), num_positions


def observation_of(estimator: estimators.TokenEstimator) -> str:
    """Return what tokens that were not generated mean to an estimator."""
    return "carry" if isinstance(estimator, estimators.TurnGAE) else estimator.observation  # type: ignore[attr-defined]


def conventions_of(estimator: estimators.TokenEstimator) -> Conventions:
    """Return what an estimator asks of the scan."""
    limits = Limits()
    if estimator.kl is not None:
        clamp = float("inf") if estimator.kl.clamp is None else float(estimator.kl.clamp)
        limits = limits._replace(kl_coefficient=float(estimator.kl.coefficient), kl_clamp=clamp)
    if estimator.reward_clip is not None:
        limits = limits._replace(reward_clip=float(estimator.reward_clip))
    if isinstance(estimator, estimators.VTrace):
        limits = limits._replace(
            rho_clip=float(estimator.rho_clip),
            c_clip=float(estimator.c_clip),
            advantage_rho_clip=float(estimator.advantage_rho_clip),
        )
    lam = 1.0 if isinstance(estimator, estimators.ReinforcePlusPlus) else estimator.lam  # type: ignore[attr-defined]
    return Conventions(
        gamma=float(estimator.gamma),  # type: ignore[attr-defined]
        lam=float(lam),
        observation=observation_of(estimator),
        limits=limits,
        estimator=None if estimator.kl is None else estimator.kl.estimator,
        by_turn=isinstance(estimator, estimators.TurnGAE),
    )


METRICS = (
    "advantage_count",
    "advantage_mean",
    "advantage_squared_deviations",
    "advantage_min",
    "advantage_max",
)
"""Names of `PackedBatch.metrics` after `with_advantages`: statistics of the counted tokens'
advantages before whitening. The first three of several batches can be merged, by Chan's formula."""


class Credit(NamedTuple):
    """Result of an estimator."""

    advantages: torch.Tensor
    returns: torch.Tensor
    moments: torch.Tensor


AllReduce = Callable[[torch.Tensor], object]
BASES = (estimators.Estimator, estimators.TokenEstimator, estimators.GroupEstimator)
"""Base classes, which are no estimators themselves."""


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
    elif isinstance(estimator, estimators.GroupEstimator):
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


def _warn_of_singletons(batch: PackedBatch, estimator: estimators.GroupEstimator) -> None:
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
    estimator: estimators.GroupEstimator,
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
    if isinstance(estimator, estimators.GPG) and all_reduce is not None:
        raise ValueError(f"{OP}: GPG takes no all_reduce: its factor counts this batch alone")
    if isinstance(estimator, estimators.GiGPO):
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
        whitened, moments = whiten_with_moments(advantages, mask, ddof=whitening, impl=impl)
        return Credit(whitened, returns, moments)
    moments = masked_moments(advantages, mask, impl=impl)
    sums = moment_sums(advantages, mask, impl=impl)
    all_reduce(sums)
    whitened = whiten(advantages, mask, sums=sums, ddof=whitening, impl=impl)
    return Credit(whitened, returns, moments)


def _group_advantages(
    batch: PackedBatch, estimator: estimators.GroupEstimator, members: Scores, impl: str
) -> torch.Tensor:
    """Return each trajectory's advantage in its group."""
    valid = members.valid if estimator.truncated == "mask" else None
    common: dict[str, Any] = {
        "num_groups": num_groups_of(batch), "valid": valid, "impl": impl
    }  # fmt: skip
    given = members.scores, batch.group_ids
    if isinstance(estimator, (estimators.GRPO, estimators.MaxRL)):
        for name in ("baseline", "scale", "ddof", "eps", "singleton"):
            if hasattr(estimator, name):
                common[name] = getattr(estimator, name)
        return group_advantages(*given, **common)
    if isinstance(estimator, estimators.GiGPO):
        if estimator.scale == "none":
            return group_recipes.dr_grpo(*given, singleton="zero", **common)
        return group_recipes.grpo(*given, eps=estimator.eps, singleton="zero", **common)
    if isinstance(estimator, estimators.PassAtK):
        return group_recipes.grpo_pass_at_k(
            *given, scale=estimator.scale, eps=estimator.eps, **common
        )
    common["singleton"] = estimator.singleton  # type: ignore[attr-defined]
    if isinstance(estimator, estimators.OPO):
        return group_recipes.opo(*given, members.lengths, **common)
    return RECIPES[type(estimator)](*given, **common)


def _step_advantages(
    batch: PackedBatch, estimator: estimators.GiGPO, inputs: Inputs, impl: Any
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
    """Return scores and lengths of the trajectories; truncated ones are not valid."""
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


RECIPES: dict[type[estimators.GroupEstimator], Callable[..., torch.Tensor]] = {
    estimators.DrGRPO: group_recipes.dr_grpo,
    estimators.RLOO: group_recipes.rloo,
    estimators.ReinforcePlusPlusBaseline: group_recipes.reinforce_plus_plus_baseline,
    estimators.GPG: group_recipes.gpg,
}
