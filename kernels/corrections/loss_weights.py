"""Per-token weights with which a sum of token losses is one of the usual means."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch

from trajpack.kernels.corrections.slots import Places, slots_of_tokens
from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.validation import check_choice, check_integer, check_number, check_tensor

INTEGERS = (torch.int32, torch.int64)

Aggregation: TypeAlias = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "prompt_mean", "constant"
]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
"""Names of the aggregations."""


def loss_weights(
    aggregation: Aggregation,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor | None = None,
    *,
    num_sequences: int | None = None,
    group_ids: torch.Tensor | None = None,
    num_groups: int | None = None,
    denominator: float | torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Return weights ``w`` such that ``(w * token_loss).sum()`` is the aggregated loss.

    With N generated tokens in all, nₛ in sequence s and n_g in group g, S sequences and G
    groups with any::

        "token_mean"                  1 / N
        "sequence_mean_token_mean"    1 / (S · nₛ)
        "sequence_mean_token_sum"     1 / S
        "prompt_mean"                 1 / (G · n_g)
        "constant"                    1 / denominator

    A sequence is one response: all generated tokens of a trajectory, in any number of rows. With
    ids of trajectories a token has bitwise the same weight in the layouts ``"turns"`` and
    ``"merged"``.

    Args:
        aggregation: One of the names above.
        loss_mask: ``[tokens]`` bool: True on generated tokens.
        sequence_ids: ``[tokens]`` int32 or int64: the token's sequence, in any order; outside
            ``[0, num_sequences)``: none, and weight 0. Not used by ``"token_mean"`` and
            ``"constant"``.
        num_sequences: Number of sequence ids.
        group_ids: ``[num_sequences]`` int32 or int64: the sequence's group of responses to one
            prompt; outside ``[0, num_groups)``: none. For ``"prompt_mean"`` alone.
        num_groups: Number of group ids.
        denominator: In place of N, S or G, where a batch is spread over ranks: the sum over
            ranks of their `PackedBatch.loss_denominator`, a number or a 0-d tensor, so that the
            losses of the ranks add up to that of the whole. Where gradients are averaged over
            ranks, divide it by their number. A sequence, or group, must then be on one rank.
            ``"constant"`` needs it: for Dr. GRPO the maximum length times the responses.
        impl: As of `segment_sum`; both implementations give the same bits.

    Returns:
        ``[tokens]`` float32, computed in float64: 0 where ``loss_mask`` is False. Not
        differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, an argument that the aggregation needs is
            missing, or a number is out of its range.

    Example:
        >>> loss_mask = torch.tensor([False, True, True, True, True])
        >>> sequence_ids = torch.tensor([0, 0, 0, 0, 1])
        >>> loss_weights("sequence_mean_token_mean", loss_mask, sequence_ids, num_sequences=2)
        tensor([0.0000, 0.1667, 0.1667, 0.1667, 0.5000])

    Reference:
        Token mean: DAPO, arXiv 2503.14476, equation 8. Sequence means: GRPO, arXiv 2402.03300,
        and ``agg_loss`` of verl, which also counts sequences with tokens only. Prompt mean:
        SkyRL. Constant: Dr. GRPO, arXiv 2503.20783. One mean over rows that were split from one
        rollout: slime, ``rollout_mask_sums``.
    """
    op = "loss_weights"
    places = _check_places(
        op, aggregation, loss_mask, sequence_ids, num_sequences, group_ids, num_groups
    )
    check_denominator(aggregation, denominator, loss_mask.device)
    chosen = resolve_impl(op, impl, loss_mask.device)
    return shares_of(aggregation, loss_mask, places, denominator, chosen)


def check_denominator(
    aggregation: str, denominator: float | torch.Tensor | None, device: torch.device
) -> None:
    """Raise unless the denominator of `loss_weights` is one, and is there where it is needed."""
    op = "loss_weights"
    if isinstance(denominator, torch.Tensor):
        numbers = (*INTEGERS, torch.float32, torch.float64)
        check_tensor(
            op, "denominator", denominator, ndim=0, dtypes=numbers, device=device, constant=True
        )
    elif denominator is not None:
        check_number(op, "denominator", denominator, above=0, finite=True)
    elif aggregation == "constant":
        raise ValueError(f"{op}: aggregation='constant' needs denominator")


def shares_of(
    aggregation: str,
    counts: torch.Tensor,
    places: Places | None,
    denominator: float | torch.Tensor | None,
    impl: str,
) -> torch.Tensor:
    """Return the weight of a token in each entry of ``counts``, 0 where it has none.

    ``counts`` are a mask over tokens, or boundaries, see `Places`; without places all tokens share
    one slot. Arguments are checked.
    """
    divides = places is not None and aggregation != "sequence_mean_token_sum"
    if impl == "triton":
        given = 0.0 if denominator is None else denominator
        on_device = given if isinstance(given, torch.Tensor) else None
        tables = places[1:3] if places else (None, None)
        weights: torch.Tensor = torch.ops.trajpack.loss_weights(
            *(None if one is None else one.contiguous() for one in (counts, *tables)),
            on_device,
            0.0 if on_device is not None else float(given),
            list(places[3:]) if places else [],
            divides,
        )
        return weights
    counts, slots, found = _counted(counts, places)
    if denominator is None:
        denominator = found if slots is None else (found[:-1] > 0).sum()
    found = found.clamp(min=1) if divides else torch.ones_like(found)
    share = 1.0 / (found.double() * denominator)
    if places is not None and slots is not None:
        share = torch.where(slots < places.num_slots, share[slots], 0.0)
    return torch.where(counts != 0, share, 0.0).float()


def denominator_of(counts: torch.Tensor, places: Places | None) -> torch.Tensor:
    """Return N, S or G of `loss_weights` for the entries of `shares_of`: 0-d int64."""
    _, slots, found = _counted(counts, places)
    return found if slots is None else (found[:-1] > 0).sum()


def _counted(
    counts: torch.Tensor, places: Places | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the tokens of each entry, its slot, and the tokens of each slot and, last, of none.

    Without places there are no slots, and all tokens are counted together.
    """
    if places is None:
        return counts, None, counts.sum()
    counts = counts if places.ids is not None else counts.diff()
    slots = slots_of_tokens(places, counts.shape[0], counts.device)
    zeros = counts.new_zeros(places.num_slots + 1, dtype=torch.int64)
    return counts, slots, zeros.scatter_add_(0, slots, counts.long())


def _check_places(
    op: str,
    aggregation: str,
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor | None,
    num_sequences: int | None,
    group_ids: torch.Tensor | None,
    num_groups: int | None,
) -> Places | None:
    """Return the places of tokens, None where all tokens share one slot."""
    check_choice(op, "aggregation", aggregation, AGGREGATIONS)
    check_tensor(op, "loss_mask", loss_mask, dtypes=(torch.bool,))
    if aggregation in ("token_mean", "constant"):
        return None
    needs = f"{op}: aggregation={aggregation!r} needs"
    if sequence_ids is None or num_sequences is None:
        raise ValueError(f"{needs} sequence_ids and num_sequences")
    check_integer(op, "num_sequences", num_sequences)
    device, tokens = loss_mask.device, loss_mask.shape[0]
    check_tensor(op, "sequence_ids", sequence_ids, dtypes=INTEGERS, device=device, entries=tokens)
    if aggregation != "prompt_mean":
        return Places(None, sequence_ids, None, num_sequences, num_sequences)
    if group_ids is None or num_groups is None:
        raise ValueError(f"{needs} group_ids and num_groups")
    check_integer(op, "num_groups", num_groups)
    options: dict[str, Any] = {"dtypes": INTEGERS, "device": device, "per": "sequence"}
    check_tensor(op, "group_ids", group_ids, entries=num_sequences, **options)
    return Places(None, sequence_ids, group_ids, num_sequences, num_groups)


def _run(counts: torch.Tensor, ids: Any, owners: Any, denominator: Any, *options: Any) -> Any:
    from trajpack.kernels.corrections.loss_weights_triton import loss_weights_forward

    given, sizes, divides = options
    places = Places(None, ids, owners, *sizes) if sizes else None
    return loss_weights_forward(counts, places, denominator, given=given, divides=divides)


def _fake(counts: torch.Tensor, ids: Any, *inputs: Any) -> torch.Tensor:
    are_ends = ids is None and len(inputs[3]) > 0
    return counts.new_empty(counts.shape[0] - are_ends, dtype=torch.float32)


register_op(
    "loss_weights(Tensor counts, Tensor? ids, Tensor? owners, Tensor? denominator, float given, "
    "int[] sizes, bool divides) -> Tensor",
    _run,
    _fake,
)
