"""Advantages relative to a group: what a member's score is beside those of its group."""

from __future__ import annotations

from math import inf
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.groups.group_terms import (
    GroupSums,
    Rule,
    advantages_of,
)
from trajpack.kernels.validation import check_device, check_tensor

OP = "group_advantages"
MAX_COUNT = 2**31 - 4096
"""Members, and groups, at most: the kernel counts them in int32, a tile further on."""

Baseline: TypeAlias = Literal["mean", "leave_one_out", "length_weighted", "second_best", "none"]
Scale: TypeAlias = Literal[
    "std", "leave_one_out_std", "std_about_baseline", "mean", "signed_mean", "nonzero", "none"
]
Singleton: TypeAlias = Literal["raw", "zero"]


def group_advantages(  # noqa: PLR0913
    scores: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    num_groups: int,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "raw",
    lengths: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Compare each member's score with those of its group: ``(score - baseline) / scale``.

    Groups may have any sizes, in any order. A group of which every counted member has the same
    score gets exactly 0 wherever something is subtracted or ``"std"`` divides; that is told
    by comparing scores, so groups of low variance are not taken for it. A counted score that is
    not finite makes its own group NaN.

    Args:
        scores: ``[members]`` float32 or float64.
        group_ids: ``[members]`` int32 or int64 in [0, ``num_groups``). A member with another id
            is in no group: it counts nowhere and its advantage is 0.
        num_groups: Groups, known to the host. A group without members is allowed.
        baseline: What is subtracted: the group's ``"mean"``; the mean of the others
            (``"leave_one_out"``); Σ length·score / Σ length (``"length_weighted"``), the mean
            where lengths sum to 0; nothing (``"none"``). With ``"second_best"`` the best member
            has what it is better by than the second best, and all others have 0.
        scale: What divides:

            - ``"std"``: the standard deviation of the group's scores, plus ``eps``.
            - ``"leave_one_out_std"``: that of the other members' scores, plus ``eps``; nothing
              for a member whose others are all equal, or no more than ``ddof``, as in pairs.
              Only with ``baseline="leave_one_out"`` (NeMo-RL's default).
            - ``"std_about_baseline"``: √(Σ(score - baseline)² / (n - ddof)), plus ``eps``: with
              ``"leave_one_out"`` n / (n - 1) times ``"std"`` (AReaL). Not with ``"second_best"``.
            - ``"mean"``: the group's mean; advantages are 0 where that is not positive.
            - ``"signed_mean"``: the group's mean plus ``eps``, whatever its sign: where it is
              negative, advantages change theirs, and the best member has the lowest (SkyRL's
              MaxRL). Nothing where it is 0. Not with ``"second_best"``.
            - ``"nonzero"``: the share of all counted members whose score is not 0, be they of
              any group, singletons too.
            - ``"none"``: nothing.
        ddof: A variance is divided by the number of scores it is of less this.
        eps: Added to a standard deviation, or to ``"signed_mean"``; not negative.
        singleton: Advantage in a group of one counted member (with ``scale="std"`` and
            ``"std_about_baseline"``: of no more than ``ddof``): its score (``"raw"``), not
            divided by a deviation or mean, or 0.
        lengths: ``[members]`` int32, int64, float32 or float64: for ``"length_weighted"`` only.
        valid: ``[members]`` bool. A member without it counts nowhere and has advantage 0,
            whatever its score is, NaN too.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[members]`` float32; statistics are made in float64. Not differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, a value or a word is none of the above, the
            scale does not go with the baseline, lengths are missing or not asked for, or
            ``scores`` or ``lengths`` requires grad.

    Cost: one launch, no sort, no atomics, no copy, no host synchronisation. Each 16 groups (8
    with ``"leave_one_out_std"``) read the ids of all members three times, 4 bytes each for
    int32, and the rest only near members of theirs: it grows with members · groups / 16, least
    where groups lie together. On the
    host: numpy's bincount. ``impl="torch"`` on a device makes tables of
    ``[num_groups, members]``, summed row by row: deterministic, and meant for checks.

    Example:
        >>> scores, groups = torch.tensor([1.0, 0.0, 5.0, 0.0]), torch.tensor([0, 1, 0, 0])
        >>> group_advantages(scores, groups, num_groups=2, scale="none")
        tensor([-1.,  0.,  3., -2.])
        >>> group_advantages(scores, groups, num_groups=2, baseline="leave_one_out", scale="none")
        tensor([-1.5000,  0.0000,  4.5000, -3.0000])

    Reference:
        Shao et al. 2024, DeepSeekMath, arXiv 2402.03300 (mean, std); Ahmadian et al. 2024,
        arXiv 2402.14740 (leave one out); deviation of the others:
        ``calculate_baseline_and_std_per_prompt`` of NeMo-RL; deviation about the baseline:
        ``Normalization`` of AReaL 1.0.4; mean of either sign: ``compute_maxrl_advantage`` of
        SkyRL. `trajpack.kernels.groups.group_recipes` has the usual ones by name.
    """
    check_tensor(OP, "scores", scores, ndim=1, dtypes=(torch.float32, torch.float64))
    check_tensor(OP, "group_ids", group_ids, ndim=1, dtypes=(torch.int32, torch.int64))
    _check_member_tensor("group_ids", group_ids, scores)
    _check_num_groups(num_groups)
    if scores.shape[0] > MAX_COUNT:
        raise ValueError(f"{OP}: at most {MAX_COUNT} members, got {scores.shape[0]}")
    _check_word("baseline", baseline, get_args(Baseline))
    _check_word("scale", scale, get_args(Scale))
    _check_word("singleton", singleton, get_args(Singleton))
    check_scale(OP, baseline, scale)
    _check_moments(ddof, eps)
    if valid is not None:
        check_tensor(OP, "valid", valid, ndim=1, dtypes=(torch.bool,))
        _check_member_tensor("valid", valid, scores)
        valid = valid.contiguous()
    lengths = _check_lengths(lengths, baseline, scores)
    if scores.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{OP}: no gradient flows to scores; pass scores.detach()")
    chosen = resolve_impl(OP, impl, scores)
    advantages: torch.Tensor = torch.ops.trajpack.group_advantages(
        scores.contiguous(), group_ids.contiguous(), num_groups, baseline, scale, ddof,
        float(eps), singleton, lengths, valid, chosen,
    )  # fmt: skip
    return advantages


def _check_member_tensor(name: str, tensor: torch.Tensor, scores: torch.Tensor) -> None:
    check_device(OP, name, tensor, scores.device)
    if tensor.shape != scores.shape:
        raise ValueError(
            f"{OP}: {name} must have one entry for each of {scores.shape[0]} member(s), "
            f"got shape {list(tensor.shape)}"
        )


def _check_num_groups(num_groups: int) -> None:
    if isinstance(num_groups, bool) or not isinstance(num_groups, (int, torch.SymInt)):
        raise TypeError(f"{OP}: num_groups must be an int, got {num_groups!r}")
    if not 0 <= num_groups <= MAX_COUNT:
        raise ValueError(f"{OP}: num_groups must be in [0, {MAX_COUNT}], got {num_groups}")


def _check_word(name: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        expected = ", ".join(map(repr, words))
        raise ValueError(f"{OP}: {name} must be one of {expected}, got {word!r}")


def check_scale(op: str, baseline: str, scale: str) -> None:
    """Raise where a scale is not defined for a baseline."""
    if scale == "leave_one_out_std" and baseline != "leave_one_out":
        raise ValueError(
            f"{op}: scale='leave_one_out_std' needs baseline='leave_one_out', got {baseline!r}"
        )
    if baseline == "second_best" and scale in ("std_about_baseline", "signed_mean"):
        raise ValueError(f"{op}: scale={scale!r} has no meaning with baseline='second_best'")


def _check_moments(ddof: int, eps: float) -> None:
    if isinstance(ddof, bool) or not isinstance(ddof, (int, torch.SymInt)):
        raise TypeError(f"{OP}: ddof must be an int, got {ddof!r}")
    if not 0 <= ddof <= MAX_COUNT:
        raise ValueError(f"{OP}: ddof must be in [0, {MAX_COUNT}], got {ddof}")
    if not isinstance(eps, Real):
        raise TypeError(f"{OP}: eps must be a number, got {eps!r}")
    if not 0 <= eps < inf:
        raise ValueError(f"{OP}: eps must be finite and not negative, got {eps}")


def _check_lengths(
    lengths: torch.Tensor | None, baseline: str, scores: torch.Tensor
) -> torch.Tensor | None:
    if lengths is None:
        if baseline == "length_weighted":
            raise ValueError(f"{OP}: baseline='length_weighted' needs lengths, got None")
        return None
    if baseline != "length_weighted":
        raise ValueError(f"{OP}: lengths are for baseline='length_weighted', got {baseline!r}")
    dtypes = (torch.int32, torch.int64, torch.float32, torch.float64)
    check_tensor(OP, "lengths", lengths, ndim=1, dtypes=dtypes)
    _check_member_tensor("lengths", lengths, scores)
    if lengths.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{OP}: no gradient flows to lengths; pass lengths.detach()")
    return lengths.contiguous()


def group_advantages_reference(
    scores: torch.Tensor,
    group_ids: torch.Tensor,
    num_groups: int,
    rule: Rule,
    lengths: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Say in plain torch what `group_advantages` means, with a table of groups by members.

    No value is read by the host, so it runs on any device.
    """
    if not (num_groups and scores.shape[0]):
        return torch.zeros_like(scores, dtype=torch.float32)
    score, group = scores.double(), group_ids.long()
    counted = (group >= 0) & (group < num_groups)
    if valid is not None:
        counted = counted & valid
    holds = (group == torch.arange(num_groups, device=group.device)[:, None]) & counted

    def total(values: torch.Tensor) -> torch.Tensor:
        return torch.where(holds, values, 0.0).sum(1)

    low = torch.where(holds, score, torch.inf).amin(1)
    high = torch.where(holds, score, -torch.inf).amax(1)
    best = score == high[:, None]
    below = torch.where(holds & ~best, score, -torch.inf).amax(1)
    excess = torch.where(holds, score - low[:, None], 0.0)
    length = excess.new_zeros(()) if lengths is None else lengths.double()
    count, bests = holds.sum(1).double(), (holds & best).sum(1)

    def squares_without_one(end: torch.Tensor, other_end: torch.Tensor) -> torch.Tensor:
        """Σ(score - mean)² of all members but one of those whose score is ``end``."""
        at_end = holds & (score == end[:, None])
        others = holds & ~(at_end & (at_end.cumsum(1) == 1))
        far = torch.where(others, score - other_end[:, None], 0.0)
        return (far * far).sum(1) - far.sum(1).square() / (count - 1).clamp(min=1)

    sums = GroupSums(
        count, low, high, torch.where(bests > 1, high, below), total(excess),
        total(excess * excess), total(length.expand_as(score)), total(length * excess),
        squares_without_one(low, high), squares_without_one(high, low),
    )  # fmt: skip
    share = counted.sum().double() / (counted & (score != 0)).sum().clamp(min=1)
    place = group.clamp(0, num_groups - 1)
    return torch.where(counted, advantages_of(score, place, sums, rule, share), 0.0).float()


def _run(  # noqa: PLR0913, PLR0917
    scores: torch.Tensor, group_ids: torch.Tensor, num_groups: int, baseline: str, scale: str,
    ddof: int, eps: float, singleton: str, lengths: torch.Tensor | None,
    valid: torch.Tensor | None, impl: str,
) -> torch.Tensor:  # fmt: skip
    rule = Rule(baseline, scale, ddof, eps, singleton)
    if impl == "triton":
        from trajpack.kernels.groups.group_advantages_triton import group_advantages_forward as run
    elif scores.device.type == "cpu":
        from trajpack.kernels.groups.group_advantages_host import group_advantages_on_host as run
    else:
        run = group_advantages_reference
    return run(scores, group_ids, num_groups, rule, lengths, valid)


def _fake(scores: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(scores, dtype=torch.float32)


LIBRARY.define(
    "group_advantages(Tensor scores, Tensor group_ids, SymInt num_groups, str baseline, "
    "str scale, int ddof, float eps, str singleton, Tensor? lengths, Tensor? valid, str impl)"
    " -> Tensor"
)
LIBRARY.impl("group_advantages", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::group_advantages", _fake, lib=LIBRARY)
