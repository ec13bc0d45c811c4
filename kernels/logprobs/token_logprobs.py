"""Log-probabilities and entropies of tokens from hidden states and the LM head."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.autograd import forward_ad

from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.logprobs.logit_statistics import HALVES, transformed
from trajpack.kernels.logprobs.pair_logits import LOGITS_PER_PAIR, Pairs
from trajpack.kernels.logprobs.vocabulary_shards import Merged, SummedGradient, shard_of
from trajpack.kernels.rearrange.repeat_rows import repeat_rows
from trajpack.kernels.scan.segment_sum import segment_sum
from trajpack.kernels.validation import (
    check_boundaries,
    check_choice,
    check_indices,
    check_integer,
    check_number,
    check_tensor,
    values_to_check,
)

FLOATS = (*HALVES, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
IDS = (*INTEGERS, torch.int16, torch.uint16, torch.uint8)
Direction: TypeAlias = Literal["forward", "reverse"]
TokenSets: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Boundaries ``[R + 1]`` int32 and tokens ``[P]``: those of row ``r`` are
``tokens[boundaries[r] : boundaries[r + 1]]``, distinct integers, as
`PackedBatch.generated` has of a ragged field."""
LEAST_TAIL = 2.0**-24
"""Least probability of a teacher's other tokens: what float32 log-probabilities can resolve."""
KEPT_ON_HOST = 2**28
"""Bytes of logits that are kept by default on the host."""
ROUNDING = 1e-3
"""Most that a teacher's log-probability may be above 0."""


def token_logprobs(  # noqa: PLR0913 - all but four are keywords
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor | TokenSets,
    *,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    support: TokenSets | None = None,
    every_row_supported: bool = False,
    group: Any = None,
    keep_logits: int | None = None,
    impl: Impl = "auto",
) -> Any:
    """Return the log-probabilities of ``targets`` in the distributions of some rows.

    The logits of row ``r`` are ``z = hidden[rows[r]] @ weight.T + bias``, then
    ``softcap * tanh(z / softcap)``, then divided by the temperature. They are computed in tiles of
    rows and vocabulary, so that memory holds one tile, and what ``keep_logits`` allows.

    Args:
        hidden: ``[tokens, H]`` bfloat16, float16, float32 or float64: the last hidden states.
        weight: ``[V, H]`` of the same dtype: the LM head. With ``group`` the part of this rank, or
            a ``DTensor`` that is sharded over it by tokens.
        rows: ``[R]`` int32 or int64 indices into ``hidden``. A row may occur more than once.
        targets: ``[R]`` int32 or int64 tokens in ``[0, V)``; or any number of tokens of each row,
            such as a teacher's: boundaries ``[R + 1]`` int32 and distinct tokens ``[P]``.
        bias: ``[V]`` of the same dtype.
        temperature: Positive: one number, which is rounded to float32, or ``[R]`` float32. No
            gradient flows to it.
        softcap: Positive: the largest absolute logit, as of Gemma 2. None for no cap.
        entropy: Whether to return entropies too.
        support: Tokens that could be sampled, one target a row: boundaries and distinct tokens, as
            of ``targets``. A row is normalised over its tokens alone; a target that is not among
            them has log-probability -inf. A row with none is normalised over all.
        every_row_supported: Whether each row has tokens in ``support``. The host sees that, and a
            device, which is not asked, is saved the vocabulary. A row with none then has
            log-probability -inf.
        group: Process group of the tensor-parallel ranks, each of which holds a part of ``weight``
            and ``bias``: equal parts in the order of the ranks. All other arguments are the same on
            all ranks, and so are the results.
        keep_logits: Most bytes of logits, in the dtype of ``hidden``, that are kept for the first
            backward pass, where a gradient is recorded: it reads whole tiles that are kept, and
            computes the others again. No result depends on it. None for a quarter of the memory of
            the device that is free or cached by torch at the call, and 256 MiB on the host; none
            while ``torch.compile`` traces or a CUDA graph is captured.
        impl: ``"auto"`` folds tiles by Triton for CUDA tensors and by torch for all others. Matrix
            products are torch's in both.

    Returns:
        Log-probabilities ``[R]``, or ``[P]`` and ``[R]``: of the tokens, and of all others of a row
        together, -inf if there are none; that is as exact where it is 1e-30 as where it is 0.5.
        With ``entropy`` also the entropies ``[R]``. They are float32, float64 of float64.
        Differentiable once with respect to ``hidden``, ``weight`` and ``bias``, in reverse mode,
        not under transforms of ``torch.func``. A logit of -inf stays so under a soft-cap.

    Raises:
        TypeError: If an argument or a dtype is none of the above.
        ValueError: If shapes or devices disagree, a number is out of its range, or values that can
            be read without waiting for a device are.
        RuntimeError: If a gradient is asked for in another way.

    Example:
        >>> hidden, weight = torch.eye(3), torch.eye(4, 3)
        >>> rows, targets = torch.tensor([0, 2]), torch.tensor([0, 3])
        >>> token_logprobs(hidden, weight, rows, targets)
        tensor([-0.7437, -1.7437])
        >>> sets = torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([0, 1])
        >>> token_logprobs(hidden, weight, rows, targets, support=sets)
        tensor([-0.3133, -1.7437])
        >>> token_logprobs(hidden, weight, rows, sets)
        (tensor([-0.7437, -1.7437]), tensor([-1.0505,  0.0000]))

    Reference:
        ``torch.nn.functional.log_softmax`` of all logits, gathered at the targets.
    """
    head = _Head(
        "token_logprobs", hidden, weight, rows,
        bias=bias, temperature=temperature, softcap=softcap, group=group, keep_logits=keep_logits,
        impl=impl,
    )  # fmt: skip
    if isinstance(targets, torch.Tensor):
        pairs = head.one_pair_a_row(targets)
    elif support is None:
        pairs = head.pairs("targets", targets)
    else:
        raise ValueError("token_logprobs: targets must be [R] with a support, got sets of tokens")
    if support is None:
        found = _over_all(*head.statistics(pairs, with_mean=entropy), pairs=pairs, entropy=entropy)
    else:
        sets, every = head.pairs("support", support), every_row_supported
        found = _over_support(head, sets, pairs, every_row=every, entropy=entropy)
    results = [one.to(head.dtype) for one in found]
    return results[0] if len(results) == 1 else tuple(results)


def topk_kl(
    logprobs: torch.Tensor,
    rest: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    *,
    boundaries: torch.Tensor,
    direction: Direction = "forward",
) -> torch.Tensor:
    """Return the divergence of each row from a teacher that is known at some tokens.

    All other tokens are one class. With the teacher's probabilities p and the model's q over the
    tokens of a row and that class, ``"forward"`` is ``sum(p * log(p / q))`` and ``"reverse"`` is
    ``sum(q * log(q / p))``.

    Args:
        logprobs: ``[P]`` float32 or float64, of `token_logprobs`.
        rest: ``[R]`` of the same dtype, of `token_logprobs`. Where it is -inf there is no class.
        teacher_logprobs: ``[P]`` float32 or float64. A token of -inf is counted with the others.
            The teacher's probability of the others is at least 2⁻²⁴. No gradient flows to them.
        boundaries: ``[R + 1]`` int32: those of the tokens.
        direction: ``"forward"`` or ``"reverse"``.

    Returns:
        ``[R]`` of the dtype of ``logprobs``, differentiable with respect to both.

    Raises:
        TypeError: If an argument or a dtype is none of the above.
        ValueError: If shapes or devices disagree; where values can be read, if a teacher's
            log-probability is above 0 or no number, or boundaries do not end at the tokens.

    Example:
        >>> hidden, weight = torch.zeros(1, 3), torch.eye(4, 3)
        >>> boundaries, tokens = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 1])
        >>> own = token_logprobs(hidden, weight, torch.tensor([0]), (boundaries, tokens))
        >>> topk_kl(*own, torch.tensor([0.5, 0.25]).log(), boundaries=boundaries)
        tensor([0.1733])
    """
    op = "topk_kl"
    check_choice(op, "direction", direction, get_args(Direction))
    floats, device = (torch.float32, torch.float64), logprobs.device
    check_tensor(op, "logprobs", logprobs, dtypes=floats)
    check_tensor(op, "rest", rest, dtypes=floats, device=device)
    num_rows, num_pairs = rest.shape[0], logprobs.shape[0]
    check_tensor(
        op, "teacher_logprobs", teacher_logprobs, dtypes=floats, device=device, entries=num_pairs,
        constant=True,
    )  # fmt: skip
    _check_boundaries(op, "logprobs", boundaries, num_rows=num_rows, tokens=logprobs)
    readable = values_to_check(teacher_logprobs)
    if readable is not None and not (readable <= ROUNDING).all():
        wrong = readable[~(readable <= ROUNDING)][0]
        raise ValueError(f"{op}: teacher_logprobs must be numbers of at most 0, got {wrong:g}")
    pairs = Pairs(boundaries, boundaries.new_zeros(num_pairs))
    teacher, own, rest = teacher_logprobs.double(), logprobs.double(), rest.double()
    known = teacher != -torch.inf
    others = _logsumexp(own.masked_fill(known, -torch.inf), pairs)
    has_others = others > -torch.inf
    with_others = torch.logaddexp(rest, others.where(has_others, 0.0))
    tail = torch.where(has_others, with_others, rest)
    has_tail = tail != -torch.inf
    own, teacher, tail = own.where(known, 0.0), teacher.where(known, 0.0), tail.where(has_tail, 0.0)
    certain = segment_sum(teacher.exp().where(known, 0.0), boundaries)
    teacher_tail = (1 - certain).clamp_min(LEAST_TAIL).log()
    compared = [(teacher, own), (teacher_tail, tail)]
    if direction == "reverse":
        compared = [(here, there) for there, here in compared]
    of_tokens, of_tail = (from_.exp() * (from_ - to) for from_, to in compared)
    total = segment_sum(of_tokens.where(known, 0.0), boundaries) + of_tail.where(has_tail, 0.0)
    return total.to(logprobs.dtype)


class _Head:
    """An LM head applied to some rows."""

    def __init__(  # noqa: PLR0913 - arguments of the public ops
        self, op: str, hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor,
        *, bias: torch.Tensor | None, temperature: float | torch.Tensor, softcap: float | None,
        group: Any, keep_logits: int | None, impl: Impl,
    ) -> None:  # fmt: skip
        check_tensor(op, "hidden", hidden, dtypes=FLOATS, ndim=2)
        check_tensor(op, "rows", rows, dtypes=INTEGERS, device=hidden.device)
        own, self.first, self.vocabulary = shard_of(op, "weight", weight, group)
        device = hidden.device
        if own.dtype != hidden.dtype:
            wanted, got = (str(one.dtype).removeprefix("torch.") for one in (hidden, own))
            raise TypeError(
                f"{op}: weight must be {wanted} as hidden, got {got}; convert one of them, "
                "hidden.to(weight.dtype) for more exact products"
            )
        check_tensor(op, "weight", own, ndim=2, device=device)
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
        if keep_logits is not None:
            check_integer(op, "keep_logits", keep_logits)
        _check_reverse_mode(op, hidden, own, bias)
        self.op, self.hidden = op, hidden
        if group is not None:
            self.hidden = SummedGradient.apply(hidden, group)  # type: ignore[no-untyped-call]
        self.weight, self.bias, self.rows = own, bias, rows.long()
        self.temperature = temperatures(op, temperature, rows)
        self.softcap = float(softcap or 0.0)
        self.group, self.impl = group, resolve_impl(op, impl, hidden.device)
        trained = any(one is not None and one.requires_grad for one in (hidden, own, bias))
        self.keep = keep_logits
        if not trained or not torch.is_grad_enabled():
            self.keep = 0
        elif keep_logits is None:
            self.keep = _spare_bytes(device)
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32

    def one_pair_a_row(self, targets: torch.Tensor) -> Pairs:
        """Check and return a token of each row."""
        op, count = self.op, self.rows.shape[0]
        check_tensor(
            op, "targets", targets, dtypes=INTEGERS, device=self.rows.device, entries=count,
            per="row",
        )  # fmt: skip
        check_indices(op, "targets", targets, self.vocabulary)
        each = torch.arange(count + 1, dtype=torch.int32, device=targets.device)
        return Pairs(each, targets.long(), each=True)

    def pairs(self, name: str, sets: TokenSets) -> Pairs:
        """Check and return the tokens of the rows."""
        op = self.op
        if not isinstance(sets, (tuple, list)) or len(sets) != 2:
            got = f"{type(sets).__name__} {sets!r}"[:60]
            raise TypeError(f"{op}: {name} must be boundaries and tokens, got {got}")
        boundaries, tokens = sets
        check_tensor(op, f"tokens of {name}", tokens, dtypes=IDS, device=self.rows.device)
        _check_boundaries(op, name, boundaries, num_rows=self.rows.shape[0], tokens=tokens)
        pairs = Pairs(boundaries, tokens.long())
        check_indices(op, f"tokens of {name}", pairs.tokens, self.vocabulary)
        readable = values_to_check(pairs.tokens)
        if readable is not None:
            key = (pairs.owners.to(readable.device) * self.vocabulary + readable).sort().values
            twice = key[1:][key.diff() == 0]
            if twice.numel():
                row, token = divmod(int(twice[0]), self.vocabulary)
                wrong = f"row {row} has {token} twice"
                raise ValueError(f"{op}: tokens of a row must be distinct in {name}, {wrong}")
        return pairs

    def statistics(
        self, pairs: Pairs, *, with_mean: bool, whole: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-sum-exp and mean of each row's other logits, and those of pairs, all float64.

        Without ``whole`` the first two are any numbers.
        """
        tokens = pairs.tokens - self.first if self.first else pairs.tokens
        found = torch.ops.trajpack.logit_statistics(
            self.hidden, self.weight, self.bias, self.rows, self.temperature,
            pairs.boundaries, tokens, self.softcap, whole, with_mean, self.impl, self.keep,
        )[:3]  # fmt: skip
        if self.group is not None:
            found = Merged.apply(*found, self.group)  # type: ignore[no-untyped-call]
        rest, mean, logits = found
        temperature = self.temperature
        if temperature is not None and not pairs.each:
            temperature = temperature[pairs.owners]
        return rest, mean, transformed(logits, self.softcap, temperature)[0]


def _spare_bytes(device: torch.device) -> int:
    """Return the bytes of logits that are kept by default."""
    if torch.compiler.is_compiling():
        return 0
    if device.type != "cuda":
        return KEPT_ON_HOST if device.type == "cpu" else 0
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return 0
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return (torch.cuda.mem_get_info()[0] + cached) // 4


def temperatures(
    op: str, temperature: float | torch.Tensor, rows: torch.Tensor
) -> torch.Tensor | None:
    """Check temperatures and return that of each of ``rows``, ``[R]`` float32; None for 1."""
    limits = torch.finfo(torch.float32)
    if not isinstance(temperature, torch.Tensor):
        check_number(op, "temperature", temperature, above=limits.tiny, most=limits.max)
        if temperature == 1:
            return None
        return torch.full(rows.shape, float(temperature), device=rows.device)
    check_tensor(
        op, "temperature", temperature, dtypes=(torch.float32,), device=rows.device,
        entries=rows.shape[0], per="row", constant=True,
    )  # fmt: skip
    readable = values_to_check(temperature)
    wrong = None if readable is None else ~((readable > limits.tiny) & (readable <= limits.max))
    if readable is not None and wrong is not None and wrong.any():
        row, least = int(wrong.int().argmax()), f"finite and above {limits.tiny:g}"
        raise ValueError(f"{op}: temperature must be {least}, row {row} has {readable[row]:g}")
    return temperature


def _over_all(
    rest: torch.Tensor, mean: torch.Tensor, logits: torch.Tensor, *, pairs: Pairs, entropy: bool
) -> list[torch.Tensor]:
    """Return log-probabilities of pairs, of all other tokens together of sets, and entropies."""
    total = torch.logaddexp(rest, _logsumexp(logits, pairs))
    results = [_relative(logits, total, pairs)]
    if not pairs.each:
        results.append(rest - total)
    if entropy:
        average = _average(logits, results[0], pairs)
        results.append(total - average - (rest - total).exp() * mean)
    return results


def _over_support(
    head: _Head, pairs: Pairs, one: Pairs, *, every_row: bool, entropy: bool
) -> list[torch.Tensor]:
    """Return log-probabilities and entropies of distributions over the tokens of ``pairs``.

    ``one`` has the target of each row.
    """
    boundaries, tokens, owners = pairs.boundaries, pairs.tokens, pairs.owners
    num_rows, num_pairs, free = one.tokens.shape[0], tokens.shape[0], None
    is_free = boundaries[1:] == boundaries[:-1]
    readable = values_to_check(is_free)
    if every_row or (readable is not None and not readable.any()):
        work = LOGITS_PER_PAIR["cuda" if tokens.is_cuda else "cpu"] * num_pairs
        whole = work > num_rows * head.weight.shape[0]
        logits = head.statistics(pairs, with_mean=False, whole=whole)[2]
    else:  # each row has one more: its target, if it has no others
        ends = boundaries + one.boundaries
        place = owners + torch.arange(num_pairs, device=owners.device)
        own = ends[1:].long() - 1
        more = tokens.new_empty(num_pairs + num_rows).index_copy_(0, place, tokens)
        more.index_copy_(0, own, one.tokens.where(is_free, -1))
        rest, mean, found = head.statistics(Pairs(ends, more), with_mean=entropy)
        logits = found.index_select(0, place)
        free = _over_all(rest, mean, found.index_select(0, own), pairs=one, entropy=entropy)
    total = _logsumexp(logits, pairs).where(~is_free, 0.0)
    logprobs = _relative(logits, total, pairs)
    is_target = tokens == one.tokens[owners]
    wanted = segment_sum(torch.where(is_target, logprobs, 0.0), boundaries)
    wanted = torch.where(segment_sum(is_target, boundaries) > 0, wanted, -torch.inf)
    results = [wanted, total - _average(logits, logprobs, pairs)] if entropy else [wanted]
    if free is not None:
        results = [x.where(~is_free, y) for x, y in zip(results, free, strict=True)]
    return results


def _logsumexp(logits: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Return the log-sum-exp of each row's pairs, -inf of none."""
    if pairs.each:
        return logits
    most = logits.new_full((pairs.boundaries.shape[0] - 1,), -torch.inf)
    most = most.scatter_reduce(0, pairs.owners, logits.detach(), "amax")
    most = most.where(most > -torch.inf, 0.0)
    total = segment_sum((logits - most[pairs.owners]).exp(), pairs.boundaries)
    return torch.where(total == 0, -torch.inf, most + total.where(total != 0, 1.0).log())


def _relative(logits: torch.Tensor, total: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Return log-probabilities of pairs by log-sum-exps of rows."""
    return logits - (total if pairs.each else repeat_rows(total, pairs.owners))


def _average(logits: torch.Tensor, logprobs: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Return the sum of each row's logits weighted by probability."""
    probability = logprobs.exp()
    weighted = probability * logits.masked_fill(probability == 0, 0.0)
    return weighted if pairs.each else segment_sum(weighted, pairs.boundaries)


def _check_boundaries(
    op: str, name: str, boundaries: torch.Tensor, *, num_rows: int, tokens: torch.Tensor
) -> None:
    """Raise unless boundaries are those of as many rows, and end at the tokens."""
    check_tensor(
        op, f"boundaries of {name}", boundaries, dtypes=(torch.int32,), device=tokens.device,
        entries=num_rows + 1, per="boundary",
    )  # fmt: skip
    check_boundaries(op, boundaries, tokens.shape[0], name=name, end="its tokens")


def _check_reverse_mode(op: str, *tensors: torch.Tensor | None) -> None:
    """Raise in forward mode, where torch would return a gradient of 0."""
    for one in tensors if not torch.compiler.is_compiling() else ():
        if one is not None and forward_ad.unpack_dual(one).tangent is not None:
            raise RuntimeError(
                f"{op}: has gradients in reverse mode, by torch.autograd; not in forward mode"
            )
