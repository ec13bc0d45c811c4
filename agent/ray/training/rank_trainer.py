"""What one data-parallel trainer rank does with the trajectories of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from trajpack.agent.training.policy_trainer import token_logprobs
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.credit.estimators import Estimator
from trajpack.packing.credit.group_estimators import GRPO
from trajpack.packing.micro_batches.micro_batch import MicroBatch
from trajpack.packing.plan.ranks import plan_ranks
from trajpack.packing.token_fields import TokenField
from trajpack.packing.types import Trajectory

Loss: TypeAlias = Callable[[Any, MicroBatch], torch.Tensor]
"""The loss of a micro-batch, ``(model, micro_batch)``: a sum of what each token adds, weighed by
``micro_batch.fields["loss_weights"]``, so that micro-batches and ranks add up to the batch."""


class RankTrainer(Protocol):
    """What runs on a trainer rank. All ranks hold the same weights, and take the same steps."""

    def step(
        self, trajectories: Sequence[Trajectory], rank: int, num_ranks: int
    ) -> Mapping[str, float]:
        """Learn from the trajectories of a step together with the other ranks.

        Every rank is given all of them, in the same order, and takes its share. The same
        trajectories lead from the same state to the same state.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return all that the next step depends on.

        It may hold tensors, numbers, strings, and dicts and lists of them.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the weights, as engines take them."""
        ...


@dataclass(frozen=True)
class StepRules:
    """How a `PackedRankTrainer` takes a step."""

    capacity: int
    """Tokens of a micro-batch at most."""
    estimator: Estimator = field(default_factory=GRPO)
    """Gives each generated token its advantage."""
    loss: Loss | None = None
    """Of a micro-batch; ``None`` is `clipped_policy_loss` with its usual bounds."""
    max_gradient_norm: float = 1.0
    """A longer gradient is scaled down to it."""
    fields: tuple[TokenField, ...] = ()
    """Fields of a caller's own that the turns bring."""
    device: str = "cpu"
    """Where a batch is packed and the model is."""


def clipped_policy_loss(
    model: Any, piece: MicroBatch, clip: tuple[float, float] = (0.2, 0.28)
) -> torch.Tensor:
    """Return the clipped policy gradient's loss, as a sum of what the loss weights weigh.

    Args:
        model: A causal language model in the manner of Hugging Face.
        piece: With advantages, and a field ``loss_weights``.
        clip: How far below and above 1 the ratio to the sampling policy counts.

    Reference:
        Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7.
    """
    advantages = piece.advantages
    assert advantages is not None  # the step has seen to it
    logprobs = token_logprobs(model, piece)
    ratio = torch.where(piece.loss_mask, logprobs - piece.rollout_logprobs, 0.0).exp()
    clipped = ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages
    objective = torch.minimum(ratio * advantages, clipped)
    return -(objective * piece.fields["loss_weights"]).sum()


class PackedRankTrainer:
    """Packs a step's trajectories on its own device, and learns from its rank's micro-batches.

    Each rank packs all trajectories and then cuts its own micro-batches out: credit compares
    whole groups and a loss is weighed by all tokens, so that both come out as on one rank, without
    a word between them. What that costs is 8 bytes of input a token from memory that the ranks
    of a node share, and the packed batch in each rank's memory. The plan is even over ranks
    whatever the groups are.

    Gradients are summed over ranks once, after the last micro-batch; without a process group
    there is one rank.

    Args:
        model: A causal language model on ``rules.device``, the same on all ranks. It must keep
            packed sequences apart: call
            `trajpack.packing.adapters.huggingface.check_isolation` before one of Hugging Face
            comes here.
        optimizer: Of its parameters.
        rules: How a step is taken.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, rules: StepRules) -> None:
        self.model = model.eval()
        """Trained in place; in evaluation mode, since a ratio has no room for dropout."""
        self._optimizer = optimizer
        self._rules = rules
        self._num_steps = 0

    def step(
        self, trajectories: Sequence[Trajectory], rank: int, num_ranks: int
    ) -> dict[str, float]:
        """Take one step of the optimizer.

        Returns:
            ``loss`` of the whole batch, ``gradient_norm`` before it was scaled down, and this
            rank's ``num_micro_batches``; ``num_tokens`` of the batch.

        Raises:
            ValueError: If nothing was generated, or a sequence is longer than the capacity.

        Cost: forward and backward passes over the rank's share, and one all-reduce.
        """
        rules = self._rules
        buffer = TrajectoryBuffer(device=rules.device, fields=rules.fields)
        buffer.extend(trajectories)
        batch = buffer.pack().with_advantages(rules.estimator)
        if not batch.num_generated:
            raise ValueError("step: the trajectories have no generated tokens to learn from")
        plan = plan_ranks(batch.seqlens, num_ranks, rules.capacity).plan(rank)
        weights = {"loss_weights": batch.loss_weights("token_mean")}
        self._optimizer.zero_grad()  # a step that failed halfway has left some
        losses = [self._learn(piece) for piece in batch.split(plan, tensors=weights)]
        loss = torch.stack(losses).sum()
        self._sum_over_ranks(loss, num_ranks)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), rules.max_gradient_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_steps += 1
        return {
            "loss": float(loss),
            "gradient_norm": float(norm),
            "num_micro_batches": len(plan),
            "num_tokens": batch.num_tokens,
        }

    def _learn(self, piece: MicroBatch) -> torch.Tensor:
        if piece.is_dummy:
            return torch.zeros((), device=self._rules.device)
        loss = (self._rules.loss or clipped_policy_loss)(self.model, piece)
        loss.backward()
        return loss.detach()

    def _sum_over_ranks(self, loss: torch.Tensor, num_ranks: int) -> None:
        """Sum gradients and loss over ranks, in place, as one tensor."""
        if num_ranks == 1:
            return
        parameters = [value for value in self.model.parameters() if value.requires_grad]
        for value in parameters:
            if value.grad is None:  # of a rank that had nothing to do
                value.grad = torch.zeros_like(value)
        parts = [loss, *(value.grad for value in parameters)]
        is_double = any(part.dtype == torch.float64 for part in parts)
        dtype = torch.float64 if is_double else torch.float32
        flat = torch.cat([part.reshape(-1).to(dtype) for part in parts])
        dist.all_reduce(flat)
        for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))

    def state(self) -> dict[str, Any]:
        """Return weights, the optimizer's state and the number of steps."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_steps": self._num_steps,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to what `state` returned."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_steps = int(state["num_steps"])

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the model's state dict."""
        weights: Mapping[str, torch.Tensor] = self.model.state_dict()
        return weights
