"""Packing to a device, done the usual ways: the host gathers, copies, and the device derives.

Same input as the whole job on the host, same ten fields, on the device. Every way gathers ids
and log-probabilities on the host into pinned memory where there is a CUDA device, sends each in
one copy, sends one row of values for each turn, and expands these on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.packing.turn_table import Table
from benchmarks.packing.whole_job import Fields, by_torch_cat
from trajpack import Trajectory


def by_concatenation(trajectories: Sequence[Trajectory], device: str) -> Fields:
    """Concatenate ids and log-probabilities with numpy; one copy each, the rest on the device."""
    table = Table(trajectories)
    total = int(table.cu_seqlens[-1])
    ids, logprobs = _pinned(total, torch.int32, device), _pinned(total, torch.float32, device)
    np.concatenate(table.ids, out=ids.numpy())
    silence = np.zeros(int(table.pieces.max(initial=0)), np.float32)
    given = table.pieces[::2].tolist()
    parts = [p for n, c in zip(given, table.logprobs, strict=True) for p in (silence[:n], c)]
    np.concatenate(parts, out=logprobs.numpy())
    sent = ids.to(device, non_blocking=True), logprobs.to(device, non_blocking=True)
    return _derived(table, *sent, device)


def by_cat_then_copies(trajectories: Sequence[Trajectory], device: str) -> Fields:
    """Make all ten fields on the host with `torch.cat`; one copy each."""
    return Fields(*(field.to(device) for field in by_torch_cat(trajectories)))


def by_padding(trajectories: Sequence[Trajectory], device: str) -> Fields:
    """Pad ids and log-probabilities on the host, copy both, and mask on the device."""
    table = Table(trajectories)
    shape = len(table.lengths), int(table.lengths.max(initial=0))
    ids, logprobs = _pinned(shape, torch.int32, device), _pinned(shape, torch.float32, device)
    id_rows, logprob_rows = ids.numpy(), logprobs.numpy()
    both = zip(table.ids[::2], table.ids[1::2], table.logprobs, strict=True)
    for row, (prompt, completion, sampled) in enumerate(both):
        end = len(prompt) + len(completion)
        id_rows[row, : len(prompt)] = prompt
        id_rows[row, len(prompt) : end] = completion
        logprob_rows[row, : len(prompt)] = 0
        logprob_rows[row, len(prompt) : end] = sampled
    lengths = torch.from_numpy(table.lengths).to(device)
    mask = torch.arange(shape[1], device=device) < lengths[:, None]
    flat = (padded.to(device, non_blocking=True)[mask] for padded in (ids, logprobs))
    return _derived(table, *flat, device)


def by_nested(trajectories: Sequence[Trajectory], device: str) -> Fields:
    """Make jagged nested tensors on the host and copy their values."""
    table = Table(trajectories)
    silence = np.zeros(int(table.pieces.max(initial=0)), np.float32)
    both = zip(table.ids[::2], table.ids[1::2], table.logprobs, strict=True)
    ids, logprobs = [], []
    for prompt, completion, sampled in both:
        ids.append(torch.from_numpy(np.concatenate((prompt, completion))))
        logprobs.append(torch.from_numpy(np.concatenate((silence[: len(prompt)], sampled))))
    flat = (
        torch.nested.nested_tensor(rows, layout=torch.jagged).values().to(device)
        for rows in (ids, logprobs)
    )
    return _derived(table, *flat, device)


def _derived(table: Table, ids: torch.Tensor, logprobs: torch.Tensor, device: str) -> Fields:
    """Expand one row of values for each turn into every other field, on the device."""
    total = ids.shape[0]
    arrays = table.lengths, table.pieces[::2].copy(), table.versions[1::2], table.returns[1::2]
    lengths, given, versions, returns = (_sent(array, device) for array in arrays)
    cu_seqlens = _sent(table.cu_seqlens, device)
    sequence = torch.repeat_interleave(lengths, output_size=total)
    positions = torch.arange(total, device=device) - cu_seqlens[:-1][sequence]
    loss_mask = positions >= given[sequence]
    sequence_ids = sequence.int()
    return Fields(
        ids.long(),
        positions,
        sequence_ids,
        torch.where(loss_mask, sequence_ids, -1),
        ~loss_mask,
        loss_mask,
        logprobs,
        torch.where(loss_mask, versions[sequence], -1),
        torch.where(loss_mask, returns[sequence], 0.0),
        cu_seqlens,
    )


def _sent(array: np.ndarray, device: str) -> torch.Tensor:
    pinned = _pinned(array.shape, torch.from_numpy(array[:0]).dtype, device)
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)


def _pinned(shape, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return memory of torch's cache of pinned memory, or plain memory without a CUDA device."""
    return torch.empty(shape, dtype=dtype, pin_memory=device != "cpu")


RIVALS = {
    "numpy.concatenate, then a copy": by_concatenation,
    "torch.cat per field, then copies": by_cat_then_copies,
    "pad, then mask": by_padding,
    "torch.nested jagged": by_nested,
}
