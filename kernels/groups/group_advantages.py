"""Advantages relative to a group: each member's score compared with those of its group."""

from __future__ import annotations

from math import inf
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.validation import check_device, check_tensor


class Rule(NamedTuple):
    """How a group's statistics make advantages: the arguments of `group_advantages`."""

    baseline: str
    scale: str
    ddof: int
    eps: float
    singleton: str


class GroupSums(NamedTuple):
    """Statistics of the counted members of each group: float64 ``[num_groups]``."""

    size: torch.Tensor
    """Number of counted members."""
    low: torch.Tensor
    """Lowest score. Sums use ``score - low`` to avoid cancellation."""
    high: torch.Tensor
    second: torch.Tensor
    """Second highest score, equal to ``high`` where two members have it."""
    total: torch.Tensor
    square: torch.Tensor
    weight: torch.Tensor
    """Sum of the lengths, if the baseline needs them."""
    weighted: torch.Tensor
    """Sum of length times ``score - low``."""
    above: torch.Tensor
    """For the deviation of the others: Σ(score - mean)² of all but one member that has the lowest
    score."""
    below: torch.Tensor
    """The same of all but one member that has the highest score."""


class GroupTerms(NamedTuple):
    """A group's advantages: ``max((score - shift - center) * factor, floor)``, float64."""

    shift: torch.Tensor
    center: torch.Tensor
    factor: torch.Tensor
    floor: torch.Tensor


def advantages_of(
    score: torch.Tensor, place: torch.Tensor, sums: GroupSums, rule: Rule, share: torch.Tensor
) -> torch.Tensor:
    """Return float64 advantages of members.

    Args:
        score: ``[members]`` float64.
        place: ``[members]`` int64: the group of each.
        sums: Of the groups.
        rule: How they make advantages.
        share: All members by those not scored 0, 0-d.
    """
    terms = GroupTerms(*(term[place] for term in group_terms(sums, rule, share)))
    excess = score - terms.shift - terms.center
    advantage = excess * terms.factor
    if rule.scale == "leave_one_out_std":
        own = GroupSums(*(each[place] for each in sums))
        advantage = advantage / _scale_of_others(score, excess, own, rule)
    return torch.where(advantage < terms.floor, terms.floor, advantage) + 0.0  # no -0


def _scale_of_others(
    score: torch.Tensor, excess: torch.Tensor, own: GroupSums, rule: Rule
) -> torch.Tensor:
    """Return the standard deviation of the others plus ``eps``; 1 where all others are equal.

    Σ(score - mean)² of the others is that of all less the member's own part. The part of the
    lowest or highest may be nearly all of it, so that these two were summed without it.
    """
    squares = own.square - own.total / own.size * own.total
    others = squares - excess * excess * (own.size / (own.size - 1).clamp(min=1))
    others = torch.where(score == own.low, own.above, others)
    others = torch.where(score == own.high, own.below, others)
    degrees = own.size - 1 - rule.ddof
    deviation = (others.clamp(min=0) / degrees.clamp(min=1)).sqrt()
    return torch.where((others > 0) & (degrees > 0), deviation + rule.eps, 1.0)


def group_terms(sums: GroupSums, rule: Rule, share: torch.Tensor) -> GroupTerms:
    """Return how scores become advantages; ``share`` is all members by those not 0."""
    count, nothing = sums.size, torch.zeros_like(sums.size)
    mean = sums.total / count.clamp(min=1)
    shift, center, floor = _center(sums, rule, mean)
    factor, alone = nothing + 1, count <= 1
    leaves_one_out = rule.baseline == "leave_one_out"
    # score - mean of the others is n / (n - 1) times score - mean
    stretch = count / (count - 1).clamp(min=1) if leaves_one_out else factor
    if rule.scale in ("std", "std_about_baseline"):
        squares = (sums.square - mean * sums.total).clamp(min=0)
        if rule.scale == "std_about_baseline":
            off = sums.low + mean - shift - center
            squares = (squares + count * off * off) * stretch * stretch
        divisor = (squares / (count - rule.ddof).clamp(min=1)).sqrt() + rule.eps
        factor = 1 / torch.where(divisor == 0, 1.0, divisor)
        alone = alone | (count <= rule.ddof)
    elif rule.scale == "mean":
        level = sums.low + mean
        factor = torch.where(level > 0, 1 / level, 0.0)
    elif rule.scale == "signed_mean":
        level = sums.low + mean + rule.eps
        factor = 1 / torch.where(level == 0, 1.0, level)
    elif rule.scale == "nonzero":
        factor = factor * share
    if leaves_one_out:
        factor = factor * stretch
    if rule.baseline != "none" or rule.scale == "std":
        factor = torch.where(sums.high == sums.low, 0.0, factor)
    of_one = (share if rule.scale == "nonzero" else 1.0) if rule.singleton == "raw" else 0.0
    factor = torch.where(alone, of_one, factor)
    factor = factor + (sums.total - sums.total)  # NaN where a score is not finite
    shift, center = (torch.where(alone, 0.0, term) for term in (shift, center))
    return GroupTerms(shift, center, factor, torch.where(alone, -torch.inf, floor))


def _center(
    sums: GroupSums, rule: Rule, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return shift, center and floor; ``mean`` is that of what scores exceed the lowest by."""
    nothing = torch.zeros_like(mean)
    floor = nothing - torch.inf
    if rule.baseline == "length_weighted":
        return sums.low, torch.where(sums.weight == 0, mean, sums.weighted / sums.weight), floor
    if rule.baseline == "second_best":
        return sums.second, nothing, nothing
    return (nothing, nothing, floor) if rule.baseline == "none" else (sums.low, mean, floor)


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
