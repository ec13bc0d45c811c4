"""Rows of a packed batch: one per sequence, split into a prompt and a response; their rewards.

The prompt is everything before the first generated token of the sequence; the response is the rest,
observations included. Where nothing was generated, all tokens are prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch

from trajpack.kernels.rearrange.pad import Number, pad
from trajpack.kernels.scan.segment_sum import segment_sum
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import as_integer
from trajpack.packing.rows.packed import check_whole

Score: TypeAlias = Literal["rewards", "returns"]
Place: TypeAlias = Literal["turns", "last"]


@dataclass(frozen=True, eq=False)
class Rows:
    """Padded rows: prompts padded on the left, responses on the right. Made by `rows_of`."""

    num_tokens: int
    """Tokens of the batch."""
    max_prompt_length: int
    """Columns of the prompts."""
    tokens: torch.Tensor
    """Index of the batch's token at each place, int64 ``[rows, columns]``; any at padding."""
    attention_mask: torch.Tensor
    """Bool ``[rows, columns]``: False at padding."""

    def whole(self, packed: torch.Tensor, value: Number = 0) -> torch.Tensor:
        """Lay ``packed`` ``[tokens, *rest]`` out as ``[rows, columns, *rest]``, ``value`` as pad.

        Differentiable.
        """
        holds = self.attention_mask
        if not self.num_tokens:
            return packed.new_full((*holds.shape, *packed.shape[1:]), value)
        holds = holds.reshape(*holds.shape, *[1] * (packed.ndim - 1))
        return torch.where(holds, packed[self.tokens], packed.new_full((), value))

    def prompts(self) -> Rows:
        """Return the columns of the prompts."""
        return self._columns(slice(None, self.max_prompt_length))

    def responses(self) -> Rows:
        """Return the columns of the responses."""
        return self._columns(slice(self.max_prompt_length, None))

    def _columns(self, columns: slice) -> Rows:
        tokens, holds = self.tokens[:, columns], self.attention_mask[:, columns]
        return Rows(self.num_tokens, self.max_prompt_length, tokens, holds)


def rows_of(
    batch: PackedBatch,
    *,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> Rows:
    """Return the padded rows of a batch; widths are those of the longest if ``None``.

    Raises:
        TypeError: If a width is not an integer.
        ValueError: If the batch is padded, or a prompt or a response is longer than its width.
            With both widths given and the batch on a GPU this is a device-side assertion;
            nothing is ever cut.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> turns = [Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5, 6], [-0.1, -0.2])]
        >>> batch = pack([Trajectory("a", turns), Trajectory("b", [Turn([7], [8], [-0.3])])])
        >>> rows_of(batch).whole(batch.input_ids)
        tensor([[1, 2, 3, 4, 5, 6],
                [0, 7, 8, 0, 0, 0]])
    """
    check_whole("rows_of", batch)
    prompts = prompt_lengths_of(batch)
    begin, end = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    num_prompt, num_response = widths_of(
        prompts, end - begin - prompts, max_prompt_length, max_response_length
    )
    column = torch.arange(num_prompt + num_response, device=batch.device)
    token = (begin + prompts - num_prompt)[:, None] + column
    holds = (token >= begin[:, None]) & (token < end[:, None])
    tokens = token.clamp(0, max(batch.num_tokens - 1, 0))
    return Rows(batch.num_tokens, num_prompt, tokens, holds)


def widths_of(
    prompts: torch.Tensor, responses: torch.Tensor, num_prompt: int | None, num_response: int | None
) -> tuple[int, int]:
    """Return the widths of prompts and responses; raises and costs as `rows_of` says."""
    given = {"max_prompt_length": num_prompt, "max_response_length": num_response}
    for name, width in given.items():
        if width is not None:
            as_integer(f"rows_of: {name}", width)
    if not prompts.shape[0]:
        return num_prompt or 0, num_response or 0
    longest = torch.stack([prompts.max(), responses.max()])
    if num_prompt is not None and num_response is not None and prompts.device.type != "cpu":
        fits = (longest[0] <= num_prompt) & (longest[1] <= num_response)
        torch._assert_async(fits, "rows_of: a prompt or a response is longer than its width")
        return num_prompt, num_response
    widths = longest.tolist()
    for index, (name, width) in enumerate(given.items()):
        if width is not None and widths[index] > width:
            sequence = int((prompts, responses)[index].argmax())
            raise ValueError(
                f"rows_of: sequence {sequence} has {widths[index]} tokens, but {name} is {width}"
            )
        widths[index] = widths[index] if width is None else width
    return widths[0], widths[1]


def right_padded(
    batch: PackedBatch, packed: torch.Tensor, value: Number = 0, *, width: int | None = None
) -> torch.Tensor:
    """Lay ``packed`` out as ``[rows, width, *rest]``, padded on the right; one launch.

    ``width`` is the longest sequence if ``None``.
    """
    return pad(packed, batch.cu_seqlens, batch.max_seqlen if width is None else width, value=value)


def prompt_lengths_of(batch: PackedBatch) -> torch.Tensor:
    """Return the number of prompt tokens of each row, int64 ``[rows]``. Some launches."""
    begin, end = batch.turn_spans[:, 0].long(), batch.turn_spans[:, 1].long()
    firsts = batch.cu_seqlens[1:].long()
    generated = torch.where(end > begin, begin, batch.num_tokens)
    firsts = firsts.scatter_reduce(0, batch.turn_sequence.long(), generated, "amin")
    return firsts - batch.cu_seqlens[:-1].long()


def in_response(batch: PackedBatch, prompts: torch.Tensor) -> torch.Tensor:
    """Return which tokens are of responses, bool ``[tokens]``, by the rows' `prompt_lengths_of`."""
    return batch.position_ids >= prompts[batch.sequence_ids.long()]


def turn_trajectories(batch: PackedBatch) -> torch.Tensor:
    """Return the index of each turn's trajectory, int64 ``[turns]``."""
    return torch.repeat_interleave(batch.cu_turns.diff().long(), output_size=batch.num_turns)


def row_owners(batch: PackedBatch) -> torch.Tensor:
    """Return the index in ``batch.ids`` of each row's trajectory, int64 ``[sequences]``."""
    owners = batch.cu_turns.new_zeros(len(batch), dtype=torch.int64)
    return owners.scatter(0, batch.turn_sequence.long(), turn_trajectories(batch))


def row_trajectories(batch: PackedBatch) -> list[int]:
    """Return `row_owners` on the host, which knows them where each trajectory is one row."""
    if len(batch) == len(batch.ids):
        return list(range(len(batch)))
    return row_owners(batch).tolist()


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
    names = [
        name if group is None else group
        for name, group in zip(batch.ids, batch.groups, strict=True)
    ]
    taken = Counter(names)
    for trajectory, group in enumerate(batch.groups):
        if group is None and taken[batch.ids[trajectory]] > 1:
            names[trajectory] = f"{batch.ids[trajectory]}#{trajectory}"
    return [names[trajectory] for trajectory in row_trajectories(batch)]


def check_field_names(op: str, batch: PackedBatch, taken: Iterable[str]) -> None:
    """Raise a `ValueError` if an extra field has the name of another key of the format."""
    repeated = sorted(set(taken) & set(batch.fields))
    if repeated:
        raise ValueError(f"{op}: extra fields must not be named as other keys, got {repeated}")


def row_scores(batch: PackedBatch, of: Score = "rewards") -> torch.Tensor:
    """Return one number for each sequence, float32 ``[sequences]``.

    ``"rewards"``: the sum of the rewards of its trajectory, not discounted, which all sequences of
    a trajectory share; ``"returns"``: the discounted return of the sequence's first turn.
    """
    if of == "rewards":
        return segment_sum(batch.turn_rewards, batch.cu_turns).float()[row_owners(batch)]
    if of != "returns":
        raise ValueError(f"row_scores: of must be 'rewards' or 'returns', got {of!r}")
    sequence = batch.turn_sequence.long()
    turn = torch.arange(batch.num_turns, device=batch.device)
    first = turn.new_full((len(batch),), batch.num_turns)
    return batch.turn_returns[first.scatter_reduce(0, sequence, turn, "amin")]


def token_scores(batch: PackedBatch, *, op: str = "", place: Place = "turns") -> torch.Tensor:
    """Return rewards at tokens, float32 ``[tokens]``, 0 elsewhere.

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
    start, end = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    sequence = batch.turn_sequence.long()
    first = (start + prompt_lengths_of(batch))[sequence]
    begins, ends = batch.turn_spans.long().unbind(1)
    order = ends.argsort(stable=True)  # chains may interleave: the order of their tokens
    generated = torch.where(ends > begins, ends - 1, -1)
    last = torch.empty_like(generated)
    last[order] = generated[order].cummax(0).values
    index = torch.maximum(last, first)
    index = torch.where(first < end[sequence], index, batch.num_tokens)  # a place to be dropped
    return _sum_by_index(batch.turn_rewards, index, batch.num_tokens + 1)[:-1]


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

    def __init__(self, batch: PackedBatch) -> None:
        check_whole("RowLists", batch)
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
