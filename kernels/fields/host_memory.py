"""Host memory for fields, used again once the batch that was written there is gone."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.fields.build import FIELD_DTYPES, NUMPY_DTYPES, TokenFields
from trajpack.kernels.runs import TILE

SLACK = 1.25
"""Size of fresh memory over what is asked for, so that a longer batch fits too."""
MOST = 2
"""Most that memory may exceed what is asked for: torch saves a tensor with its whole storage."""

_held_by_a_list = [np.empty(0)]
ALONE = sys.getrefcount(_held_by_a_list[0])
"""References to an array that a list alone holds, while they are counted."""


class HostMemory:
    """Memory for a batch's fields that is reused when the batch is gone.

    The first touch of fresh memory costs more than writing it. A tensor made here, its views and
    their numpy arrays all hold a reference to the tensor's array; without one the array is free.
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
        # one more free array is kept; the memory of a peak is released
        spared = [arrays[i] for i in free if arrays[i] is not chosen][:1]
        held = [arrays[i] for i in range(len(arrays)) if i not in free]
        self._lent[name] = [*held, *spared, chosen]
        return chosen
