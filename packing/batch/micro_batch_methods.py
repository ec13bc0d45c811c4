"""What a packed batch does about micro-batches: cutting itself up, and taking outputs back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.micro_batches.cutting import (
    Lengths,
    cut,
    lengths_of,
    merged,
    place_plan,
    place_selected,
)

if TYPE_CHECKING:
    import torch

    from trajpack.kernels.dispatch import Impl
    from trajpack.kernels.rearrange.token_rows import Number
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.batch.turn_counts import LayoutTokens
    from trajpack.packing.micro_batches.micro_batch import MicroBatch
    from trajpack.packing.plan.plan import Plan

UNALIGNED = Alignment()


class MicroBatchMethods:
    """Methods of `PackedBatch`."""

    @property
    def _whole(self) -> PackedBatch:
        return cast("PackedBatch", self)

    @cached_property
    def host_lengths(self) -> Lengths:
        """Sequences' lengths and starts as int64 arrays on the host."""
        return lengths_of(self._whole.seqlens)

    def select(
        self,
        sequences: Iterable[int],
        alignment: Alignment = UNALIGNED,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        impl: Impl = "auto",
    ) -> MicroBatch:
        """Return some of the sequences as a micro-batch, in the order that is asked for.

        Args:
            sequences: Which; none at all makes a dummy, a micro-batch of padding.
            alignment: How it is padded.
            tensors: ``[tokens, ...]`` each, of any dtype of at most 8 bytes: what else the loss
                takes, such as ``{"loss_weights": batch.loss_weights("token_mean")}``. They become
                `MicroBatch.fields`, 0 on padding; no gradient flows.
            impl: See `trajpack.kernels`.

        Raises:
            TypeError: If ``sequences`` are no integers, or one of ``tensors`` is none.
            ValueError: If there is no such sequence, a tensor has a wrong shape, device or name,
                or the alignment has no room.
            RuntimeError: While a CUDA graph is captured: select before.

        Cost: one copy of 16 bytes a sequence, from pinned memory, and one launch; no
        synchronisation. Of the host, a pass over the batch's lengths the first time.

        Example:
            >>> import trajpack
            >>> turn = trajpack.Turn([1, 2], [3], [-0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory(name, [turn]) for name in "abc"])
            >>> batch.select([2, 0], trajpack.Alignment(sequence_multiple=4)).input_ids
            tensor([1, 2, 3, 0, 1, 2, 3, 0])
        """
        placed = place_selected(self.host_lengths, sequences, alignment)
        return next(cut(self._whole, self.host_lengths, [placed], alignment, tensors, impl))

    def micro_batches(
        self,
        plan: Plan,
        alignment: Alignment = UNALIGNED,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        impl: Impl = "auto",
    ) -> Iterator[MicroBatch]:
        """Return the micro-batches of a plan one by one: each is made when it is asked for.

        Args:
            plan: Such as ``trajpack.plan_micro_batches(batch.seqlens, capacity)``. Of a sequence
                that it cuts off the first tokens are taken; where it has no sequences, the
                micro-batch is a dummy.
            alignment: As for `select`.
            tensors: As for `select`.
            impl: See `trajpack.kernels`.

        Raises:
            TypeError: As `select`.
            ValueError: As `select`; also if the plan is for other sequences, or those of a
                micro-batch, each padded, go over the plan's capacity. All at once, before the
                first.
            RuntimeError: As `select`.

        Cost: one copy for all micro-batches together, of 16 bytes a sequence, from pinned memory;
        one launch for each; no synchronisation.
        """
        placed = place_plan(self.host_lengths, plan, alignment)
        return cut(self._whole, self.host_lengths, placed, alignment, tensors, impl)

    def split(
        self,
        plan: Plan,
        alignment: Alignment = UNALIGNED,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        impl: Impl = "auto",
    ) -> list[MicroBatch]:
        """Return all micro-batches of a plan: `micro_batches` as a list.

        Cost: as `micro_batches`, and the memory of the whole batch again.
        """
        return list(self.micro_batches(plan, alignment, tensors, impl=impl))

    def merge(
        self,
        plan: Plan,
        outputs: Sequence[torch.Tensor],
        alignment: Alignment = UNALIGNED,
        *,
        fill: Number = 0,
        impl: Impl = "auto",
    ) -> torch.Tensor:
        """Bring outputs of the micro-batches into the order of the batch: the inverse of `split`.

        Args:
            plan: As it was split by.
            outputs: A tensor of one dtype for each micro-batch, dummies too, ``[its tokens, ...]``,
                with a row for each token, padding included: values, or log-probabilities at their
                tokens' own index. What a model says of the next token is shifted first; see
                `trajpack.kernels.shift_tokens`.
            alignment: As it was split with.
            fill: What tokens hold that are in no micro-batch: of sequences that the plan dropped,
                and those it cut off.
            impl: See `trajpack.kernels`.

        Returns:
            ``[tokens, ...]``: padding is left out. Differentiable with respect to the outputs.

        Raises:
            TypeError: If an output is no tensor.
            ValueError: If there are not as many as micro-batches, one has another number of rows,
                dtype or shape of a row, or the plan does not fit the batch.
            RuntimeError: While a CUDA graph is captured.

        Cost: one concatenation and one launch; one copy of 16 bytes a sequence; no
        synchronisation.

        Example:
            >>> import torch, trajpack
            >>> turn = trajpack.Turn([1, 2], [3], [-0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory(name, [turn]) for name in "abc"])
            >>> plan = trajpack.plan_micro_batches(batch.seqlens, capacity=6)
            >>> outputs = [micro_batch.input_ids for micro_batch in batch.split(plan)]
            >>> torch.equal(batch.merge(plan, outputs), batch.input_ids)
            True
        """
        return merged(self._whole, plan, outputs, alignment, fill, impl)

    def turn_ends(self) -> list[list[int]]:
        """Return for each sequence how many of its tokens stand before each turn's end.

        Where a sequence may be cut off: ``plan_micro_batches(batch.seqlens, capacity,
        oversized="truncate_at_turn", turn_ends=batch.turn_ends())``.

        Cost: two copies of 4 and 8 bytes a turn to the host, where it is not there (synchronises).

        Example:
            >>> import trajpack
            >>> turns = [trajpack.Turn([1], [2], [-0.5]), trajpack.Turn([1, 2, 3], [4], [-0.5])]
            >>> trajpack.pack([trajpack.Trajectory("a", turns)]).turn_ends()
            [[2, 4]]
        """
        from trajpack.packing.batch.turn_counts import turn_ends

        return turn_ends(self._whole)

    def layout_tokens(self) -> LayoutTokens:
        """Return how many tokens the turns take in layout ``"turns"`` and in ``"merged"``.

        Whatever layout the batch has. What `trajpack.pack_resident` packed in layout ``"turns"``
        does not know what a prompt repeats: both are the same there.

        Cost: three copies of 16 bytes a turn to the host, where it is not there (synchronises).

        Example:
            >>> import trajpack
            >>> turns = [trajpack.Turn([1], [2], [-0.5]), trajpack.Turn([1, 2, 3], [4], [-0.5])]
            >>> trajpack.pack([trajpack.Trajectory("a", turns)]).layout_tokens()
            LayoutTokens(turns=6, merged=4)
        """
        from trajpack.packing.batch.turn_counts import layout_tokens

        return layout_tokens(self._whole)
