"""Log-probabilities and entropies of tokens from hidden states and the LM head."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args, overload

import torch

from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.logprobs.logit_statistics import HALVES, transformed
from trajpack.kernels.logprobs.vocabulary_shards import merged, shard_of, with_summed_gradient
from trajpack.kernels.reduce.segment_reduce import segment_max, segment_sum
from trajpack.kernels.validation import (
    check_boundaries,
    check_choice,
    check_indices,
    check_number,
    check_tensor,
    values_to_check,
)

FLOATS = (*HALVES, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
Direction: TypeAlias = Literal["forward", "reverse"]
LEAST_TAIL = 2.0**-24
"""Least probability of the tokens outside the top k: what float32 log-probabilities can resolve."""


@overload
def token_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor,
    *, bias: torch.Tensor | None = ..., temperature: float | torch.Tensor = ...,
    softcap: float | None = ..., entropy: Literal[False] = ...,
    support: tuple[torch.Tensor, torch.Tensor] | None = ..., group: Any = ..., impl: Impl = ...,
) -> torch.Tensor: ...  # fmt: skip


@overload
def token_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor,
    *, bias: torch.Tensor | None = ..., temperature: float | torch.Tensor = ...,
    softcap: float | None = ..., entropy: Literal[True],
    support: tuple[torch.Tensor, torch.Tensor] | None = ..., group: Any = ..., impl: Impl = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def token_logprobs(  # noqa: PLR0913 - all but four are keywords
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    support: tuple[torch.Tensor, torch.Tensor] | None = None,
    group: Any = None,
    impl: Impl = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of ``targets`` in the distributions of some rows.

    The logits of row ``r`` are ``z = hidden[rows[r]] @ weight.T + bias``, then
    ``softcap * tanh(z / softcap)``, then divided by the temperature. They are computed in tiles of
    rows and vocabulary, so ``[R, V]`` is never in memory, neither forward nor backward.

    Args:
        hidden: ``[tokens, H]`` bfloat16, float16, float32 or float64: the last hidden states.
        weight: ``[V, H]`` of the same dtype: the LM head. With ``group`` the part of this rank, or
            a ``DTensor`` that is sharded over it by tokens.
        rows: ``[R]`` int32 or int64 indices into ``hidden``. A row may occur more than once.
        targets: ``[R]`` int32 or int64 tokens in ``[0, V)``.
        bias: ``[V]`` of the same dtype.
        temperature: Positive: one number, or ``[R]`` float32. No gradient flows to it.
        softcap: Positive: the largest absolute logit, as of Gemma 2. None for no cap.
        entropy: Whether to return entropies too.
        support: Tokens that could be sampled: boundaries ``[R + 1]`` int32 and the distinct tokens
            of each row, int32 or int64. A row is normalised over its tokens alone; a target that is
            not among them has log-probability -inf. A row with none is normalised over all.
        group: Process group of the tensor-parallel ranks, each of which holds a part of ``weight``
            and ``bias``: equal parts in the order of the ranks. All other arguments are the same on
            all ranks, and so are the results.
        impl: ``"auto"`` folds tiles by Triton for CUDA tensors and by torch for all others. Matrix
            products are torch's in both.

    Returns:
        Log-probabilities ``[R]``, with ``entropy`` also the entropies ``[R]``: float32, float64 of
        float64. Differentiable with respect to ``hidden``, ``weight`` and ``bias``, once.

    Raises:
        TypeError: If an argument or a dtype is none of the above.
        ValueError: If shapes or devices disagree, a number is out of its range, or indices that can
            be read without waiting for a device are.

    Cost: one matrix product forward and three backward, over the ``R`` rows alone, and one launch
    that reads each tile, backward one that reads and writes it. Memory: one tile (on a device
    4,096 rows of 16,384 logits), the gathered rows, and backward float32 gradients of the rows and
    of one column of tiles. Sums are float32 at least and in a fixed order: results are bitwise the
    same in every run. No copy to the host, no synchronisation. With ``group`` two all-reduces of
    two and of three float64 numbers a row, backward one of the gradient of ``hidden``.

    Example:
        >>> hidden, weight = torch.eye(3), torch.eye(4, 3)
        >>> rows, targets = torch.tensor([0, 2]), torch.tensor([0, 3])
        >>> token_logprobs(hidden, weight, rows, targets)
        tensor([-0.7437, -1.7437])
        >>> boundaries, tokens = torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([0, 1])
        >>> token_logprobs(hidden, weight, rows, targets, support=(boundaries, tokens))
        tensor([-0.3133, -1.7437])

    Reference:
        ``torch.nn.functional.log_softmax`` of all logits, gathered at the targets.
    """
    op = "token_logprobs"
    head = _Head(
        op, hidden, weight, rows,
        bias=bias, temperature=temperature, softcap=softcap, group=group, impl=impl,
    )  # fmt: skip
    num_rows, device = rows.shape[0], hidden.device
    check_tensor(
        op, "targets", targets, dtypes=INTEGERS, device=device, entries=num_rows, per="row"
    )
    check_indices(op, "targets", targets, head.vocabulary)
    row = torch.arange(num_rows, device=device)
    if support is None:
        logsumexp, mean, logits = head.statistics(row, targets.long(), 1, with_mean=entropy)
        logprobs, entropies = logits - logsumexp, logsumexp - mean
    else:
        logprobs, entropies = _supported(
            op, head, row, targets.long(), support, with_entropy=entropy
        )
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return (logprobs.to(dtype), entropies.to(dtype)) if entropy else logprobs.to(dtype)


def topk_kl(  # noqa: PLR0913 - all but five are keywords
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    *,
    direction: Direction = "forward",
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    group: Any = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Return the divergence of each row from a teacher that is known at k tokens.

    All other tokens are one class. With the teacher's probabilities p and the model's q over the k
    tokens and that class, ``"forward"`` is ``sum(p * log(p / q))`` and ``"reverse"`` is
    ``sum(q * log(q / p))``. The probability of the class is at least 2⁻²⁴.

    Args:
        hidden: As of `token_logprobs`, like ``weight``, ``rows`` and all that follows here.
        weight: The LM head of the model, not of the teacher.
        rows: ``[R]``
        tokens: ``[R, k]`` int32 or int64, distinct in each row.
        teacher_logprobs: ``[R, k]`` float32 or float64. Entries of -inf are left out, with their
            tokens: rows with fewer than k tokens end in such. No gradient flows to them.
        direction: ``"forward"`` or ``"reverse"``.
        bias: ``[V]``
        temperature: Of the model. The teacher's log-probabilities are taken as they are.
        softcap: Of the model.
        group: As of `token_logprobs`.
        impl: As of `token_logprobs`.

    Returns:
        ``[R]``, differentiable and of the dtype of `token_logprobs`.

    Raises:
        TypeError: As `token_logprobs`.
        ValueError: As `token_logprobs`, and if a row has a token twice, where that can be read.

    Cost: that of `token_logprobs`, and some small operations over ``[R, k]``.

    Example:
        >>> hidden, weight = torch.zeros(1, 3), torch.eye(4, 3)
        >>> rows, tokens = torch.tensor([0]), torch.tensor([[0, 1]])
        >>> topk_kl(hidden, weight, rows, tokens, torch.tensor([[0.5, 0.25]]).log())
        tensor([0.1733])
    """
    op = "topk_kl"
    check_choice(op, "direction", direction, get_args(Direction))
    head = _Head(
        op, hidden, weight, rows,
        bias=bias, temperature=temperature, softcap=softcap, group=group, impl=impl,
    )  # fmt: skip
    num_rows, device = rows.shape[0], hidden.device
    check_tensor(
        op, "tokens", tokens, dtypes=INTEGERS, ndim=2, device=device, entries=num_rows, per="row"
    )
    check_tensor(
        op, "teacher_logprobs", teacher_logprobs, dtypes=(torch.float32, torch.float64), ndim=2,
        device=device, entries=num_rows, per="row", constant=True,
    )  # fmt: skip
    if teacher_logprobs.shape != tokens.shape:
        raise ValueError(
            f"{op}: teacher_logprobs must have the shape {list(tokens.shape)} of tokens, "
            f"got {list(teacher_logprobs.shape)}"
        )
    most = tokens.shape[1]
    teacher = teacher_logprobs.double()
    known = teacher > -torch.inf
    wanted = torch.where(known, tokens, -1)
    check_indices(op, "tokens", wanted, head.vocabulary, least=-1)
    row = torch.arange(num_rows, device=device).repeat_interleave(most)
    _check_distinct(op, row, wanted.flatten())
    logsumexp, _, logits = head.statistics(row, wanted.long().flatten(), most, with_mean=False)
    model = logits.view(num_rows, most) - logsumexp[:, None]
    model, teacher = (torch.where(known, one, 0.0) for one in (model, teacher))
    here, there = (_with_tail(one, known) for one in (model, teacher))
    if direction == "forward":
        here, there = there, here
    divergence = (here.exp() * (here - there)).masked_fill(~_with_class(known), 0.0).sum(1)
    return divergence.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)


def _with_tail(logprobs: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Append the logarithm of the probability of all other tokens."""
    inside = logprobs.exp().masked_fill(~known, 0.0).sum(1, keepdim=True)
    return torch.cat((logprobs, (1 - inside).clamp_min(LEAST_TAIL).log()), 1)


def _with_class(known: torch.Tensor) -> torch.Tensor:
    return torch.cat((known, known.new_ones(known.shape[0], 1)), 1)


class _Head:
    """An LM head applied to some rows."""

    def __init__(  # noqa: PLR0913 - arguments of the public ops
        self, op: str, hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor,
        *, bias: torch.Tensor | None, temperature: float | torch.Tensor, softcap: float | None,
        group: Any, impl: Impl,
    ) -> None:  # fmt: skip
        check_tensor(op, "hidden", hidden, dtypes=FLOATS, ndim=2)
        check_tensor(op, "rows", rows, dtypes=INTEGERS, device=hidden.device)
        own, self.first, self.vocabulary = shard_of(op, "weight", weight, group)
        device = hidden.device
        check_tensor(op, "weight", own, dtypes=(hidden.dtype,), ndim=2, device=device)
        if own.shape[1] != hidden.shape[1] or not own.shape[0]:
            raise ValueError(
                f"{op}: weight must have shape [V, {hidden.shape[1]}] with at least one token, "
                f"got {list(own.shape)}"
            )
        if bias is not None:
            bias = shard_of(op, "bias", bias, group)[0]
            check_tensor(
                op, "bias", bias, dtypes=(hidden.dtype,), device=device, entries=own.shape[0]
            )
        check_indices(op, "rows", rows, hidden.shape[0])
        if softcap is not None:
            check_number(op, "softcap", softcap, above=0, finite=True)
        self.temperature: torch.Tensor | None = None
        if isinstance(temperature, torch.Tensor):
            self.temperature = temperature
            check_tensor(
                op, "temperature", temperature, dtypes=(torch.float32,), device=device,
                entries=rows.shape[0], per="row", constant=True,
            )  # fmt: skip
        else:
            check_number(op, "temperature", temperature, above=0, finite=True)
            if temperature != 1:
                self.temperature = torch.full(rows.shape, float(temperature), device=device)
        self.hidden = hidden if group is None else with_summed_gradient(hidden, group)
        self.weight, self.bias, self.rows = own, bias, rows.long()
        self.softcap = float(softcap or 0.0)
        self.group, self.impl = group, resolve_impl(op, impl, hidden)

    def statistics(
        self, pair_rows: torch.Tensor, pair_tokens: torch.Tensor, per_row: int, *, with_mean: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-sum-exp and mean logit of the rows, and the logits of pairs, all float64."""
        found = torch.ops.trajpack.logit_statistics(
            self.hidden, self.weight, self.bias, self.rows, self.temperature,
            pair_rows, pair_tokens - self.first, per_row, self.softcap, with_mean, self.impl,
        )  # fmt: skip
        logsumexp, mean, logits = found if self.group is None else merged(found, self.group)
        temperature = None if self.temperature is None else self.temperature[pair_rows]
        return logsumexp, mean, transformed(logits, self.softcap, temperature)[0]


def _supported(
    op: str, head: _Head, row: torch.Tensor, targets: torch.Tensor,
    support: tuple[torch.Tensor, torch.Tensor], *, with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return log-probabilities and entropies of distributions over the tokens of ``support``."""
    boundaries, tokens = support
    num_rows, device = row.shape[0], row.device
    check_tensor(
        op, "boundaries of support", boundaries, dtypes=(torch.int32,), device=device,
        entries=num_rows + 1, per="boundary",
    )  # fmt: skip
    check_tensor(op, "tokens of support", tokens, dtypes=INTEGERS, device=device)
    check_boundaries(op, boundaries, tokens.shape[0], name="support", end="its tokens")
    check_indices(op, "tokens of support", tokens, head.vocabulary)
    place = torch.arange(tokens.shape[0], device=device)
    owner = torch.searchsorted(boundaries.long(), place, right=True) - 1
    _check_distinct(op, owner, tokens)
    is_free = boundaries[1:] == boundaries[:-1]
    pair_rows = torch.cat((owner, row))
    pair_tokens = torch.cat((tokens.long(), targets.where(is_free, -1)))
    logsumexp, mean, logits = head.statistics(pair_rows, pair_tokens, 0, with_mean=with_entropy)
    inside, outside = logits.split((tokens.shape[0], num_rows))
    most = segment_max(inside.detach(), boundaries).masked_fill(is_free, 0.0)
    terms = (inside - most[owner]).exp()
    total = segment_sum(terms, boundaries).masked_fill(is_free, 1.0)
    is_target = tokens == targets[owner]
    wanted = segment_sum(torch.where(is_target, inside, 0.0), boundaries)
    has_target = segment_sum(is_target, boundaries) > 0
    normalizer = total.log() + most
    average = segment_sum(torch.where(terms == 0, 0.0, terms * inside), boundaries) / total
    logprobs = torch.where(has_target, wanted - normalizer, -torch.inf)
    logprobs = torch.where(is_free, outside - logsumexp, logprobs)
    return logprobs, torch.where(is_free, logsumexp - mean, normalizer - average)


def _check_distinct(op: str, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Raise if values can be read and a row has a token twice."""
    readable = values_to_check(tokens)
    if readable is None:
        return
    pairs = torch.stack((rows.to(readable.device), readable.long()))[:, readable >= 0]
    distinct, counts = pairs.unique(dim=1, return_counts=True)
    if (counts > 1).any():
        row, token = distinct[:, int((counts > 1).int().argmax())].tolist()
        raise ValueError(f"{op}: tokens of a row must be distinct, row {row} has {token} twice")
