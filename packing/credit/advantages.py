"""Advantages of a packed batch: the inputs of an estimator, checked, and its result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch

from trajpack.kernels.credit.turns import Scores, Turns, scores_of_trajectories, spread
from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.groups.group_advantages import (
    RECIPES,
    Members,
    advantages_of,
    members_of,
    number_pairs,
)
from trajpack.kernels.reduce.whiten import (
    moments_of,
    moments_of_sums,
    sums_of_moments,
    whiten_by,
)
from trajpack.kernels.scan.credit_scan import credit_scan
from trajpack.kernels.scan.observations import PASSING
from trajpack.kernels.scan.scan_inputs import Limits, Scan
from trajpack.kernels.validation import check_tensor, values_to_check
from trajpack.packing.conversion import shown
from trajpack.packing.credit.estimators import (
    GAE,
    Estimator,
    GiGPO,
    GroupEstimator,
    ReinforcePlusPlus,
    TokenEstimator,
    TurnGAE,
    TurnReturns,
    VTrace,
)

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.tree.entries import BatchEntries

    Batch: TypeAlias = PackedBatch | BatchEntries

B = TypeVar("B", "PackedBatch", "BatchEntries")
OP = "with_advantages"
NAMED: Mapping[str, Callable[[], Estimator]] = {
    **{recipe: partial(GroupEstimator, cast("Any", recipe)) for recipe in RECIPES},
    "gigpo": GiGPO,
    "gae": GAE,
    "turn_gae": TurnGAE,
    "vtrace": VTrace,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "turn_returns": TurnReturns,
}
"""Estimators with their usual parameters, by name."""
FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
METRICS = (
    "advantage_count",
    "advantage_mean",
    "advantage_squared_deviations",
    "advantage_min",
    "advantage_max",
)
"""Names of `PackedBatch.metrics` after `with_advantages`: statistics of the counted tokens'
advantages before whitening. The first three of several batches can be merged, by Chan's formula."""

AllReduce = Callable[[torch.Tensor], object]
Own: TypeAlias = torch.Tensor | Callable[..., torch.Tensor]
"""A caller's advantages, or the function of scores, groups and batch that computes them."""
Unit: TypeAlias = Literal["trajectory", "turn", "token"]
"""Unit of a caller's values; the tokens are the generated ones, in the order of the batch."""


@dataclass(frozen=True)
class OwnEstimator(Estimator):
    """A caller's estimator."""

    credit: Own

    def __post_init__(self) -> None:  # nothing of it is a number to be checked
        pass

    @property
    def name(self) -> str:
        """Name in error messages."""
        return getattr(self.credit, "__name__", type(self.credit).__name__)


class Inputs(NamedTuple):
    """Tensors that estimators may need beside the batch; see `PackedBatch.with_advantages`."""

    values: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    bootstrap: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    state_ids: torch.Tensor | None = None


class Credit(NamedTuple):
    """Result of an estimator before whitening.

    Advantages of tokens, or of turns or trajectories, whose tokens share them. Moments over tokens
    are those of turns or trajectories, each as often as it has tokens.
    """

    values: torch.Tensor
    """float32: advantages, 0 where they do not count."""
    counts: Callable[[], torch.Tensor]
    """How often each counts: bool ``[tokens]``, or int32 numbers of tokens."""
    returns: torch.Tensor
    """float32 ``[tokens]``."""
    are_shared: bool = False
    """Whether the tokens of a turn share the value at ``place``."""
    place: torch.Tensor | None = None
    """int32 ``[turns]``: place of each turn's value; its own number if ``None``."""
    steps: torch.Tensor | None = None
    """float32 ``[turns]``: added to the values of the turns' tokens, times ``weight``."""
    weight: float = 1.0


def with_advantages(
    batch: B,
    estimator: Estimator | Own | str,
    inputs: Inputs,
    *,
    all_reduce: AllReduce | None,
    impl: Impl,
) -> B:
    """Implement `PackedBatch.with_advantages`."""
    estimator = _estimator_of(estimator)
    _check_inputs(batch, estimator, inputs)
    inputs = Inputs(*(None if tensor is None else tensor.contiguous() for tensor in inputs))
    chosen = resolve_impl(OP, impl, batch.device)
    if isinstance(estimator, OwnEstimator):
        credit = _of_own(batch, estimator, inputs, chosen)
    elif isinstance(estimator, TokenEstimator):
        credit = _of_tokens(batch, estimator, inputs, chosen)
    elif isinstance(estimator, GroupEstimator):
        if estimator.rule.scale == "nonzero" and all_reduce is not None:
            raise ValueError(
                f"{OP}: {estimator.name} takes no all_reduce: its factor counts this batch alone"
            )
        _warn_of_singletons(batch, estimator)
        credit = _of_groups(batch, estimator, inputs, chosen)
    else:
        credit = _of_turns(batch, estimator, chosen)
    values, metrics = _whitened(credit, estimator.whitening, all_reduce, chosen)
    if credit.are_shared:
        turns = Turns(batch.turn_ids, batch.tables.runs)
        values, _ = spread(
            turns, values, credit.steps, index=credit.place, weight=credit.weight, impl=chosen
        )
    return replace(
        batch, advantages=values, returns=credit.returns, metrics=metrics, metric_names=METRICS
    )


def _estimator_of(given: Any) -> Estimator:
    """Return an estimator; that of a name, or a function or a tensor as an `OwnEstimator`."""
    if isinstance(given, str):
        if given not in NAMED:
            raise ValueError(f"{OP}: estimator must be one of {', '.join(NAMED)}, got {given!r}")
        return NAMED[given]()
    is_class = isinstance(given, type)
    if isinstance(given, torch.Tensor) or (callable(given) and not is_class):
        return OwnEstimator(given)
    is_known = isinstance(given, (TokenEstimator, GroupEstimator, TurnReturns))
    if is_known and type(given) is not TokenEstimator:
        return cast("Estimator", given)
    remedy = f"; make one: {given.__name__}()" if is_class else ""
    raise TypeError(
        f"{OP}: estimator must be an estimator such as trajpack.GRPO(), its name, a function or a "
        f"tensor, got {given!r}{remedy}"
    )


def _check_inputs(batch: Batch, estimator: Estimator, inputs: Inputs) -> None:
    """Raise if an input is of a wrong type, shape or device, is missing, or would not be used."""
    penalized = getattr(estimator, "kl", None) is not None
    needs = {
        "values": isinstance(estimator, (GAE, TurnGAE, VTrace)),
        "logprobs": isinstance(estimator, VTrace),
        "ref_logprobs": penalized,
        "bootstrap": estimator.truncated == "bootstrap",
        "state_ids": isinstance(estimator, GiGPO),
    }
    for name, needed in needs.items():
        if needed and getattr(inputs, name) is None:
            raise ValueError(f"{OP}: {estimator.name} needs {name}, got None")
    for name, taken, why in (
        ("ref_logprobs", penalized, "it has no kl"),
        ("bootstrap", needs["bootstrap"], "its truncated is not 'bootstrap'"),
        ("state_ids", needs["state_ids"], "it has no step groups"),
        (
            "scores",
            isinstance(estimator, GroupEstimator | OwnEstimator),
            "it does not compare trajectories",
        ),
    ):
        if getattr(inputs, name) is not None and not taken:
            raise ValueError(f"{OP}: {estimator.name} takes no {name}: {why}")
    trajectory = batch.cu_turns.shape[0] - 1, "trajectory"
    per = {"bootstrap": trajectory, "scores": trajectory, "state_ids": (batch.num_turns, "turn")}
    for name, tensor in inputs._asdict().items():
        if tensor is not None:
            entries, noun = per.get(name, (batch.num_tokens, "token"))
            check_tensor(
                OP,
                name,
                tensor,
                dtypes=INTEGERS if name == "state_ids" else FLOATS,
                device=batch.device,
                entries=entries,
                per=noun,
                constant=True,
            )
    known = None if inputs.scores is None else values_to_check(inputs.scores)
    if known is not None and not known.isfinite().all():
        place = int(known.isfinite().int().argmin())
        raise ValueError(
            f"{OP}: scores must be finite, got {known[place]} for {batch.ids[place]!r}"
        )


def chunks_of(batch: Batch, estimator: TokenEstimator) -> Scan:
    """Return a scan of the tokens that each turn generated, without what the estimator makes of it.

    Where tokens that were not generated are steps, all tokens that are new with a turn belong to
    it.
    """
    spans, begins, cu_positions = batch.turn_spans, batch.turn_spans[:, 0], batch.cu_generated
    longest = batch.tables.longest
    num_positions = batch.num_generated
    are_steps = getattr(estimator, "observation", "carry") not in PASSING
    if are_steps:
        begins, num_positions = batch.turn_begin, batch.num_tokens
        cu_positions = batch.tables.cu_new
    return Scan(
        batch.cu_turns,
        cu_positions=cu_positions,
        begins=begins,
        spans=spans,
        turn_rewards=batch.turn_rewards,
        turn_ids=batch.turn_ids,
        num_positions=num_positions,
        max_seqlen=longest.new if are_steps else longest.generated,
    )


def _of_tokens(batch: Batch, estimator: TokenEstimator, inputs: Inputs, impl: str) -> Credit:
    """Scan the tokens of each trajectory from its end."""
    options: dict[str, Any] = {
        name: float(getattr(estimator, name))
        for name in ("reward_clip", "rho_clip", "c_clip", "advantage_rho_clip")
        if getattr(estimator, name, None) is not None
    }
    sampled = batch.rollout_logprobs if inputs.logprobs is None else inputs.logprobs
    by_turn, masks = isinstance(estimator, TurnGAE), estimator.truncated == "mask"
    bootstrap = inputs.bootstrap
    if bootstrap is not None:
        bootstrap = torch.where(batch.truncated, bootstrap, 0.0)
    scan = chunks_of(batch, estimator)._replace(
        values=inputs.values if hasattr(estimator, "lam") else None,
        gamma=float(estimator.gamma),  # type: ignore[attr-defined]
        lam=float(getattr(estimator, "lam", 1.0)),
        observation=getattr(estimator, "observation", "carry"),
        bootstrap=bootstrap,
        by_turn=by_turn,
    )
    if estimator.kl is not None:
        clamp = inf if estimator.kl.clamp is None else float(estimator.kl.clamp)
        options |= {"kl_coefficient": float(estimator.kl.coefficient), "kl_clamp": clamp}
        scan = scan._replace(
            logprobs=sampled, ref_logprobs=inputs.ref_logprobs, estimator=estimator.kl.estimator
        )
    if isinstance(estimator, VTrace):
        scan = scan._replace(
            kind="vtrace", logprobs=sampled, rollout_logprobs=batch.rollout_logprobs
        )
    scan = scan._replace(limits=Limits(**options))
    values, returns = credit_scan(scan, OP, impl)
    turns = Turns(batch.turn_ids, batch.tables.runs) if by_turn or masks else None
    if by_turn and turns is not None:
        first = batch.turn_spans[:, 0]
        values, returns = spread(turns, values, index=first, others=returns, impl=impl)
    if not masks or turns is None:
        return Credit(values, lambda: batch.loss_mask, returns)
    valid = (~batch.truncated).float()
    counts = spread(turns, valid, index=batch.tables.group_order.owners, impl=impl)[0] > 0
    return Credit(torch.where(counts, values, 0.0), partial(_counts, counts, None), returns)


def _of_turns(batch: Batch, estimator: Estimator, impl: str) -> Credit:
    """Take the turns' returns as advantages."""
    values, returns = batch.turn_returns, _returns(batch, impl)
    valid = None
    if estimator.truncated != "keep":
        valid = ~batch.truncated[batch.tables.group_order.owners]
        values = torch.where(valid, values, 0.0)
    counts = partial(_counts_of_turns, batch, valid)
    return Credit(values, counts, returns, are_shared=True)


def _of_groups(batch: Batch, estimator: GroupEstimator, inputs: Inputs, impl: str) -> Credit:
    """Compare the trajectories of each group."""
    clip = inf if estimator.reward_clip is None else float(estimator.reward_clip)
    truncated = batch.truncated if estimator.truncated == "mask" else None
    members = _members(batch, impl, given=inputs.scores, clip=clip, truncated=truncated)
    valid = None if truncated is None else ~truncated
    rule, order, num_groups = estimator.rule, batch.tables.group_order, batch.num_groups
    longest = batch.tables.longest.group
    by_group = Members(
        batch.group_ids, num_groups, order.trajectories, order.cu_trajectories, longest
    )
    values = advantages_of(
        members.scores,
        by_group,
        rule,
        lengths=members.lengths if rule.baseline == "length_weighted" else None,
        valid=valid,
        shares=members.shares if rule.scale == "nonzero" else None,
        impl=impl,
    )
    returns, owners = _returns(batch, impl), order.owners
    if not isinstance(estimator, GiGPO):
        counts = partial(_counts, members.lengths, valid)
        return Credit(values, counts, returns, are_shared=True, place=owners)
    assert inputs.state_ids is not None
    of_turns = None if valid is None else valid[owners]
    pairs = number_pairs(batch.group_ids[owners], inputs.state_ids)
    by_state = members_of(pairs, batch.num_turns, impl)
    steps = advantages_of(batch.turn_returns, by_state, rule, valid=of_turns, impl=impl)
    counts = partial(_counts_of_turns, batch, of_turns)
    return Credit(
        values, counts, returns, are_shared=True, place=owners, steps=steps,
        weight=float(estimator.step_weight),
    )  # fmt: skip


def _counts(counts: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    return counts if valid is None else counts * valid


def _counts_of_turns(batch: Batch, valid: torch.Tensor | None) -> torch.Tensor:
    return _counts(batch.cu_generated.diff(), valid)


def _of_own(batch: Batch, estimator: OwnEstimator, inputs: Inputs, impl: str) -> Credit:
    """Bring a caller's advantages to the tokens; their unit is the first with their number."""
    rows: Any = estimator.credit
    if not isinstance(rows, torch.Tensor):
        scores = _members(batch, impl).scores if inputs.scores is None else inputs.scores.double()
        rows = rows(scores, batch.group_ids, batch)
    name = f"{OP}: {estimator.name}"
    counts = {
        "trajectory": batch.cu_turns.shape[0] - 1,
        "turn": batch.num_turns,
        "token": batch.num_generated,
        "any token": batch.num_tokens,
    }
    entries = rows.shape[0] if isinstance(rows, torch.Tensor) and rows.ndim == 1 else -1
    unit = next((unit for unit, count in counts.items() if count == entries), None)
    if unit is None or not rows.is_floating_point() or rows.device != batch.device:
        shape = " or ".join(f"[{count}] ({unit})" for unit, count in counts.items())
        got = shown(rows)
        if isinstance(rows, torch.Tensor):
            got = f"{rows.dtype} {list(rows.shape)} on {rows.device}"
        raise ValueError(f"{name} must give floats {shape} on {batch.device}, got {got}")
    same = unit in ("trajectory", "turn") and entries == batch.num_generated
    if same and not bool((batch.cu_generated.diff() == 1).all()):  # rare, so it may synchronise
        raise ValueError(
            f"{name} gives {entries} numbers, but there are as many generated tokens as "
            f"{unit}s: give batch.spread(x, of=...)"
        )
    rows = rows.detach().float()
    if unit == "any token":
        rows = rows.where(batch.turn_ids >= 0, 0.0)
    else:
        rows = spread_over_tokens(batch, rows, cast("Unit", unit))
    return Credit(rows, lambda: batch.loss_mask, _returns(batch, impl))


def spread_over_tokens(batch: Batch, x: torch.Tensor, of: Unit) -> torch.Tensor:
    """Implement `PackedBatch.spread`."""
    counts = {
        "trajectory": batch.cu_turns.shape[0] - 1,
        "turn": batch.num_turns,
        "token": batch.num_generated,
    }
    if of not in counts:
        raise ValueError(f"spread: of must be 'trajectory', 'turn' or 'token', got {of!r}")
    check_tensor("spread", "x", x, or_more=True, device=batch.device, entries=counts[of], per=of)
    is_generated = batch.turn_ids >= 0
    is_generated = is_generated.reshape(-1, *[1] * (x.ndim - 1))
    if of == "token":
        empty = x.new_zeros(batch.num_tokens, *x.shape[1:])
        return empty.masked_scatter(is_generated.expand_as(empty), x)
    if not batch.num_turns:
        return x.new_zeros(batch.num_tokens, *x.shape[1:])
    if of == "trajectory":
        x = x[batch.tables.group_order.owners.long()]
    return torch.where(is_generated, x[batch.turn_ids.long().clamp(min=0)], x.new_zeros(()))


def _warn_of_singletons(batch: Batch, estimator: GroupEstimator) -> None:
    """Warn if every group has one member; the groups are known to the host."""
    num_trajectories = len(batch.groups)
    if num_trajectories < 2 or batch.num_groups < num_trajectories:
        return
    unnamed = [
        task for group, task in zip(batch.groups, batch.task_ids, strict=True) if group is None
    ]
    tasks = [task for task in unnamed if task is not None]
    if len(set(tasks)) < len(tasks):
        remedy = "pass group=... to Trajectory; several have the same task_id and no group"
    elif unnamed:
        remedy = "pass group=... to Trajectory, the same for all trajectories of a task"
    else:
        remedy = "all of Trajectory.group differ; name them alike within a task"
    warnings.warn(
        f"{OP}: every group has one member, so {estimator.name} compares nothing: {remedy}",
        stacklevel=4,  # the caller of PackedBatch.with_advantages
    )


def _returns(batch: Batch, impl: str) -> torch.Tensor:
    """Return the turns' returns at their tokens, also of a batch that has other returns."""
    if batch.advantages is None:
        return batch.returns
    turns = Turns(batch.turn_ids, batch.tables.runs)
    return spread(turns, batch.turn_returns, impl=impl)[0]


def _members(
    batch: Batch,
    impl: str,
    *,
    given: torch.Tensor | None = None,
    clip: float = inf,
    truncated: torch.Tensor | None = None,
) -> Scores:
    return scores_of_trajectories(
        batch.turn_rewards,
        batch.cu_generated,
        batch.cu_turns,
        batch.group_ids,
        given=given,
        truncated=truncated,
        clip=clip,
        impl=impl,
    )


def _whitened(
    credit: Credit, whitening: int | None, all_reduce: AllReduce | None, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values, whitened over all ranks if asked for, and metrics."""
    values = credit.values
    if whitening is None:
        return values, _moments(credit, impl)
    counts = credit.counts()
    if all_reduce is None:
        whitened, own = whiten_by(values, counts, None, ddof=whitening, impl=impl)
        return whitened, own
    own = moments_of(values, counts, impl)
    sums = sums_of_moments(own)
    all_reduce(sums)
    given = moments_of_sums(sums)
    whitened, _ = whiten_by(values, counts, given, ddof=whitening, impl=impl)
    return whitened, own


def _moments(credit: Credit, impl: str) -> torch.Tensor:
    """Return the moments of values that were not whitened."""
    if credit.steps is None or credit.place is None:
        return moments_of(credit.values, credit.counts(), impl)
    of_turns = credit.values[credit.place] + credit.weight * credit.steps
    return moments_of(of_turns, credit.counts(), impl)
