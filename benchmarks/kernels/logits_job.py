"""`unpad` of rows as wide as a vocabulary, where a second copy in memory would hurt."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.contest import OURS, Contender, Contest
from trajpack.kernels.rearrange.pad import unpad
from trajpack.testing import boundaries

JOB = "unpad of logits, bfloat16"
VOCABULARY = 151_936
LENGTHS = np.random.default_rng(10).integers(200, 2049, 8)


def logits_contest(lengths=LENGTHS, vocabulary=VOCABULARY, device="cuda"):
    """Return what `hold_on_device` takes; 5 GB of padded logits at full size."""
    shape = len(lengths), int(lengths.max()), vocabulary
    generator = torch.Generator(device).manual_seed(11)
    padded = torch.empty(shape, dtype=torch.bfloat16, device=device)
    padded.normal_(generator=generator)
    cu_seqlens, tokens = boundaries(lengths).to(device), int(lengths.sum())
    mask = torch.arange(shape[1], device=device) < cu_seqlens.diff()[:, None]

    def check(packed):
        begin = 0
        assert packed.shape == (tokens, vocabulary)
        for row, length in enumerate(lengths.tolist()):
            assert torch.equal(packed[begin : begin + length], padded[row, :length])
            begin += length

    def cut():
        return torch.cat([padded[row, :length] for row, length in enumerate(lengths.tolist())])

    wrote = f"{tokens:,} x {vocabulary:,}"
    entrants = [
        Contender(OURS, lambda: unpad(padded, cu_seqlens, tokens), wrote),
        Contender("boolean mask", lambda: padded[mask], wrote),
        Contender("torch.cat of slices, lengths on the host", cut, wrote),
    ]
    workload = f"{len(lengths)} of U(200, 2048)"
    moved = 2 * tokens * vocabulary
    return Contest(JOB, workload, tokens, check), entrants, (moved, moved), device
