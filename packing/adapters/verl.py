"""verl: the padded ``DataProto``, the jagged ``TensorDict``, and rollouts of its agent loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from trajpack.packing.adapters.row_arrays import reward_for_missing
from trajpack.packing.adapters.row_names import (
    check_field_names,
    given_groups,
    row_groups,
    row_ids,
)
from trajpack.packing.adapters.verl_arrays import proto_arrays, version_range
from trajpack.packing.batch import PackedBatch
from trajpack.packing.masked_tokens import MaskedTokens
from trajpack.packing.optional import require
from trajpack.packing.row_scores import Place, placed_scores
from trajpack.packing.rows import prompt_lengths_of, row_turns, rows_of
from trajpack.packing.types import Trajectory

FULL_LENGTH = frozenset({"routed_experts", "teacher_ids", "teacher_logprobs"})
"""Extra fields that verl keeps for prompts too; all others it keeps for responses alone."""

OF_ROWS = ("prompts", "responses", "attention_mask", "token_level_rewards")
"""Keys, beside those of `_fields`, that no extra field can be named as."""


def to_data_proto_dict(
    batch: PackedBatch,
    *,
    pad_token_id: int = 0,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    scores: Place = "turns",
    meta_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of ``DataProto.from_dict``: a row for each sequence.

    ``B`` rows, prompts of ``P`` tokens padded on the left, responses of ``R`` padded on the
    right. Column ``j`` of a response's fields belongs to its token ``j``: nothing is shifted.

    =================== ======= ========== ==================================================
    tensors             dtype   shape      content, and what stands at padding
    =================== ======= ========== ==================================================
    prompts             int64   [B, P]     up to the first generated token; pad_token_id
    responses           int64   [B, R]     the rest, observations too; pad_token_id
    response_mask       int64   [B, R]     1 where generated; 0
    input_ids           int64   [B, P + R] prompts, responses; pad_token_id
    attention_mask      int64   [B, P + R] 1 where there is a token; 0
    position_ids        int64   [B, P + R] from 0; left 0, right the last position again
    rollout_log_probs   float32 [B, R]     0
    rm_scores           float32 [B, R]     rewards, see ``scores``; 0
    advantages, returns float32 [B, R]     if the batch has advantages; 0
    token_level_scores  float32 [B, R]     with them, rm_scores; also as token_level_rewards
    each extra field    its own [B, R, *]  ``routed_experts`` and teachers' [B, P + R, *]; 0
    =================== ======= ========== ==================================================

    Of ``non_tensors``, arrays of ``B``: ``uid``, the group or else the id; ``__num_turns__``,
    completions and what came before each; ``min_global_steps`` and ``max_global_steps``, the
    policy versions.

    Args:
        batch: In any layout; a sequence is a row.
        pad_token_id: What stands at padding of token ids.
        max_prompt_length: ``P``, the trainer's ``data.max_prompt_length``; that of the longest
            prompt if ``None``.
        max_response_length: ``R``, likewise.
        scores: ``"turns"`` puts each turn's reward at its last token, ``"last"`` the sum of the
            row's rewards at the row's last token, as verl's own agent loops do.
        meta_info: Goes in as it is: temperature and so on.

    Returns:
        ``tensors``, ``non_tensors``, ``meta_info``; tensors on the batch's device.

    Raises:
        ValueError: If a prompt or a response is longer than its width, the batch is padded,
            ``scores`` is neither, or an extra field is named as another key.

    Cost: some launches for each key; reads tables of turns and the widths back to the host,
    which synchronises a device.
    """
    rows = rows_of(
        batch, max_prompt_length=max_prompt_length, max_response_length=max_response_length
    )
    ids = rows.whole(batch.input_ids, pad_token_id)
    attention = rows.attention_mask.long()
    tensors = {
        "prompts": ids[:, : rows.max_prompt_length],
        "responses": ids[:, rows.max_prompt_length :],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }
    for key, packed in _fields(batch, scores).items():
        lay_out = rows.whole if key in FULL_LENGTH else rows.responses
        tensors[key] = lay_out(packed)
    if batch.advantages is not None:
        tensors["token_level_scores"] = tensors["token_level_rewards"] = tensors["rm_scores"]
    labels = {key: _as_array(key, values) for key, values in _labels(batch).items()}
    return {"tensors": tensors, "non_tensors": labels, "meta_info": dict(meta_info or {})}


def to_data_proto(batch: PackedBatch, **options: Any) -> Any:
    """Return a ``verl.DataProto`` of the batch; needs verl.

    Args:
        batch: In any layout; a sequence is a row.
        options: Those of `to_data_proto_dict`, which says what is in it and what it costs.

    Raises:
        ModuleNotFoundError: If verl is not installed.
    """
    require("verl")
    from verl import DataProto

    return DataProto.from_dict(**to_data_proto_dict(batch, **options))


def to_tensordict(batch: PackedBatch, *, scores: Place = "turns") -> Any:
    """Return the ``TensorDict`` without padding that verl's V1 trainer passes around.

    Tensors are jagged ones of ``torch.nested``, a row for each sequence; nothing is shifted.

    ============================================= ======= =====================================
    key                                           dtype   content
    ============================================= ======= =====================================
    input_ids, position_ids                       int64   of sequences; positions from 0
    prompts, responses                            int64   their parts
    response_mask, loss_mask                      int64   of responses; 1 where generated
    rollout_log_probs, rm_scores                  float32 of responses
    advantages, returns                           float32 of responses; if it has advantages
    each extra field                              its own as in `to_data_proto_dict`
    max_seq_len, max_response_len                 int     no tensors
    uid, num_turns, min_ and max_global_steps     list    no tensors; an entry for each row
    ============================================= ======= =====================================

    Args:
        batch: In any layout, not empty.
        scores: As in `to_data_proto_dict`.

    Raises:
        ModuleNotFoundError: If tensordict is not installed.
        ValueError: If the batch is empty, which no jagged tensor can be, or padded.

    Cost: what is of whole sequences is views of the batch; each other key is gathered. Reads
    lengths and tables of turns back to the host, which synchronises a device.
    """
    require("tensordict")
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    batch.check_unpadded()
    if not len(batch):
        raise ValueError("to_tensordict: the batch is empty, which a jagged tensor cannot be")
    prompts = prompt_lengths_of(batch)
    offsets = batch.cu_seqlens.long()
    responses = offsets.diff() - prompts
    ends = torch.nn.functional.pad(responses.cumsum(0), (1, 0))
    is_response = batch.position_ids >= prompts[batch.sequence_ids.long()]
    response, prompt = is_response.nonzero()[:, 0], (~is_response).nonzero()[:, 0]
    jagged = torch.nested.nested_tensor_from_jagged
    fields = {
        "input_ids": jagged(batch.input_ids, offsets),
        "position_ids": jagged(batch.position_ids, offsets),
        "prompts": jagged(batch.input_ids[prompt], offsets - ends),
        "responses": jagged(batch.input_ids[response], ends),
    }
    for key, packed in _fields(batch, scores).items():
        full = key in FULL_LENGTH
        fields[key] = jagged(packed, offsets) if full else jagged(packed[response], ends)
    fields["loss_mask"] = fields["response_mask"]
    found = TensorDict(fields, batch_size=[len(batch)])
    found["max_seq_len"] = NonTensorData(batch.max_seqlen)
    found["max_response_len"] = NonTensorData(int(responses.max()))
    for key, values in _labels(batch).items():
        stack = NonTensorStack.from_list([NonTensorData(value) for value in values])
        found[key.strip("_")] = stack
    return found


def from_data_proto(
    proto: Any, ids: Iterable[str] | None = None, *, missing_reward: float | None = None
) -> list[Trajectory]:
    """Return the trajectories of a padded ``DataProto``, or of its dictionary form.

    A row is a trajectory: each run of its ``response_mask`` a turn, with all before it as
    prompt. Log-probabilities are ``rollout_log_probs``; rewards ``token_level_scores``, else
    ``rm_scores``, each given to the turn in which it stands; groups are the ``uid``; versions go
    from ``min_global_steps`` to ``max_global_steps`` where these are there.

    What is not in it cannot come back: turns between which nothing was observed are one, turns
    that generated nothing are gone, and so is which were truncated, which version sampled which
    token, and the discount.

    Args:
        proto: A ``DataProto``, or what `to_data_proto_dict` returns.
        ids: Names of the trajectories; the uid and a number if ``None``.
        missing_reward: The reward of each row's last turn where the proto has neither
            ``token_level_scores`` nor ``rm_scores``; such a proto is refused if ``None``.

    Raises:
        TypeError: If it is neither.
        ValueError: If a key is missing or shapes disagree.

    Cost: copies the tensors to the host, which synchronises a device.
    """
    (prompts, responses, attention, mask, logprobs, *scores), labels = proto_arrays(proto)
    reward = 0.0
    if not scores and len(prompts):
        expected = "token_level_scores or rm_scores"
        reward = reward_for_missing("from_data_proto", missing_reward, expected=expected)
    in_prompt, in_response = np.split(attention != 0, [prompts.shape[1]], axis=1)
    uids = labels.get("uid", [None] * len(prompts))
    found = []
    for row, name in enumerate(row_ids("from_data_proto", ids, uids)):
        of = in_response[row]
        masked = MaskedTokens.of_response(
            prompts[row][in_prompt[row]], responses[row][of], mask[row][of], logprobs[row][of],
            scores[0][row][of] if scores else None, reward=reward,
            version_range=version_range(labels, row), name=name,
        )  # fmt: skip
        group = None if uids[row] is None else str(uids[row])
        found.append(masked.trajectory(name, group=group))
    return found


def from_agent_loop_outputs(
    outputs: Iterable[Any],
    ids: Iterable[str] | None = None,
    groups: Iterable[str] | None = None,
    *,
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of ``AgentLoopOutput``, or of dictionaries with its fields.

    As `from_data_proto`; the reward is ``reward_score``, of the last turn, and versions are in
    ``extra_fields``.

    Args:
        outputs: One for each trajectory.
        ids: Names of the trajectories; their group and a number if ``None``.
        groups: Their groups; none if ``None``.
        missing_reward: The reward of an output whose ``reward_score`` is missing or ``None``; such
            an output is refused if ``None``.

    Raises:
        ValueError: If tokens, a mask, log-probabilities or a reward are missing, or lengths
            disagree.
    """
    given = [output if isinstance(output, Mapping) else vars(output) for output in outputs]
    uids = given_groups("from_agent_loop_outputs", groups, len(given))
    found = []
    for output, name, group in zip(
        given, row_ids("from_agent_loop_outputs", ids, uids), uids, strict=True
    ):
        for key in ("prompt_ids", "response_ids", "response_mask", "response_logprobs"):
            if output.get(key) is None:
                raise ValueError(f"from_agent_loop_outputs: {name!r} has no {key}")
        reward = output.get("reward_score")
        if reward is None:
            reward = reward_for_missing(
                "from_agent_loop_outputs", missing_reward, expected="reward_score", of=repr(name)
            )
        masked = MaskedTokens.of_response(
            output["prompt_ids"],
            output["response_ids"],
            output["response_mask"],
            output["response_logprobs"],
            reward=float(reward),
            version_range=version_range(output.get("extra_fields") or {}),
            name=name,
        )
        found.append(masked.trajectory(name, group=group))
    return found


def _fields(batch: PackedBatch, scores: Place) -> dict[str, torch.Tensor]:
    """Return what verl has for responses, as tensors over the batch's tokens."""
    fields = {
        "response_mask": batch.loss_mask.long(),
        "rollout_log_probs": batch.rollout_logprobs,
        "rm_scores": placed_scores(batch, "to_verl", scores),
    }
    if batch.advantages is not None:
        fields |= {"advantages": batch.advantages, "returns": batch.returns}
    check_field_names("to_verl", batch, {*fields, *OF_ROWS})
    return fields | dict(batch.fields)


def _labels(batch: PackedBatch) -> dict[str, list[Any]]:
    """Return what rows have that is no tensor."""
    turns = row_turns(batch)
    first, last = batch.turn_version_start.tolist(), batch.turn_version_end.tolist()
    return {
        "uid": row_groups(batch),
        "__num_turns__": [2 * len(of) for of in turns],
        "min_global_steps": [min(first[turn] for turn in of) for of in turns],
        "max_global_steps": [max(last[turn] for turn in of) for of in turns],
    }


def _as_array(key: str, values: list[Any]) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=object if key == "uid" else np.int32)
