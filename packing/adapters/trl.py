"""TRL's GRPO: inputs of its trainer's loss, and samples and rows of its asynchronous trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from trajpack.packing.adapters.trl_tree import columns_of_tree, to_tree_kwargs
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows import layout, reading
from trajpack.packing.tree.nodes import TreeNodes
from trajpack.packing.types import Trajectory

__all__ = [
    "from_grpo_inputs",
    "to_async_row",
    "to_async_samples",
    "to_grpo_inputs",
    "to_tree_kwargs",
]

Level = Literal["token", "sequence"]
IGNORED = -100
"""Label of tokens without a loss."""
OPTIONAL = ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")
"""Optional keys of the trainer's dictionary."""
NEEDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
LOGPROBS = ("sampling_per_token_logps", "old_per_token_logps")
"""Keys of log-probabilities; the first that is there is read."""
IMAGES = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes")


def to_grpo_inputs(
    batch: PackedBatch,
    *,
    pad_token_id: int,
    advantages: Level = "token",
    max_prompt_length: int | None = None,
    max_completion_length: int | None = None,
    num_items_in_batch: torch.Tensor | None = None,
    **optional: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the result of ``GRPOTrainer._generate_and_score_completions``: a row per sequence.

    ``advantages="token"`` keeps the advantage of each token; ``"sequence"`` gives one per sequence,
    as TRL does, and raises if they differ within a sequence. Widths are those of the longest if
    ``None``. ``num_items_in_batch`` is for several ranks; the trained tokens of this batch if
    ``None``. ``optional`` are those of ``OPTIONAL``, each over the batch's ``[tokens]``.

    Raises:
        TypeError: As in all formats, and if one of ``optional`` is no tensor or of another name.
        ValueError: As in all formats, and if a row is longer than its width.

    Example:
        >>> from trajpack import GroupEstimator, Trajectory, Turn, pack
        >>> turns = [Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5, 6], [-0.1, -0.2])]
        >>> batch = pack([Trajectory("a", turns)]).with_advantages(GroupEstimator("dr_grpo"))
        >>> inputs = to_grpo_inputs(batch, pad_token_id=0)
        >>> inputs["completion_ids"], inputs["tool_mask"]
        (tensor([[3, 4, 5, 6]]), tensor([[1, 0, 1, 1]]))
    """
    op = "to_grpo_inputs"
    layout.check_whole(op, batch)
    credit = layout.advantages_of(op, batch)
    if advantages not in ("token", "sequence"):
        raise ValueError(f"{op}: advantages must be 'token' or 'sequence', got {advantages!r}")
    _, prompts, completions = layout.split_rows(
        batch, max_prompt_length=max_prompt_length, max_response_length=max_completion_length
    )
    by_token = advantages == "token"
    inputs = {
        "prompt_ids": prompts.of(batch.input_ids, pad_token_id),
        "prompt_mask": prompts.of(layout.ones_of(batch)),
        "completion_ids": completions.of(batch.input_ids, pad_token_id),
        "completion_mask": completions.of(layout.ones_of(batch)),
        "tool_mask": completions.of(batch.loss_mask.long(), 1),
        "sampling_per_token_logps": completions.of(batch.rollout_logprobs),
        "advantages": completions.of(credit) if by_token else _of_sequences(op, batch),
        "num_items_in_batch": batch.loss_mask.sum()
        if num_items_in_batch is None
        else num_items_in_batch,
    }
    for name, tensor in optional.items():
        if name not in OPTIONAL:
            raise TypeError(f"{op}: expected one of {', '.join(OPTIONAL)}, got {name}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.shape[:1] != (batch.num_tokens,) or tensor.device != batch.device:
            raise ValueError(
                f"{op}: {name} must be over {batch.num_tokens} tokens on {batch.device}, "
                f"got shape {list(tensor.shape)} on {tensor.device}"
            )
        inputs[name] = completions.of(tensor.float())
    return inputs


def from_grpo_inputs(
    inputs: Mapping[str, Any],
    ids: Iterable[str] | None = None,
    groups: Iterable[str] | None = None,
    *,
    rewards: Iterable[float | None] | None = None,
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of ``GRPOTrainer``'s inputs, one for each row.

    Tokens where ``completion_mask`` is 0 are padding, those where ``tool_mask`` is 0 observations.
    Log-probabilities are the first of ``LOGPROBS`` that is there. TRL keeps no rewards: ``rewards``
    has one for each row, for its last turn. Advantages are not read. Lost in the format: versions,
    truncation, rewards of single turns.
    """
    op = "from_grpo_inputs"
    reading.check_carried(op, inputs, keys={}, refused=IMAGES)
    there = [key for key in LOGPROBS if inputs.get(key) is not None]
    logprobs = (there or LOGPROBS)[0]
    arrays = reading.host_arrays(op, inputs, (*NEEDED, logprobs), ("tool_mask",))
    shape = dict.fromkeys(arrays, arrays["completion_ids"].shape)
    shape["prompt_ids"] = shape["prompt_mask"] = arrays["prompt_ids"].shape
    reading.check_shapes(op, arrays, shape)
    arrays.setdefault("tool_mask", arrays["completion_mask"])
    columns = {"input_ids": "completion_ids", "mask": "tool_mask", "logprobs": logprobs}
    rows = reading.stretches(arrays, columns, arrays["completion_mask"])
    prompts = reading.stretches(arrays, {"prompt_ids": "prompt_ids"}, arrays["prompt_mask"])
    labels = reading.labels_of(op, "groups", groups, len(rows))
    owners = zip(reading.row_ids(op, ids, labels), labels, strict=True)
    return reading.joined(
        op,
        [(owner, [row]) for row, owner in enumerate(owners)],
        lambda row, _: prompts[row] | rows[row],
        rewards=reading.labels_of(op, "rewards", rewards, len(rows)),
        missing_reward=missing_reward,
        expected="the argument rewards",
    )


def to_async_samples(batch: PackedBatch) -> list[dict[str, Any]]:
    """Return the samples of the asynchronous trainer's queue: a dictionary for each sequence.

    TRL's planner folds sequences with a common prefix into one row, and its collator writes it.
    Advantages that differ within a sequence are a `ValueError`.
    """
    op = "to_async_samples"
    layout.check_whole(op, batch)
    advantages, groups = _of_sequences(op, batch).tolist(), batch.group_ids.tolist()
    columns = {
        "input_ids": batch.input_ids,
        "completion_mask": batch.loss_mask.long(),
        "old_log_probs": batch.rollout_logprobs,
    }
    pieces, owners = layout.pieces_of(batch, columns), layout.row_trajectories(batch)
    return [
        {name: values.numpy() for name, values in of.items()}
        | {"advantage": advantage, "group_id": groups[trajectory], "metrics": {}}
        for of, advantage, trajectory in zip(pieces, advantages, owners, strict=True)
    ]


def to_async_row(
    batch: layout.Packed | TreeNodes, *, num_trained: torch.Tensor | None = None
) -> dict[str, Any]:
    """Return the row that the asynchronous collator of TRL 1.16 writes for one rank.

    Of a tree of ``pack_tree(..., boundary="duplicate")``: TRL's own ``TreeRow`` of the same
    sequences, in the order of their tokens. A trained token has its own advantage. Of a batch or a
    micro-batch: sequences side by side, TRL's own row for sequences without a common prefix.

    ``token_index`` is -1 at generated tokens that are not trained, which the trainer strips.
    ``num_trained`` is the number of trained tokens of all ranks, one entry; those of this row if
    ``None``.

    Raises:
        ValueError: As in all formats; also if a tree has another ``boundary``, or no nodes.
    """
    op, order = "to_async_row", None
    if isinstance(batch, TreeNodes):
        columns, order, num_sequences = columns_of_tree(op, batch)
    else:
        columns, num_sequences = _columns(op, batch), len(batch)
    generated = batch.generated
    counted = generated.loss_mask.sum() if num_trained is None else num_trained
    of_generated = {
        "token_index": torch.where(generated.loss_mask, generated.predicted_by, -1),
        "old_log_probs": generated.rollout_logprobs,
        "advantages": generated.advantages,
    }
    columns |= {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": torch.ones_like(batch.input_ids),
        **{name: of if order is None else of[order] for name, of in of_generated.items()},
    }
    total = torch.full((1,), float(batch.input_ids.shape[0]), device=batch.device)
    return {name: values[None] for name, values in columns.items()} | {
        "global_n_tokens": counted.reshape(1).float(),
        "global_n_forward_tokens": total,
        "mean_seq_len": total / max(num_sequences, 1),
    }


def _columns(op: str, batch: layout.Packed) -> dict[str, torch.Tensor]:
    """Return what `to_async_row` has of sequences side by side."""
    places = layout.memory_of(batch).places
    layout.advantages_of(op, batch)
    return {
        "shift_labels": torch.where(batch.loss_mask, batch.input_ids, IGNORED).roll(-1),
        "tree_kv_index": torch.arange(batch.num_tokens, device=batch.device),
        "tree_cu_seqlens_q": places,
        "tree_cu_seqlens_k": places,
        "tree_max_seqlens": torch.full((2,), batch.max_seqlen, device=batch.device),
        "segment_id": batch.generated.of(batch.sequence_ids.long()),
    }


def _of_sequences(op: str, batch: PackedBatch) -> torch.Tensor:
    """Return the single advantage of each sequence; reads back whether it is a single one."""
    advantages = layout.advantages_of(op, batch)
    sequence = batch.sequence_ids.long()
    infinite = advantages.new_full((len(batch),), float("inf"))
    trained = torch.where(batch.loss_mask, advantages, float("inf"))
    low = infinite.scatter_reduce(0, sequence, trained, "amin")
    trained = torch.where(batch.loss_mask, advantages, -float("inf"))
    high = (-infinite).scatter_reduce(0, sequence, trained, "amax")
    differ = low < high
    if differ.any():
        first = int(differ.nonzero()[0, 0])
        raise ValueError(
            f"{op}: the advantages of a sequence must be equal, "
            f"got {float(low[first])} to {float(high[first])} in sequence {first}"
        )
    return torch.where(high == -float("inf"), 0.0, high)  # NaN stays NaN
