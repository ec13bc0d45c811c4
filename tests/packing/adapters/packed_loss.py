"""A clipped loss over packed tokens, that trainers' losses of other forms are compared with."""

from __future__ import annotations

import torch

from trajpack import PackedBatch


def packed_logprobs(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return the log-probability of each token, in one pass over the packed batch."""
    logits = model(**batch.model_inputs()).logits[0].float().log_softmax(-1)
    following = logits[:-1].gather(1, batch.input_ids[1:, None])[:, 0]
    return torch.cat([following.new_zeros(1), following])


def clipped_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return the mean over the mask of what is clipped at 0.8 and 1.2."""
    ratio = (logprobs - old).exp()
    gains = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(gains * mask).sum() / mask.sum()
