"""Tensors of this process, found by the addresses that a table of pointers holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from tests.ptx.memory import Allocation, Extent

POINTERS = 1 << 32, 1 << 47
"""Numbers below and above are no addresses of a process."""
TENSORS = torch.Tensor, torch.nn.Parameter
_frozen: list[weakref.ref[torch.Tensor]] = []
"""Tensors that ``gc.freeze`` has hidden from the garbage collector."""


def freeze_objects() -> None:
    """Spare the garbage collector all objects of this process; tensors among them stay known."""
    gc.collect()
    _frozen.extend(weakref.ref(one) for one in gc.get_objects() if type(one) in TENSORS)
    gc.freeze()


def allocations(given: list[torch.Tensor], *, follow: bool) -> list[Allocation]:
    """Return the memory of tensors and, with ``follow``, of those that their numbers point to."""
    tables = [t.flatten() for t in given if follow and t.dtype == torch.int64 and t.numel()]
    named = [t[(t > POINTERS[0]) & (t < POINTERS[1])].numpy() for t in tables]
    pointers = np.unique(np.concatenate(named)) if named else np.zeros(0, np.int64)
    found = dict(_extent(tensor) for tensor in given)
    if len(pointers):
        for begin, end in map(_extent, _all_tensors()):
            if np.searchsorted(pointers, begin) < np.searchsorted(pointers, end):
                found[begin] = end
    return [Allocation(begin, end) for begin, end in found.items() if begin < end]


def extent_of(tensor: torch.Tensor) -> Extent:
    """Return the bytes of a tensor, not of the allocation that it may be a part of."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    entries = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    begin = tensor.data_ptr()
    return begin, begin + entries * tensor.element_size()


def _extent(tensor: torch.Tensor) -> Extent:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _all_tensors() -> Iterator[torch.Tensor]:
    for one in [*(known() for known in _frozen), *gc.get_objects()]:
        if type(one) in TENSORS and one.device.type == "cpu" and one.layout == torch.strided:
            yield one
