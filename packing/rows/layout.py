"""Writing rows: a batch as padded rectangles, as lists and as pieces, and the scores of its rows.

The prompt of a row is everything before the first generated token of the sequence; the response is
the rest, observations included. Where nothing was generated, all tokens are prompt. ``op`` is the
operation that errors name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from trajpack.kernels.fields.stretches import located, moved, taken
from trajpack.kernels.rearrange.pad import BITS, Number
from trajpack.kernels.scan.segment_sum import segment_sum
from trajpack.kernels.validation import HOSTS
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import as_integer
from trajpack.packing.micro_batches.micro_batch import MicroBatch
from trajpack.packing.ragged import Ragged, ragged_rows

Packed: TypeAlias = PackedBatch | MicroBatch
Score: TypeAlias = Literal["rewards", "returns"]
Place: TypeAlias = Literal["turns", "last"]


class Memory(NamedTuple):
    """Where sequences lie: boundaries int32 ``[n + 1]``, and lengths with and without padding.

    ``kept`` has no padding sequence behind the others.
    """

    places: torch.Tensor
    lengths: tuple[int, ...]
    kept: tuple[int, ...]


def memory_of(batch: Packed) -> Memory:
    """Return where sequences lie; every format reads them here. A tree is a `TypeError`."""
    if not isinstance(batch, Packed):
        raise TypeError(
            "the format takes a PackedBatch or a MicroBatch of sequences, got "
            f"{type(batch).__name__}; formats of trees are in docs/tree.md"
        )
    if isinstance(batch, PackedBatch):
        return Memory(batch.cu_seqlens, batch.seqlens, batch.seqlens)
    return Memory(batch.cu_seqlens_padded, batch.padded_seqlens, batch.num_kept)


def check_whole(op: str, batch: PackedBatch) -> None:
    """Raise a `TypeError` for a micro-batch or a tree."""
    memory_of(batch)
    if not isinstance(batch, PackedBatch):
        raise TypeError(f"{op}: batch must be a PackedBatch, got {type(batch).__name__}")


def check_fields(
    op: str, batch: Packed, names: Iterable[str] | None = None, keys: Iterable[str] = ()
) -> None:
    """Raise a `ValueError` if a field is named as a key, or one of ``names`` (all) is ragged."""
    repeated = sorted(set(keys) & set(batch.fields))
    if repeated:
        raise ValueError(f"{op}: extra fields must not be named as other keys, got {repeated}")
    ragged = sorted(set(batch.fields if names is None else names) & set(batch.ragged_values))
    if ragged:
        raise ValueError(f"{op}: extra fields must have a row for each token, {ragged} are ragged")


def advantages_of(op: str, batch: Any) -> torch.Tensor:
    """Return the advantages, of a tree too; raise a `ValueError` if there are none."""
    advantages: torch.Tensor | None = batch.advantages
    if advantages is None:
        raise ValueError(f"{op}: the batch has no advantages, call with_advantages first")
    return advantages


def holds_token(batch: Packed) -> torch.Tensor:
    """Return where there is a token and no padding, bool ``[tokens]``; a tree is a `TypeError`."""
    memory_of(batch)
    return batch.prompt_mask | (batch.turn_ids >= 0)


def at_trained(batch: Packed, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with 0 where `loss_mask` is False; a caller's mask may drop tokens."""
    return torch.where(batch.loss_mask, tensor, 0.0)


def pieces_of(
    batch: PackedBatch, columns: Mapping[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """Copy tensors over the tokens to the host, and return those of each sequence."""
    pieces = (column.cpu().split(batch.seqlens) for column in columns.values())
    return [dict(zip(columns, of, strict=True)) for of in zip(*pieces, strict=True)]


@dataclass(frozen=True, eq=False)
class Rows:
    """Stretches of a batch's tokens, laid out with padding; tensors are int64 ``[stretches]``."""

    first: torch.Tensor
    """Place of each stretch, rows one after the other; they grow."""
    begin: torch.Tensor
    """First token of each stretch, an index of the batch's tokens."""
    size: torch.Tensor
    """Tokens of each stretch."""
    shape: tuple[int, ...]
    """Rows and columns, or the columns of a single row."""

    def of(self, packed: torch.Tensor, value: Number = 0) -> torch.Tensor:
        """Lay ``packed`` ``[tokens, *rest]`` out as ``[*shape, *rest]``, ``value`` as padding.

        Differentiable.
        """
        fill = packed.new_full((), value)
        if packed.device.type not in HOSTS or packed.requires_grad:
            rows = taken(packed, *self._index, fill)
        else:
            bits, num_places = BITS[packed.element_size()], math.prod(self.shape)
            stretches = self.first, self.begin, self.size, num_places
            rows = moved(packed.view(bits), *stretches, fill.view(bits)).view(packed.dtype)
        return rows.view(*self.shape, *packed.shape[1:])

    @cached_property
    def _index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of the token at each place, and whether there is one."""
        _, _, index, holds = located(math.prod(self.shape), self.first, self.begin, self.size)
        return index, holds


def padded(begin: torch.Tensor, size: torch.Tensor, width: int, before: Any = 0) -> Rows:
    """Return a row for each stretch, with ``before`` columns of padding before it."""
    first = torch.arange(len(size), device=size.device) * width + before
    return Rows(first, begin, size, (len(size), width))


def right_padded(batch: PackedBatch, width: int | None = None, *, skip: int = 0) -> Rows:
    """Return sequences without their first ``skip`` tokens, padded to ``width`` or the longest."""
    size = (batch.cu_seqlens.diff().long() - skip).clamp(min=0)
    width = batch.max_seqlen if width is None else width
    return padded(batch.cu_seqlens[:-1].long() + skip, size, width)


def split_rows(
    batch: PackedBatch,
    *,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> tuple[Rows, Rows, Rows]:
    """Return rows of whole sequences, of prompts padded on the left, of responses on the right.

    Widths are those of the longest if ``None``.

    Raises:
        TypeError: If a width is not an integer.
        ValueError: If a prompt or a response is longer than its width. With both widths given and
            the batch on a GPU this is a device-side assertion; nothing is ever cut.
    """
    check_whole("rows_of", batch)
    prompts, begin = prompt_lengths_of(batch), batch.cu_seqlens[:-1].long()
    lengths = batch.cu_seqlens.diff().long()
    given = {"max_prompt_length": max_prompt_length, "max_response_length": max_response_length}
    width, other = widths_of(given, (prompts, lengths - prompts))
    return (
        padded(begin, lengths, width + other, width - prompts),
        padded(begin, prompts, width, width - prompts),
        padded(begin + prompts, lengths - prompts, other),
    )


def widths_of(given: Mapping[str, int | None], sizes: tuple[torch.Tensor, ...]) -> list[int]:
    """Return the widths of rows with these sizes, named as options; raises as `split_rows`."""
    for name, width in given.items():
        if width is not None:
            as_integer(f"rows_of: {name}", width)
    if not len(sizes[0]):
        return [width or 0 for width in given.values()]
    longest = torch.stack([size.max() for size in sizes])
    known = [width for width in given.values() if width is not None]
    if len(known) == len(given) and longest.device.type not in HOSTS:
        for most, width in zip(longest, known, strict=True):  # beyond the end: an assertion there
            most.new_zeros(1).index_select(0, (most > width).long()[None])
        return known
    widths = longest.tolist()
    for index, (name, width) in enumerate(given.items()):
        if width is not None and widths[index] > width:
            raise ValueError(
                f"rows_of: sequence {int(sizes[index].argmax())} has {widths[index]} tokens, but "
                f"{name} is {width}"
            )
        widths[index] = widths[index] if width is None else width
    return widths


def ones_of(batch: PackedBatch, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return 1 for each token, without memory: rows of it are their mask."""
    return torch.ones((), dtype=dtype, device=batch.device).expand(batch.num_tokens)


def prompt_lengths_of(batch: PackedBatch) -> torch.Tensor:
    """Return the number of prompt tokens of each row, int64 ``[rows]``."""
    begin, end = batch.turn_spans.long().unbind(1)
    generated = torch.where(end > begin, begin, batch.num_tokens)
    firsts = batch.cu_seqlens[1:].long()
    firsts = firsts.scatter_reduce(0, batch.turn_sequence.long(), generated, "amin")
    return firsts - batch.cu_seqlens[:-1].long()


def row_owners(batch: PackedBatch) -> torch.Tensor:
    """Return the index in ``batch.ids`` of each row's trajectory, int64 ``[sequences]``."""
    of_turns = torch.repeat_interleave(batch.cu_turns.diff().long(), output_size=batch.num_turns)
    return of_turns.new_zeros(len(batch)).scatter(0, batch.turn_sequence.long(), of_turns)


def row_trajectories(batch: PackedBatch) -> list[int]:
    """Return `row_owners` on the host, which knows them where each trajectory is one row."""
    return list(range(len(batch))) if len(batch) == len(batch.ids) else row_owners(batch).tolist()


def row_turns(batch: PackedBatch) -> list[list[int]]:
    """Return the indices of each row's turns, oldest first; reads a table from the device."""
    turns: list[list[int]] = [[] for _ in range(len(batch))]
    for turn, sequence in enumerate(batch.turn_sequence.tolist()):
        turns[sequence].append(turn)
    return turns


def row_groups(batch: PackedBatch) -> list[str]:
    """Return the name of each row's group, or the id of its trajectory if it has no group.

    Where such an id is also the name of a group or another id, ``#`` and the trajectory's index
    follow it, so that no trainer compares the two.
    """
    labels = list(zip(batch.ids, batch.groups, strict=True))
    count = Counter(name if group is None else group for name, group in labels)
    names = [
        group if group is not None else name if count[name] == 1 else f"{name}#{index}"
        for index, (name, group) in enumerate(labels)
    ]
    return [names[trajectory] for trajectory in row_trajectories(batch)]


def row_scores(batch: PackedBatch, of: Score = "rewards") -> torch.Tensor:
    """Return one number for each sequence, float32 ``[sequences]``.

    ``"rewards"``: the sum of the rewards of its trajectory, not discounted, which all sequences of
    a trajectory share; ``"returns"``: the discounted return of the sequence's first turn.
    """
    if of == "rewards":
        return segment_sum(batch.turn_rewards, batch.cu_turns).float()[row_owners(batch)]
    if of != "returns":
        raise ValueError(f"row_scores: of must be 'rewards' or 'returns', got {of!r}")
    turn = torch.arange(batch.num_turns, device=batch.device)
    first = turn.new_full((len(batch),), batch.num_turns)
    first = first.scatter_reduce(0, batch.turn_sequence.long(), turn, "amin")
    return batch.turn_returns[first]


def token_scores(
    batch: PackedBatch,
    *,
    op: str = "",
    place: Place = "turns",
    rewards: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rewards at tokens, float32 ``[tokens]``, 0 elsewhere; ``rewards`` are others of turns.

    With ``"turns"`` each turn's reward is at its last generated token. The reward of a turn without
    generated tokens is at the generated token before it in the sequence, or else at the first one;
    a sequence without generated tokens loses its rewards. With ``"last"`` the `row_scores` are at
    the last tokens of the sequences, generated or not. No value is read from the device.
    """
    if place not in ("turns", "last"):
        raise ValueError(f"{op}: scores must be 'turns' or 'last', got {place!r}")
    if place == "last":
        scores = batch.turn_rewards.new_zeros(batch.num_tokens, dtype=torch.float32)
        return scores.index_copy(0, batch.cu_seqlens[1:].long() - 1, row_scores(batch))
    if not batch.num_tokens:
        return batch.turn_rewards.float()
    end, sequence = batch.cu_seqlens[1:].long(), batch.turn_sequence.long()
    first = (batch.cu_seqlens[:-1].long() + prompt_lengths_of(batch))[sequence]
    begins, ends = batch.turn_spans.long().unbind(1)
    order = ends.argsort(stable=True)  # chains may interleave: the order of their tokens
    generated = torch.where(ends > begins, ends - 1, -1)
    last = torch.empty_like(generated)
    last[order] = generated[order].cummax(0).values
    index = torch.maximum(last, first)
    index = torch.where(first < end[sequence], index, batch.num_tokens)  # a place to be dropped
    rewards = batch.turn_rewards if rewards is None else rewards
    return _sum_by_index(rewards, index, batch.num_tokens + 1)[:-1]


def _sum_by_index(values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Sum values with equal index in their order, without atomics: bitwise reproducible."""
    index, order = index.sort(stable=True)
    number = (index.diff(prepend=index.new_full((1,), -1)) != 0).cumsum(0) - 1
    bounds = torch.searchsorted(number, torch.arange(len(values) + 1, device=index.device))
    sums = segment_sum(values[order], bounds.int()).float()
    place = torch.cat([index, index.new_full((1,), size)])[bounds[:-1]]  # of no values: dropped
    return sums.new_zeros(size + 1).index_copy_(0, place, sums)[:-1]


class RowLists:
    """Rows as Python lists on the host; reads the turn tables and each tensor from the device."""

    def __init__(self, op: str, batch: PackedBatch) -> None:
        check_whole(op, batch)
        bounds, prompts = pairwise(batch.cu_seqlens.tolist()), prompt_lengths_of(batch).tolist()
        self.spans = [
            (begin, begin + prompt, end)
            for (begin, end), prompt in zip(bounds, prompts, strict=True)
        ]
        """First token of each prompt, first of each response, end of the row."""
        self.turns = row_turns(batch)
        self.trajectories = row_trajectories(batch)
        truncated = batch.truncated.tolist()
        self.truncated = [truncated[trajectory] for trajectory in self.trajectories]
        """Whether the trajectory of each row was cut off."""

    def prompts(self, packed: torch.Tensor) -> list[list[Any]]:
        """Return the values at each prompt."""
        values = packed.tolist()
        return [values[begin:split] for begin, split, _ in self.spans]

    def responses(self, packed: torch.Tensor) -> list[list[Any]]:
        """Return the values at each response."""
        values = packed.tolist()
        return [values[split:end] for _, split, end in self.spans]


def masks_of(op: str, batch: Packed) -> Ragged:
    """Return the sampling masks of all tokens, as int32 arrays on the host.

    They are the token ids that top-p and top-k left to sample from, which trainers replay. Raises a
    `ValueError` if the field is not ragged, or holds no integers.
    """
    if "sampling_mask" not in batch.ragged_values:
        raise ValueError(f"{op}: sampling_mask must be a field with ragged=True, got padded rows")
    values = ragged_rows(batch, "sampling_mask").values
    if values.ndim != 1 or values.is_floating_point():
        raise ValueError(
            f"{op}: sampling_mask must hold integers without further dimensions, "
            f"got {values.dtype} and shape {list(values.shape[1:])}"
        )
    counts = batch.fields["sampling_mask"][:, 1].cpu().numpy()
    cu = np.append(0, counts).cumsum(dtype=np.int32)
    return Ragged(cu, values[: int(cu[-1])].int().cpu().numpy())


def mask_rows(op: str, batch: Packed) -> torch.Tensor:
    """Return the ids of `masks_of` as int32 rows ``[tokens, K]``, -1 behind the last id of each."""
    cu, ids = masks_of(op, batch)
    counts = np.diff(cu)
    rows = np.full((len(counts), counts.max(initial=1)), -1, np.int32)
    rows[np.arange(rows.shape[1]) < counts[:, None]] = ids
    return torch.from_numpy(rows).to(batch.device)
