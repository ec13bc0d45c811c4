"""What the turns of a packed batch come to, counted on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch


class LayoutTokens(NamedTuple):
    """Tokens that the same turns take in each layout."""

    turns: int
    """In layout ``"turns"``: every turn's prompt and completion."""
    merged: int
    """In layout ``"merged"``: what is new with each turn, once."""

    @property
    def ratio(self) -> float:
        """Tokens as turns for each one as merged; 1 where there are none."""
        return self.turns / self.merged if self.merged else 1.0


def turn_ends(batch: PackedBatch) -> list[list[int]]:
    """Do what `PackedBatch.turn_ends` says."""
    sequence = batch.turn_sequence.cpu().numpy()
    ends = batch.turn_spans[:, 1].cpu().numpy() - batch.host_lengths.starts[sequence]
    sequence, ends = (
        sequence[ends > 0],
        ends[ends > 0],
    )  # those of a padded batch's padding end at 0
    order = np.lexsort((ends, sequence))
    cuts = np.cumsum(np.bincount(sequence, minlength=len(batch)))[:-1]
    return [part.tolist() for part in np.split(ends[order], cuts)] if len(batch) else []


def layout_tokens(batch: PackedBatch) -> LayoutTokens:
    """Do what `PackedBatch.layout_tokens` says."""
    end = batch.turn_spans[:, 1].cpu().numpy().astype(np.int64)
    begin = batch.turn_begin.cpu().numpy()
    start = batch.host_lengths.starts[batch.turn_sequence.cpu().numpy()]
    return LayoutTokens(int((end - start).sum()), int((end - begin).sum()))
