"""verl: the padded ``DataProto``, the jagged ``TensorDict``, and rollouts of its agent loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import host_array
from trajpack.packing.optional import require
from trajpack.packing.rows import layout, reading
from trajpack.packing.types import Trajectory

OF_ROWS = ("prompts", "responses", "attention_mask", "token_level_rewards")
"""Keys, beside those of `_fields`, that no extra field can be named as."""
NEEDED = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs")
"""Tensors that a ``DataProto`` must have to be read."""
OUTPUT_KEYS = {
    "prompt_ids": "prompt_ids",
    "input_ids": "response_ids",
    "mask": "response_mask",
    "logprobs": "response_logprobs",
}
"""Fields that an ``AgentLoopOutput`` must have to be read, by the argument of `turns_of`."""


def to_data_proto_dict(
    batch: PackedBatch,
    *,
    pad_token_id: int = 0,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    scores: layout.Place = "turns",
    meta_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of ``DataProto.from_dict``: a row for each sequence.

    Prompts are left-padded, responses right-padded, to the longest if no width is given.
    ``scores="turns"`` puts each turn's reward at its last token, ``"last"`` the sum of the
    trajectory's rewards at the row's last token, as verl's agent loops do. ``meta_info`` are
    entries of the proto, such as the temperature.

    Raises:
        ValueError: As in all formats, and if a prompt or a response is longer than its width.
    """
    whole, prompts, responses = layout.split_rows(
        batch, max_prompt_length=max_prompt_length, max_response_length=max_response_length
    )
    ids = whole.of(batch.input_ids, pad_token_id)
    padding = prompts.shape[1] - prompts.size[:, None]
    positions = torch.arange(ids.shape[1], device=batch.device) - padding
    last = whole.size[:, None] - 1
    tensors = {
        "prompts": ids[:, : prompts.shape[1]],
        "responses": ids[:, prompts.shape[1] :],
        "input_ids": ids,
        "attention_mask": whole.of(layout.ones_of(batch)),
        "position_ids": torch.minimum(positions.clamp_(min=0), last, out=positions),
    }
    for key, packed in _fields(batch, scores).items():
        tensors[key] = (whole if key in reading.WHOLE_SEQUENCE_FIELDS else responses).of(packed)
    if batch.advantages is not None:
        tensors["token_level_scores"] = tensors["token_level_rewards"] = tensors["rm_scores"]
    labels = {
        key: np.array(values, dtype=object if key == "uid" else np.int32)
        for key, values in _labels(batch).items()
    }
    return {"tensors": tensors, "non_tensors": labels, "meta_info": dict(meta_info or {})}


def to_data_proto(batch: PackedBatch, **options: Any) -> Any:
    """Return a ``verl.DataProto``, with content and options of `to_data_proto_dict`."""
    require("verl")
    from verl import DataProto

    return DataProto.from_dict(**to_data_proto_dict(batch, **options))


def to_tensordict(batch: PackedBatch, *, scores: layout.Place = "turns") -> Any:
    """Return the ``TensorDict`` without padding that verl's V1 trainer passes around.

    Tensors are jagged ones of ``torch.nested``, a row for each sequence. verl's ``ppo_loss`` also
    needs ``old_log_probs``: an extra field of that name or the actor's result.

    Raises:
        ValueError: As in all formats, and if the batch is empty, which no jagged tensor can be.
    """
    require("tensordict")
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    layout.check_whole("to_tensordict", batch)
    if not len(batch):
        raise ValueError("to_tensordict: the batch is empty, which a jagged tensor cannot be")
    prompts = layout.prompt_lengths_of(batch).tolist()
    responses = [length - prompt for length, prompt in zip(batch.seqlens, prompts, strict=True)]
    pieces = [size for sizes in zip(prompts, responses, strict=True) for size in sizes]

    def jagged(lengths: Sequence[int]) -> Any:
        # without its longest row a tensor would be padded to the tokens of all rows
        return partial(
            torch.nested.nested_tensor_from_jagged,
            offsets=torch.tensor([0, *lengths]).cumsum(0).to(batch.device),
            min_seqlen=min(lengths),
            max_seqlen=max(lengths),
        )

    def part(packed: torch.Tensor, first: int) -> torch.Tensor:
        return torch.cat(packed.split(pieces)[first::2])

    of_sequences, of_responses = jagged(batch.seqlens), jagged(responses)
    fields = {
        "input_ids": of_sequences(batch.input_ids),
        "position_ids": of_sequences(batch.position_ids),
        "prompts": jagged(prompts)(part(batch.input_ids, 0)),
        "responses": of_responses(part(batch.input_ids, 1)),
    }
    for key, packed in _fields(batch, scores).items():
        whole = key in reading.WHOLE_SEQUENCE_FIELDS
        fields[key] = of_sequences(packed) if whole else of_responses(part(packed, 1))
    fields["loss_mask"] = fields["response_mask"]
    found = TensorDict(fields, batch_size=[len(batch)])
    found["max_seq_len"] = NonTensorData(batch.max_seqlen)
    found["max_response_len"] = NonTensorData(max(responses))
    for key, values in _labels(batch).items():
        stack = NonTensorStack.from_list([NonTensorData(value) for value in values])
        found[key.strip("_")] = stack
    return found


def to_agent_loop_outputs(batch: PackedBatch) -> list[list[dict[str, Any]]]:
    """Return the fields of an ``AgentLoopOutput`` for each sequence: a list for each trajectory.

    Of a trajectory whose history was rewritten the list has several, as verl's V1 trainer takes
    them. All have the trajectory's reward, as verl's own copies of it. verl refuses an output
    without ``metrics``, which are the caller's, and copies ``reward_extra_info``, empty here, from
    the last. Not carried: rewards of single turns.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> ((output,),) = to_agent_loop_outputs(pack([Trajectory("a", [Turn([1], [2], [-1.0])])]))
        >>> output["response_ids"], output["num_turns"]
        ([2], 2)
    """
    op = "to_agent_loop_outputs"
    rows = layout.RowLists(op, batch)
    layout.check_fields(op, batch, reading.WHOLE_SEQUENCE_FIELDS)
    labels, rewards = _labels(batch), layout.row_scores(batch).tolist()
    whole = {
        name: batch.fields[name].cpu().split(batch.seqlens)
        for name in sorted(reading.WHOLE_SEQUENCE_FIELDS & set(batch.fields))
    }
    columns = {
        "prompt_ids": rows.prompts(batch.input_ids),
        "response_ids": rows.responses(batch.input_ids),
        "response_mask": rows.responses(batch.loss_mask.long()),
        "response_logprobs": rows.responses(batch.rollout_logprobs),
        "reward_score": rewards,
        "num_turns": labels["__num_turns__"],
    }
    sessions: list[list[dict[str, Any]]] = [[] for _ in batch.ids]
    for row, trajectory in enumerate(rows.trajectories):
        output = {key: values[row] for key, values in columns.items()}
        extra = {key: labels[key][row] for key in ("min_global_steps", "max_global_steps")}
        extra |= {"turn_scores": [], "tool_rewards": [], "reward_extra_info": {}}
        extra |= {name: pieces[row] for name, pieces in whole.items()}
        routes = extra.pop("routed_experts", None)
        output["routed_experts"] = None if routes is None else routes.numpy()
        sessions[trajectory].append(output | {"extra_fields": extra})
    return sessions


def from_data_proto(
    proto: Any, ids: Iterable[str] | None = None, *, missing_reward: float | None = None
) -> list[Trajectory]:
    """Return the trajectories of a padded ``DataProto``, or of its dictionary form.

    A row is a trajectory; rows with the same one of ``ids`` are one, whose reward is that of the
    last. Rewards are ``token_level_scores``, else ``rm_scores``, each for its turn, else
    ``missing_reward`` for the last turn; groups are the ``uid``; versions go from
    ``min_global_steps`` to ``max_global_steps`` if present. Lost in the format: truncation,
    versions of single tokens, the discount.
    """
    op = "from_data_proto"
    tensors, labels = _parts_of_proto(proto)
    names = ("token_level_scores", "rm_scores")
    scores = [key for key in names if tensors.get(key) is not None][:1]
    arrays = reading.host_arrays(op, tensors, NEEDED, scores)
    num_rows, num_prompt = (*arrays["prompts"].shape, 0, 0)[:2]
    num_response = (*arrays["responses"].shape, 0, 0)[1]
    shapes = dict.fromkeys(arrays, (num_rows, num_response))
    shapes["prompts"] = (num_rows, num_prompt)
    shapes["attention_mask"] = (num_rows, num_prompt + num_response)
    reading.check_shapes(op, arrays, shapes)
    uids, *steps = (
        reading.labels_of(op, key, labels.get(key), num_rows)
        for key in ("uid", "min_global_steps", "max_global_steps")
    )
    reward = 0.0
    if not scores and num_rows:
        expected = "token_level_scores or rm_scores"
        reward = reading.reward_or_missing(op, None, missing_reward, expected=expected)
    in_prompt, in_response = np.split(arrays["attention_mask"], [num_prompt], axis=1)
    columns = {"input_ids": "responses", "mask": "response_mask", "logprobs": "rollout_log_probs"}
    if scores:
        columns["token_rewards"] = scores[0]
    rows: list[dict[str, Any]] = [
        prompt | row | {"reward": reward, "version_range": _version_range(*versions)}
        for prompt, row, *versions in zip(
            reading.stretches(arrays, {"prompt_ids": "prompts"}, in_prompt),
            reading.stretches(arrays, columns, in_response),
            *steps,
            strict=True,
        )
    ]
    groups = [None if uid is None else str(uid) for uid in uids]
    owners = reading.rows_by(zip(reading.row_ids(op, ids, uids), groups, strict=True))
    for own in owners.values():
        for row in own[:-1]:  # whose rewards are copies of the last one's
            rows[row] |= {"token_rewards": None, "reward": 0.0}
    return [
        reading.trajectory_of(*owner, [rows[row] for row in own]) for owner, own in owners.items()
    ]


def from_agent_loop_outputs(
    outputs: Iterable[Any],
    ids: Iterable[str] | None = None,
    groups: Iterable[str] | None = None,
    *,
    fields: Sequence[str] = (),
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of ``AgentLoopOutput``, or of dictionaries with its fields.

    A list of outputs is one session whose history was rewritten, as in verl's V1 trainer: one
    trajectory with the turns of all outputs. Its reward is the ``reward_score`` of the last output,
    for its last turn; verl's copies of it in the others are not counted. ``fields`` may be
    ``"routed_experts"``, ``"teacher_ids"`` and ``"teacher_logprobs"``; tokens behind the last
    recorded route get rows of zeros, as in verl.
    """
    op = "from_agent_loop_outputs"
    reading.check_known_fields(op, fields, reading.WHOLE_SEQUENCE_FIELDS)
    sessions = [output if isinstance(output, (list, tuple)) else [output] for output in outputs]
    uids = reading.labels_of(op, "groups", groups, len(sessions))
    found = []
    for session, name, group in zip(sessions, reading.row_ids(op, ids, uids), uids, strict=True):
        if not session:
            raise ValueError(f"{op}: {name!r} is an empty list of outputs")
        given = [reading.fields_of(f"{op}: the output of {name!r}", output) for output in session]
        reward, of = given[-1].get("reward_score"), repr(name)
        reward = reading.reward_or_missing(
            op, reward, missing_reward, expected="reward_score", of=of
        )
        rows = [_output(f"{op}: {name!r}", output, fields) for output in given]
        rows[-1]["reward"] = reward
        found.append(reading.trajectory_of(name, group, rows))
    return found


def _output(whose: str, output: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `turns_of` for an ``AgentLoopOutput``."""
    for key in OUTPUT_KEYS.values():
        if output.get(key) is None:
            raise ValueError(f"{whose} has no {key}")
    extra, media = output.get("extra_fields") or {}, output.get("multi_modal_data") or {}
    keys = {key: key for key in sorted(reading.WHOLE_SEQUENCE_FIELDS)}
    given = {key: extra.get(key) for key in keys}
    given["routed_experts"] = output.get("routed_experts")
    reading.check_carried(whose, {**media, **given}, fields=fields, keys=keys, refused=media)
    rows = {key: host_array(given[key]) for key in fields}
    if "routed_experts" in rows:
        length = len(output["prompt_ids"]) + len(output["response_ids"])
        rows["routed_experts"] = reading.filled_up(rows["routed_experts"][:length], length, 0)
    versions = _version_range(extra.get("min_global_steps"), extra.get("max_global_steps"))
    found = {name: output[key] for name, key in OUTPUT_KEYS.items()}
    return found | {"version_range": versions, "fields": rows}


def _fields(batch: PackedBatch, scores: layout.Place) -> dict[str, torch.Tensor]:
    """Return verl's fields of responses, as tensors over the batch's tokens."""
    fields = {
        "response_mask": batch.loss_mask.long(),
        "rollout_log_probs": batch.rollout_logprobs,
        "rm_scores": layout.token_scores(batch, op="to_verl", place=scores),
    }
    if batch.advantages is not None:
        fields |= {"advantages": batch.advantages, "returns": batch.returns}
    layout.check_fields("to_verl", batch, keys={*fields, *OF_ROWS})
    return fields | dict(batch.fields)


def _labels(batch: PackedBatch) -> dict[str, list[Any]]:
    """Return verl's labels of rows, which are not tensors."""
    turns = layout.row_turns(batch)
    first, last = batch.turn_version_start.tolist(), batch.turn_version_end.tolist()
    return {
        "uid": layout.row_groups(batch),
        "__num_turns__": [2 * len(of) for of in turns],
        "min_global_steps": [min(first[turn] for turn in of) for of in turns],
        "max_global_steps": [max(last[turn] for turn in of) for of in turns],
    }


def _version_range(first: Any, last: Any) -> tuple[int, int]:
    """Return the first and last policy version, 0 and 0 if unknown."""
    return (0, 0) if first is None or last is None else (int(first), int(last))


def _parts_of_proto(proto: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the tensors and the labels of a ``DataProto`` or of its dictionary."""
    if isinstance(proto, Mapping) and "tensors" in proto:
        tensors, labels = proto["tensors"], proto.get("non_tensors")
    elif hasattr(proto, "non_tensor_batch"):
        tensors, labels = getattr(proto, "batch", None), proto.non_tensor_batch
    else:
        raise TypeError(
            "from_data_proto: proto must be a padded DataProto or its dictionary, "
            f"got {type(proto).__name__}"
        )
    if tensors is None:
        raise ValueError(f"from_data_proto: the proto's batch is None, expected {[*NEEDED]}")
    return dict(tensors.items()), labels or {}
