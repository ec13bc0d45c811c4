"""The jobs of planning: few micro-batches, or even ones, from lengths alone."""

from __future__ import annotations

import numpy as np

from benchmarks import rivals
from benchmarks.contest import OURS, Contender, Contest
from benchmarks.packing import plan_loops
from trajpack.packing.plan.plan import plan_micro_batches
from trajpack.packing.plan.statistics import lower_bound

FEWEST, EVEN = "plan few micro-batches", "plan 64 even ones"
SIZES = (1000, 10_000, 100_000)
NUM_EVEN = 64
CAPACITY = 32_768
QUADRATIC = 10_000
"""Rivals that take time by the square of their input run up to so many lengths."""
TOO_LONG = "takes time by lengths times micro-batches"


def power_law(count):
    """Density as length to the power -2, from 200 to 32,768 tokens."""
    drawn = 200 / np.random.default_rng(4).random(count)
    return np.minimum(drawn, CAPACITY).astype(np.int64)


def code(count):
    """Repositories in the context: sequences of a good part of the capacity, few alike."""
    drawn = np.random.default_rng(5).lognormal(8.2, 0.9, count)
    return drawn.clip(64, CAPACITY).astype(np.int64)


MIXES = {"power law": power_law, "code": code}


def as_bins(found):
    """Return sequences and where each micro-batch begins, of a plan or of any rival's bins."""
    if hasattr(found, "order"):
        return found.order, found.cu_bins
    bins = [list(held) for held in found]  # some are dictionaries
    return np.concatenate(bins), np.concatenate([[0], np.cumsum([len(held) for held in bins])])


def loads_of(found, lengths):
    """Return the tokens of each micro-batch, if each sequence is in one.

    Raises:
        AssertionError: If it is not.
    """
    order, begins = as_bins(found)
    assert np.array_equal(np.sort(order), np.arange(len(lengths))), "each sequence once"
    return np.diff(np.concatenate([[0], np.cumsum(lengths[order])])[begins])


def _contenders(ways, check, count):
    """Return the contenders of ``(name, work, quadratic)``; each has its result noted by name."""
    listed = []
    for name, work, quadratic in ways:
        left_out = quadratic and count > QUADRATIC
        listed.append(
            Contender(
                name, None if left_out or work is None else work, "", check=check(name),
                missing=TOO_LONG if left_out else "",
            )
        )  # fmt: skip
    return listed


def fewest_contest(mix, count, noted, **options):
    """Return the contest of packing; ``noted`` gets each contender's micro-batches."""
    lengths = MIXES[mix](count)
    given, fewest = lengths.tolist(), lower_bound(lengths, CAPACITY)

    def check(name):
        def passes(found):
            loads = loads_of(found, lengths)
            assert loads.max() <= CAPACITY, "over the capacity"
            assert len(loads) <= (1.005 if name.startswith(OURS) else 1.5) * fewest + 1
            noted[name] = f"{len(loads):,}"

        return passes

    def ours(algorithm):
        return lambda: plan_micro_batches(given, CAPACITY, algorithm=algorithm)

    ways = [
        (OURS, ours("best_fit_decreasing"), False),
        (f"{OURS}, first fit decreasing", ours("first_fit_decreasing"), False),
        (
            "best fit by a tree over rooms, as TRL's",
            lambda: plan_loops.best_fit_by_tree(given, CAPACITY),
            False,
        ),
        (
            "first fit by a scan, as prime-rl's",
            lambda: plan_loops.first_fit_by_scan(given, CAPACITY),
            True,
        ),
        (
            "fewest sequences first, as AReaL's",
            lambda: plan_loops.fewest_held_by_scan(given, CAPACITY),
            True,
        ),
    ]
    entrants = _contenders(ways, check, count)
    weights = dict(enumerate(given))
    entrants.append(
        _binpacking(
            lambda module: lambda: module.to_constant_volume(weights, CAPACITY), check, count
        )
    )
    contest = Contest(f"{FEWEST}, {mix}", f"{count:,}", int(lengths.sum()), check(""), **options)
    return contest, entrants


def even_contest(mix, count, noted, **options):
    """Return the contest of balance; ``noted`` gets the largest load over the mean."""
    lengths = MIXES[mix](count)
    given = lengths.tolist()

    def check(name):
        def passes(found):
            loads = loads_of(found, lengths)
            assert len(loads) == NUM_EVEN
            uneven = loads.max() / loads.mean()
            # longest first is within a third of the best (Graham), which holds the longest
            assert uneven < 4 / 3 * max(1.0, NUM_EVEN * lengths.max() / lengths.sum())
            noted[name] = f"{uneven:.5f}"

        return passes

    def ours(algorithm):
        capacity, asked = int(lengths.sum()), {"algorithm": algorithm, "min_bins": NUM_EVEN}
        return lambda: plan_micro_batches(given, capacity, **asked)

    ways = [
        (OURS, ours("longest_processing_time"), False),
        (f"{OURS}, Karmarkar and Karp", ours("karmarkar_karp"), False),
        (
            "longest first by a heap, as SkyRL's",
            lambda: plan_loops.longest_first_by_heap(given, NUM_EVEN),
            False,
        ),
        (
            "Karmarkar and Karp, all parts, as verl's",
            lambda: plan_loops.differencing_by_rows(given, NUM_EVEN),
            True,
        ),
    ]
    entrants = _contenders(ways, check, count)
    weights = dict(enumerate(given))
    entrants.append(
        _binpacking(
            lambda module: lambda: module.to_constant_bin_number(weights, NUM_EVEN), check, count
        )
    )
    contest = Contest(f"{EVEN}, {mix}", f"{count:,}", int(lengths.sum()), check(""), **options)
    return contest, entrants


def _binpacking(make, check, count):
    name = "binpacking"
    if count > QUADRATIC:
        return Contender(name, None, "", missing=TOO_LONG)
    return rivals.contender(name, name, make, "", check=check(name))
