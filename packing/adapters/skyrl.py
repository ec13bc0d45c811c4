"""SkyRL: the ``GeneratorOutput`` of its generators, and the ``TrainingInput`` of its trainer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from trajpack.kernels.pad import Number, pad
from trajpack.packing.adapters.row_arrays import reward_for_missing
from trajpack.packing.adapters.row_lists import RowLists
from trajpack.packing.adapters.row_names import check_field_names, row_groups
from trajpack.packing.batch import PackedBatch
from trajpack.packing.conversion import host_array
from trajpack.packing.masked_tokens import MaskedTokens
from trajpack.packing.row_scores import row_scores, token_scores
from trajpack.packing.rows import prompt_lengths_of, widths_of
from trajpack.packing.types import Trajectory


class TrajectoryID(NamedTuple):
    """What SkyRL's class of that name is: a task, and which of its trajectories."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """Return both in one."""
        return f"{self.instance_id}_{self.repetition_id}"


def to_generator_output(
    batch: PackedBatch, *, rewards: Literal["tokens", "rows"] = "tokens"
) -> dict[str, Any]:
    """Return a ``GeneratorOutput``: an entry in each list for each sequence.

    ====================== =================== ============================================
    key                    entry               content
    ====================== =================== ============================================
    prompt_token_ids       list[int]           up to the first generated token
    response_ids           list[int]           the rest, observations too
    loss_masks             list[int]           of the response; 1 where generated
    rollout_logprobs       list[float]         of the response, not shifted; 0.0 else
    rewards                list[float], float  see ``rewards``
    stop_reasons           str                 "length" where the last turn was, or "stop"
    trajectory_ids         `TrajectoryID`      the group or else the id; number in the group
    is_last_step           bool                whether it is its trajectory's last sequence
    rollout_expert_indices nested lists        of extra field ``routed_experts``, if any
    rollout_metrics        None
    ====================== =================== ============================================

    Where trajectories are several sequences each (layout ``"turns"``, or rewritten histories),
    SkyRL must be told so by ``generator.step_wise_trajectories``. It wants the trajectories of
    a group beside each other, as a batch of theirs has them. Not carried: policy versions,
    advantages.

    Args:
        batch: In any layout.
        rewards: ``"tokens"``: each turn's at its last token; ``"rows"``: the sum.

    Raises:
        ValueError: If the batch is padded, or ``rewards`` is neither.

    Cost: everything is read back to the host, which synchronises a device, and becomes lists.
    """
    if rewards not in ("tokens", "rows"):
        raise ValueError(
            f"to_generator_output: rewards must be 'tokens' or 'rows', got {rewards!r}"
        )
    rows = RowLists(batch)
    by_token = rewards == "tokens"
    owners = rows.trajectories
    names = zip(row_groups(batch), rows.numbers_in_group(), strict=True)
    found = {
        "prompt_token_ids": rows.prompts(batch.input_ids),
        "response_ids": rows.responses(batch.input_ids),
        "rewards": rows.responses(token_scores(batch)) if by_token else row_scores(batch).tolist(),
        "loss_masks": rows.responses(batch.loss_mask.int()),
        "stop_reasons": ["length" if cut else "stop" for cut in rows.truncated()],
        "rollout_metrics": None,
        "rollout_logprobs": rows.responses(batch.rollout_logprobs),
        "trajectory_ids": [TrajectoryID(*name) for name in names],
        "is_last_step": [one != other for one, other in pairwise([*owners, None])],
    }
    if "routed_experts" in batch.fields:
        found["rollout_expert_indices"] = rows.wholes(batch.fields["routed_experts"])
    return found


def to_training_input(
    batch: PackedBatch, *, pad_token_id: int = 0, max_response_length: int | None = None
) -> dict[str, torch.Tensor]:
    """Return a ``TrainingInput``: a row for each sequence, all that is of it at the right.

    ``B`` rows of ``S`` tokens, as the longest sequence has, padded on the left; of responses the
    last ``R`` columns. Nothing is shifted: column ``j`` of ``R`` belongs to its token.

    ==================== ======= ========= ==================================================
    key                  dtype   shape     content, and what stands at padding
    ==================== ======= ========= ==================================================
    sequences            int64   [B, S]    tokens; pad_token_id
    attention_mask       int64   [B, S]    1 where there is a token; 0
    response_mask        int64   [B, R]    1 on the response, observations too; 0
    loss_mask            float32 [B, R]    1 where generated; 0
    rewards              float32 [B, R]    each turn's at its last token; 0
    rollout_logprobs     float32 [B, R]    0
    advantages, returns  float32 [B, R]    if the batch has advantages; 0
    rollout_expert_indices  int  [B, S, *] extra field ``routed_experts``, if any; 0
    each other field     its own [B, R, *] 0
    ==================== ======= ========= ==================================================

    ``TrainingInputBatch`` takes it; its ``metadata["uids"]`` is for the caller, from
    `trajpack.packing.adapters.row_names.row_groups`. Not carried: policy versions, truncation.

    Args:
        batch: In any layout.
        pad_token_id: What stands at padding of token ids.
        max_response_length: ``R``; that of the longest response if ``None``.

    Raises:
        ValueError: If a response is longer than that, as in `trajpack.packing.rows.rows_of`, the
            batch is padded, or an extra field is named as another key.

    Cost: a launch for each key and some over the turns. One host read of a number, which
    synchronises a device, unless ``max_response_length`` is given.
    """
    batch.check_unpadded()
    prompts = prompt_lengths_of(batch)
    lengths = batch.cu_seqlens.diff().long()
    _, width = widths_of(prompts, lengths - prompts, batch.max_seqlen, max_response_length)
    is_response = batch.position_ids >= prompts[batch.sequence_ids.long()]

    def whole(packed: torch.Tensor, value: Number = 0) -> torch.Tensor:
        return pad(packed, batch.cu_seqlens, batch.max_seqlen, value=value, side="left")

    def response(packed: torch.Tensor) -> torch.Tensor:
        longest = max(batch.max_seqlen, width)
        padded = pad(packed, batch.cu_seqlens, longest, side="left")
        return padded[:, longest - width :].contiguous()

    found = {
        "sequences": whole(batch.input_ids, pad_token_id),
        "attention_mask": whole(torch.ones_like(batch.input_ids)),
        "response_mask": response(is_response.long()),
        "loss_mask": response(batch.loss_mask.float()),
        "rewards": response(token_scores(batch)),
        "rollout_logprobs": response(batch.rollout_logprobs),
    }
    if batch.advantages is not None:
        found |= {"advantages": response(batch.advantages), "returns": response(batch.returns)}
    check_field_names("to_training_input", batch, found)
    for name, values in batch.fields.items():
        if name == "routed_experts":
            found["rollout_expert_indices"] = whole(values)
        else:
            kept = is_response.reshape(-1, *[1] * (values.ndim - 1))
            found[name] = response(torch.where(kept, values, 0))
    return found


def from_generator_output(
    output: Mapping[str, Any], *, missing_reward: float | None = None
) -> list[Trajectory]:
    """Return the trajectories of a ``GeneratorOutput``.

    Entries of one ``trajectory_ids``, the steps of a step-wise output, are one trajectory;
    without these an entry is one. Each run of a ``loss_masks`` is a turn, with all before it
    in its entry as prompt. Rewards of tokens go to the turns in which they stand, one of an
    entry to its last turn; an entry's last turn is truncated where it stopped for its length.
    Groups are the ``instance_id``.

    What is not in it cannot come back: turns that generated nothing or had no observation
    between them, policy versions.

    Args:
        output: Of a generator.
        missing_reward: The reward of an entry whose reward is ``None``; such an entry is refused
            if this is ``None`` too.

    Raises:
        ValueError: If a key or a reward is missing or lengths disagree.
    """
    needed = ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs")
    for key in needed:
        if output.get(key) is None:
            raise ValueError(f"from_generator_output: {key} are missing, got {sorted(output)}")
    count = len(output["response_ids"])
    for key in (*needed, "trajectory_ids", "stop_reasons"):
        if output.get(key) is not None and len(output[key]) != count:
            raise ValueError(
                f"from_generator_output: {key} must be {count}, one for each of response_ids, "
                f"got {len(output[key])}"
            )
    labels = output.get("trajectory_ids")
    names = [str(row) for row in range(count)] if labels is None else [_name(of) for of in labels]
    found: dict[str, Trajectory] = {}
    for row, name in enumerate(names):
        group = None if labels is None else str(labels[row].instance_id)
        masked = _masked(output, row, name, missing_reward=missing_reward)
        trajectory = masked.trajectory(name, group=group)
        before = found[name].turns if name in found else ()
        found[name] = Trajectory(name, [*before, *trajectory.turns], group)
    return list(found.values())


def _name(label: Any) -> str:
    if not hasattr(label, "to_string"):
        raise TypeError(
            f"from_generator_output: trajectory_ids must be of class TrajectoryID, got {label!r}"
        )
    return str(label.to_string())


def _masked(
    output: Mapping[str, Any], row: int, name: str, *, missing_reward: float | None
) -> MaskedTokens:
    reward = output["rewards"][row]
    if reward is None:
        expected, of = f"rewards[{row}]", f"trajectory {name!r}"
        reward = reward_for_missing(
            "from_generator_output", missing_reward, expected=expected, of=of
        )
    by_token = host_array(reward).ndim > 0
    reasons = output.get("stop_reasons")
    return MaskedTokens.of_response(
        output["prompt_token_ids"][row],
        output["response_ids"][row],
        output["loss_masks"][row],
        output["rollout_logprobs"][row],
        reward if by_token else None,
        reward=0.0 if by_token else float(reward),
        truncated=reasons is not None and reasons[row] == "length",
        name=name,
    )
