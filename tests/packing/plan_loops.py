"""The rules of plans as plain loops over sequences, and lengths as they come in training."""

import numpy as np


def next_fit(lengths, capacity, max_sequences=None):
    """Return bins as lists of sequences."""
    bins, room = [], 0
    for sequence, length in enumerate(lengths):
        if not bins or length > room or len(bins[-1]) == max_sequences:
            bins.append([])
            room = capacity
        bins[-1].append(sequence)
        room -= length
    return bins


def fit_decreasing(lengths, capacity, *, best, max_sequences=None):
    """Return bins: longest first, each into the first bin with room or into the fullest."""
    bins, rooms = [], []
    for sequence in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        fitting = [
            (room if best else 0, number)
            for number, room in enumerate(rooms)
            if room >= lengths[sequence] and len(bins[number]) != max_sequences
        ]
        number = min(fitting)[1] if fitting else len(bins)
        if not fitting:
            bins.append([])
            rooms.append(capacity)
        bins[number].append(sequence)
        rooms[number] -= lengths[sequence]
    return [sorted(held) for held in bins]


def longest_processing_time(lengths, costs, num_bins, capacity):
    """Return bins: most costly first, each into the cheapest bin with room; None if none has."""
    bins, rooms, loads = [[] for _ in range(num_bins)], [capacity] * num_bins, [0] * num_bins
    for sequence in sorted(range(len(lengths)), key=lambda one: -costs[one]):
        fitting = [number for number in range(num_bins) if rooms[number] >= lengths[sequence]]
        if not fitting:
            return None
        number = min(fitting, key=lambda one: (loads[one], one))
        bins[number].append(sequence)
        rooms[number] -= lengths[sequence]
        loads[number] += costs[sequence]
    return [sorted(held) for held in bins]


def karmarkar_karp(costs, num_bins):
    """Return the loads, ascending, of Karmarkar and Karp's method with full rows and a search."""
    rows = [[0] * (num_bins - 1) + [cost] for cost in costs]
    while len(rows) > 1:
        rows.sort(key=lambda row: row[0] - row[-1])
        left, right = rows[0], rows[1]
        joined = [one + other for one, other in zip(left, reversed(right), strict=True)]
        rows = [*rows[2:], sorted(joined)]
    return rows[0]


def power_law(generator, count):
    """Many short answers and few very long ones: density as length to the power -2."""
    return np.minimum(200 / generator.random(count), 32_768).astype(np.int64), 32_768


def bimodal(generator, count):
    """Answers of a few hundred tokens, and long chains of thought."""
    long = generator.random(count) < 0.3
    drawn = np.where(long, generator.normal(8000, 2000, count), generator.normal(400, 100, count))
    return drawn.clip(16, 32_768).astype(np.int64), 32_768


def chat(generator, count):
    """Conversations."""
    return generator.lognormal(6.5, 1.0, count).clip(8, 16_384).astype(np.int64), 16_384


def code(generator, count):
    """Repositories in the context: many sequences of a good part of the capacity."""
    return generator.lognormal(8.2, 0.9, count).clip(64, 32_768).astype(np.int64), 32_768


def turns(generator, count):
    """Trajectories of many turns, in multiples of 128."""
    drawn = generator.geometric(0.15, count) * generator.integers(200, 900, count)
    return (-(-drawn.clip(1, 16_384) // 128) * 128).astype(np.int64), 16_384


MIXES = {each.__name__: each for each in (power_law, bimodal, chat, code, turns)}
