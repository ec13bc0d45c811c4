"""SkyRL 0.4: the ``GeneratorOutput`` of its generators, the ``TrainingInput`` of its trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from trajpack.kernels.rearrange.pad import Number, pad
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import host_array
from trajpack.packing.optional import require
from trajpack.packing.rows import reading
from trajpack.packing.rows.masked_tokens import joined_trajectory
from trajpack.packing.rows.packed import check_not_ragged, check_whole
from trajpack.packing.rows.rows import (
    RowLists,
    check_field_names,
    in_response,
    prompt_lengths_of,
    row_groups,
    row_owners,
    row_scores,
    token_scores,
    widths_of,
)
from trajpack.packing.rows.sampling_mask import mask_rows, without_padding
from trajpack.packing.turn_fields import STOP_REASONS
from trajpack.packing.types import Trajectory

ROUTE_DTYPES = (torch.uint8, torch.int16, torch.int32)
"""Dtypes of expert numbers that SkyRL takes."""
CARRIED = {"routed_experts": "rollout_expert_indices", "sampling_mask": "rollout_sample_support"}
"""SkyRL's names of extra fields."""
NEEDED = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
"""Keys that every ``GeneratorOutput`` has."""
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

    Keys, dtypes and shapes are those of ``docs/formats/skyrl.md``.

    A batch has no times and no images: their keys are ``None``. Routes are of all tokens but the
    last, which no engine forwards: declare ``routed_experts`` with ``generated_only=False``.

    If trajectories have several sequences each (layout ``"turns"``, or rewritten histories), set
    SkyRL's ``generator.step_wise_trajectories``. It then counts the rewards of the last one alone,
    at whose end is the trajectory's whole reward. SkyRL wants the trajectories of a group next to
    each other.

    Raises:
        ValueError: As in all formats, and if a field has a dtype or a shape that SkyRL does not
            take.
    """
    if rewards not in ("tokens", "rows"):
        raise ValueError(
            f"to_generator_output: rewards must be 'tokens' or 'rows', got {rewards!r}"
        )
    rows = RowLists(batch)
    by_token = rewards == "tokens"
    scores = _scores(batch, by_token=by_token)
    numbers: list[int] = []  # of each trajectory in its group
    seen: Counter[int] = Counter()
    for group in batch.group_ids.tolist():
        numbers.append(seen[group])
        seen[group] += 1
    labels = [
        TrajectoryID(name, numbers[trajectory])
        for name, trajectory in zip(row_groups(batch), rows.trajectories, strict=True)
    ]
    found = {
        "prompt_token_ids": rows.prompts(batch.input_ids),
        "response_ids": rows.responses(batch.input_ids),
        "rewards": rows.responses(scores) if by_token else scores.tolist(),
        "loss_masks": rows.responses(batch.loss_mask.int()),
        "stop_reasons": _stop_reasons(batch, rows),
        "rollout_logprobs": rows.responses(batch.rollout_logprobs),
        "trajectory_ids": labels,
        "is_last_step": [one != other for one, other in pairwise([*rows.trajectories, None])],
        **dict.fromkeys((*CARRIED.values(), *TIMES, *IMAGES)),
    }
    check_not_ragged("to_generator_output", batch, ["routed_experts"])
    if "routed_experts" in batch.fields:
        routes = _routes(batch).cpu().numpy()
        found["rollout_expert_indices"] = [
            routes[begin : max(end - 1, begin + 1)] for begin, _, end in rows.spans
        ]
    if "sampling_mask" in batch.fields:
        support = mask_rows("to_generator_output", batch).cpu().numpy()
        found["rollout_sample_support"] = [support[split:end] for _, split, end in rows.spans]
    return found


def to_training_input(
    batch: PackedBatch, *, pad_token_id: int = 0, max_response_length: int | None = None
) -> dict[str, Any]:
    """Return a ``TrainingInput``: a row for each sequence, aligned at the right.

    ``S`` is the longest sequence, left-padded; responses are the last ``R`` columns, those of the
    longest or ``max_response_length``. Nothing is shifted: column ``j`` of ``R`` belongs to its
    token.

    Keys, dtypes and shapes are those of ``docs/formats/skyrl.md``.

    ``TrainingInputBatch`` takes it; its ``metadata["uids"]`` is for the caller, from
    `trajpack.packing.rows.rows.row_groups`. The fields ``routed_experts`` and ``sampling_mask``
    need SkyRL, for its ``PackedTensor``. The last token of a sequence has no route: it gets experts
    0, 1, 2, ..., as in SkyRL.

    Raises:
        ValueError: As in all formats, and if a response is longer than ``max_response_length``, a
            field has a dtype or a shape that SkyRL does not take, or a batch with one of the two
            fields is empty.
    """
    op = "to_training_input"
    check_whole(op, batch)
    prompts = prompt_lengths_of(batch)
    lengths = batch.cu_seqlens.diff().long()
    _, width = widths_of(prompts, lengths - prompts, batch.max_seqlen, max_response_length)
    is_response = in_response(batch, prompts)

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
        "rewards": response(_scores(batch, by_token=True)),
        "rollout_logprobs": response(batch.rollout_logprobs),
    }
    if batch.advantages is not None:
        found |= {"advantages": response(batch.advantages), "returns": response(batch.returns)}
    check_field_names(op, batch, (*found, *CARRIED.values(), "router_padding_mask"))
    check_not_ragged(op, batch, set(batch.fields) - {"sampling_mask"})
    for name, values in batch.fields.items():
        if name not in CARRIED:
            kept = is_response.reshape(-1, *[1] * (values.ndim - 1))
            found[name] = response(torch.where(kept, values, 0))
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
        found["router_padding_mask"] = whole(last, True)
    if "sampling_mask" in batch.fields:
        ends = (lengths - prompts).cumsum(0, dtype=torch.int32)
        support = mask_rows(op, batch)[is_response]
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
    without ids each entry is one. Rewards at tokens go to their turns, a single one to the entry's
    last turn, if the entry is the last of its trajectory. An entry's last turn has its stop reason,
    and is truncated by another than ``"stop"`` and ``"tool_calls"``. Groups are the
    ``instance_id``. Lost in the format: policy versions.

    ``fields`` may be ``"routed_experts"`` (rows of prompt and completion, 0, 1, 2, ... where no
    route was captured; declare the `TokenField` with ``generated_only=False``) and
    ``"sampling_mask"`` (rows of the completion, ragged).
    """
    op = "from_generator_output"
    reading.check_known_fields(op, fields, CARRIED)
    reading.check_carried(op, output, fields=fields, keys=CARRIED, refused=IMAGES)
    reading.check_keys(op, output, NEEDED)
    count = len(output["response_ids"])
    lists = (*NEEDED, *(CARRIED[name] for name in fields), "rewards", "trajectory_ids")
    for key in (*lists, "stop_reasons"):
        if output.get(key) is not None and len(output[key]) != count:
            raise ValueError(
                f"{op}: {key} must be {count}, one for each of response_ids, got {len(output[key])}"
            )
    entries: dict[tuple[str, str | None], list[int]] = {}
    for row, label in enumerate(output.get("trajectory_ids") or [None] * count):
        if label is not None and not hasattr(label, "to_string"):
            raise TypeError(f"{op}: trajectory_ids must be of class TrajectoryID, got {label!r}")
        owner = (str(row), None) if label is None else (label.to_string(), str(label.instance_id))
        entries.setdefault(owner, []).append(row)
    trajectories = []
    for (name, group), own in entries.items():
        options: dict[str, Any] = {"fields": fields, "missing_reward": missing_reward}
        rows = [_entry(output, row, name, **options) for row in own]
        for row_of in rows[:-1]:
            row_of["reward"] = 0.0
        trajectories.append(joined_trajectory(name, group, rows))
    return trajectories


def _entry(
    output: Mapping[str, Any],
    row: int,
    name: str,
    *,
    fields: Sequence[str],
    missing_reward: float | None,
) -> dict[str, Any]:
    """Return the arguments of `masked_trajectory` for an entry."""

    def given(reward: Any, expected: str) -> Any:
        of = f"trajectory {name!r}"
        op = "from_generator_output"
        return reading.reward_or_missing(op, reward, missing_reward, expected=expected, of=of)

    rewards, reasons = output.get("rewards"), output.get("stop_reasons")
    reward = given(None if rewards is None else rewards[row], f"rewards[{row}]")
    as_array = host_array(reward)
    by_token = as_array.ndim > 0
    if by_token and as_array.dtype == object:  # None is among them
        reward = [given(one, f"rewards[{row}][{index}]") for index, one in enumerate(reward)]
    word = None if reasons is None else reasons[row]
    word = "tool" if word == "tool_calls" else word
    prompt, response = output["prompt_token_ids"][row], output["response_ids"][row]
    rows: dict[str, Any] = {field: host_array(output[CARRIED[field]][row]) for field in fields}
    if "sampling_mask" in rows:
        rows["sampling_mask"] = without_padding(rows["sampling_mask"])
    if "routed_experts" in rows:
        rows["routed_experts"] = reading.routes_of_all(
            f"trajectory {name!r}", rows["routed_experts"], len(prompt) + len(response)
        )
    return {
        "prompt_ids": prompt,
        "input_ids": response,
        "mask": output["loss_masks"][row],
        "logprobs": output["rollout_logprobs"][row],
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
    edges[1:-1] = row_owners(batch).diff() != 0
    whole = torch.where(edges[1:], row_scores(batch), 0.0)
    if not by_token:
        return whole
    at_end = whole.new_zeros(batch.num_tokens).index_copy_(
        0, batch.cu_seqlens[1:].long() - 1, whole
    )
    at_end = torch.where(in_response(batch, prompt_lengths_of(batch)), at_end, 0.0)
    is_alone = (edges[:-1] & edges[1:])[batch.sequence_ids.long()]
    return torch.where(is_alone, token_scores(batch), at_end)


def _stop_reasons(batch: PackedBatch, rows: RowLists) -> list[str]:
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
