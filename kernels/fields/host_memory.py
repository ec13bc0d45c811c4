"""Memory for fields on the host that is used again once nobody holds what was written there."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.fields.build import FIELD_DTYPES, NUMPY_DTYPES, TokenFields
from trajpack.kernels.runs import TILE

SLACK = 1.25
"""Room that fresh memory has beyond what is asked for, so that a longer batch fits too."""
MOST = 2
"""Times what is asked for that memory may have: what is written to a file by its storage, as
torch does with tensors, is never much larger than the batch."""

_held_by_a_list = [np.empty(0)]
ALONE = sys.getrefcount(_held_by_a_list[0])
"""References to an array that a list alone holds, while they are counted."""


class HostMemory:
    """Lends memory for a batch's fields, and lends it again when the batch is gone.

    The first touch of fresh memory costs more than writing it. A tensor made here keeps its
    array alive, as do its views and whatever numpy makes of it; when the last of them is gone,
    nothing but this object refers to the array, and the next batch may have it.
    """

    def __init__(self) -> None:
        self._lent: dict[str, list[npt.NDArray[np.generic]]] = {name: [] for name in FIELD_DTYPES}

    def fields(self, num_tokens: int) -> TokenFields:
        """Return uninitialised fields, as `trajpack.kernels.fields.build.empty_fields` does."""
        size = -(-num_tokens // TILE) * TILE
        return TokenFields(
            *(
                torch.from_numpy(self._array(name, size))[:num_tokens]
                for name in TokenFields._fields
            )
        )

    def _array(self, name: str, size: int) -> npt.NDArray[np.generic]:
        arrays = self._lent[name]
        free = [i for i in range(len(arrays)) if sys.getrefcount(arrays[i]) <= ALONE]
        fitting = [i for i in free if size <= arrays[i].size <= MOST * size]
        if fitting:
            chosen = arrays[min(fitting, key=lambda i: arrays[i].size)]
        else:
            chosen = np.empty(int(size * SLACK), NUMPY_DTYPES[FIELD_DTYPES[name]])
        # of what nobody holds, one more is kept; a peak does not stay
        spared = [arrays[i] for i in free if arrays[i] is not chosen][:1]
        held = [arrays[i] for i in range(len(arrays)) if i not in free]
        self._lent[name] = [*held, *spared, chosen]
        return chosen
