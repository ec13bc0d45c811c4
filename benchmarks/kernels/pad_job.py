"""Packed to padded and back, float32: the same job done other ways.

Masks are made from the boundaries beforehand and not timed, and so are the views that
`torch.split` makes for `pad_sequence`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.rivals import contender
from trajpack.kernels.rearrange.pad import pad, unpad
from trajpack.testing import assert_same_bits, boundaries

PAD = "pad, packed to padded"
UNPAD = "unpad, padded to packed"
TUNED = {"tunes_threads": True}


def inputs(lengths, device="cpu"):
    """Return packed values, boundaries and the mask of what a padded row holds."""
    generator = torch.Generator().manual_seed(7)
    packed = torch.randn(int(lengths.sum()), generator=generator).to(device)
    cu_seqlens = boundaries(lengths).to(device)
    mask = torch.arange(int(lengths.max()), device=device) < cu_seqlens.diff()[:, None]
    return packed, cu_seqlens, mask


def reference(packed, cu_seqlens, longest):
    """Copy each sequence to its row."""
    bounds = cu_seqlens.tolist()
    padded = torch.zeros(len(bounds) - 1, longest, device=packed.device)
    for row, (begin, end) in enumerate(pairwise(bounds)):
        padded[row, : end - begin] = packed[begin:end]
    return padded


def fbgemm(name, make, wrote):
    """Return a contender of fbgemm's operators, which loading the package registers."""
    return contender("fbgemm_gpu", name, lambda module: make(torch.ops.fbgemm), wrote, **TUNED)


def pad_contest(workload, lengths, device="cpu", **options):
    """Return the contest of packed to padded and who takes part, ours first."""
    packed, cu_seqlens, mask = inputs(lengths, device)
    rows, longest = mask.shape
    expected = reference(packed, cu_seqlens, longest)
    pieces, column = packed.split(lengths.tolist()), packed[:, None]
    offsets, wrote = cu_seqlens.long(), "padded"

    def masked():
        padded = packed.new_zeros(rows, longest)
        padded[mask] = packed
        return padded

    def by_fbgemm(ops):
        return lambda: ops.jagged_1d_to_dense(packed, offsets, longest, 0)

    def by_aten():
        dense = torch.ops.aten._jagged_to_padded_dense_forward(column, [offsets], [longest], 0.0)
        return dense[..., 0]

    entrants = [
        Contender(OURS, lambda: pad(packed, cu_seqlens, longest), wrote),
        Contender("pad_sequence", lambda: pad_sequence(pieces, batch_first=True), wrote, **TUNED),
        Contender("boolean mask", masked, wrote, **TUNED),
        Contender("aten jagged", by_aten, wrote, **TUNED),
        fbgemm("fbgemm jagged", by_fbgemm, wrote),
    ]

    def check(padded):
        assert_same_bits(padded, expected)

    return Contest(PAD, workload, len(packed), check, **options), entrants


def unpad_contest(workload, lengths, device="cpu", **options):
    """Return the contest of padded to packed and who takes part, ours first."""
    packed, cu_seqlens, mask = inputs(lengths, device)
    padded = reference(packed, cu_seqlens, mask.shape[1])
    tokens, offsets, wrote = len(packed), cu_seqlens.long(), "packed"
    deep = padded[..., None]

    def by_fbgemm(ops):
        return lambda: ops.dense_to_jagged(deep, [offsets], tokens)[0][:, 0]

    def by_aten():
        aten = torch.ops.aten._padded_dense_to_jagged_forward
        return aten(deep, [offsets], tokens)[:, 0]

    entrants = [
        Contender(OURS, lambda: unpad(padded, cu_seqlens, tokens), wrote),
        Contender("boolean mask", lambda: padded[mask], wrote, **TUNED),
        Contender("aten jagged", by_aten, wrote, **TUNED),
        fbgemm("fbgemm jagged", by_fbgemm, wrote),
    ]

    def check(got):
        assert_same_bits(got, packed)

    return Contest(UNPAD, workload, tokens, check, **options), entrants
