"""`pack_resident`: packs turns whose tensors are on the device; the host reads no token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, call_op, check_not_captured, resolve_impl
from trajpack.kernels.fields.gather_words import (
    KINDS,
    MAX_WORDS,
    PIECE_WIDTH,
    gather_words,
    piece_table,
)
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import lazy_columns, write_batch
from trajpack.packing.buffer.chains import ValidatedTurns, checked_labels, placed, take_numbers
from trajpack.packing.buffer.staging import DeviceRegion, Staging
from trajpack.packing.buffer.tables import (
    BatchTables,
    Counts,
    StoredTurns,
    check_layout,
    columns_for,
)
from trajpack.packing.conversion import check_memory, shown
from trajpack.packing.layout import Layout
from trajpack.packing.types import Trajectory, Turn, several_trajectories


def pack_resident(
    trajectories: Iterable[Trajectory], layout: Layout = "turns", impl: Impl = "auto"
) -> PackedBatch:
    """Pack turns whose tensors are on one device, for instance tensors of a colocated engine.

    A kernel gathers token ids and log-probabilities through a table of addresses. The host does not
    read the values, so they are not checked: ids must fit int32 and not be negative. Prompts are
    not compared: in layout ``"turns"`` a whole turn is new, and ``turn_begin`` is the start of
    its sequence.

    Args:
        trajectories: Their turns' ``prompt_ids``, ``completion_ids`` and
            ``completion_logprobs`` are one-dimensional, contiguous tensors on one device.
        layout: ``"turns"``, or ``"merged"`` if the caller guarantees that prompts repeat earlier
            turns: a turn then extends the previous one if its prompt is long enough.
        impl: See `trajpack.kernels`.

    Raises:
        TypeError: If a value is of the wrong kind, or an array is no tensor.
        ValueError: If lengths disagree, devices differ, a tensor's memory was freed, or a turn
            brings extra fields.
        RuntimeError: If ``impl`` cannot run for the device, or a CUDA graph is captured.

    Cost: one copy of the tables, three launches, no synchronisation; about 7 microseconds of the
        host a turn. The tensors must be ready on the current stream and exist until the launches
        have run. Torch guarantees the latter for memory of the current stream; call
        ``record_stream`` on tensors of another stream.

    Example:
        >>> turn = Turn(torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([-0.5]))
        >>> pack_resident([Trajectory("a", [turn])]).input_ids
        tensor([1, 2, 3])
    """
    check_layout(layout)
    given = several_trajectories(trajectories)
    intake, pieces = _take_in(given, layout)
    device = pieces[0].device if pieces else torch.get_default_device()
    chosen = resolve_impl("pack_resident", impl, device)
    check_not_captured("pack_resident", device, "it reads the turns' addresses once")
    num_ids = intake.num_tokens
    num_words = num_ids + intake.num_generated
    if num_words > MAX_WORDS:
        raise ValueError(f"a batch holds at most {MAX_WORDS} words, this one needs {num_words}")
    tables = BatchTables()
    on_device = chosen == "triton" or device.type == "meta"
    addresses = piece_table(pieces) if on_device and pieces else np.zeros((0, PIECE_WIDTH))
    staging = Staging(device, columns_for(()))
    table_words = 2 * addresses.size
    staging.reserve(table_words, len(intake.turn_size) + 1, words_used=0)
    staging.region.stream[:table_words].view(np.int64)[:] = addresses.reshape(-1)
    reserve = partial(staging.reserve, 0, words_used=table_words)
    counts = Counts()
    if given:
        counts = tables.append_rows(StoredTurns(intake, 0, num_ids, ()), counts, reserve)
    counts = tables.arrange(layout, counts, Counts(), reserve=reserve)
    with staging.on_device():
        arena = staging.send(table_words)
        words = _words(arena, pieces, num_words, chosen)
        ready, later = write_batch(arena, words, counts, (), chosen)
    ready |= {"layout": layout, "num_generated": intake.num_generated}
    lazy = lazy_columns(arena, intake.labels, tables, counts=counts)
    return PackedBatch.with_lazy_columns(ready, lazy | later)


def _words(
    arena: DeviceRegion, pieces: Sequence[torch.Tensor], num_words: int, impl: str
) -> torch.Tensor:
    """Gather the pieces into one stream, through the table at the start of the region's stream."""
    if not arena.stream.shape[0]:
        return gather_words(pieces, "torch").to(arena.words.device)
    table = arena.stream.view(torch.int64).view(-1, PIECE_WIDTH)
    words: torch.Tensor = call_op("gather_words", table, num_words)
    return words


def _take_in(
    trajectories: Sequence[Trajectory], layout: Layout
) -> tuple[ValidatedTurns, list[torch.Tensor]]:
    """Check everything except the values; return columns, and tensors in the stream's order."""
    intake = ValidatedTurns(())
    ids: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    for trajectory in trajectories:
        index = -1
        try:
            intake.labels.append(checked_labels(trajectory))
            tips: list[tuple[torch.Tensor, torch.Tensor]] = []
            for index, turn in enumerate(trajectory.turns):  # noqa: B007 - for the error
                prompt, completion, values = _tensors(turn, logprobs)
                take_numbers(intake, turn, len(prompt), len(completion))
                if layout == "merged" and tips and len(prompt) >= sum(map(len, tips[-1])):
                    tips[-1] = prompt, completion
                else:
                    tips.append((prompt, completion))
                intake.turn_chain.append(len(intake.chain_sizes) + len(tips) - 1)
                logprobs.append(values)
            if index < 0:
                raise ValueError("must have at least one turn, got none")
        except MemoryError:
            raise
        except (TypeError, ValueError) as error:
            raise placed(error, trajectory, index) from error.__cause__
        except Exception as error:  # raised by a class of the caller
            unread = ValueError(f"it cannot be read: {shown(error)}")
            raise placed(unread, trajectory, index) from error
        intake.num_turns.append(index + 1)
        for tip in tips:
            intake.chain_sizes.append(sum(map(len, tip)))
            ids += tip
    intake.num_tokens, intake.num_generated = sum(intake.chain_sizes), sum(intake.turn_size)
    return intake, ids + logprobs


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
    if type(tensor) is not torch.Tensor:  # a subclass may override attributes
        with torch._C.DisableTorchFunctionSubclass():
            plain: torch.Tensor = tensor.as_subclass(torch.Tensor)
        return _tensor(name, plain, real=real)
    if tensor.dtype.is_floating_point != real or tensor.dtype == torch.bool:
        kind = "floats" if real else "integers"
        raise TypeError(f"{name} must be {kind}, got {tensor.dtype}")
    if tensor.dtype not in KINDS or tensor.is_neg():
        raise TypeError(f"{name} must be of a dtype that has words, got {tensor.dtype}")
    if tensor.ndim != 1 or not tensor.is_contiguous():
        shape = list(tensor.shape)
        raise ValueError(f"{name} must have one dimension and be contiguous, got {shape}")
    try:
        check_memory(tensor)
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    return tensor
