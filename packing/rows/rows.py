"""Sequences of a packed batch as rows of a prompt and a response, for trainers that pad."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from trajpack.kernels.rearrange.pad import Number
from trajpack.packing.batch.batch import PackedBatch


@dataclass(frozen=True, eq=False)
class Rows:
    """A packed batch as rows: a sequence each, its prompt left-, its response right-padded.

    The prompt of a row is what stands before the first generated token of its sequence, the
    response is the rest: generated tokens and the observations between them. Where nothing was
    generated, all of it is prompt. Made by `rows_of`.
    """

    batch: PackedBatch
    """What the rows hold."""
    prompt_lengths: torch.Tensor
    """int64 ``[rows]``: tokens of each prompt."""
    response_lengths: torch.Tensor
    """int64 ``[rows]``: tokens of each response."""
    max_prompt_length: int
    """Tokens of a row's prompt, padding included: the width of `prompts`."""
    max_response_length: int
    """Tokens of a row's response, padding included: the width of `responses`."""
    tokens: torch.Tensor
    """int64 ``[rows, max_prompt_length + max_response_length]``: which of the batch's tokens
    stands at a place. At padding it is one that does not."""
    attention_mask: torch.Tensor
    """bool, of that shape: False at padding."""

    def __len__(self) -> int:
        """Rows."""
        return len(self.batch)

    @property
    def width(self) -> int:
        """Tokens of a row, padding included."""
        return self.max_prompt_length + self.max_response_length

    def whole(self, packed: torch.Tensor, value: Number = 0) -> torch.Tensor:
        """Lay out ``packed`` ``[tokens, *rest]`` as ``[rows, width, *rest]``.

        Args:
            packed: A tensor over the batch's tokens, of any dtype. Differentiable.
            value: What stands at padding.

        Cost: two launches, no synchronisation.
        """
        return self._laid_out(packed, value, 0, self.width)

    def prompts(self, packed: torch.Tensor, value: Number = 0) -> torch.Tensor:
        """Lay out the prompts' part: ``[rows, max_prompt_length, *rest]``, padded on the left."""
        return self._laid_out(packed, value, 0, self.max_prompt_length)

    def responses(self, packed: torch.Tensor, value: Number = 0) -> torch.Tensor:
        """Lay out the responses' part: ``[rows, max_response_length, *rest]``, padded behind."""
        return self._laid_out(packed, value, self.max_prompt_length, self.width)

    @property
    def prompt_attention(self) -> torch.Tensor:
        """Bool ``[rows, max_prompt_length]``: True where a prompt has a token."""
        return self.attention_mask[:, : self.max_prompt_length]

    @property
    def response_attention(self) -> torch.Tensor:
        """Bool ``[rows, max_response_length]``: True where a response has one."""
        return self.attention_mask[:, self.max_prompt_length :]

    def packed_responses(self, padded: torch.Tensor, value: Number = 0) -> torch.Tensor:
        """Bring what a trainer computed for the responses back to the batch's tokens.

        The inverse of `responses`: log-probabilities or values ``[rows, max_response_length,
        *rest]`` become ``[tokens, *rest]``, with ``value`` at tokens of prompts. Differentiable.

        Raises:
            ValueError: If it is not of the rows' shape.

        Cost: some launches over the tokens, no synchronisation.
        """
        expected = [len(self), self.max_response_length]
        if list(padded.shape[:2]) != expected:
            raise ValueError(
                f"packed_responses: padded must begin with {expected}, got {list(padded.shape)}"
            )
        batch = self.batch
        rest = padded.shape[2:]
        if not padded.numel():
            return padded.new_full((batch.num_tokens, *rest), value)
        row = batch.sequence_ids.long()
        place = batch.position_ids - self.prompt_lengths[row]
        given = padded[row, place.clamp(min=0)]
        return torch.where(_over_rest(place >= 0, given), given, padded.new_full((), value))

    def _laid_out(self, packed: torch.Tensor, value: Number, begin: int, end: int) -> torch.Tensor:
        if packed.shape[:1] != (self.batch.num_tokens,):
            raise ValueError(
                f"rows: packed must be over {self.batch.num_tokens} tokens, "
                f"got shape {list(packed.shape)}"
            )
        holds = self.attention_mask[:, begin:end]
        if packed.shape[0] == 0:
            return packed.new_full((*holds.shape, *packed.shape[1:]), value)
        moved = packed[self.tokens[:, begin:end]]
        return torch.where(_over_rest(holds, moved), moved, packed.new_full((), value))


def rows_of(
    batch: PackedBatch,
    *,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> Rows:
    """Find where prompts end and responses begin, and where each token stands in its row.

    Args:
        batch: In any layout. A sequence of several turns is one row.
        max_prompt_length: Width of the prompts; that of the longest if ``None``.
        max_response_length: Width of the responses; that of the longest if ``None``.

    Returns:
        The rows, on the batch's device.

    Raises:
        TypeError: If a width is no integer.
        ValueError: If the batch is padded, or a prompt or a response is longer than its width.
            With both widths given and the batch on a GPU, that it is longer is found there
            and raised where CUDA raises what a device asserts: nothing is ever cut.

    Cost: some launches over the places of the rows. One host read of two numbers, which
    synchronises a device, unless both widths are given.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> turns = [Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5, 6], [-0.1, -0.2])]
        >>> batch = pack([Trajectory("a", turns), Trajectory("b", [Turn([7], [8], [-0.3])])])
        >>> rows_of(batch).whole(batch.input_ids)
        tensor([[1, 2, 3, 4, 5, 6],
                [0, 7, 8, 0, 0, 0]])
    """
    batch.check_unpadded()
    prompts = prompt_lengths_of(batch)
    begin, end = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    responses = end - begin - prompts
    num_prompt, num_response = widths_of(prompts, responses, max_prompt_length, max_response_length)
    place = torch.arange(num_prompt + num_response, device=batch.device)
    token = (begin + prompts - num_prompt)[:, None] + place
    holds = (token >= begin[:, None]) & (token < end[:, None])
    tokens = token.clamp(0, max(batch.num_tokens - 1, 0))
    return Rows(batch, prompts, responses, num_prompt, num_response, tokens, holds)


def prompt_lengths_of(batch: PackedBatch) -> torch.Tensor:
    """Return the tokens before each sequence's first generated one, int64 ``[sequences]``.

    All of them where nothing was generated. Cost: a few launches over the turns.
    """
    begin, end = batch.turn_spans[:, 0].long(), batch.turn_spans[:, 1].long()
    firsts = batch.cu_seqlens[1:].long()
    generated = torch.where(end > begin, begin, batch.num_tokens)
    firsts = firsts.scatter_reduce(0, batch.turn_sequence.long(), generated, "amin")
    return firsts - batch.cu_seqlens[:-1].long()


def row_trajectories(batch: PackedBatch) -> list[int]:
    """Return for each sequence the trajectory it is of, an index of ``batch.ids``.

    Cost: nothing where each trajectory is one sequence. Else it reads two tables of the turns
    back to the host, which synchronises a device.
    """
    if len(batch) == len(batch.ids):
        return list(range(len(batch)))
    owners = [0] * len(batch)
    sequences = batch.turn_sequence.tolist()
    for trajectory, (begin, end) in enumerate(pairwise(batch.cu_turns.tolist())):
        for turn in range(begin, end):
            owners[sequences[turn]] = trajectory
    return owners


def row_turns(batch: PackedBatch) -> list[list[int]]:
    """Return the turns of each sequence, oldest first.

    Cost: reads a table of the turns back to the host, which synchronises a device.
    """
    turns: list[list[int]] = [[] for _ in range(len(batch))]
    for turn, sequence in enumerate(batch.turn_sequence.tolist()):
        turns[sequence].append(turn)
    return turns


def widths_of(
    prompts: torch.Tensor, responses: torch.Tensor, num_prompt: int | None, num_response: int | None
) -> tuple[int, int]:
    """Return the widths of prompts and responses: those given, or those of the longest.

    Raises and costs what `rows_of` says.
    """
    for name, given in (("max_prompt_length", num_prompt), ("max_response_length", num_response)):
        if given is None:
            continue
        if isinstance(given, bool) or not isinstance(given, int):
            raise TypeError(f"rows_of: {name} must be an integer, got {given!r}")
        if given < 0:
            raise ValueError(f"rows_of: {name} must be 0 or more, got {given}")
    if not prompts.shape[0]:
        return num_prompt or 0, num_response or 0
    longest = torch.stack([prompts.max(), responses.max()])
    if num_prompt is not None and num_response is not None and prompts.device.type != "cpu":
        fits = (longest[0] <= num_prompt) & (longest[1] <= num_response)
        torch._assert_async(fits, "rows_of: a prompt or a response is longer than its width")
        return num_prompt, num_response
    found = longest.tolist()
    for name, given, of, values in (
        ("max_prompt_length", num_prompt, found[0], prompts),
        ("max_response_length", num_response, found[1], responses),
    ):
        if given is not None and of > given:
            raise ValueError(
                f"rows_of: sequence {int(values.argmax())} has {of} tokens, but {name} is {given}"
            )
    return (
        found[0] if num_prompt is None else num_prompt,
        found[1] if num_response is None else num_response,
    )


def _over_rest(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.reshape(*mask.shape, *[1] * (like.ndim - mask.ndim))
