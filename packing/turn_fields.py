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
    words: tuple[str | None, ...] = ()
    """Values of a field of words: each is stored as its place here."""

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """Dtype of the tensor's table on the host."""
        return torch.empty(0, dtype=self.dtype, device="cpu").numpy().dtype

    def plain(self, value: Any) -> float:
        """Return the value as a Python float, bool or int."""
        if self.words:
            return self.words.index(value)
        if self.dtype.is_floating_point:
            return float(value)
        return bool(value) if self.dtype == torch.bool else operator.index(value)

    def value(self, number: float) -> Any:
        """Return the value of `Turn` that `plain` made a number of."""
        if self.words:
            return self.words[int(number)]
        return bool(number) if self.dtype == torch.bool else number


STOP_REASONS = (None, "stop", "length", "tool", "abort", "error")
"""Values of `Turn.stop_reason`."""
TURN_FIELDS = (
    TurnField("reward", "turn_rewards", torch.float64),
    TurnField("truncated", "turn_truncated", torch.bool),
    TurnField("version_start", "turn_version_start", torch.int32),
    TurnField("version_end", "turn_version_end", torch.int32),
    TurnField("stop_reason", "turn_stop_reasons", torch.int8, STOP_REASONS),
)
"""Each has an attribute of `Turn` and one of `PackedBatch`. The buffer's tables, batches, batch
files, `unpack`, `TrajectoryArrays` (log, Ray) and the equality of turns
loop over this table. Stored files and logs hold the numbers in this order."""
