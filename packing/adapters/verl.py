"""verl: the padded ``DataProto``, the jagged ``TensorDict``, and rollouts of its agent loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.adapters.verl_arrays import proto_arrays, version_range
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import host_array
from trajpack.packing.optional import require
from trajpack.packing.rows.arrays import fields_of, filled_up, reward_or_missing
from trajpack.packing.rows.masked_tokens import WHOLE_SEQUENCE_FIELDS, MaskedTokens
from trajpack.packing.rows.names import (
    check_field_names,
    given_groups,
    row_groups,
    row_ids,
)
from trajpack.packing.rows.rows import prompt_lengths_of, row_turns, rows_of
from trajpack.packing.rows.scores import Place, placed_scores
from trajpack.packing.types import Trajectory

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
        lay_out = rows.whole if key in WHOLE_SEQUENCE_FIELDS else rows.responses
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

    Tensors are jagged ones of ``torch.nested``, a row for each sequence; nothing is shifted. Each
    knows its longest row, so that ``to_padded_tensor`` pads to that: verl's ``ppo_loss`` takes it
    with ``old_log_probs``, an extra field of that name or what an actor computed.

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

    def jagged(offsets: torch.Tensor, lengths: Sequence[int]) -> Any:
        # without its longest row a tensor would be padded to as many places as all rows have
        return partial(
            torch.nested.nested_tensor_from_jagged,
            offsets=offsets,
            min_seqlen=min(lengths),
            max_seqlen=max(lengths),
        )

    response_lengths = responses.tolist()
    of_sequences, of_responses = jagged(offsets, batch.seqlens), jagged(ends, response_lengths)
    fields = {
        "input_ids": of_sequences(batch.input_ids),
        "position_ids": of_sequences(batch.position_ids),
        "prompts": jagged(offsets - ends, prompts.tolist())(batch.input_ids[prompt]),
        "responses": of_responses(batch.input_ids[response]),
    }
    for key, packed in _fields(batch, scores).items():
        whole = key in WHOLE_SEQUENCE_FIELDS
        fields[key] = of_sequences(packed) if whole else of_responses(packed[response])
    fields["loss_mask"] = fields["response_mask"]
    found = TensorDict(fields, batch_size=[len(batch)])
    found["max_seq_len"] = NonTensorData(batch.max_seqlen)
    found["max_response_len"] = NonTensorData(max(response_lengths))
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
        reward = reward_or_missing("from_data_proto", None, missing_reward, expected=expected)
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
    fields: Sequence[str] = (),
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of ``AgentLoopOutput``, or of dictionaries with its fields.

    As `from_data_proto`; the reward is ``reward_score``, of the last turn, and versions are in
    ``extra_fields``. A list in the place of an output is a session whose history was rewritten,
    as verl's V1 trainer takes it from an agent loop: one trajectory with the turns of all its
    outputs. Its reward is that of the last output; verl copies that to the others, where it is
    not counted again.

    Args:
        outputs: One for each trajectory, or a list of outputs.
        ids: Names of the trajectories; their group and a number if ``None``.
        groups: Their groups; none if ``None``.
        fields: What turns take over as `Turn.fields`: ``"routed_experts"``, ``"teacher_ids"``,
            ``"teacher_logprobs"``, each with a row for every token of prompt and response. Declare
            a `TokenField` of that name with ``generated_only=False``. Tokens behind the last
            recorded route have rows of zeros, as in verl.
        missing_reward: The reward of an output, or of the last output of a session, whose
            ``reward_score`` is missing or ``None``; such an output is refused if ``None``.

    Raises:
        ValueError: If tokens, a mask, log-probabilities or a reward are missing, lengths disagree,
            a list of outputs is empty, one of ``fields`` is missing or another name; if an output
            has images, videos or audio, or a teacher's log-probabilities that ``fields`` does not
            name.
    """
    unknown = sorted(set(fields) - WHOLE_SEQUENCE_FIELDS)
    if unknown:
        raise ValueError(
            "from_agent_loop_outputs: fields must be of "
            f"{sorted(WHOLE_SEQUENCE_FIELDS)}, got {unknown}"
        )
    sessions = [output if isinstance(output, (list, tuple)) else [output] for output in outputs]
    uids = given_groups("from_agent_loop_outputs", groups, len(sessions))
    found = []
    for session, name, group in zip(
        sessions, row_ids("from_agent_loop_outputs", ids, uids), uids, strict=True
    ):
        if not session:
            raise ValueError(f"from_agent_loop_outputs: {name!r} is an empty list of outputs")
        whose = f"from_agent_loop_outputs: the output of {name!r}"
        given = [fields_of(whose, output) for output in session]
        reward = reward_or_missing(
            "from_agent_loop_outputs", given[-1].get("reward_score"), missing_reward,
            expected="reward_score", of=repr(name),
        )  # fmt: skip
        rewards = [0.0] * (len(given) - 1) + [reward]
        turns = [
            turn
            for output, of_output in zip(given, rewards, strict=True)
            for turn in _masked_output(output, name, fields, reward=of_output)
            .trajectory(name)
            .turns
        ]
        found.append(Trajectory(name, turns, group))
    return found


def _masked_output(
    given: Mapping[str, Any], name: str, fields: Sequence[str], *, reward: float
) -> MaskedTokens:
    """Return the tokens of an ``AgentLoopOutput``, and the reward of its last turn."""
    extra = given.get("extra_fields") or {}
    for key in ("prompt_ids", "response_ids", "response_mask", "response_logprobs"):
        if given.get(key) is None:
            raise ValueError(f"from_agent_loop_outputs: {name!r} has no {key}")
    media = given.get("multi_modal_data") or {}
    media = sorted(key for key, of in media.items() if of is not None and len(of))
    if media:
        raise ValueError(f"from_agent_loop_outputs: {name!r} has {media}, which are not carried")
    for key in ("teacher_ids", "teacher_logprobs"):
        if extra.get(key) is not None and key not in fields:
            raise ValueError(
                f"from_agent_loop_outputs: {name!r} has {key}: name it in fields, or take it out"
            )
    values = {key: extra.get(key) for key in WHOLE_SEQUENCE_FIELDS}
    values["routed_experts"] = given.get("routed_experts")
    length = len(given["prompt_ids"]) + len(given["response_ids"])
    return MaskedTokens.of_response(
        given["prompt_ids"],
        given["response_ids"],
        given["response_mask"],
        given["response_logprobs"],
        reward=reward,
        version_range=version_range(extra),
        fields={key: _rows_of_all(name, key, values[key], length=length) for key in fields},
        name=name,
    )


def _rows_of_all(name: str, field: str, values: Any, *, length: int) -> npt.NDArray[Any]:
    """Return rows of a field. Routes, fewer than tokens, are followed by zeros, as in verl."""
    if values is None:
        raise ValueError(f"from_agent_loop_outputs: {name!r} has no {field}")
    rows = host_array(values)
    return filled_up(rows[:length], length, 0) if field == "routed_experts" else rows


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
