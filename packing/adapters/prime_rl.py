"""prime-rl: its micro-batches, as tensors and as they travel, and its training samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import host_array
from trajpack.packing.rows.arrays import reward_or_missing
from trajpack.packing.rows.masked_tokens import MaskedTokens
from trajpack.packing.rows.packed import (
    Packed,
    advantages_of,
    check_unpadded,
    check_whole,
    holds_token,
    lengths_in_memory,
    num_kept_of,
    places_of,
)
from trajpack.packing.rows.sampling_mask import (
    RaggedMask,
    as_integers,
    mask_rows,
    padded,
    ragged,
    widest,
)
from trajpack.packing.types import Trajectory

STREAMS = ("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
"""Float streams that a batch may have, as extra fields of these names."""

LEFT_OUT = ("mm_kwargs", "mm_refs", "trace_ids", "branch_indices")
"""What a micro-batch has of images and of prime-rl's traces, and a batch has not."""
IMAGES = ("mm_kwargs", "mm_refs", "payload")
"""What a sample has, of images for the most part, that no trajectory can have."""


def to_tensor_micro_batch(
    batch: Packed,
    *,
    temperature: float = 1.0,
    env_names: str | Sequence[str] = "",
    num_loras: int = 1,
) -> dict[str, Any]:
    """Return the entries of a ``TensorMicroBatch``: what the trainer makes of what it received.

    ============================ ======= ====================== ================================
    key                          dtype   shape                  content; at padding
    ============================ ======= ====================== ================================
    input_ids                    int64   [1, T]                 tokens; as in the batch
    position_ids                 int64   [1, T]                 from 0 in every sequence
    advantages                   float32 [1, T]                 at the token; 0
    inference_logprobs           float32 [1, T]                 at the token; 0
    temperatures                 float32 [1, T]                 sampled at, or ``temperature``; 1
    loss_mask                    bool    [1, T]                 generated tokens; False
    seq_lens                     int64   [segments]             the last has the padding, too
    sequence_lengths             list    segments               the same, on the host
    env_names                    list    T                      name of the token's ``env``; ""
    lora_num_tokens              int32   [num_loras]            all tokens are the first's
    routed_experts               int32   [1, T, layers, top k]  field of that name, or ``None``
    ref_logprobs, rl_weights,    float32 [1, T]                 fields of these names, or
    ce_weights, ref_kl_weights                                  ``None``; 0
    mm_token_type_ids            int64   [1, T]                 field of that name, or ``None``
    sampling_mask                int32   [1, T, K]              field of that name, or ``None``; -1
    mm_kwargs, mm_refs                                          ``None``: images
    trace_ids, branch_indices                                   ``None``: places in its traces
    ============================ ======= ====================== ================================

    Everything stands at its own token; the trainer shifts logits. It pads with token 1, which
    a micro-batch does where it is told to.

    Not carried: versions, returns, images.

    Args:
        batch: A batch or a micro-batch.
        temperature: Where the batch has no field ``temperatures``, and where nothing was sampled.
        env_names: Of each sequence, or one for all.
        num_loras: Adapters that the trainer runs.

    Raises:
        ValueError: If the batch has no advantages or is that of a `StaticBatch`, there are not
            as many names as sequences, or a sampling mask has another shape.

    Cost: views and some launches over the tokens; `env_names` is a list of the host. No
    synchronisation.
    """
    check_unpadded(batch)
    experts = batch.fields.get("routed_experts")
    temperatures = torch.where(holds_token(batch), _temperatures(batch, temperature), 1.0)
    lengths = _segments(batch)
    lora_num_tokens = torch.zeros(num_loras, dtype=torch.int32, device=batch.device)
    lora_num_tokens[:1] = batch.num_tokens
    return {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "advantages": advantages_of("to_tensor_micro_batch", batch)[None],
        "inference_logprobs": batch.rollout_logprobs[None],
        "loss_mask": batch.loss_mask[None],
        "temperatures": temperatures[None],
        "env_names": _env_names(batch, env_names),
        "sequence_lengths": lengths,
        "seq_lens": _segment_lengths(batch, len(lengths)),
        "lora_num_tokens": lora_num_tokens,
        "routed_experts": None if experts is None else experts.int()[None],
        **dict.fromkeys(LEFT_OUT),
        "sampling_mask": mask_rows("to_tensor_micro_batch", batch)[None]
        if "sampling_mask" in batch.fields
        else None,
        "mm_token_type_ids": _stream(batch, "mm_token_type_ids", torch.int64),
        **{name: _stream(batch, name, torch.float32) for name in STREAMS},
    }


def to_micro_batch(
    batch: Packed, *, temperature: float = 1.0, env_names: str | Sequence[str] = ""
) -> dict[str, Any]:
    """Return the fields of a ``MicroBatch``: the same as it travels, a list for each.

    ``routed_experts`` is a dictionary of bytes, shape and dtype's name; all others are what
    `to_tensor_micro_batch` says, as lists. Adapters' tokens are counted where it arrives. Where the
    batch has the field, ``sampling_mask`` is a dictionary: bytes of all tokens as ``ids``, of how
    many each place has as ``counts``, both int32.

    Raises:
        ValueError: As `to_tensor_micro_batch`.

    Cost: copies every field to the host (synchronises) and makes lists of it.
    """
    tensors = to_tensor_micro_batch(batch, temperature=temperature, env_names=env_names)
    for name in ("lora_num_tokens", "routed_experts", *LEFT_OUT):
        del tensors[name]
    mask = tensors.pop("sampling_mask")
    if mask is not None:
        tensors["sampling_mask"] = _mask_bytes(mask[0])
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = (value if name == "seq_lens" else value[0]).tolist()
    return tensors | {"routed_experts": _bytes(batch.fields.get("routed_experts"))}


def to_training_samples(
    batch: PackedBatch, *, temperature: float = 1.0, env_names: str | Sequence[str] = ""
) -> list[dict[str, Any]]:
    """Return the fields of a ``TrainingSample`` for each sequence, for prime-rl's own packer.

    =================================== =========== ==============================================
    key                                 type        content
    =================================== =========== ==============================================
    token_ids                           list[int]   tokens of the sequence
    mask                                list[bool]  True on generated tokens
    logprobs                            list[float] log-probabilities, 0.0 where not generated
    temperatures                        list[float] sampled at, or ``temperature``
    advantages                          list[float] 0.0 where not generated; ``None`` without
    env_name                            str
    routed_experts, ref_logprobs,                   fields of these names, else ``None``
    rl_weights, ce_weights,
    ref_kl_weights, mm_token_type_ids
    sampling_mask                       dict        only with the field: as in `to_micro_batch`
    =================================== =========== ==============================================

    Raises:
        TypeError, ValueError: If it is no batch, is padded, or has not as many sequences as names.

    Cost: copies every field to the host (synchronises) and makes lists of it.
    """
    check_whole("to_training_samples", batch)
    names, fields = _names("to_training_samples", batch, env_names), batch.fields
    columns = {
        "token_ids": batch.input_ids,
        "mask": batch.loss_mask,
        "logprobs": batch.rollout_logprobs,
        "temperatures": _temperatures(batch, temperature),
        "advantages": batch.advantages,
        **{name: fields.get(name) for name in ("mm_token_type_ids", "routed_experts", *STREAMS)},
    }
    missing = (None,) * len(batch)
    pieces: dict[str, tuple[Any, ...]] = {
        name: missing if column is None else column.cpu().split(batch.seqlens)
        for name, column in columns.items()
    }
    experts = pieces.pop("routed_experts")
    samples = [
        {name: None if of[s] is None else of[s].tolist() for name, of in pieces.items()}
        | {"env_name": names[s], "routed_experts": _bytes(experts[s])}
        for s in range(len(batch))
    ]
    if "sampling_mask" in fields:
        masks = mask_rows("to_training_samples", batch).cpu().split(batch.seqlens)
        for sample, mask in zip(samples, masks, strict=True):
            sample["sampling_mask"] = _mask_bytes(mask)
    return samples


def from_training_samples(
    samples: Sequence[Any],
    *,
    ids: Sequence[str] | None = None,
    groups: Sequence[str | None] | None = None,
    rewards: Sequence[float | None] | None = None,
    versions: Sequence[int] | None = None,
    fields: Sequence[str] = (),
    sampling_mask_width: int | None = None,
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return a trajectory for each ``TrainingSample``, or whatever has its fields.

    Each run of trainable tokens is a turn; its prompt is all that stands before it. What
    came back, packed in layout ``"merged"``, has the tokens, the mask and the log-probabilities of
    the samples, sequence by sequence.

    A sample does not say: name, group, rewards, versions, whether it was cut off, where a turn ends
    and another begins without a token between. Advantages are not taken over.

    Args:
        samples: Objects or mappings with ``token_ids``, ``mask``, ``logprobs``.
        ids: Names of the trajectories; their numbers if ``None``.
        groups: Their groups.
        rewards: Their rewards, which the last turn gets.
        versions: Policy versions that sampled them; 0 if ``None``.
        fields: What turns take over as `Turn.fields`, for a `TokenField` of that name: per-token
            lists such as ``"temperatures"``, and ``"sampling_mask"``, of the tokens they generated;
            ``"routed_experts"`` of prompt and completion, whose field is declared with
            ``generated_only=False``. Streams and routes are left out where they are not named.
        sampling_mask_width: Tokens that a row of ``"sampling_mask"`` holds; as many as the longest
            of these samples has if ``None``.
        missing_reward: The reward of all samples where ``rewards`` is ``None``, and of each whose
            own is ``None``; samples without rewards are refused if this is ``None`` too.

    Raises:
        TypeError: If lists hold no numbers.
        ValueError: If a reward is missing or not finite, lists are not of one length, labels are
            not as many as samples, or the first token of a sample is trainable; if something is
            missing, a sample has images or a payload, or a sampling mask that ``fields`` does not
            name.

    Cost: host work over the tokens.

    Example:
        >>> sample = {"token_ids": [1, 2, 3], "mask": [False, True, True], "logprobs": [0, -1, -2]}
        >>> (trajectory,) = from_training_samples([sample], rewards=[1.0])
        >>> trajectory.turns[0].completion_ids.tolist(), trajectory.turns[0].reward
        ([2, 3], 1.0)
    """
    labels = {"ids": ids, "groups": groups, "rewards": rewards, "versions": versions}
    for name, given in labels.items():
        if given is not None and len(given) != len(samples):
            raise ValueError(
                f"from_training_samples: {name} must be of {len(samples)} samples, got {len(given)}"
            )
    names = [str(index) for index in range(len(samples))] if ids is None else ids
    for sample, name in zip(samples, names, strict=True):
        _check_carried(sample, name, fields)
    masks = [_mask(sample) for sample in samples] if "sampling_mask" in fields else []
    width = widest(masks, sampling_mask_width)
    trajectories = []
    for index, (sample, name) in enumerate(zip(samples, names, strict=True)):
        version = 0 if versions is None else versions[index]
        rows = {field: _rows(sample, field) for field in fields if field != "sampling_mask"}
        if masks:
            rows["sampling_mask"] = padded(f"trajectory {name!r}", masks[index], width)
        expected, of = f"rewards[{index}]", f"trajectory {name!r}"
        if rewards is None:
            expected, of = "the argument rewards, since a sample has none", ""
        reward = reward_or_missing(
            "from_training_samples", None if rewards is None else rewards[index], missing_reward,
            expected=expected, of=of,
        )  # fmt: skip
        masked = MaskedTokens(
            _field_of(sample, "token_ids"),
            _field_of(sample, "mask"),
            _field_of(sample, "logprobs"),
            version_range=(version, version),
            reward=reward,
            fields=rows,
        )
        group = None if groups is None else groups[index]
        trajectories.append(masked.trajectory(name, group=group))
    return trajectories


def _check_carried(sample: Any, name: str, fields: Sequence[str]) -> None:
    """Raise where a sample has what its loss needs, and trajectories are not to have."""
    for key in IMAGES:
        if _field_of(sample, key):
            raise ValueError(f"trajectory {name!r}: {key} is there, which is not carried")
    for key in ("token_ids", "mask", "logprobs", *fields):
        if _field_of(sample, key) is None:
            raise ValueError(f"trajectory {name!r}: {key} is missing")
    mask = _field_of(sample, "sampling_mask")
    if mask is not None and "sampling_mask" not in fields:
        raise ValueError(
            f"trajectory {name!r}: a sampling_mask is there: name it in fields, or take it out"
        )
    if mask is not None and _field_of(mask, "logprobs") is not None:
        raise ValueError(f"trajectory {name!r}: logprobs of a sampling_mask are not carried")


def _mask(sample: Any) -> RaggedMask:
    mask = _field_of(sample, "sampling_mask")
    return RaggedMask(*(as_integers(_field_of(mask, key)) for key in ("ids", "counts")))


def _rows(sample: Any, field: str) -> Any:
    """Return a field as rows, one for each token."""
    values = _field_of(sample, field)
    if field != "routed_experts":
        return host_array(values)
    data, dtype, shape = (_field_of(values, key) for key in ("data", "dtype", "shape"))
    return np.frombuffer(data, dtype).reshape(shape)


def _field_of(sample: Any, name: str) -> Any:
    """Return what an object or a mapping has, ``None`` where it has nothing."""
    return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)


def _temperatures(batch: Packed, temperature: float) -> torch.Tensor:
    """Return what tokens were sampled at; elsewhere not the field's fill, as logits are divided."""
    field = batch.fields.get("temperatures")
    given = torch.full((batch.num_tokens,), temperature, device=batch.device)
    return given if field is None else torch.where(batch.turn_ids >= 0, field.float(), given)


def _stream(batch: Packed, name: str, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a field, 0 at padding: a weight there would train it."""
    field = batch.fields.get(name)
    return None if field is None else torch.where(holds_token(batch), field, 0).to(dtype)[None]


def _segments(batch: Packed) -> list[int]:
    """Return what each sequence takes, and the last one all that is left."""
    lengths = list(lengths_in_memory(batch)[: max(len(num_kept_of(batch)), 1)])
    if lengths:
        lengths[-1] += batch.num_tokens - sum(lengths)
    return lengths


def _segment_lengths(batch: Packed, count: int) -> torch.Tensor:
    ends = places_of(batch)[: count + 1].long()
    ends[count:] = batch.num_tokens
    return ends.diff()


def _names(op: str, batch: Packed, env_names: str | Sequence[str]) -> list[str]:
    count = len(num_kept_of(batch))
    names = [env_names] * count if isinstance(env_names, str) else list(env_names)
    if len(names) != count:
        raise ValueError(f"{op}: env_names must be of {count} sequences, got {len(names)}")
    return names


def _env_names(batch: Packed, env_names: str | Sequence[str]) -> list[str]:
    """Return the name at each token, none at padding."""
    names = _names("to_tensor_micro_batch", batch, env_names)
    starts = accumulate(lengths_in_memory(batch), initial=0)
    at = [""] * batch.num_tokens
    for name, start, length in zip(names, starts, num_kept_of(batch), strict=False):
        at[start : start + length] = [name] * length
    return at


def _bytes(experts: torch.Tensor | None) -> dict[str, Any] | None:
    if experts is None:
        return None
    rows = experts.detach().cpu().contiguous()
    dtype = str(rows.dtype).removeprefix("torch.")
    return {"data": rows.numpy().tobytes(), "shape": list(rows.shape), "dtype": dtype}


def _mask_bytes(mask: torch.Tensor) -> dict[str, bytes]:
    ids, counts = ragged(mask)
    return {"ids": ids.tobytes(), "counts": counts.tobytes()}
