"""Statistics of logits whose vocabulary is spread over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import distributed

Statistics: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Log-sum-exp and mean logit of rows, and the logits of pairs; float64."""


def shard_of(op: str, weight: torch.Tensor, group: Any) -> tuple[torch.Tensor, int, int]:
    """Return the part of ``weight`` that this rank holds, its first token, and the vocabulary.

    Without a group a ``DTensor`` is gathered; with one it must be sharded by tokens over the group.
    """
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{op}: weight must be a tensor, got {type(weight).__name__}")
    full_tensor = getattr(weight, "full_tensor", None)
    if group is None:
        whole: torch.Tensor = weight if full_tensor is None else full_tensor()
        return whole, 0, whole.shape[0]
    rank, size = group.rank(), group.size()
    if full_tensor is not None:
        vocabulary = weight.shape[0]
        return _local(op, weight, group), rank * -(-vocabulary // size), vocabulary
    return weight, rank * weight.shape[0], size * weight.shape[0]


def _local(op: str, weight: Any, group: Any) -> torch.Tensor:
    """Return the shard of a ``DTensor`` over ``group``, gathered over all other dimensions."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = weight.device_mesh
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    if group not in groups or weight.placements[groups.index(group)] != Shard(0):
        raise ValueError(
            f"{op}: weight must be sharded by tokens, Shard(0), over group, "
            f"got {weight.placements} over groups of {[one.size() for one in groups]} ranks"
        )
    wanted = [Shard(0) if one == group else Replicate() for one in groups]
    local: torch.Tensor = weight.redistribute(placements=wanted).to_local()
    return local


def with_summed_gradient(hidden: torch.Tensor, group: Any) -> torch.Tensor:
    """Return ``hidden``; its gradient is the sum of those of all ranks."""
    found: torch.Tensor = _SummedGradient.apply(hidden, group)  # type: ignore[no-untyped-call]
    return found


def merged(statistics: Statistics, group: Any) -> Statistics:
    """Return the statistics of the whole vocabulary, from those of the shards."""
    found: Statistics = _Merged.apply(*statistics, group)  # type: ignore[no-untyped-call]
    return found


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        is_half = grad.dtype in (torch.float16, torch.bfloat16)
        total = grad.float() if is_half else grad.clone()
        distributed.all_reduce(total, group=ctx.group)
        return total.to(grad.dtype), None


class _Merged(torch.autograd.Function):
    """Two all-reduces; each rank's gradient is its share of that of the whole."""

    @staticmethod
    def forward(
        ctx: Any, logsumexp: torch.Tensor, mean: torch.Tensor, logits: torch.Tensor, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        most = logsumexp.clone()
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=group)
        share = torch.where(logsumexp == -torch.inf, 0.0, (logsumexp - most).exp())
        num_rows = most.shape[0]
        sums = torch.cat((share, share * mean, logits))
        distributed.all_reduce(sums, group=group)
        total, weighted, logits = sums.split((num_rows, num_rows, logits.shape[0]))
        whole = most + total.log()
        whole_mean = weighted / total
        ctx.save_for_backward(share / total, mean - whole_mean)
        return whole, whole_mean, logits

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_logsumexp, of_mean, of_logits = grads
        share, away = ctx.saved_tensors
        return share * (of_logsumexp + of_mean * away), share * of_mean, of_logits, None
