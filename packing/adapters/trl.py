"""TRL's GRPO: what its trainer makes of completions, and what its asynchronous one collates."""

from __future__ import annotations

from typing import Any, Literal

import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows.packed import (
    Packed,
    advantages_of,
    check_over_tokens,
    check_unpadded,
    check_whole,
    places_of,
)
from trajpack.packing.rows.rows import row_trajectories, rows_of

Level = Literal["token", "sequence"]
IGNORED = -100
"""The label that no loss is taken at."""
OPTIONAL = ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")
"""What the trainer may have worked out besides."""


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
    """Return what ``GRPOTrainer._generate_and_score_completions`` returns, a sequence a row.

    The prompt is what stands before the first generated token, the completion all the rest.

    ======================== ======= ============= =================================== ============
    key                      dtype   shape         content                           at padding
    ======================== ======= ============= =================================== ============
    prompt_ids               int64   [B, P]        prompts, padded on the left       pad_token_id
    prompt_mask              int64   [B, P]        1 on prompts                      0
    completion_ids           int64   [B, C]        completions, padded on the right  pad_token_id
    completion_mask          int64   [B, C]        1 on completions, all of them     0
    tool_mask                int64   [B, C]        1 on what was generated           1
    sampling_per_token_logps float32 [B, C]        log-probabilities at the token, 0 0
                                                   on observations
    advantages               float32 [B, C] or [B] of the token, or of the sequence  0
    num_items_in_batch       int64   []            trained tokens of all ranks
    ======================== ======= ============= =================================== ============

    Not carried: versions, returns, groups; extra fields.

    Args:
        batch: In any layout, with advantages.
        pad_token_id: Token at padding.
        advantages: ``"token"`` keeps each token's, which the loss takes as it is; ``"sequence"``
            has one for each, as TRL's own, and raises where they differ within a sequence.
        max_prompt_length: P; that of the longest if ``None``.
        max_completion_length: C; that of the longest if ``None``.
        num_items_in_batch: Where there are several ranks; of this batch if ``None``.
        optional: ``old_per_token_logps``, ``ref_per_token_logps`` or
            ``importance_sampling_ratio``, each ``[tokens]`` of the batch: laid out as the rest.

    Raises:
        TypeError: If it is no batch, or one of ``optional`` no tensor or of another name.
        ValueError: If the batch has no advantages or is padded, a row is longer than it may be, or
            advantages differ within a sequence that shall have one.

    Cost: some launches for each entry. One host read of two widths, which synchronises a device,
    unless both are given; one more for ``"sequence"``.

    Example:
        >>> from trajpack import DrGRPO, Trajectory, Turn, pack
        >>> turns = [Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5, 6], [-0.1, -0.2])]
        >>> batch = pack([Trajectory("a", turns)]).with_advantages(DrGRPO())
        >>> inputs = to_grpo_inputs(batch, pad_token_id=0)
        >>> inputs["completion_ids"], inputs["tool_mask"]
        (tensor([[3, 4, 5, 6]]), tensor([[1, 0, 1, 1]]))
    """
    op = "to_grpo_inputs"
    check_whole(op, batch)
    credit = advantages_of(op, batch)
    rows = rows_of(
        batch, max_prompt_length=max_prompt_length, max_response_length=max_completion_length
    )
    if advantages not in ("token", "sequence"):
        raise ValueError(f"{op}: advantages must be 'token' or 'sequence', got {advantages!r}")
    inputs = {
        "prompt_ids": rows.prompts(batch.input_ids, pad_token_id),
        "prompt_mask": rows.prompt_attention.long(),
        "completion_ids": rows.responses(batch.input_ids, pad_token_id),
        "completion_mask": rows.response_attention.long(),
        "tool_mask": rows.responses(batch.loss_mask.long(), 1),
        "sampling_per_token_logps": rows.responses(batch.rollout_logprobs),
        "advantages": rows.responses(credit) if advantages == "token" else _of_sequences(op, batch),
        "num_items_in_batch": batch.loss_mask.sum()
        if num_items_in_batch is None
        else num_items_in_batch,
    }
    for name, tensor in optional.items():
        if name not in OPTIONAL:
            raise TypeError(f"{op}: expected one of {', '.join(OPTIONAL)}, got {name}")
        check_over_tokens(op, name, tensor, batch)
        inputs[name] = rows.responses(tensor.float())
    return inputs


def to_async_samples(batch: PackedBatch) -> list[dict[str, Any]]:
    """Return what the asynchronous trainer's queue yields: a dictionary for each sequence.

    Its planner folds sequences that begin alike into one row, and its collator writes the row.

    =============== ================ ==============================================================
    key             type             content
    =============== ================ ==============================================================
    input_ids       int64 array      tokens of the sequence
    completion_mask int64 array      1 on generated tokens
    old_log_probs   float32 array    log-probabilities at the token, 0 where not generated
    advantage       float            of all its generated tokens; 0.0 where there are none
    group_id        int              number of its trajectory's group
    metrics         dict             empty
    =============== ================ ==============================================================

    Not carried: versions (the queue itself drops what is stale), returns, an advantage for each
    token: `to_async_row` has those.

    Raises:
        TypeError: If it is no batch.
        ValueError: If the batch has no advantages or is padded, or advantages differ within a
            sequence.

    Cost: copies the tensors to the host, which synchronises a device; arrays are views of that.
    """
    op = "to_async_samples"
    check_whole(op, batch)
    advantages_of(op, batch)
    columns = {
        "input_ids": batch.input_ids,
        "completion_mask": batch.loss_mask.long(),
        "old_log_probs": batch.rollout_logprobs,
    }
    arrays = {
        name: [piece.numpy() for piece in column.cpu().split(batch.seqlens)]
        for name, column in columns.items()
    }
    advantages, groups = _of_sequences(op, batch).tolist(), batch.group_ids.tolist()
    return [
        {name: of[sequence] for name, of in arrays.items()}
        | {"advantage": advantages[sequence], "group_id": groups[trajectory], "metrics": {}}
        for sequence, trajectory in enumerate(row_trajectories(batch))
    ]


def to_async_row(batch: Packed, *, num_trained: torch.Tensor | None = None) -> dict[str, Any]:
    """Return the row that the asynchronous collator of TRL 1.16 writes for one rank.

    The row is of sequences side by side. TRL's own folds those that begin alike, and
    is this one where none do. Versions up to 1.15 read another: `to_flat_async_row`.

    ==================================== ======= ========= ========================================
    key                                  dtype   shape     content
    ==================================== ======= ========= ========================================
    input_ids, position_ids              int64   [1, T]    as in the batch
    attention_mask                       int64   [1, T]    1, padding of a micro-batch too
    shift_labels                         int64   [1, T]    token t + 1 if it is trained, else -100
    tree_kv_index                        int64   [1, T]    0 to T - 1: keys that are gathered
    tree_cu_seqlens_q, tree_cu_seqlens_k int32   [1, n+1]  where sequences lie
    tree_max_seqlens                     int64   [1, 2]    longest sequence, of both
    token_index                          int64   [1, M]    the token before each trained one; -1
    old_log_probs, advantages            float32 [1, M]    of the trained tokens; 0
    segment_id                           int64   [1, M]    their sequences; 0
    global_n_tokens                      float32 [1]       trained tokens of all ranks
    global_n_forward_tokens              float32 [1]       T
    mean_seq_len                         float32 [1]       T over the number of sequences
    ==================================== ======= ========= ========================================

    M is what a batch generated. A micro-batch does not know, so that it is T, and like
    all that is not trained the rest is padding, which the trainer strips.

    Not carried: versions, returns, extra fields.

    Args:
        batch: A batch or a micro-batch, with advantages.
        num_trained: Trained tokens of all ranks, of one entry; those of this row if ``None``.

    Raises:
        ValueError: If there are no advantages, or the batch is that of a `StaticBatch`.

    Cost: some launches over the tokens, no synchronisation.
    """
    check_unpadded(batch)
    advantages = advantages_of("to_async_row", batch)
    size = batch.num_generated if isinstance(batch, PackedBatch) else batch.num_tokens
    trained = torch.nonzero_static(batch.loss_mask, size=size, fill_value=-1)[:, 0]
    holds, places = trained >= 0, places_of(batch)

    def at_trained(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(holds, tensor[trained], 0)[None]

    following = torch.where(batch.loss_mask, batch.input_ids, IGNORED).roll(-1)
    tokens = torch.arange(batch.num_tokens, device=batch.device)
    return {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "shift_labels": following[None],
        "tree_kv_index": tokens[None],
        "tree_cu_seqlens_q": places[None],
        "tree_cu_seqlens_k": places[None],
        "tree_max_seqlens": torch.full((1, 2), batch.max_seqlen, device=batch.device),
        "token_index": torch.where(holds, trained - 1, -1)[None],
        "old_log_probs": at_trained(batch.rollout_logprobs),
        "advantages": at_trained(advantages),
        "segment_id": at_trained(batch.sequence_ids.long()),
        "attention_mask": torch.ones_like(batch.input_ids)[None],
        **_counts(batch, num_trained),
    }


def to_flat_async_row(batch: Packed, *, num_trained: torch.Tensor | None = None) -> dict[str, Any]:
    """Return the row that the asynchronous collator of TRL up to 1.15 writes for one rank.

    ======================= ======= ====== ====================================================
    key                     dtype   shape  content, all of it at the token
    ======================= ======= ====== ====================================================
    input_ids               int64   [1, T] tokens
    attention_mask          int64   [1, T] 1
    completion_mask         int64   [1, T] 1 on generated tokens: never on the first of a sequence
    position_ids            int64   [1, T] from 0 in every sequence
    old_log_probs           float32 [1, T] log-probabilities; 0 where not generated
    advantages              float32 [1, T] advantages; 0 where not generated
    global_n_tokens         float32 [1]    trained tokens of all ranks
    global_n_forward_tokens float32 [1]    T; from 1.11 on
    mean_seq_len            float32 [1]    T over the number of sequences; from 1.11 on
    metrics                 dict           empty, as no sample has any to log; up to 1.10
    ======================= ======= ====== ====================================================

    The trainer itself drops the first column: a sequence's first token predicts nothing.

    Args:
        batch: A batch or a micro-batch, with advantages.
        num_trained: Trained tokens of all ranks, of one entry; those of this row if ``None``.

    Raises:
        ValueError: If there are no advantages, or the batch is that of a `StaticBatch`.

    Cost: views and a few launches, no synchronisation.
    """
    check_unpadded(batch)
    advantages = advantages_of("to_flat_async_row", batch)
    return {
        "input_ids": batch.input_ids[None],
        "attention_mask": torch.ones_like(batch.input_ids)[None],
        "completion_mask": batch.loss_mask.long()[None],
        "position_ids": batch.position_ids[None],
        "old_log_probs": batch.rollout_logprobs[None],
        "advantages": advantages[None],
        **_counts(batch, num_trained),
        "metrics": {},
    }


def _counts(batch: Packed, num_trained: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return tokens that are trained and that are forwarded, and the mean length, ``[1]`` each."""
    counted = batch.loss_mask.sum() if num_trained is None else num_trained
    total = torch.full((1,), float(batch.num_tokens), device=batch.device)
    return {
        "global_n_tokens": counted.reshape(1).float(),
        "global_n_forward_tokens": total,
        "mean_seq_len": total / max(len(batch), 1),
    }


def _of_sequences(op: str, batch: PackedBatch) -> torch.Tensor:
    """Return the one advantage of each sequence; reads back whether there is one."""
    advantages = advantages_of(op, batch)
    sequence = batch.sequence_ids.long()
    extremes = []
    for reduce, nothing in (("amin", float("inf")), ("amax", -float("inf"))):
        trained = torch.where(batch.loss_mask, advantages, nothing)
        none = advantages.new_full((len(batch),), nothing)
        extremes.append(none.scatter_reduce(0, sequence, trained, reduce))
    low, high = extremes
    differ = low < high
    if differ.any():
        first = int(differ.nonzero()[0, 0])
        raise ValueError(
            f"{op}: the advantages of a sequence must be equal, "
            f"got {float(low[first])} to {float(high[first])} in sequence {first}"
        )
    return torch.where(high > -float("inf"), high, 0.0)
