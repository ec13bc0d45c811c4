"""`TURN_FIELDS`: the table of the per-turn fields."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np
import torch


class TurnField(NamedTuple):
    """A number of each turn."""

    attribute: str
    """Attribute of `Turn`, and list of the validated turns."""
    name: str
    """Attribute of `PackedBatch`: a tensor ``[turns]``."""
    dtype: torch.dtype
    """Dtype of the tensor."""

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """Dtype of the tensor's table on the host."""
        return torch.empty(0, dtype=self.dtype).numpy().dtype

    def plain(self, value: Any) -> float:
        """Return the number as a Python float, bool or int."""
        if self.dtype.is_floating_point:
            return float(value)
        return bool(value) if self.dtype == torch.bool else operator.index(value)


TURN_FIELDS = (
    TurnField("reward", "turn_rewards", torch.float64),
    TurnField("truncated", "turn_truncated", torch.bool),
    TurnField("version_start", "turn_version_start", torch.int32),
    TurnField("version_end", "turn_version_end", torch.int32),
)
"""Each has an attribute of `Turn` and one of `PackedBatch`. The buffer's tables, batches, batch
files, `unpack`, `TrajectoryArrays` (log, Parquet, Ray) and the equality of turns
loop over this table. New rows go to its end: stored logs hold the numbers in this order."""
