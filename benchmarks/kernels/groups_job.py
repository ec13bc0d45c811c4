"""Statistics of groups, segments and batches: the same jobs done other ways.

Ids of groups and of segments, made from boundaries alone, are made beforehand and not timed.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.workloads import filled, single_turns
from trajpack import GAE, GRPO, TurnGAE
from trajpack.kernels import group_advantages
from trajpack.kernels.reduce.whiten import whiten
from trajpack.kernels.scan.segment_sum import segment_sum
from trajpack.testing import boundaries

GROUPS, SEGMENTS, WHITEN = "grpo of scores", "segment_sum of tokens", "whiten tokens"
GROUP_SIZES = {"512 groups of 16": (512, 16), "8,192 groups of 8": (8192, 8)}
EPS = 1e-6
BATCH = "A: 4,096 of U(50, 4000)"
ESTIMATORS = {
    "GRPO": (GRPO(), False),
    "GAE": (GAE(0.99, 0.95), True),
    "GAE, whitened": (GAE(0.99, 0.95, whiten=True), True),
    "turn-level GAE": (TurnGAE(), True),
}
"""By name, and whether it needs values."""
TUNED = {"tunes_threads": True}


def close_to(expected, atol=1e-4):
    def check(got):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=atol)

    return check


def by_members(scores, ids):
    """Return verl's way: a list for each group, and a step of Python for each member."""

    def work():
        groups, moments, of_members = defaultdict(list), {}, ids.tolist()
        for member, group in enumerate(of_members):
            groups[group].append(scores[member])
        for group, members in groups.items():
            moments[group] = torch.tensor(0.0), torch.tensor(1.0)
            if len(members) > 1:
                stacked = torch.stack(members)
                moments[group] = stacked.mean(), stacked.std()
        advantages = torch.empty_like(scores)
        for member, group in enumerate(of_members):
            mean, std = moments[group]
            advantages[member] = (scores[member] - mean) / (std + EPS)
        return advantages

    return work


def by_adding_at(scores, ids, num_groups):
    """Return a vectorised way: sums by ``index_add``, in two passes."""

    def total(values):
        return torch.zeros(num_groups, device=scores.device).index_add_(0, ids, values)

    def work():
        counts = total(torch.ones_like(scores))
        single = counts <= 1
        mean = torch.where(single, 0.0, total(scores) / counts)
        away = scores - mean[ids]
        std = (total(away * away) / (counts - 1).clamp(min=1)).sqrt()
        return away / (torch.where(single, 1.0, std)[ids] + EPS)

    return work


def groups_contest(workload, shape, device="cpu", **options):
    """Return the contest of GRPO's advantages, rewards of 1 and -1, members in any order."""
    num_groups, size = shape
    generator = np.random.default_rng(13)
    ids = generator.permutation(np.repeat(np.arange(num_groups), size))
    scores = generator.choice([-1.0, 1.0], len(ids))
    rows = scores[np.argsort(ids, kind="stable")].reshape(shape)
    normed = (rows - rows.mean(1, keepdims=True)) / (rows.std(1, ddof=1, keepdims=True) + EPS)
    expected = torch.zeros(len(ids))
    expected[torch.from_numpy(np.argsort(ids, kind="stable"))] = (
        torch.tensor(normed).float().view(-1)
    )
    scores, ids = (torch.from_numpy(each).to(device) for each in (scores.astype(np.float32), ids))
    wrote, vectorised = "advantages", by_adding_at(scores, ids, num_groups)
    entrants = [
        Contender(OURS, lambda: group_advantages(scores, ids, num_groups=num_groups), wrote),
        Contender("index_add, twice", vectorised, wrote, **TUNED),
    ]
    if device == "cpu":  # on a device it waits for each member
        entrants.append(Contender("lists of groups, as verl's", by_members(scores, ids), wrote))
    return Contest(GROUPS, workload, len(ids), close_to(expected), **options), entrants


def batch_contest(name, lengths, device="cpu", **options):
    """Return the contest of an estimator's advantages of a packed batch, groups of eight."""
    trajectories = [replace(one, group=str(i // 8)) for i, one in enumerate(single_turns(lengths))]
    tokens = int(lengths.sum())
    values = torch.randn(tokens, generator=torch.Generator().manual_seed(18))
    estimator, needs_values = ESTIMATORS[name]

    def given(device):
        batch = filled(trajectories, device).pack("turns")
        beside = {"values": values.to(device)} if needs_values else {}
        return functools.partial(batch.with_advantages, estimator, **beside)

    expected = given("cpu")(impl="torch").advantages
    work = given(device)
    entrants = [Contender(OURS, lambda: work().advantages, "advantages, returns")]
    job = f"advantages of a batch, {name}"
    return Contest(job, BATCH, tokens, close_to(expected), **options), entrants


def segments_contest(workload, lengths, device="cpu", **options):
    """Return the contest of sums over segments."""
    tokens, bounds, longest = int(lengths.sum()), boundaries(lengths), int(lengths.max())
    x = torch.randn(tokens, generator=torch.Generator().manual_seed(14))
    expected = torch.from_numpy(np.add.reduceat(x.double().numpy(), bounds[:-1].numpy())).float()
    segment = torch.repeat_interleave(bounds.diff(), output_size=tokens).to(device)
    x, cu_seqlens, offsets = x.to(device), bounds.to(device), bounds.long().to(device)
    num_segments, wrote = len(lengths), "sums"

    def added():
        return torch.zeros(num_segments, device=device).index_add_(0, segment, x)

    def reduced():
        return torch.segment_reduce(x, "sum", offsets=offsets, unsafe=True)

    entrants = [
        Contender(OURS, lambda: segment_sum(x, cu_seqlens, max_seqlen=longest), wrote),
        Contender("torch.segment_reduce", reduced, wrote, **TUNED),
        Contender("index_add", added, wrote, **TUNED),
    ]
    check = close_to(expected, atol=2e-3)  # float32, one after another
    return Contest(SEGMENTS, workload, tokens, check, **options), entrants


def whiten_contest(workload, lengths, device="cpu", **options):
    """Return the contest of whitening, half of the tokens counted."""
    generator = torch.Generator().manual_seed(15)
    tokens = int(lengths.sum())
    x = torch.randn(tokens, generator=generator) * 2 + 1
    mask = torch.rand(tokens, generator=generator) < 0.5
    counted = x[mask].double()
    expected = torch.where(mask, (x - counted.mean()) / counted.std(), 0.0).float()
    x, mask = x.to(device), mask.to(device)

    def masked_whiten():
        """As verl's, of tensors over tokens, put out as 0 where nothing counts."""
        count = mask.sum()
        mean = (x * mask).sum() / (count + 1e-8)
        var = ((x - mean) ** 2 * mask).sum() / (count + 1e-8) * count / (count - 1)
        return (x - mean) * torch.rsqrt(var + 1e-8) * mask

    entrants = [
        Contender(OURS, lambda: whiten(x, mask), "whitened"),
        Contender("masked_whiten, as verl's", masked_whiten, "whitened", **TUNED),
    ]
    return Contest(WHITEN, workload, tokens, close_to(expected), **options), entrants
