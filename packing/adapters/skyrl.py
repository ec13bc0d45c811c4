"""SkyRL 0.4: the ``GeneratorOutput`` of its generators, the ``TrainingInput`` of its trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import host_array
from trajpack.packing.optional import require
from trajpack.packing.ragged import Ragged
from trajpack.packing.rows import layout, reading
from trajpack.packing.turn_fields import STOP_REASONS
from trajpack.packing.types import Trajectory

ROUTE_DTYPES = (torch.uint8, torch.int16, torch.int32)
"""Dtypes of expert numbers that SkyRL takes."""
CARRIED = {"routed_experts": "rollout_expert_indices", "sampling_mask": "rollout_sample_support"}
"""SkyRL's names of extra fields."""
COLUMNS = {
    "prompt_ids": "prompt_token_ids",
    "input_ids": "response_ids",
    "mask": "loss_masks",
    "logprobs": "rollout_logprobs",
}
"""Keys that every ``GeneratorOutput`` has, by the argument of `turns_of`."""
IMAGES = ("pixel_values", "image_grid_thw")
TIMES = ("rollout_metrics", "env_metrics", "trajectory_generation_times", "trajectory_time_splits")


class TrajectoryID(NamedTuple):
    """A task and the number of a trajectory of it, as SkyRL's class of that name."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """Return both in one string."""
        return f"{self.instance_id}_{self.repetition_id}"


def to_generator_output(
    batch: PackedBatch, *, rewards: Literal["tokens", "rows"] = "tokens"
) -> dict[str, Any]:
    """Return a ``GeneratorOutput``: an entry in each list for each sequence.

    If trajectories have several sequences each, set SkyRL's ``generator.step_wise_trajectories``.
    It then counts the rewards of the last one alone, at whose end is the trajectory's whole reward.
    SkyRL wants the trajectories of a group next to each other.

    Raises:
        ValueError: As in all formats, and for a dtype or a shape of a field that SkyRL refuses.
    """
    op = "to_generator_output"
    if rewards not in ("tokens", "rows"):
        raise ValueError(f"{op}: rewards must be 'tokens' or 'rows', got {rewards!r}")
    rows = layout.RowLists(op, batch)
    layout.check_fields(op, batch, ["routed_experts"])
    by_token = rewards == "tokens"
    scores = _scores(batch, by_token=by_token)
    numbers: list[int] = []  # of each trajectory in its group
    seen: Counter[int] = Counter()
    for group in batch.group_ids.tolist():
        numbers.append(seen[group])
        seen[group] += 1
    owners = zip(layout.row_groups(batch), rows.trajectories, strict=True)
    found = {
        "prompt_token_ids": rows.prompts(batch.input_ids),
        "response_ids": rows.responses(batch.input_ids),
        "rewards": rows.responses(scores) if by_token else scores.tolist(),
        "loss_masks": rows.responses(batch.loss_mask.int()),
        "stop_reasons": _stop_reasons(batch, rows),
        "rollout_logprobs": rows.responses(batch.rollout_logprobs),
        "trajectory_ids": [TrajectoryID(group, numbers[owner]) for group, owner in owners],
        "is_last_step": [one != other for one, other in pairwise([*rows.trajectories, None])],
        **dict.fromkeys((*CARRIED.values(), *TIMES, *IMAGES)),
    }
    if "routed_experts" in batch.fields:
        routes = _routes(batch).cpu().numpy()
        found["rollout_expert_indices"] = [
            routes[begin : max(end - 1, begin + 1)] for begin, _, end in rows.spans
        ]
    if "sampling_mask" in batch.fields:
        support = layout.mask_rows(op, batch).cpu().numpy()
        found["rollout_sample_support"] = [support[split:end] for _, split, end in rows.spans]
    return found


def to_training_input(
    batch: PackedBatch, *, pad_token_id: int = 0, max_response_length: int | None = None
) -> dict[str, Any]:
    """Return a ``TrainingInput``: a row for each sequence, aligned at the right.

    ``TrainingInputBatch`` takes it; its ``metadata["uids"]`` is for the caller, from
    `trajpack.packing.rows.layout.row_groups`. The fields ``routed_experts`` and ``sampling_mask``
    need SkyRL, for its ``PackedTensor``.

    Raises:
        ValueError: As in all formats, and if a response is longer than ``max_response_length``, a
            field has a dtype or a shape that SkyRL refuses, or a batch with one of the two fields
            is empty.
    """
    op = "to_training_input"
    layout.check_whole(op, batch)
    prompts, lengths = layout.prompt_lengths_of(batch), batch.cu_seqlens.diff().long()
    begin, responses = batch.cu_seqlens[:-1].long(), lengths - prompts
    (width,) = layout.widths_of({"max_response_length": max_response_length}, (responses,))
    whole = layout.padded(begin, lengths, batch.max_seqlen, batch.max_seqlen - lengths)
    response = layout.padded(begin + prompts, responses, width, width - responses)
    found = {
        "sequences": whole.of(batch.input_ids, pad_token_id),
        "attention_mask": whole.of(layout.ones_of(batch)),
        "response_mask": response.of(layout.ones_of(batch)),
    }
    columns = {
        "loss_mask": batch.loss_mask.float(),
        "rewards": _scores(batch, by_token=True),
        "rollout_logprobs": batch.rollout_logprobs,
    }
    if batch.advantages is not None:
        columns |= {"advantages": batch.advantages, "returns": batch.returns}
    keys = (*found, *columns, *CARRIED.values(), "router_padding_mask")
    layout.check_fields(op, batch, set(batch.fields) - {"sampling_mask"}, keys)
    columns |= {name: values for name, values in batch.fields.items() if name not in CARRIED}
    found |= {key: response.of(packed) for key, packed in columns.items()}
    if not CARRIED.keys() & batch.fields.keys():
        return found
    require("skyrl")
    from skyrl.backends.skyrl_train.utils.packed_tensor import PackedTensor

    if not len(batch):
        raise ValueError(f"{op}: the batch is empty, which no PackedTensor can be")
    if "routed_experts" in batch.fields:
        routes = _routes(batch)
        # the last token, which no engine forwards; a sequence of one token keeps its route
        length = lengths[batch.sequence_ids.long()]
        last = (batch.position_ids + 1 == length) & (length > 1)
        dummy = torch.arange(routes.shape[-1], dtype=routes.dtype, device=batch.device)
        routes = torch.where(last[:, None, None], dummy, routes)
        found["rollout_expert_indices"] = PackedTensor(routes, batch.cu_seqlens)
        found["router_padding_mask"] = whole.of(last, True)
    if "sampling_mask" in batch.fields:
        responds = batch.position_ids >= prompts[batch.sequence_ids.long()]
        support = layout.mask_rows(op, batch)[responds]
        ends = responses.cumsum(0, dtype=torch.int32)
        bounds = torch.nn.functional.pad(ends, (1, 0))
        found["rollout_sample_support"] = PackedTensor(support, bounds)
    return found


def from_generator_output(
    output: Mapping[str, Any],
    *,
    fields: Sequence[str] = (),
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of a ``GeneratorOutput``.

    Entries with the same ``trajectory_ids``, the steps of a step-wise output, are one trajectory;
    without ids each entry is one. Rewards at tokens go to their turns, a single one to the last
    turn of the trajectory. An entry's last turn has its stop reason, and is truncated by another
    than ``"stop"`` and ``"tool_calls"``. Groups are the ``instance_id``. Lost in the format: policy
    versions. ``fields`` may be those of ``CARRIED``.
    """
    op = "from_generator_output"
    reading.check_known_fields(op, fields, CARRIED)
    reading.check_carried(op, output, fields=fields, keys=CARRIED, refused=IMAGES)
    reading.check_keys(op, output, COLUMNS.values())
    count = len(output["response_ids"])
    lists = (*COLUMNS.values(), *(CARRIED[name] for name in fields), "rewards", "trajectory_ids")
    for key in (*lists, "stop_reasons"):
        if output.get(key) is not None and len(output[key]) != count:
            raise ValueError(
                f"{op}: {key} must be {count}, one for each of response_ids, got {len(output[key])}"
            )
    owners: list[tuple[str, str | None]] = []
    for row, label in enumerate(output.get("trajectory_ids") or [None] * count):
        if label is not None and not hasattr(label, "to_string"):
            raise TypeError(f"{op}: trajectory_ids must be of class TrajectoryID, got {label!r}")
        owners.append(
            (str(row), None) if label is None else (label.to_string(), str(label.instance_id))
        )
    trajectories = []
    for owner, own in reading.rows_by(owners).items():
        whose = f"trajectory {owner[0]!r}"
        rows = [
            _entry(output, row, whose, fields=fields, missing_reward=missing_reward) for row in own
        ]
        for entry in rows[:-1]:
            entry["reward"] = 0.0
        trajectories.append(reading.trajectory_of(*owner, rows))
    return trajectories


def _entry(
    output: Mapping[str, Any],
    row: int,
    whose: str,
    *,
    fields: Sequence[str],
    missing_reward: float | None,
) -> dict[str, Any]:
    """Return the arguments of `turns_of` for an entry."""

    def known(reward: Any, expected: str) -> Any:
        op = "from_generator_output"
        return reading.reward_or_missing(op, reward, missing_reward, expected=expected, of=whose)

    entry: dict[str, Any] = {
        key: None if output.get(key) is None else output[key][row]
        for key in (
            *COLUMNS.values(),
            "rewards",
            "stop_reasons",
            *(CARRIED[name] for name in fields),
        )
    }
    reward = known(entry["rewards"], f"rewards[{row}]")
    as_array = host_array(reward)
    by_token = as_array.ndim > 0
    if by_token and as_array.dtype == object:  # None is among them
        reward = [known(score, f"rewards[{row}][{index}]") for index, score in enumerate(reward)]
    word = "tool" if entry["stop_reasons"] == "tool_calls" else entry["stop_reasons"]
    rows: dict[str, Any] = {field: host_array(entry[CARRIED[field]]) for field in fields}
    if "sampling_mask" in rows:
        kept = rows["sampling_mask"] != -1
        ends = np.append(0, kept.sum(1)).cumsum(dtype=np.int32)
        rows["sampling_mask"] = Ragged(ends, rows["sampling_mask"][kept])
    if "routed_experts" in rows:
        length = len(entry["prompt_token_ids"]) + len(entry["response_ids"])
        rows["routed_experts"] = reading.routes_of_all(whose, rows["routed_experts"], length)
    return {name: entry[key] for name, key in COLUMNS.items()} | {
        "token_rewards": reward if by_token else None,
        "reward": 0.0 if by_token else reward,
        "truncated": word not in (None, "stop", "tool"),
        "stop_reason": word if word in STOP_REASONS else None,
        "fields": rows,
    }


def _scores(batch: PackedBatch, *, by_token: bool) -> torch.Tensor:
    """Return the reward of each sequence, or the rewards at tokens.

    A trajectory of several sequences has all of it at the last one, at its end.
    """
    edges = torch.ones(len(batch) + 1, dtype=torch.bool, device=batch.device)
    edges[1:-1] = layout.row_owners(batch).diff() != 0
    whole = torch.where(edges[1:], layout.row_scores(batch), 0.0)
    if not by_token:
        return whole
    is_alone, last = edges[:-1] & edges[1:], batch.cu_seqlens[1:].long() - 1
    rewards = torch.where(is_alone[batch.turn_sequence.long()], batch.turn_rewards, 0.0)
    scores = layout.token_scores(batch, rewards=rewards)
    responds = layout.prompt_lengths_of(batch) < batch.cu_seqlens.diff()
    at_end = torch.where(is_alone, scores[last], torch.where(responds, whole, 0.0))
    return scores.index_copy_(0, last, at_end)


def _stop_reasons(batch: PackedBatch, rows: layout.RowLists) -> list[str]:
    """Return a word for each sequence: ``"stop"``, or why its trajectory was cut off."""
    last = batch.turn_stop_reasons[batch.cu_turns[1:].long() - 1].tolist()
    words = [STOP_REASONS[last[trajectory]] for trajectory in rows.trajectories]
    return [
        "stop" if not cut else word if word in ("abort", "error") else "length"
        for cut, word in zip(rows.truncated, words, strict=True)
    ]


def _routes(batch: PackedBatch) -> torch.Tensor:
    """Return the experts of each token, ``[tokens, layers, k]``."""
    routes = batch.fields["routed_experts"]
    if routes.dtype not in ROUTE_DTYPES or routes.ndim != 3:
        raise ValueError(
            "SkyRL takes routed_experts of uint8, int16 or int32 with two dimensions for a token, "
            f"got {routes.dtype} and shape {list(routes.shape[1:])}"
        )
    return routes
