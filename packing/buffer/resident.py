"""`pack_resident`: packs turns whose tensors are on the device; the host reads no token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trajpack.kernels.dispatch import Impl, check_not_captured, resolve_impl
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import write_batch
from trajpack.packing.buffer.chains import ValidatedTurns, checked_labels, located, take_numbers
from trajpack.packing.buffer.staging import Staging
from trajpack.packing.buffer.stored import Stored
from trajpack.packing.buffer.tables import check_layout, tables_of
from trajpack.packing.conversion import INT32_MAX, check_memory
from trajpack.packing.layout import Layout
from trajpack.packing.types import Trajectory, Turn, several_trajectories


def pack_resident(
    trajectories: Iterable[Trajectory], layout: Layout = "turns", impl: Impl = "auto"
) -> PackedBatch:
    """Pack turns whose tensors are on one device, for instance tensors of a colocated engine.

    The tensors are concatenated on the device. The host does not read the values, so they are not
    checked: ids must fit int32 and not be negative. Prompts are not compared: in layout ``"turns"``
    a whole turn is new, and ``turn_begin`` is the start of its sequence.

    Args:
        trajectories: Their turns' ``prompt_ids``, ``completion_ids`` and
            ``completion_logprobs`` are one-dimensional tensors on one device.
        layout: ``"turns"``, or ``"merged"`` if the caller guarantees that prompts repeat earlier
            turns: a turn then extends the previous one if its prompt is long enough.
        impl: See `trajpack.kernels`.

    Raises:
        TypeError: If a value is of the wrong kind, or an array is no tensor.
        ValueError: If lengths disagree, devices differ, or a turn brings extra fields.
        RuntimeError: If ``impl`` cannot run for the device, or a CUDA graph is captured.

    Example:
        >>> turn = Turn(torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([-0.5]))
        >>> pack_resident([Trajectory("a", [turn])]).input_ids
        tensor([1, 2, 3])
    """
    check_layout(layout)
    given = several_trajectories(trajectories)
    intake = _take_in(given, layout)
    device = intake.ids[0].device if given else torch.get_default_device()
    chosen = resolve_impl("pack_resident", impl, device)
    check_not_captured("pack_resident", device, "its tables leave host memory of this call")
    num_words = intake.num_tokens + intake.num_generated
    if num_words > INT32_MAX:
        raise ValueError(f"a batch holds at most {INT32_MAX} words, this one needs {num_words}")
    stored, staging = Stored.empty(), Staging(device)
    stored.append(intake.new, intake.num_tokens, num_words)
    tables = tables_of(stored.columns(), stored.labels, (), layout)
    with staging.on_device():
        region = staging.send(0, tables.arrays)
        if given:
            logprobs = torch.cat(intake.logprobs).float().view(torch.int32)
            region = region._replace(stream=torch.cat([torch.cat(intake.ids).int(), logprobs]))
        batch = write_batch(region, tables, (), chosen)
    batch |= {"layout": layout, "num_generated": intake.num_generated}
    return PackedBatch(**batch, **stored.labels.as_tuples())


def _take_in(trajectories: Sequence[Trajectory], layout: Layout) -> ValidatedTurns:
    """Check everything except the values; return columns, with tensors in the stream's order."""
    intake = ValidatedTurns()
    new = intake.new
    for trajectory in trajectories:
        index, tips = -1, list[tuple[torch.Tensor, torch.Tensor]]()
        try:
            new.labels.append(*checked_labels(trajectory))
            for index, turn in enumerate(trajectory.turns):  # noqa: B007 - for the error
                prompt, completion, logprobs = _tensors(turn, intake.logprobs)
                if layout == "merged" and tips and len(prompt) >= sum(map(len, tips[-1])):
                    tips[-1] = prompt, completion
                else:
                    tips.append((prompt, completion))
                chain = len(new.chain_sizes) + len(tips) - 1
                take_numbers(intake, turn, chain, (len(prompt), len(completion)))
                intake.logprobs.append(logprobs)
        except (TypeError, ValueError) as error:
            raise located(error, trajectory, index) from error.__cause__
        new.num_turns.append(index + 1)
        for tip in tips:
            new.chain_sizes.append(sum(map(len, tip)))
            intake.ids += tip
    return intake


def _tensors(
    turn: Turn, earlier: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return prompt, completion and log-probabilities of a turn, with checked shapes and dtypes."""
    if not isinstance(turn, Turn):
        raise TypeError(f"expected a Turn, got {type(turn).__name__}")
    if turn.fields:
        raise ValueError(f"fields must be packed by a TrajectoryBuffer, got {sorted(turn.fields)}")
    prompt = _tensor("prompt_ids", turn.prompt_ids, real=False)
    completion = _tensor("completion_ids", turn.completion_ids, real=False)
    logprobs = _tensor("completion_logprobs", turn.completion_logprobs, real=True)
    device = (earlier or [prompt])[0].device
    named = {"prompt_ids": prompt, "completion_ids": completion, "completion_logprobs": logprobs}
    for name, tensor in named.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, others are on {device}")
    if not len(prompt):
        raise ValueError("prompt_ids must not be empty")
    if len(completion) != len(logprobs):
        raise ValueError(
            "completion_logprobs must have one entry per completion token, got "
            f"{len(logprobs)} for {len(completion)} token(s)"
        )
    return prompt, completion, logprobs


def _tensor(name: str, tensor: Any, *, real: bool) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    integers = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not (tensor.is_floating_point() if real else integers):
        raise TypeError(f"{name} must be {'floats' if real else 'integers'}, got {tensor.dtype}")
    if tensor.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {list(tensor.shape)}")
    check_memory(tensor)
    return tensor.detach()
