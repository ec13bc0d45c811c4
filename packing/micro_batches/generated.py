"""Generated tokens of batches and micro-batches: the places that predict them, and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from trajpack.packing.micro_batches.logprobs import LogprobMethods, Predictions
from trajpack.packing.ragged import Ragged, gathered

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.micro_batches.micro_batch import MicroBatch


class GeneratedMethods(LogprobMethods):
    """Methods of `PackedBatch` and `MicroBatch`."""

    def _predictions(self, most: int | None, *, each: bool) -> Predictions:
        batch, _ = self._batch, each  # each generated token has its own row anyway
        return Predictions(*self.logprob_rows(most), None, batch.num_tokens)

    def _support(self, name: str, most: int | None) -> tuple[Ragged, bool]:
        return self.ragged(name, most), not self._batch.value_counts[name][1]

    @property
    def _batch(self) -> PackedBatch | MicroBatch:
        return cast("PackedBatch | MicroBatch", self)

    def logprob_rows(self, most: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places whose output predicts each generated token, and those tokens.

        A token's place is the one before it in its sequence, so ``rows + 1`` are the places of the
        tokens themselves: ``batch.advantages[rows + 1]``. Tokens are in the order of the batch.

        Args:
            most: Length of the result, for shapes that must not change; `num_generated` if None.
                Rows that are left over are -1, with token 0, as those of a micro-batch are whose
                sequence was cut off.

        Returns:
            ``rows`` and ``targets``, int64 ``[num_generated]``: arguments of
            `trajpack.kernels.token_logprobs`.

        Raises:
            ValueError: If ``most`` is below `num_generated`.

        Cost: a pass over `loss_mask`, and four small operations over the result. No
        synchronisation.

        Example:
            >>> import trajpack
            >>> turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory(name, [turn]) for name in "ab"])
            >>> batch.logprob_rows()
            (tensor([1, 2, 5, 6]), tensor([3, 4, 3, 4]))
        """
        batch = self._batch
        num_rows = checked("logprob_rows", most, batch.num_generated)
        # the first token of a batch was not generated: its place is that of what is left over
        place = torch.nonzero_static(batch.loss_mask, size=num_rows, fill_value=0)[:, 0]
        ids = batch.input_ids if batch.num_tokens else batch.input_ids.new_zeros(1)
        return place - 1, torch.where(place > 0, ids[place], 0)

    def ragged(self, name: str, most: int | None = None) -> Ragged:
        """Return the values of a ragged field for each row of `logprob_rows`, in that order.

        Args:
            name: Name of a `TokenField` with ``ragged=True``.
            most: As of `logprob_rows`. Rows that are left over have no values. On a device the last
                of them has those of generated tokens that are no rows: `value_counts` are known,
                and no others.

        Returns:
            ``cu`` int32 ``[num_generated + 1]`` and ``values`` ``[all, *shape]``.

        Raises:
            ValueError: If there is no such field; see also `logprob_rows`.

        Cost: that of `logprob_rows`, and a dozen small operations. No synchronisation where `pack`
            made the batch, `with_advantages` included; of any other batch as
            `PackedBatch.value_lens`.
        """
        spans = self._spans(name)
        if not self._batch.num_tokens:
            spans = spans.new_zeros(1, 2)
        return self._gathered(name, spans[self.logprob_rows(most)[0] + 1])

    def values_of_tokens(self, name: str) -> Ragged:
        """Return the values of a ragged field for each token of `fields`, in their order.

        Cost: a dozen small operations, and that of `PackedBatch.value_lens`.
        """
        return self._gathered(name, self._spans(name))

    def _spans(self, name: str) -> torch.Tensor:
        batch = self._batch
        if name not in batch.ragged_values:
            known = sorted(batch.ragged_values)
            raise ValueError(f"ragged: name must be that of a ragged field, {known}, got {name!r}")
        return batch.fields[name]

    def _gathered(self, name: str, spans: torch.Tensor) -> Ragged:
        batch = self._batch
        on_host = spans.device.type == "cpu"  # where the exact number costs nothing
        total = int(spans[:, 1].sum()) if on_host else batch.value_counts[name][0]
        return gathered(spans, batch.ragged_values[name], total)


def checked(op: str, most: int | None, least: int) -> int:
    """Return the length of a result, ``least`` if ``most`` is None."""
    if most is not None and most < least:
        raise ValueError(f"{op}: most must be at least {least}, got {most}")
    return least if most is None else most
