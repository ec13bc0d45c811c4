"""Advantages of a packed batch: the inputs of an estimator, checked, and its result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

import torch

from trajpack.kernels.credit.turns import (
    Scores,
    TokenSpread,
    Turns,
    credit_of_turns,
    scores_of_trajectories,
    spread_of_trajectories,
    spread_of_turns,
)
from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.groups.group_advantages import Members, Rule, advantages_of
from trajpack.kernels.reduce.whiten import moments_and_sums, whiten_by
from trajpack.kernels.scan.observations import PASSING
from trajpack.kernels.scan.scan_inputs import Limits, ScanChunks
from trajpack.kernels.validation import check_tensor
from trajpack.packing.conversion import shown
from trajpack.packing.credit.estimators import (
    GAE,
    GPG,
    GRPO,
    OPO,
    RLOO,
    DrGRPO,
    Estimator,
    GiGPO,
    GroupEstimator,
    MaxRL,
    PassAtK,
    ReinforcePlusPlusBaseline,
    TokenEstimator,
    TurnGAE,
    TurnReturns,
    VTrace,
)

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch

OP = "with_advantages"
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
RULES: dict[type[GroupEstimator], Rule] = {
    GRPO: Rule("mean", "std", 1, 1e-6, "raw"),
    DrGRPO: Rule("mean", "none", 1, 0.0, "raw"),
    RLOO: Rule("leave_one_out", "none", 1, 0.0, "raw"),
    OPO: Rule("length_weighted", "none", 1, 0.0, "raw"),
    ReinforcePlusPlusBaseline: Rule("mean", "none", 1, 0.0, "raw"),
    MaxRL: Rule("mean", "mean", 1, 1e-6, "zero"),
    GPG: Rule("mean", "nonzero", 1, 0.0, "raw"),
    PassAtK: Rule("second_best", "none", 1, 1e-6, "zero"),
    GiGPO: Rule("mean", "std", 1, 1e-6, "zero"),
}
"""Rule of each estimator that compares trajectories; its fields of the same names replace it."""

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
    """Result of an estimator before whitening."""

    advantages: torch.Tensor
    returns: torch.Tensor
    counted: torch.Tensor | None
    """bool ``[tokens]``: tokens that count; ``None`` if all that were generated do."""
    spread: TokenSpread | None = None
    """Advantages with the moments that the kernel stored, if it did."""


def with_advantages(
    batch: PackedBatch,
    estimator: Estimator | Own,
    inputs: Inputs,
    *,
    all_reduce: AllReduce | None,
    impl: Impl,
) -> PackedBatch:
    """Implement `PackedBatch.with_advantages`."""
    estimator = _estimator_of(estimator)
    _check_inputs(batch, estimator, inputs)
    inputs = Inputs(*(None if tensor is None else tensor.contiguous() for tensor in inputs))
    chosen = resolve_impl(OP, impl, batch.input_ids)
    if isinstance(estimator, OwnEstimator):
        credit = _of_own(batch, estimator, inputs, chosen)
    elif isinstance(estimator, TokenEstimator):
        credit = _of_tokens(batch, estimator, inputs, chosen)
    elif isinstance(estimator, GroupEstimator):
        if isinstance(estimator, GPG) and all_reduce is not None:
            raise ValueError(f"{OP}: GPG takes no all_reduce: its factor counts this batch alone")
        _warn_of_singletons(batch, estimator)
        credit = _of_groups(batch, estimator, inputs, chosen)
    else:
        spread = _turn_returns(batch, chosen)
        counted = _counted(batch, chosen) if estimator.truncated == "mask" else None
        returns = advantages = spread.rows
        if counted is not None:
            advantages = torch.where(counted, advantages, 0.0)
        elif estimator.whitening is None:
            returns = returns.clone()
        credit = Credit(advantages, returns, counted, spread)
    advantages, moments = _finish(batch, credit, estimator.whitening, all_reduce, chosen)
    credited = batch.replaced(
        advantages=advantages,
        returns=credit.returns,
        metrics=None,
        metric_names=METRICS,
    )
    if isinstance(moments, torch.Tensor):
        credited.__dict__["metrics"] = moments
    else:  # computed at first access
        del credited.__dict__["metrics"]
        credited.__dict__.setdefault("_later", {})["metrics"] = moments
    return credited


def _estimator_of(given: Any) -> Estimator:
    """Return an estimator; a function or a tensor as an `OwnEstimator`."""
    is_class = isinstance(given, type)
    if isinstance(given, torch.Tensor) or (callable(given) and not is_class):
        return OwnEstimator(given)
    is_known = isinstance(given, (TokenEstimator, *RULES, TurnReturns))
    if is_known and type(given) is not TokenEstimator:
        return cast("Estimator", given)
    remedy = f"; make one: {given.__name__}()" if is_class else ""
    raise TypeError(
        f"{OP}: estimator must be an estimator such as trajpack.GRPO(), a function or a tensor, "
        f"got {given!r}{remedy}"
    )


def _check_inputs(batch: PackedBatch, estimator: Estimator, inputs: Inputs) -> None:
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


class Scanned(NamedTuple):
    """Tokens that an estimator scans."""

    chunks: ScanChunks
    num_positions: int
    """Upper bound of their number."""
    longest: int | None
    """Upper bound of the number of a trajectory, if the host knows one."""


def chunks_of(batch: PackedBatch, estimator: TokenEstimator) -> Scanned:
    """Return the scanned tokens of each turn: those that it generated.

    Where tokens that were not generated are steps, all tokens that are new with a turn belong to
    it. The host summed up their numbers when it packed; for any other batch three small launches
    do.
    """
    spans, begins, cu_positions = batch.turn_spans, batch.turn_spans[:, 0], batch.cu_generated
    num_positions = batch.num_tokens if batch.is_padded else batch.num_generated
    are_steps = getattr(estimator, "observation", "carry") not in PASSING
    if are_steps:
        begins, num_positions = batch.turn_begin, batch.num_tokens
        known: torch.Tensor | None = getattr(batch, "cu_new", None)
        cu_positions = torch.zeros_like(batch.cu_generated) if known is None else known
        if known is None:
            torch.cumsum(spans[:, 1] - begins, 0, dtype=torch.int32, out=cu_positions[1:])
    truncated = batch.turn_truncated if estimator.truncated == "bootstrap" else None
    chunks = ScanChunks(cu_positions, begins, spans, batch.turn_rewards, truncated)
    return Scanned(chunks, num_positions, _longest(batch, are_steps))


def _longest(batch: PackedBatch, are_steps: bool) -> int | None:
    """Return an upper bound of a trajectory's scanned tokens, ``None`` where the host has none."""
    if batch.is_padded:  # a replay has other trajectories
        return None
    longest = getattr(batch, "longest", None)  # of a batch as it was packed
    if longest is not None:
        return int(longest.new if are_steps else longest.generated)
    return batch.max_seqlen if len(batch.seqlens) == len(batch.ids) else None


def _of_tokens(batch: PackedBatch, estimator: TokenEstimator, inputs: Inputs, impl: str) -> Credit:
    """Scan the tokens of each trajectory from its end."""
    options: dict[str, Any] = {
        name: float(getattr(estimator, name))
        for name in ("reward_clip", "rho_clip", "c_clip", "advantage_rho_clip")
        if getattr(estimator, name, None) is not None
    }
    sampled = batch.rollout_logprobs if inputs.logprobs is None else inputs.logprobs
    kl: tuple[torch.Tensor, ...] = ()
    if estimator.kl is not None and inputs.ref_logprobs is not None:
        kl = sampled, inputs.ref_logprobs
        clamp = inf if estimator.kl.clamp is None else float(estimator.kl.clamp)
        options |= {"kl_coefficient": float(estimator.kl.coefficient), "kl_clamp": clamp}
    scanned = chunks_of(batch, estimator)
    by_turn = isinstance(estimator, TurnGAE)
    advantages, returns = credit_of_turns(
        scanned.chunks,
        batch.cu_turns,
        batch.turn_ids,
        num_positions=scanned.num_positions,
        max_seqlen=scanned.longest,
        gamma=float(estimator.gamma),  # type: ignore[attr-defined]
        lam=float(getattr(estimator, "lam", 1.0)),
        observation=getattr(estimator, "observation", "carry"),
        impl=impl,
        values=inputs.values if hasattr(estimator, "lam") else None,
        bootstrap=inputs.bootstrap,
        weights=(sampled, batch.rollout_logprobs) if isinstance(estimator, VTrace) else (),
        kl=kl,
        kl_estimator=None if estimator.kl is None else estimator.kl.estimator,
        limits=Limits(**options),
        by_turn=by_turn,
    )
    counted = _counted(batch, impl) if estimator.truncated == "mask" else None
    spread = None
    if by_turn:
        spread = spread_of_turns(_turns(batch), advantages, returns, impl)
        advantages, returns = spread.rows, spread.others
    if counted is not None:
        advantages = torch.where(counted, advantages, 0.0)
    return Credit(advantages, returns, counted, spread)


def _of_groups(batch: PackedBatch, estimator: GroupEstimator, inputs: Inputs, impl: str) -> Credit:
    """Compare the trajectories of each group."""
    clip = inf if estimator.reward_clip is None else float(estimator.reward_clip)
    members = _members(batch, impl, clip)
    scores = members.scores
    if inputs.scores is not None:
        scores = inputs.scores.double().clamp(-clip, clip)
    valid = members.valid if estimator.truncated == "mask" else None
    rule = next(RULES[kind] for kind in type(estimator).__mro__ if kind in RULES)
    own = {name: getattr(estimator, name) for name in Rule._fields if hasattr(estimator, name)}
    if isinstance(estimator, ReinforcePlusPlusBaseline):
        own.pop("ddof")  # of the whitening
    rule, order, num_groups = rule._replace(**own), batch.group_order, num_groups_of(batch)
    rows = advantages_of(
        scores,
        Members(batch.group_ids, order.trajectories),
        num_groups,
        rule,
        lengths=members.lengths if isinstance(estimator, OPO) else None,
        valid=valid,
        impl=impl,
    )
    steps, weight = None, 0.0
    if isinstance(estimator, GiGPO):
        assert inputs.state_ids is not None
        inner = None
        if impl == "triton":
            inner = torch.argsort(inputs.state_ids[order.turns], stable=True)
        by_state = Members(batch.group_ids, order.turns, inputs.state_ids, inner, order.owners)
        steps = advantages_of(
            batch.turn_returns,
            by_state,
            num_groups,
            rule,
            valid=None if valid is None else valid[order.owners],
            impl=impl,
        )
        weight = estimator.step_weight
    spread = spread_of_trajectories(_turns(batch), rows, steps, weight=weight, impl=impl)
    returns = batch.returns if batch.advantages is None else _turn_returns(batch, impl).rows
    counted = None if valid is None else _counted(batch, impl, members)
    return Credit(spread.rows, returns, counted, spread)


def _of_own(batch: PackedBatch, estimator: OwnEstimator, inputs: Inputs, impl: str) -> Credit:
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
        rows = spread(batch, rows, cast("Unit", unit))
    returns = batch.returns if batch.advantages is None else _turn_returns(batch, impl).rows
    return Credit(rows, returns, None)


def spread(batch: PackedBatch, x: torch.Tensor, of: Unit) -> torch.Tensor:
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
        x = x[batch.group_order.owners.long()]
    return torch.where(is_generated, x[batch.turn_ids.long().clamp(min=0)], x.new_zeros(()))


def num_groups_of(batch: PackedBatch) -> int:
    """Return an upper bound of the groups that is the same for all contents of a static batch."""
    return batch.cu_turns.shape[0] - 1 if batch.is_padded else batch.num_groups


def _warn_of_singletons(batch: PackedBatch, estimator: GroupEstimator) -> None:
    """Warn if every group has one member; the groups are known to the host."""
    num_trajectories = len(batch.groups)  # without the padding of a `StaticBatch`
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


def _turns(batch: PackedBatch) -> Turns:
    return Turns(batch.turn_ids, batch.cu_turns, batch.turn_spans)


def _turn_returns(batch: PackedBatch, impl: str) -> TokenSpread:
    """Return the turns' returns at their tokens, also of a batch that has other returns."""
    return spread_of_trajectories(_turns(batch), None, batch.turn_returns, weight=1.0, impl=impl)


def _members(batch: PackedBatch, impl: str, clip: float = inf) -> Scores:
    return scores_of_trajectories(
        batch.turn_rewards,
        batch.turn_truncated,
        batch.cu_generated,
        batch.cu_turns,
        clip=clip,
        impl=impl,
    )


def _counted(batch: PackedBatch, impl: str, members: Scores | None = None) -> torch.Tensor:
    """Return bool ``[tokens]``: generated tokens of trajectories that were not truncated."""
    valid = (_members(batch, impl) if members is None else members).valid.float()
    return spread_of_trajectories(_turns(batch), valid, None, weight=0.0, impl=impl).rows > 0


def _finish(
    batch: PackedBatch,
    credit: Credit,
    whitening: int | None,
    all_reduce: AllReduce | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor | Callable[[], torch.Tensor]]:
    """Return advantages, whitened over all ranks if asked for, and their moments before.

    Without whitening the moments are a function that computes them.
    """
    advantages, mask = credit.advantages, batch.loss_mask
    moments = None if credit.spread is None else credit.spread.moments
    if credit.counted is not None:
        mask, moments = credit.counted, None
    if whitening is None:
        if moments is not None:
            return advantages, moments[:5]
        return advantages, lambda: moments_and_sums(advantages, mask, impl=impl)[:5]
    if moments is None:
        moments = moments_and_sums(advantages, mask, impl=impl)
    given = moments
    if all_reduce is not None:
        given = moments[5:]
        all_reduce(given)
    return whiten_by(advantages, mask, given, ddof=whitening, impl=impl), moments[:5]
