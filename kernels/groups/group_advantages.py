"""Advantages relative to a group: each member's score compared with those of its group."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.validation import (
    check_boundaries,
    check_choice,
    check_indices,
    check_integer,
    check_number,
    check_segments_within,
    check_tensor,
)

OP = "group_advantages"
MAX_COUNT = 2**31 - 4096
"""Largest number of members and of groups: the kernel counts them in int32, a tile further on."""
MOST_COMPARED = 1024
"""Members of a group up to which `order_by_state` compares them with each other."""
FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)

Baseline: TypeAlias = Literal["mean", "leave_one_out", "length_weighted", "second_best", "none"]
Scale: TypeAlias = Literal[
    "std", "leave_one_out_std", "std_about_baseline", "mean", "signed_mean", "nonzero", "none"
]
Singleton: TypeAlias = Literal["raw", "zero"]


class Members(NamedTuple):
    """Groups of members: by ids for ``impl="torch"``, and by places in an order for Triton."""

    group_ids: torch.Tensor
    """int32 or int64 ``[members]``: group of each member."""
    num_groups: int
    order: torch.Tensor
    """int32 or int64 ``[members]``: a permutation in which members of a group are neighbours. Sums
    follow it."""
    segments: torch.Tensor
    """int32: boundaries ``[groups + 1]`` of the groups' places in the order, or spans
    ``[members, 2]``. A span that ends a place before it begins is a member of no group."""
    longest: int | None = None
    """Upper bound of a group's members, if the host knows one."""


class Rule(NamedTuple):
    """How a group's statistics make advantages: the arguments of `group_advantages`."""

    baseline: str
    scale: str
    ddof: int
    eps: float
    singleton: str


class GroupSums(NamedTuple):
    """Statistics of the counted members of each group: float64 ``[groups]``."""

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
    without_low: torch.Tensor
    """Σ(score - mean)² without one member of the lowest score, for ``"leave_one_out_std"``."""
    without_high: torch.Tensor
    """The same without one member of the highest score."""


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

    Groups may have any sizes, in any order. A group whose counted members all have the same score
    gets exactly 0 where a baseline is subtracted or ``"std"`` divides; scores are compared for
    this, so groups of low variance are not affected. A counted score that is not finite makes its
    own group NaN.

    Args:
        scores: ``[members]`` float32 or float64.
        group_ids: ``[members]`` int32 or int64 in [0, ``num_groups``). A member with another id
            is in no group: it counts nowhere and its advantage is 0.
        num_groups: Number of groups. A group without members is allowed.
        baseline: Subtracted from the score: the group's ``"mean"``; the mean of the others
            (``"leave_one_out"``); Σ length·score / Σ length (``"length_weighted"``), the mean
            where lengths sum to 0; 0 (``"none"``). With ``"second_best"`` the best member gets
            its lead over the second best, and all others get 0.
        scale: Divisor:

            - ``"std"``: the standard deviation of the group's scores, plus ``eps``.
            - ``"leave_one_out_std"``: that of the other members' scores, plus ``eps``; 1 for a
              member whose others are all equal, or no more than ``ddof``, as in pairs. Only with
              ``baseline="leave_one_out"`` (NeMo-RL's default).
            - ``"std_about_baseline"``: √(Σ(score - baseline)² / (n - ddof)), plus ``eps``: with
              ``"leave_one_out"`` n / (n - 1) times ``"std"`` (AReaL). Not with ``"second_best"``.
            - ``"mean"``: the group's mean; advantages are 0 where that is not positive.
            - ``"signed_mean"``: the group's mean plus ``eps``. A negative mean changes the sign of
              the advantages, so the best member has the lowest (SkyRL's MaxRL). 1 where it is 0.
              Not with ``"second_best"``.
            - ``"nonzero"``: the share of nonzero scores among counted members of all groups.
            - ``"none"``: 1.
        ddof: A variance is divided by its number of scores minus ``ddof``.
        eps: Added to a standard deviation, or to ``"signed_mean"``; not negative.
        singleton: Advantage in a group of one counted member (with ``scale="std"`` and
            ``"std_about_baseline"``: of no more than ``ddof``): its score (``"raw"``), not
            divided by a deviation or mean, or 0.
        lengths: ``[members]`` int32, int64, float32 or float64: for ``"length_weighted"`` only.
        valid: ``[members]`` bool. A member where it is False counts nowhere and has advantage 0,
            even if its score is NaN.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[members]`` float32; statistics are computed in float64. Not differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, a value is none of the above, the scale does not
            go with the baseline, lengths are missing or not needed, or ``scores`` or ``lengths``
            requires grad.

    Cost: a stable sort of the ids, three small operations that find the groups in it, and one
    launch, which reads each member four times; another above 512 members, for groups that long.
    Three more with ``"nonzero"``. No copy, no host synchronisation. With ``impl="torch"`` one pass
    for each statistic.

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
    rule = Rule(baseline, scale, ddof, eps, singleton)
    check_tensor(OP, "scores", scores, dtypes=FLOATS, constant=True)
    per = {"device": scores.device, "entries": scores.shape[0], "per": "member"}
    check_tensor(OP, "group_ids", group_ids, dtypes=INTEGERS, **per)  # type: ignore[arg-type]
    check_integer(OP, "num_groups", num_groups, most=MAX_COUNT)
    check_integer(OP, "number of members", scores.shape[0], most=MAX_COUNT)
    _check_rule(rule)
    if valid is not None:
        check_tensor(OP, "valid", valid, dtypes=(torch.bool,), **per)  # type: ignore[arg-type]
    if baseline == "length_weighted" and lengths is None:
        raise ValueError(f"{OP}: baseline='length_weighted' needs lengths, got None")
    if lengths is not None:
        if baseline != "length_weighted":
            raise ValueError(f"{OP}: lengths are for baseline='length_weighted', got {baseline!r}")
        numbers = (*INTEGERS, *FLOATS)
        check_tensor(OP, "lengths", lengths, dtypes=numbers, constant=True, **per)  # type: ignore[arg-type]
    chosen = resolve_impl(OP, impl, scores)
    shares = None
    if chosen == "triton" and scale == "nonzero":
        counted = (group_ids >= 0) & (group_ids < num_groups)
        counted = counted if valid is None else counted & valid
        shares = torch.stack([counted.sum(), (counted & (scores != 0)).sum()]).int()
    members = members_of(group_ids, num_groups, chosen)
    return advantages_of(
        scores, members, rule, lengths=lengths, valid=valid, shares=shares, impl=chosen
    )


def members_of(group_ids: torch.Tensor, num_groups: int, impl: str) -> Members:
    """Return groups by ids in any order; by Triton a stable sort and three operations find them."""
    if impl == "torch":
        return Members(group_ids, num_groups, group_ids, group_ids)
    order = torch.argsort(group_ids, stable=True)
    group = torch.arange(num_groups + 1, device=group_ids.device)
    segments = torch.searchsorted(group_ids[order].long(), group, out_int32=True)
    return Members(group_ids, num_groups, order, segments)


def _check_rule(rule: Rule) -> None:
    baseline, scale = rule.baseline, rule.scale
    check_choice(OP, "baseline", baseline, get_args(Baseline))
    check_choice(OP, "scale", scale, get_args(Scale))
    check_choice(OP, "singleton", rule.singleton, get_args(Singleton))
    if scale == "leave_one_out_std" and baseline != "leave_one_out":
        raise ValueError(
            f"{OP}: scale='leave_one_out_std' needs baseline='leave_one_out', got {baseline!r}"
        )
    if baseline == "second_best" and scale in ("std_about_baseline", "signed_mean"):
        raise ValueError(f"{OP}: scale={scale!r} has no meaning with baseline='second_best'")
    check_integer(OP, "ddof", rule.ddof, most=MAX_COUNT)
    check_number(OP, "eps", rule.eps, least=0, finite=True)


def advantages_of(
    scores: torch.Tensor,
    members: Members,
    rule: Rule,
    *,
    impl: str,
    lengths: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `group_advantages` of members whose order is known; arguments are checked.

    ``shares`` are int32 ``[parts, 2]``, for ``scale="nonzero"`` by Triton: the counted members in
    each part of all, and those of them with a score that is not 0.

    Cost: one launch, another where a group may have more than 512 members; one more that fills
    zeros where members may be in no group.
    """
    order, groups = None, members.group_ids
    if impl == "triton":
        order, groups = members.order, members.segments
    advantages: torch.Tensor = torch.ops.trajpack.group_advantages(
        *(None if one is None else one.contiguous() for one in (scores, groups, order)),
        members.num_groups,
        *rule[:3],
        float(rule.eps),
        rule.singleton,
        *(None if one is None else one.contiguous() for one in (lengths, valid, shares)),
        members.longest,
    )
    return advantages


def group_advantages_reference(
    scores: torch.Tensor,
    group_ids: torch.Tensor,
    num_groups: int,
    rule: Rule,
    lengths: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Define `group_advantages` in plain torch, on any device; no value is read by the host.

    Sums are made in the members' order: ``index_put_`` of float64 adds serially on the host, and
    after a stable sort on CUDA.
    """
    score, group = scores.double(), group_ids.long()
    counted = (group >= 0) & (group < num_groups)
    if valid is not None:
        counted = counted & valid
    group = torch.where(counted, group, num_groups)  # one more group takes all other members
    score = torch.where(counted, score, 0.0)

    def total(rows: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros(num_groups + 1).index_put_((group,), rows, accumulate=True)

    def extreme(rows: torch.Tensor, reduction: str, start: float) -> torch.Tensor:
        return rows.new_full((num_groups + 1,), start).scatter_reduce_(0, group, rows, reduction)

    low, high = extreme(score, "amin", torch.inf), extreme(score, "amax", -torch.inf)
    excess, size = score - low[group], total(counted.double())
    second = high
    weights = without_one = [torch.zeros_like(size)] * 2
    if rule.baseline == "second_best":
        best = score == high[group]
        below = extreme(torch.where(best, -torch.inf, score), "amax", -torch.inf)
        second = torch.where(total(best.double()) > 1, high, below)
    if lengths is not None:
        weights = [total(lengths.double()), total(lengths.double() * excess)]
    if rule.scale == "leave_one_out_std":
        width = high - low

        def squares_without_one(end: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
            at_end = score == end[group]
            others = total(at_end.double()) - 1  # members at this end that stay
            distance = torch.where(at_end, 0.0, distance)
            sum_of_squares = total(distance * distance) + others * width * width
            distances = total(distance) + others * width
            return sum_of_squares - distances * distances / (size - 1).clamp(min=1)

        of_low = squares_without_one(low, high[group] - score)
        without_one = [of_low, squares_without_one(high, excess)]
    sums = GroupSums(
        size, low, high, second, total(excess), total(excess * excess), *weights, *without_one
    )
    by_nonzero = counted.sum().double() / (counted & (score != 0)).sum().clamp(min=1)
    shift, center, factor, floor = (term[group] for term in group_terms(sums, rule, by_nonzero))
    excess = score - shift - center
    advantage = excess * factor
    if rule.scale == "leave_one_out_std":
        own = GroupSums(*(of_groups[group] for of_groups in sums))
        advantage = advantage / _std_of_others(score, excess, own, rule)
    advantage = torch.where(advantage < floor, floor, advantage) + 0.0  # no -0
    return torch.where(counted, advantage, 0.0).float()


def _std_of_others(
    score: torch.Tensor, excess: torch.Tensor, own: GroupSums, rule: Rule
) -> torch.Tensor:
    """Return the standard deviation of the others plus ``eps``; 1 where all others are equal.

    Σ(score - mean)² of the others is that of all minus the member's own part. The part of the
    lowest or highest member may be nearly all of it, so these two have sums of their own.
    """
    squares = own.square - own.total / own.size * own.total
    others = squares - excess * excess * (own.size / (own.size - 1).clamp(min=1))
    others = torch.where(score == own.low, own.without_low, others)
    others = torch.where(score == own.high, own.without_high, others)
    degrees = own.size - 1 - rule.ddof
    deviation = (others.clamp(min=0) / degrees.clamp(min=1)).sqrt()
    return torch.where((others > 0) & (degrees > 0), deviation + rule.eps, 1.0)


def group_terms(
    sums: GroupSums, rule: Rule, by_nonzero: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return shift, center, factor and floor of each group, float64 ``[groups]``.

    A member's advantage is ``max((score - shift - center) * factor, floor)``. ``by_nonzero`` is
    the number of all counted members by those with a nonzero score, 0-d.
    """
    size = sums.size
    mean = sums.total / size.clamp(min=1)  # of the excess over the lowest score
    shift, center, floor = _center(sums, rule, mean)
    factor, alone = torch.ones_like(size), size <= 1
    leaves_one_out = rule.baseline == "leave_one_out"
    # score - mean of the others is n / (n - 1) times score - mean
    stretch = size / (size - 1).clamp(min=1) if leaves_one_out else factor
    if rule.scale in ("std", "std_about_baseline"):
        squares = (sums.square - mean * sums.total).clamp(min=0)
        if rule.scale == "std_about_baseline":
            off = sums.low + mean - shift - center
            squares = (squares + size * off * off) * stretch * stretch
        divisor = (squares / (size - rule.ddof).clamp(min=1)).sqrt() + rule.eps
        factor = 1 / torch.where(divisor == 0, 1.0, divisor)
        alone = alone | (size <= rule.ddof)
    elif rule.scale == "mean":
        level = sums.low + mean
        factor = torch.where(level > 0, 1 / level, 0.0)
    elif rule.scale == "signed_mean":
        level = sums.low + mean + rule.eps
        factor = 1 / torch.where(level == 0, 1.0, level)
    elif rule.scale == "nonzero":
        factor = factor * by_nonzero
    if leaves_one_out:
        factor = factor * stretch
    if rule.baseline != "none" or rule.scale == "std":
        factor = torch.where(sums.high == sums.low, 0.0, factor)
    of_one = (by_nonzero if rule.scale == "nonzero" else 1.0) if rule.singleton == "raw" else 0.0
    factor = torch.where(alone, of_one, factor)
    factor = factor + (sums.total - sums.total)  # NaN where a score is not finite
    shift, center = (torch.where(alone, 0.0, term) for term in (shift, center))
    return shift, center, factor, torch.where(alone, -torch.inf, floor)


def _center(
    sums: GroupSums, rule: Rule, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    zero = torch.zeros_like(mean)
    no_floor = zero - torch.inf
    if rule.baseline == "length_weighted":
        center = torch.where(sums.weight == 0, mean, sums.weighted / sums.weight)
        return sums.low, center, no_floor
    if rule.baseline == "second_best":
        return sums.second, zero, zero
    return (zero, zero, no_floor) if rule.baseline == "none" else (sums.low, mean, no_floor)


def _run(
    scores: torch.Tensor, groups: torch.Tensor, order: torch.Tensor | None, *inputs: Any
) -> torch.Tensor:
    num_groups, *terms, lengths, valid, shares, longest = inputs
    rule = Rule(*terms)
    if order is None:
        return group_advantages_reference(scores, groups, num_groups, rule, lengths, valid)
    if groups.ndim == 1:  # the other is made by `order_by_state`
        check_indices(OP, "order", order, scores.shape[0])
        check_segments_within(OP, "groups", groups, scores.shape[0])
    from trajpack.kernels.groups.group_advantages_triton import group_advantages_forward

    given = {"lengths": lengths, "valid": valid, "shares": shares}
    return group_advantages_forward(scores, groups, order, rule, **given, longest=longest)


def order_by_state(
    order: torch.Tensor, cu_groups: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put members of one state next to each other in each group; for `Members`, by Triton alone.

    ``order`` is int32 ``[members]``, ``cu_groups`` int32 boundaries of the groups in it, ``states``
    int32 or int64 ``[members]``. A negative state is in no group. Groups of more than
    `MOST_COMPARED` members are for `number_pairs`: each member is compared with all of its group.

    Returns:
        int32 ``[members]``: the new order; and ``[members, 2]``: spans of the states in it, each at
        its first place, the spans at all other places empty.

    Cost: one launch without a sort.
    """
    ordered: tuple[torch.Tensor, torch.Tensor] = torch.ops.trajpack.order_by_state(
        order, cu_groups, states
    )
    return ordered


def _run_order(
    order: torch.Tensor, cu_groups: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    check_indices("order_by_state", "order", order, states.shape[0])
    size = states.shape[0]
    check_boundaries("order_by_state", cu_groups, size, name="cu_groups", end="members")
    from trajpack.kernels.groups.group_advantages_triton import order_forward

    return order_forward(order, cu_groups, states)


def number_pairs(group_ids: torch.Tensor, state_ids: torch.Tensor) -> torch.Tensor:
    """Number the pairs of a group and a state from 0 on, in ascending order, as int64.

    The same pair has the same number wherever it stands; -1 where the state is negative. Sorts
    of integers alone: deterministic, and no value is read by the host.

    Example:
        >>> number_pairs(torch.tensor([5, 5, 2, 5]), torch.tensor([9, 1, 9, 9]))
        tensor([2, 1, 0, 2])
    """
    if not group_ids.shape[0]:
        return group_ids.long()
    order = torch.argsort(state_ids, stable=True)
    order = order[torch.argsort(group_ids[order], stable=True)]
    groups, states = group_ids[order], state_ids[order]
    is_new = (groups[1:] != groups[:-1]) | (states[1:] != states[:-1])
    numbers = torch.nn.functional.pad(is_new.long(), (1, 0)).cumsum(0)
    numbers = numbers.scatter(0, order, numbers)  # each place once
    return torch.where(state_ids < 0, -1, numbers)


register_op(
    "group_advantages(Tensor scores, Tensor groups, Tensor? order, SymInt num_groups, "
    "str baseline, str scale, int ddof, float eps, str singleton, Tensor? lengths, Tensor? valid, "
    "Tensor? shares, SymInt? longest) -> Tensor",
    _run,
    lambda scores, *_: torch.empty_like(scores, dtype=torch.float32),
)
register_op(
    "order_by_state(Tensor order, Tensor cu_groups, Tensor states) -> (Tensor, Tensor)",
    _run_order,
    lambda order, *_: (torch.empty_like(order), order.new_empty((order.shape[0], 2))),
)
