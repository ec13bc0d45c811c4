"""Supervised learning, so that a policy has something to improve upon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trajpack.agent.training.policy_trainer import token_logprobs
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.plan.plan import plan_micro_batches
from trajpack.packing.types import Trajectory

_RAMP_STEPS = 20


def warm_up(
    model: Any,
    trajectories: Sequence[Trajectory],
    *,
    num_steps: int,
    learning_rate: float,
    capacity: int,
) -> Iterator[float]:
    """Train a model in place to say what was said in ``trajectories``, in one pass over them.

    Args:
        model: A Hugging Face causal language model.
        trajectories: Demonstrations; every generated token is learned.
        num_steps: Steps of the optimizer; each takes as many trajectories as the others.
        learning_rate: Of AdamW at its highest: it rises over twenty steps, and falls to nothing.
        capacity: Tokens of a micro-batch at most.

    Yields:
        The loss of each step, in nats per generated token.

    Raises:
        ValueError: If there are fewer trajectories than steps.
    """
    size = len(trajectories) // num_steps
    if not size:
        raise ValueError(
            f"warm_up: {num_steps} steps need as many trajectories, got {len(trajectories)}"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    for step in range(num_steps):
        ramp = min((step + 1) / _RAMP_STEPS, 1 - step / num_steps)
        optimizer.param_groups[0]["lr"] = learning_rate * ramp
        batch = pack(trajectories[step * size : (step + 1) * size])
        weights = {"loss_weights": batch.loss_weights("token_mean")}
        plan = plan_micro_batches(batch.seqlens, capacity)
        total = 0.0
        optimizer.zero_grad()
        for piece in batch.micro_batches(plan, tensors=weights):
            loss = -(token_logprobs(model, piece) * piece.fields["loss_weights"]).sum()
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield total
