"""Statistics of logits whose vocabulary is spread over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


def shard_of(op: str, name: str, head: torch.Tensor, group: Any) -> tuple[torch.Tensor, int, int]:
    """Return this rank's part of a weight or bias, its first token, and the vocabulary.

    A ``DTensor`` must be sharded by tokens over the group, and over no other dimension of its mesh.
    """
    if not isinstance(head, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(head).__name__}")
    if group is not None and not isinstance(group, distributed.ProcessGroup):
        got = type(group).__name__
        raise TypeError(f"{op}: group must be a torch.distributed.ProcessGroup, got {got}")
    if hasattr(head, "device_mesh"):
        return _local_part(op, name, head, group)
    if group is None:
        return head, 0, head.shape[0]
    return head, group.rank() * head.shape[0], group.size() * head.shape[0]


def _local_part(op: str, name: str, head: Any, group: Any) -> tuple[torch.Tensor, int, int]:
    from torch.distributed.tensor import Replicate, Shard

    mesh, vocabulary = head.device_mesh, head.shape[0]
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    expected = tuple(Shard(0) if one == group else Replicate() for one in groups)
    if group not in groups or head.placements != expected:
        raise ValueError(
            f"{op}: {name} must be a tensor, or a DTensor that is Shard(0) over group and "
            f"Replicate() else, got {head.placements} "
            f"{'without' if group is None else 'with'} group; gather one that is sharded over data "
            "by full_tensor(), with the grad_placements of its gradient"
        )
    return head.to_local(), group.rank() * -(-vocabulary // group.size()), vocabulary


class SummedGradient(torch.autograd.Function):
    """Hidden states, whose gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Any) -> torch.Tensor:
        """Return the hidden states."""
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Add the gradients of all ranks in float32 at least."""
        is_half = grad.dtype in (torch.float16, torch.bfloat16)
        total = grad.float() if is_half else grad.clone()
        distributed.all_reduce(total, group=ctx.group)
        return total.to(grad.dtype), None


class Merged(torch.autograd.Function):
    """Statistics of the whole vocabulary, from those of the shards, in two all-reduces.

    Each rank's gradient is its share of that of the whole.
    """

    @staticmethod
    def forward(
        ctx: Any, logsumexp: torch.Tensor, mean: torch.Tensor, logits: torch.Tensor, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-sum-exp and mean of rows, and the logits of pairs; float64."""
        most = logsumexp.clone()
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=group)
        share = torch.where(logsumexp == -torch.inf, 0.0, (logsumexp - most).exp())
        num_rows = most.shape[0]
        sums = torch.cat((share, share * mean, logits))
        distributed.all_reduce(sums, group=group)
        total, weighted, logits = sums.split((num_rows, num_rows, logits.shape[0]))
        whole, total = most + total.log(), total.where(most > -torch.inf, 1.0)
        whole_mean = weighted / total
        ctx.save_for_backward(share / total, mean - whole_mean)
        return whole, whole_mean, logits

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the rank's shares."""
        of_logsumexp, of_mean, of_logits = grads
        share, away = ctx.saved_tensors
        return share * (of_logsumexp + of_mean * away), share * of_mean, of_logits, None
