"""Training a causal language model on packed batches by clipped policy gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trajpack.packing.adapters.huggingface import check_isolation
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.micro_batches.micro_batch import MicroBatch
from trajpack.packing.plan.plan import plan_micro_batches

_RAMP_BATCHES = 10


@dataclass(frozen=True)
class StepOutcome:
    """What a batch came to."""

    loss: float
    """Of the whole batch, in the first epoch."""
    gradient_norm: float
    """In the first epoch, before it was scaled down."""
    clip_fraction: float
    """Share of the generated tokens that the clip kept from being learned from, over the epochs."""
    num_micro_batches: int
    """What the batch was cut into."""
    fill: float
    """Tokens of the micro-batches as a share of what they have room for."""
    mean_staleness: float
    """By how many versions the weights that sampled a token were older, on average."""
    max_staleness: int
    """The same at most."""
    num_on_policy: int
    """Tokens of the turns that were sampled from first to last by the weights that the step
    began with."""
    logprob_gap: float
    """Largest distance of their log-probabilities here from those that the engine reported."""


def token_logprobs(model: Any, piece: PackedBatch | MicroBatch) -> torch.Tensor:
    """Return the log-probability of each token given those before it in its sequence.

    Args:
        model: A Hugging Face causal language model that keeps packed sequences apart; see
            `trajpack.packing.adapters.huggingface.check_isolation`.
        piece: A batch, or a micro-batch of one.

    Returns:
        float32 ``[tokens]``, at each token's own index, as `PackedBatch.rollout_logprobs`. The
        first token of a sequence, which nothing predicts, has no meaningful value.

    Cost: one forward pass.
    """
    logits = model(**piece.model_inputs()).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(1, piece.input_ids[1:, None])[:, 0]
    return torch.nn.functional.pad(chosen, (1, 0))


class PolicyTrainer:
    """Trains a model in place, batch after batch.

    A batch is cut into micro-batches of limited size, so that memory and the square of the
    attention stay small; their gradients add up to those of the whole. The model stays in
    evaluation mode: a ratio to the sampling policy has no room for dropout.

    Args:
        model: A Hugging Face causal language model.
        learning_rate: Of AdamW, once it has risen over ten batches: as long as it has seen little,
            AdamW takes the noise of a gradient for its direction.
        capacity: Tokens of a micro-batch at most.
        num_epochs: Optimizer steps on each batch; the clip bounds what the later ones do.
        clip: How far below and above 1 the ratio to the sampling policy counts.
        max_gradient_norm: A longer gradient is scaled down to it.

    Raises:
        ValueError: If the model does not keep the sequences of a packed batch apart.

    Cost: the forward passes of `trajpack.packing.adapters.huggingface.check_isolation`.

    Reference:
        Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7; with two
        bounds instead of one, Yu et al., "DAPO", 2025, equation 10.
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
    ) -> None:
        check_isolation(model)
        self.model = model.eval()
        self.version = 0
        """Batches that the weights have seen."""
        self._num_epochs = num_epochs
        self._learning_rate = learning_rate
        self._capacity = capacity
        self._bounds = 1 - clip[0], 1 + clip[1]
        self._max_gradient_norm = max_gradient_norm
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )

    def step(self, batch: PackedBatch) -> StepOutcome:
        """Move towards what earned an advantage, and away from what cost one.

        The ratio of a token is to the policy that sampled it, however old, by the
        log-probability that the engine reported. Each generated token weighs the same.

        Args:
            batch: With advantages.

        Raises:
            ValueError: If it has none, or has generated nothing, or a sequence of it is longer
                than a micro-batch.

        Cost: a forward and a backward pass for each micro-batch and epoch; some numbers are read
        from the device at the end.
        """
        if batch.advantages is None:
            raise ValueError("step: the batch has no advantages; call with_advantages first")
        if not batch.num_generated:
            raise ValueError("step: the batch has no generated tokens to learn from")
        plan = plan_micro_batches(batch.seqlens, self._capacity)
        pieces = batch.split(
            plan,
            tensors={
                "loss_weights": batch.loss_weights("token_mean"),
                "is_on_policy": self._is_on_policy(batch),
            },
        )
        staleness = self.version - batch.policy_versions[batch.loss_mask]
        ramp = min((self.version + 1) / _RAMP_BATCHES, 1.0)
        self._optimizer.param_groups[0]["lr"] = ramp * self._learning_rate
        epochs = torch.stack([self._take_epoch(pieces) for _ in range(self._num_epochs)])
        self.version += 1
        losses, num_clipped, num_on_policy, gaps, norms = epochs.unbind(1)
        return StepOutcome(
            loss=float(losses[0]),
            gradient_norm=float(norms[0]),
            clip_fraction=float(num_clipped.mean()) / batch.num_generated,
            num_micro_batches=len(plan),
            fill=plan.fill,
            mean_staleness=float(staleness.float().mean()),
            max_staleness=int(staleness.max()),
            num_on_policy=int(num_on_policy[0]),
            logprob_gap=float(gaps[0]),
        )

    def _take_epoch(self, pieces: list[MicroBatch]) -> torch.Tensor:
        """Take one step of the optimizer; return sums, the largest gap and the norm, ``[5]``."""
        self._optimizer.zero_grad()  # a step that failed halfway has left some
        rows = torch.stack([self._learn(piece) for piece in pieces])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_gradient_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.cat([rows[:, :3].sum(0), rows[:, 3:].amax(0), norm[None]])

    def _is_on_policy(self, batch: PackedBatch) -> torch.Tensor:
        """Select what the present weights sampled with no older weights' keys and values.

        A turn is a request of its own to the engine. One that began under older weights goes on
        with their cache, so its later tokens are the present weights' in name only.
        """
        of_turns = batch.turn_version_start == self.version
        return batch.loss_mask & of_turns[batch.turn_ids.long()]

    def _learn(self, piece: MicroBatch) -> torch.Tensor:
        """Add a micro-batch's gradients; return its loss and what is counted, ``[4]``."""
        logprobs = token_logprobs(self.model, piece)
        distance = torch.where(piece.loss_mask, logprobs - piece.rollout_logprobs, 0.0)
        ratio = distance.exp()
        advantages = piece.advantages
        assert advantages is not None  # `step` has seen to it
        clipped = ratio.clamp(*self._bounds) * advantages
        objective = torch.minimum(ratio * advantages, clipped)
        loss = -(objective * piece.fields["loss_weights"]).sum()
        loss.backward()
        is_clipped = piece.loss_mask & (clipped < ratio * advantages)
        is_on_policy = piece.fields["is_on_policy"]
        gap = torch.where(is_on_policy, distance.detach().abs(), 0.0).max()
        return torch.stack([loss.detach(), is_clipped.sum(), is_on_policy.sum(), gap])
