"""Trains a causal language model on packed batches, supervised or by clipped policy gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import torch

from trajpack.agent.rollout.settings import LayoutName
from trajpack.packing.adapters.huggingface import (
    LMHead,
    check_isolation,
    register_tree_attention,
)
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.micro_batches.micro_batch import MicroBatch
from trajpack.packing.plan.plan import Plan, plan_micro_batches
from trajpack.packing.tree.chain_plan import ChainPlan
from trajpack.packing.tree.micro_batches import TreeMicroBatch
from trajpack.packing.tree.pack_tree import pack_tree
from trajpack.packing.tree.tree_batch import TreeBatch
from trajpack.packing.types import Trajectory

Batch: TypeAlias = PackedBatch | TreeBatch
"""Batch of one of the layouts."""
Piece: TypeAlias = MicroBatch | TreeMicroBatch
"""Micro-batch of a `Batch`."""
_RAMP_BATCHES = 10
_WARM_UP_RAMP_STEPS = 20


@dataclass(frozen=True)
class StepOutcome:
    """Measurements of one trained batch.

    Attributes:
        loss: Loss of the batch in the first epoch.
        gradient_norm: Norm of the gradient in the first epoch, before scaling.
        clip_fraction: Share of the generated tokens whose gradient the clip set to zero, mean over
            the epochs.
        fill: Tokens, or nodes, of the micro-batches divided by their capacity.
        mean_staleness: Mean over generated tokens of trainer version less token version.
        num_on_policy: Tokens of turns that the current weights sampled from the first token to the
            last.
        logprob_gap: Largest absolute difference of their log-probabilities between trainer and
            engine, nats.
    """

    loss: float
    gradient_norm: float
    clip_fraction: float
    num_micro_batches: int
    fill: float
    mean_staleness: float
    max_staleness: int
    num_on_policy: int
    logprob_gap: float


def pack_as(trajectories: Sequence[Trajectory], layout: LayoutName) -> Batch:
    """Pack trajectories in a layout, ``"tree"`` by `trajpack.pack_tree`."""
    return pack_tree(trajectories) if layout == "tree" else pack(trajectories, layout=layout)


def clipped_policy_loss(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    weights: torch.Tensor,
    clip: tuple[float, float] = (0.2, 0.28),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the clipped policy-gradient loss of generated tokens, and where the clip takes effect.

    Args:
        logprobs: float ``[num_generated]``, of `PackedBatch.logprobs`.
        rollout_logprobs: float ``[num_generated]``, of the policy that sampled.
        advantages: float ``[num_generated]``
        weights: float ``[num_generated]``, of `PackedBatch.loss_weights`, so that micro-batches and
            ranks add up to the batch.
        clip: Lower and upper distance from 1 at which the ratio of a token to the policy that
            sampled it is clipped.

    Returns:
        The loss, a scalar, and bool ``[num_generated]``: True where the clip sets the gradient to
        zero.

    Reference:
        Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7; with two
        bounds instead of one, Yu et al., "DAPO", 2025, equation 10.
    """
    ratio = (logprobs - rollout_logprobs).exp()
    objective = ratio * advantages
    clipped = ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages
    loss = -(torch.minimum(objective, clipped) * weights).sum()
    return loss, clipped < objective


class PolicyTrainer:
    """Trains a model in place, one batch per step, in micro-batches of limited size.

    The model stays in evaluation mode, since dropout would change the ratio to the sampling
    policy.

    Args:
        model: A Hugging Face causal language model.
        learning_rate: Learning rate of AdamW, reached after a ramp of ten batches.
        capacity: Maximum number of tokens in a micro-batch.
        num_epochs: Optimizer steps on each batch.
        clip: Lower and upper distance from 1 at which the ratio of a token is clipped.
        max_gradient_norm: Gradients with a larger norm are scaled down to it.
        layout: Layout of the batches. ``"tree"`` trains a `TreeBatch`, and sets the model's
            attention to ``"trajpack_tree"``; the others train a `PackedBatch`.

    Raises:
        ValueError: If the layout is unknown; if the model does not keep the sequences of a packed
            batch apart, or does not compute trees; or if it makes its logits in a way that
            `trajpack.packing.adapters.huggingface.LMHead` does not know.

    Cost: the forward passes of `trajpack.packing.adapters.huggingface.LMHead`; of layouts but
    ``"tree"`` also those of ``check_isolation``.
    """

    def __init__(
        self,
        model: Any,
        *,
        learning_rate: float,
        capacity: int,
        num_epochs: int = 1,
        clip: tuple[float, float] = (0.2, 0.28),
        max_gradient_norm: float = 1.0,
        layout: LayoutName = "merged",
    ) -> None:
        if layout not in get_args(LayoutName):
            names = ", ".join(map(repr, get_args(LayoutName)))
            raise ValueError(f"layout must be one of {names}, got {layout!r}")
        self._batch_type = TreeBatch if layout == "tree" else PackedBatch
        if layout == "tree":
            register_tree_attention()
            model.set_attn_implementation("trajpack_tree")
        else:
            check_isolation(model)
        self.model = model.eval()
        self._head = LMHead(model)
        self.version = 0
        """Number of batches trained."""
        self._num_epochs = num_epochs
        self._learning_rate = learning_rate
        self._capacity = capacity
        self._clip = clip
        self._max_gradient_norm = max_gradient_norm
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )

    def step(self, batch: Batch) -> StepOutcome:
        """Train on a batch with advantages; each generated token has the same weight.

        Raises:
            TypeError: If the batch is not of the trainer's layout.
            ValueError: If the batch has no advantages or no generated tokens, or a sequence of it
                is longer than a micro-batch.

        Cost: a forward and a backward pass for each micro-batch and epoch; some numbers are read
        from the device at the end.
        """
        if not isinstance(batch, self._batch_type):
            wanted, got = self._batch_type.__name__, type(batch).__name__
            raise TypeError(f"step: the trainer's layout takes a {wanted}, got {got}")
        tokens = batch.entries if isinstance(batch, TreeBatch) else batch
        if tokens.advantages is None:
            raise ValueError("step: the batch has no advantages; call with_advantages first")
        if not tokens.num_generated:
            raise ValueError("step: the batch has no generated tokens to learn from")
        # A turn is one request. One that began under older weights keeps their attention cache,
        # so that none of its tokens is on-policy.
        began_now = (tokens.turn_version_start == self.version)[tokens.turn_ids.long()]
        tensors = {
            "loss_weights": batch.loss_weights("token_mean"),
            "is_on_policy": tokens.loss_mask & began_now,
        }
        plan, pieces = _micro_batches(batch, self._capacity, tensors)
        staleness = self.version - tokens.policy_versions[tokens.loss_mask]
        ramp = min((self.version + 1) / _RAMP_BATCHES, 1.0)
        self._optimizer.param_groups[0]["lr"] = ramp * self._learning_rate
        epochs = torch.stack([self._take_epoch(pieces) for _ in range(self._num_epochs)])
        self.version += 1
        losses, num_clipped, num_on_policy, gaps, norms = epochs.unbind(1)
        return StepOutcome(
            loss=float(losses[0]),
            gradient_norm=float(norms[0]),
            clip_fraction=float(num_clipped.mean()) / tokens.num_generated,
            num_micro_batches=len(plan),
            fill=plan.fill,
            mean_staleness=float(staleness.float().mean()),
            max_staleness=int(staleness.max()),
            num_on_policy=int(num_on_policy[0]),
            logprob_gap=float(gaps[0]),
        )

    def _take_epoch(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Take one optimizer step; return loss, counts, log-probability gap and norm, ``[5]``."""
        self._optimizer.zero_grad()  # gradients of a step that failed halfway
        rows = []
        for piece in pieces:
            tokens, place = _generated(piece)
            logprobs, old = self._head.logprobs(piece), tokens.rollout_logprobs[place]
            assert tokens.advantages is not None
            weights = tokens.fields["loss_weights"][place]
            loss, is_clipped = clipped_policy_loss(
                logprobs, old, tokens.advantages[place], weights=weights, clip=self._clip
            )
            loss.backward()
            is_on_policy = tokens.fields["is_on_policy"][place]
            distance = (logprobs.detach() - old).abs()
            gap = torch.where(is_on_policy, distance, 0.0).max()
            rows.append(torch.stack([loss.detach(), is_clipped.sum(), is_on_policy.sum(), gap]))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_gradient_norm)
        self._optimizer.step()
        table = torch.stack(rows)
        return torch.cat([table[:, :3].sum(0), table[:, 3:].amax(0), norm[None]])


def _micro_batches(
    batch: Batch, capacity: int, tensors: Mapping[str, torch.Tensor]
) -> tuple[Plan | ChainPlan, list[Piece]]:
    """Return a plan of a batch, and its micro-batches that have generated tokens."""
    plan: Plan | ChainPlan
    if isinstance(batch, TreeBatch):
        plan = batch.plan_micro_batches(capacity)
        pieces: list[Piece] = [*batch.micro_batches(plan, tensors=tensors)]
    else:
        plan = plan_micro_batches(batch.seqlens, capacity)
        pieces = [*batch.micro_batches(plan, tensors=tensors)]
    trained = [piece.entries if isinstance(piece, TreeMicroBatch) else piece for piece in pieces]
    return plan, [piece for piece, of in zip(pieces, trained, strict=True) if of.num_generated]


def _generated(piece: Piece) -> tuple[MicroBatch, torch.Tensor | slice]:
    """Return what has the generated tokens of a micro-batch, and the places of these in it."""
    if isinstance(piece, TreeMicroBatch):
        return piece.entries, slice(None)
    return piece, piece.logprob_rows()[0] + 1


def warm_up(
    model: Any,
    trajectories: Sequence[Trajectory],
    *,
    num_steps: int,
    learning_rate: float,
    capacity: int,
    layout: LayoutName = "merged",
) -> Iterator[float]:
    """Train a model in place on the generated tokens of ``trajectories``, in one pass over them.

    Yields the loss of each step, in nats per generated token. The learning rate of AdamW rises over
    20 steps to ``learning_rate``, then falls to 0. A micro-batch has at most ``capacity`` tokens.
    Layout ``"tree"`` needs a model whose attention is ``"trajpack_tree"``, as `PolicyTrainer` sets
    it; the others one that keeps packed sequences apart.

    Raises:
        ValueError: If there are fewer trajectories than steps.
    """
    head, size = LMHead(model), len(trajectories) // num_steps
    if not size:
        raise ValueError(
            f"warm_up: {num_steps} steps need as many trajectories, got {len(trajectories)}"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    for step in range(num_steps):
        ramp = min((step + 1) / _WARM_UP_RAMP_STEPS, 1 - step / num_steps)
        optimizer.param_groups[0]["lr"] = learning_rate * ramp
        batch = pack_as(trajectories[step * size : (step + 1) * size], layout)
        weights = {"loss_weights": batch.loss_weights("token_mean")}
        total = 0.0
        optimizer.zero_grad()
        for piece in _micro_batches(batch, capacity, weights)[1]:
            tokens, place = _generated(piece)
            loss = -(head.logprobs(piece) * tokens.fields["loss_weights"][place]).sum()
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield total
