"""Generalized advantages of packed tokens, one γ and one λ for all: the same job done other ways.

Each takes float32 rewards and values and int32 boundaries, or the mask of what was generated too,
and returns advantages and returns, float32 ``[tokens]``. What a way derives from boundaries and
mask alone is made beforehand and not timed. The ways are restated from what other systems do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.kernels import gae_ways
from benchmarks.kernels.gae_ways import GAMMA, LAM, Rows
from benchmarks.promises import GAE, GAE_MASKED, ONE_LANE, OVER_COLUMNS
from benchmarks.rivals import contender
from trajpack.kernels.credit.gae import gae
from trajpack.testing import boundaries

WROTE = "advantages, returns"
STRETCH = 128
"""Every third stretch of so many tokens was not generated."""
MOST_COLUMNS = 32_768
TOO_LONG = "not run: on a device it takes a dozen launches for each of its columns"
TUNED = {"tunes_threads": True}


class Given(NamedTuple):
    """What all contenders get."""

    rewards: torch.Tensor
    values: torch.Tensor
    cu_seqlens: torch.Tensor
    generated: torch.Tensor | None
    """None where all were."""


def inputs(lengths, device="cpu", *, masked=False):
    """Return seeded inputs; rewards lie on generated tokens alone, where systems agree."""
    generator = torch.Generator().manual_seed(12)
    tokens, bounds = int(lengths.sum()), boundaries(lengths)
    rewards, values = (torch.randn(tokens, generator=generator) for _ in range(2))
    generated = None
    if masked:
        starts = torch.repeat_interleave(bounds[:-1], bounds.diff(), output_size=tokens)
        generated = (torch.arange(tokens) - starts) // STRETCH % 3 != 0
        rewards *= generated
        generated = generated.to(device)
    return Given(rewards.to(device), values.to(device), bounds.to(device), generated)


def reference(given, lengths):
    """Walk backward over time in float64, all sequences at once; return both, on the host."""
    rewards, values, _, generated = (None if t is None else t.cpu() for t in given)
    rows = Rows(lengths)
    counted = torch.ones_like(rewards) if generated is None else generated
    packed = (rewards.double(), values.double(), counted.double())
    reward, value, mask = (rows.padded(t).T.contiguous().numpy() for t in packed)
    out, mask = reward.copy(), mask.astype(bool)
    later = passed = 0.0 * reward[0]
    for time in range(len(reward) - 1, -1, -1):
        here = mask[time]
        fresh = reward[time] + GAMMA * later - value[time] + GAMMA * LAM * passed
        later = value[time] * here + later * ~here
        passed = fresh * here + passed * ~here
        out[time] = passed
    advantages = rows.packed(torch.from_numpy(out).T) * counted
    return advantages.float(), ((advantages + values.double()) * counted).float()


def check_of(expected, generated):
    """Return the check of what is generated: the systems put out other things elsewhere."""

    def check(result):
        for got, wanted in zip(result, expected, strict=True):
            kept = got if generated is None else torch.where(generated, got, 0.0)
            torch.testing.assert_close(kept.cpu(), wanted, rtol=1e-4, atol=1e-4)

    return check


def check_of_ours(expected):
    """Return the check of ours: zeros too where nothing was generated."""

    def check(result):
        for got, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=1e-6)

    return check


def torchrl_way(given, lengths):
    """Return torchrl's convolution, on one row of time; ``done`` ends a sequence.

    It cuts the filter where a power of γλ falls below 1e-7.
    """
    name, (rewards, values, cu_seqlens, _) = "vec_generalized_advantage_estimate", given
    if gae_ways.is_too_uneven(lengths):
        return Contender(f"torchrl {name}", None, WROTE, missing=gae_ways.TOO_UNEVEN)
    done = gae_ways.last_tokens(cu_seqlens)

    def make(module):
        estimate = getattr(module, name)

        def work():
            later = torch.cat([values[1:], values[:1]])[:, None]
            both = estimate(GAMMA, LAM, values[:, None], later, rewards[:, None], done)
            return tuple(rows[:, 0] for rows in both)

        return work

    return contender("torchrl.objectives.value.functional", f"torchrl {name}", make, WROTE, **TUNED)


def ways_of_rows(given, lengths):
    """Return the ways that pad: by columns, back over time, by chunks."""
    rewards, values, _, generated = given
    device = rewards.device
    too_long = device.type != "cpu" and int(lengths.max()) > MOST_COLUMNS
    columns = None if too_long else gae_ways.over_columns(Rows(lengths, device), given)
    by_columns = Contender(OVER_COLUMNS, columns, WROTE, missing=TOO_LONG, **TUNED)
    if generated is not None:
        lengths = gae_ways.generated_lengths(generated, lengths)
    rows, prefix = Rows(lengths, device), "" if generated is None else "take out, "
    ways = {"pad, then walk back over time": gae_ways.over_time}
    ways |= {f"chunked matmul, {gae_ways.CHUNK} at a time": gae_ways.by_chunks}
    entrants = [by_columns]
    for name, way in ways.items():
        work = gae_ways.taken_out(way(rows), rewards, values, generated)
        entrants.append(Contender(f"{prefix}{name}", work, WROTE, **TUNED))
    return entrants


def contest(workload, lengths, device="cpu", *, masked=False, **options):
    """Return the contest and who takes part in it, ours first."""
    given = inputs(lengths, device, masked=masked)
    rewards, values, cu_seqlens, generated = given
    expected = reference(given, lengths)

    longest = int(lengths.max())

    def ours(longest=longest):
        return gae(
            rewards, values, cu_seqlens, gamma=GAMMA, lam=LAM, loss_mask=generated,
            max_seqlen=longest,
        )  # fmt: skip

    entrants = [Contender(OURS, ours, WROTE, check_of_ours(expected))]
    entrants += ways_of_rows(given, lengths)
    if not masked:
        entrants.append(torchrl_way(given, lengths))
    if device == "cpu":
        entrants.append(Contender("Python loop", gae_ways.by_loop(given), WROTE))
    elif not masked:
        from benchmarks.kernels.gae_one_lane import one_lane  # Triton, where there is a GPU

        entrants.append(Contender(ONE_LANE, lambda: one_lane(*given[:3], GAMMA, LAM), WROTE))
    job, check = GAE_MASKED if masked else GAE, check_of(expected, generated)
    return Contest(job, workload, len(rewards), check, **options), entrants
