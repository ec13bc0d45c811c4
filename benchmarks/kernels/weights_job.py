"""Importance weights of tokens and of segments, and weights of a loss: by one pass, and by torch.

The tokens of a loss are counted first, and so read twice.
"""

from __future__ import annotations

import torch

from benchmarks.contest import OURS, Contender, Contest
from trajpack.kernels.corrections.importance_weights import Correction, importance_weights
from trajpack.kernels.corrections.loss_weights import loss_weights
from trajpack.testing import boundaries

IMPORTANCE, LOSS = "importance weights of tokens", "loss weights of sequences"
TUNED = {"tunes_threads": True}


def close_to(expected):
    def check(got):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-6)

    return check


def importance_contest(workload, lengths, device="cpu", **options):
    """Return the contest of truncated importance sampling, nine tokens of ten generated."""
    generator, tokens = torch.Generator().manual_seed(16), int(lengths.sum())
    old = -torch.rand(tokens, generator=generator)
    given = old + 0.2 * torch.randn(tokens, generator=generator), old
    mask = torch.rand(tokens, generator=generator) < 0.9
    rule = Correction.tis(2.0)
    expected = importance_weights(*given, mask, rule, impl="torch")[0]
    inputs = [one.to(device) for one in (*given, mask)]

    def by_torch():
        return importance_weights(*inputs, rule, impl="torch")[0]

    entrants = [
        Contender(OURS, lambda: importance_weights(*inputs, rule)[0], "weights and metrics"),
        Contender("torch operations", by_torch, "weights and metrics", **TUNED),
    ]
    return Contest(IMPORTANCE, workload, tokens, close_to(expected), **options), entrants


def loss_contest(workload, lengths, device="cpu", **options):
    """Return the contest of the mean over sequences of means over tokens."""
    tokens, num = int(lengths.sum()), len(lengths)
    ids = torch.repeat_interleave(boundaries(lengths).diff(), output_size=tokens).int()
    mask = torch.rand(tokens, generator=torch.Generator().manual_seed(17)) < 0.9
    name = "sequence_mean_token_mean"
    expected = loss_weights(name, mask, ids, num_sequences=num, impl="torch")
    mask, ids = mask.to(device), ids.to(device)

    def by_torch():
        return loss_weights(name, mask, ids, num_sequences=num, impl="torch")

    entrants = [
        Contender(OURS, lambda: loss_weights(name, mask, ids, num_sequences=num), "weights"),
        Contender("torch operations", by_torch, "weights", **TUNED),
    ]
    return Contest(LOSS, workload, tokens, close_to(expected), **options), entrants
