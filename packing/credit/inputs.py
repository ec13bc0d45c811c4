"""What an estimator is given: tensors beside the batch, checked, and the batch's own tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from trajpack.kernels.credit.credit_of_turns import Conventions
from trajpack.kernels.credit.spread import Turns
from trajpack.kernels.scan.observations import PASSING
from trajpack.kernels.scan.scan_inputs import Limits, ScanChunks
from trajpack.kernels.validation import check_device, check_tensor
from trajpack.packing.credit import estimators, group_estimators

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
        "state_ids": isinstance(estimator, group_estimators.GiGPO),
    }
    for name, needed in needs.items():
        if needed and getattr(inputs, name) is None:
            raise ValueError(f"{OP}: {estimator.name} needs {name}, got None")
    takes_scores = isinstance(estimator, group_estimators.GroupEstimator)
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
