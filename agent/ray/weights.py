"""A model's weights as arrays, for the object store."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from trajpack.agent.ray.payload import as_array


@dataclass(frozen=True)
class Weights:
    """The weights of one policy version, put into the object store once for all workers."""

    version: int
    """Of the policy."""
    arrays: Mapping[str, tuple[str, npt.NDArray[Any]]]
    """By name: the dtype, and the values as numpy holds them."""

    @classmethod
    def of(cls, state_dict: Mapping[str, torch.Tensor], version: int) -> Weights:
        """Take the tensors of a state dict to the host.

        Cost: one copy for each tensor that is on a device; the object store makes another.
        """
        return cls(version, {name: as_array(value) for name, value in state_dict.items()})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors.

        They may be views of memory that other processes read too: copy from them, and never
        write to them.

        Example:
            >>> Weights.of({"bias": torch.ones(2)}, version=3).state_dict()
            {'bias': tensor([1., 1.])}
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return {
                name: torch.from_numpy(array).view(getattr(torch, dtype))
                for name, (dtype, array) in self.arrays.items()
            }
