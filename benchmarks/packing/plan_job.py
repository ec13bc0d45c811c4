"""The jobs of planning: few micro-batches, or even ones, from lengths alone."""

from __future__ import annotations

import functools

import numpy as np

from benchmarks import rivals
from benchmarks.contest import OURS, Contender, Contest
from benchmarks.packing import plan_loops
from trajpack.packing.plan.algorithms import lower_bound
from trajpack.packing.plan.plan import plan_micro_batches

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
    """Return contenders of ``(name, function, arguments, whether its time is quadratic)``."""
    listed = []
    for name, plan, given, quadratic in ways:
        missing = TOO_LONG if quadratic and count > QUADRATIC else ""
        work = None if missing else functools.partial(plan, *given)
        listed.append(Contender(name, work, "", check=check(name), missing=missing))
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

    asked = (given, CAPACITY)
    ways = [
        (OURS, plan_micro_batches, asked, False),
        ("best fit by a tree over rooms, as TRL's", plan_loops.best_fit_by_tree, asked, False),
        ("first fit by a scan, as prime-rl's", plan_loops.first_fit_by_scan, asked, True),
        ("fewest sequences first, as AReaL's", plan_loops.fewest_held_by_scan, asked, True),
    ]
    entrants = _contenders(ways, check, count)
    entrants.append(_binpacking("to_constant_volume", given, CAPACITY, check=check))
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

    ours = functools.partial(plan_micro_batches, algorithm="karmarkar_karp", min_bins=NUM_EVEN)
    whole, asked = (given, int(lengths.sum())), (given, NUM_EVEN)
    by_rows = plan_loops.differencing_by_rows
    ways = [
        (OURS, ours, whole, False),
        ("longest first by a heap, as SkyRL's", plan_loops.longest_first_by_heap, asked, False),
        ("Karmarkar and Karp, all parts, as verl's", by_rows, asked, True),
    ]
    entrants = _contenders(ways, check, count)
    entrants.append(_binpacking("to_constant_bin_number", given, NUM_EVEN, check=check))
    contest = Contest(f"{EVEN}, {mix}", f"{count:,}", int(lengths.sum()), check(""), **options)
    return contest, entrants


def _binpacking(function, given, limit, *, check):
    name, weights = "binpacking", dict(enumerate(given))
    if len(given) > QUADRATIC:
        return Contender(name, None, "", missing=TOO_LONG)

    def make(module):
        return functools.partial(getattr(module, function), weights, limit)

    return rivals.contender(name, name, make, "", check=check(name))
