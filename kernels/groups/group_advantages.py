"""Advantages relative to a group: each member's score compared with those of its group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.validation import (
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
FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
NARROW = (torch.int8, torch.int16, torch.int32)
"""Dtypes in which ids are sorted, the fewest bytes first."""

Baseline: TypeAlias = Literal["mean", "leave_one_out", "length_weighted", "second_best", "none"]
Scale: TypeAlias = Literal[
    "std", "leave_one_out_std", "std_about_baseline", "mean", "signed_mean", "nonzero", "none"
]
Singleton: TypeAlias = Literal["raw", "zero"]
Recipe: TypeAlias = Literal[
    "grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "max_rl", "gpg", "pass_at_k"
]
"""Names of `RECIPES`."""


class Members(NamedTuple):
    """Groups of members: by ids for ``impl="torch"``, and by places in an order for Triton."""

    group_ids: torch.Tensor
    """int32 or int64 ``[members]``: group of each member."""
    num_groups: int
    order: torch.Tensor
    """int32 or int64 ``[members]``: a permutation in which members of a group are neighbours. Sums
    follow it."""
    segments: torch.Tensor
    """int32 ``[groups + 1]``: boundaries of the groups' places in the order."""
    longest: int | None = None
    """Upper bound of a group's members, if the host knows one."""


class Rule(NamedTuple):
    """How a group's statistics make advantages: arguments of `group_advantages`."""

    baseline: str = "mean"
    scale: str = "std"
    ddof: int = 1
    eps: float = 1e-6
    singleton: str = "raw"


RECIPES = {
    "grpo": Rule(),
    "dr_grpo": Rule(scale="none"),
    "rloo": Rule("leave_one_out", "none"),
    "opo": Rule("length_weighted", "none"),
    "reinforce_plus_plus_baseline": Rule(scale="none"),
    "max_rl": Rule(scale="mean", singleton="zero"),
    "gpg": Rule(scale="nonzero"),
    "pass_at_k": Rule("second_best", "none", singleton="zero"),
}
"""Rule of each recipe; `group_advantages` has their sources."""


def rule_of(op: str, recipe: str, **changes: Any) -> Rule:
    """Return the rule of a recipe with those ``changes`` that are not None, checked."""
    check_choice(op, "recipe", recipe, tuple(RECIPES))
    changes = {name: value for name, value in changes.items() if value is not None}
    rule = RECIPES[recipe]._replace(**changes)
    check_choice(op, "baseline", rule.baseline, get_args(Baseline))
    check_choice(op, "scale", rule.scale, get_args(Scale))
    check_choice(op, "singleton", rule.singleton, get_args(Singleton))
    if rule.scale == "leave_one_out_std" and rule.baseline != "leave_one_out":
        raise ValueError(
            f"{op}: scale='leave_one_out_std' needs baseline='leave_one_out', got {rule.baseline!r}"
        )
    if rule.baseline == "second_best" and rule.scale in ("std_about_baseline", "signed_mean"):
        raise ValueError(f"{op}: scale={rule.scale!r} has no meaning with baseline='second_best'")
    check_integer(op, "ddof", rule.ddof, most=MAX_COUNT)
    check_number(op, "eps", rule.eps, least=0, finite=True)
    return rule


def group_advantages(  # noqa: PLR0913
    scores: torch.Tensor,
    group_ids: torch.Tensor,
    recipe: Recipe = "grpo",
    *,
    num_groups: int,
    baseline: Baseline | None = None,
    scale: Scale | None = None,
    ddof: int | None = None,
    eps: float | None = None,
    singleton: Singleton | None = None,
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
        recipe: What the other options are where they are ``None``; ``ddof`` is 1 and ``eps`` 1e-6.

            - ``"grpo"``: ``baseline="mean"``, ``scale="std"``, ``singleton="raw"`` as in verl
              (DeepSeekMath, arXiv 2402.03300).
            - ``"dr_grpo"``: ``scale="none"`` (arXiv 2503.20783).
            - ``"rloo"``: ``baseline="leave_one_out"``, ``scale="none"`` (arXiv 2402.14740).
            - ``"opo"``: ``baseline="length_weighted"``, ``scale="none"`` (arXiv 2505.23585).
            - ``"reinforce_plus_plus_baseline"``: ``scale="none"``; the estimator whitens the
              result over the tokens of the batch (arXiv 2501.03262).
            - ``"max_rl"``: ``scale="mean"``, ``singleton="zero"`` (arXiv 2602.02710, prime-rl).
            - ``"gpg"``: ``scale="nonzero"`` (arXiv 2504.02546, verl with ``f_norm=1``).
            - ``"pass_at_k"``: ``baseline="second_best"``, ``scale="none"``, ``singleton="zero"``
              (arXiv 2503.19595, verl's ``grpo_passk``, which has ``scale="std"``).
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
            divided by a deviation or mean, or 0 (``"zero"``).
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

    Example:
        >>> scores, groups = torch.tensor([1.0, 0.0, 5.0, 0.0]), torch.tensor([0, 1, 0, 0])
        >>> group_advantages(scores, groups, "dr_grpo", num_groups=2)
        tensor([-1.,  0.,  3., -2.])
        >>> group_advantages(scores, groups, "rloo", num_groups=2, singleton="zero")
        tensor([-1.5000,  0.0000,  4.5000, -3.0000])
    """
    changes = {"baseline": baseline, "scale": scale, "ddof": ddof, "eps": eps}
    rule = rule_of(OP, recipe, **changes, singleton=singleton)
    check_tensor(OP, "scores", scores, dtypes=FLOATS, constant=True)
    per: dict[str, Any] = {"device": scores.device, "entries": scores.shape[0], "per": "member"}
    check_tensor(OP, "group_ids", group_ids, dtypes=INTEGERS, **per)
    check_integer(OP, "num_groups", num_groups, most=MAX_COUNT)
    check_integer(OP, "number of members", scores.shape[0], most=MAX_COUNT)
    if valid is not None:
        check_tensor(OP, "valid", valid, dtypes=(torch.bool,), **per)
    if rule.baseline == "length_weighted" and lengths is None:
        raise ValueError(f"{OP}: baseline='length_weighted' needs lengths, got None")
    if lengths is not None:
        if rule.baseline != "length_weighted":
            raise ValueError(
                f"{OP}: lengths are for baseline='length_weighted', got {rule.baseline!r}"
            )
        check_tensor(OP, "lengths", lengths, dtypes=(*INTEGERS, *FLOATS), constant=True, **per)
    chosen = resolve_impl(OP, impl, scores.device)
    shares = None
    if chosen == "triton" and rule.scale == "nonzero":
        counted = (group_ids >= 0) & (group_ids < num_groups)
        counted = counted if valid is None else counted & valid
        shares = torch.stack([counted.sum(), (counted & (scores != 0)).sum()]).int()
    members = members_of(group_ids, num_groups, chosen)
    return advantages_of(
        scores, members, rule, lengths=lengths, valid=valid, shares=shares, impl=chosen
    )


def members_of(group_ids: torch.Tensor, num_groups: int, impl: str) -> Members:
    """Return groups by ids in any order; by Triton a stable sort and two operations find them.

    A device sorts 8 bits of an id in a launch, so ids are sorted in the fewest bytes that hold
    ``num_groups``. Those that are out of range stay so.
    """
    if impl == "torch":
        return Members(group_ids, num_groups, group_ids, group_ids)
    narrow = next(one for one in NARROW if num_groups <= torch.iinfo(one).max)
    keys = group_ids
    if narrow.itemsize < keys.dtype.itemsize:
        keys = keys.clamp(-1, num_groups).to(narrow)
    keys, order = torch.sort(keys, stable=True)
    group = torch.arange(num_groups + 1, dtype=keys.dtype, device=keys.device)
    segments = torch.searchsorted(keys, group, out_int32=True)
    return Members(group_ids, num_groups, order, segments)


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
    """
    order, groups = None, members.group_ids
    if impl == "triton":
        order, groups = members.order, members.segments
    advantages: torch.Tensor = torch.ops.trajpack.group_advantages(
        *(None if one is None else one.contiguous() for one in (scores, groups, order)),
        members.num_groups,
        *rule._replace(eps=float(rule.eps)),
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

    Every statistic has an entry for each member, that of its group. Sums are made in the members'
    order: ``index_put_`` of float64 adds serially on the host, and after a stable sort on CUDA.
    """
    score, group = scores.double(), group_ids.long()
    counted = (group >= 0) & (group < num_groups)
    if valid is not None:
        counted = counted & valid
    # one more group takes all other members
    group, score = torch.where(counted, group, num_groups), torch.where(counted, score, 0.0)

    def total(rows: torch.Tensor) -> torch.Tensor:
        sums = rows.new_zeros(num_groups + 1)
        return sums.index_put_((group,), rows, accumulate=True)[group]

    def extreme(rows: torch.Tensor, reduction: str, start: float) -> torch.Tensor:
        ends = rows.new_full((num_groups + 1,), start)
        return ends.scatter_reduce_(0, group, rows, reduction)[group]

    size = total(counted.double())
    low, high = extreme(score, "amin", torch.inf), extreme(score, "amax", -torch.inf)
    excess = score - low  # whose sums avoid cancellation
    sum_of_excess = total(excess)
    mean = sum_of_excess / size.clamp(min=1)
    squares = (total(excess * excess) - mean * sum_of_excess).clamp(min=0)
    nothing = torch.zeros_like(mean)
    shift, center, floor = low, mean, -torch.inf  # the baseline is shift + center
    if lengths is not None:
        weight, weighted = total(lengths.double()), total(lengths.double() * excess)
        center = torch.where(weight == 0, mean, weighted / weight)
    elif rule.baseline == "second_best":
        below = extreme(torch.where(score == high, -torch.inf, score), "amax", -torch.inf)
        second = torch.where(total((score == high).double()) > 1, high, below)
        shift, center, floor = second, nothing, 0.0
    elif rule.baseline == "none":
        shift = center = nothing
    by_nonzero = counted.sum().double() / (counted & (score != 0)).sum().clamp(min=1)
    factor, alone = _factor(rule, size, squares, low + mean, low + mean - shift - center)
    if rule.baseline != "none" or rule.scale == "std":
        factor = torch.where(high == low, 0.0, factor)
    factor = torch.where(alone, 1.0 if rule.singleton == "raw" else 0.0, factor)
    if rule.scale == "nonzero":
        factor = factor * by_nonzero
    factor = factor + (sum_of_excess - sum_of_excess)  # NaN where a score is not finite
    away = torch.where(alone, score, score - shift - center)
    advantage = away * factor
    if rule.scale == "leave_one_out_std":
        advantage = advantage / _std_of_others(rule, score, (low, high), size, squares, away, total)
    advantage = torch.where((advantage < floor) & ~alone, floor, advantage)
    return torch.where(counted, advantage + 0.0, 0.0).float()  # no -0


def _factor(
    rule: Rule, size: torch.Tensor, squares: torch.Tensor, level: torch.Tensor, off: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factor of ``score - baseline``, and whether a group is too small for the rule.

    ``squares`` are Σ(score - mean)², ``level`` the mean, and ``off`` the mean less the baseline.
    """
    factor, alone = torch.ones_like(size), size <= 1
    if rule.baseline == "leave_one_out":  # score - mean of the others is so much times score - mean
        factor = size / (size - 1).clamp(min=1)
    if rule.scale in ("std", "std_about_baseline"):
        if rule.scale == "std_about_baseline":
            squares = (squares + size * off * off) * factor * factor
        divisor = (squares / (size - rule.ddof).clamp(min=1)).sqrt() + rule.eps
        return factor / torch.where(divisor == 0, 1.0, divisor), alone | (size <= rule.ddof)
    if rule.scale == "mean":
        factor = torch.where(level > 0, factor / level, 0.0)
    elif rule.scale == "signed_mean":
        level = level + rule.eps
        factor = factor / torch.where(level == 0, 1.0, level)
    return factor, alone


def _std_of_others(
    rule: Rule,
    score: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    size: torch.Tensor,
    squares: torch.Tensor,
    away: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the standard deviation of the others plus ``eps``; 1 where all others are equal.

    Σ(score - mean)² of the others is that of all minus the member's own part. The part of the
    lowest or highest member may be nearly all of it, so these two have sums of their own.
    """
    rest = (size - 1).clamp(min=1)
    others = squares - away * away * (size / rest)
    for end, other in (ends, ends[::-1]):
        at_end = score == end
        stay, width = total(at_end.double()) - 1, end - other
        distance = torch.where(at_end, 0.0, score - other)
        distances = total(distance) + stay * width
        own = total(distance * distance) + stay * width * width - distances * distances / rest
        others = torch.where(at_end, own, others)
    degrees = size - 1 - rule.ddof
    deviation = (others.clamp(min=0) / degrees.clamp(min=1)).sqrt()
    return torch.where((others > 0) & (degrees > 0), deviation + rule.eps, 1.0)


def _run(
    scores: torch.Tensor, groups: torch.Tensor, order: torch.Tensor | None, *inputs: Any
) -> torch.Tensor:
    num_groups, *terms, lengths, valid, shares, longest = inputs
    rule = Rule(*terms)
    if order is None:
        return group_advantages_reference(scores, groups, num_groups, rule, lengths, valid)
    check_indices(OP, "order", order, scores.shape[0])
    check_segments_within(OP, "groups", groups, scores.shape[0])
    from trajpack.kernels.groups.group_advantages_triton import group_advantages_forward

    given = {"lengths": lengths, "valid": valid, "shares": shares}
    return group_advantages_forward(scores, groups, order, rule, **given, longest=longest)


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
