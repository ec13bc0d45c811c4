"""Reference planners as plain loops, laws of plans, and lengths as they occur in training."""

from typing import get_args

import numpy as np

from trajpack.packing.plan.units import Algorithm


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


def best_fit_decreasing(lengths, capacity, max_sequences=None):
    """Return bins: longest first, each into the fullest bin with room."""
    bins, rooms = [], []
    for sequence in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        fitting = [
            (room, number)
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


def karmarkar_karp(costs, num_bins, width=1):
    """Return bins of Karmarkar and Karp's method with full rows and a search.

    A row begins with ``width`` sequences of about equal cost, each in a part of its own: as many
    as there are bins, so that bins end with equally many (verl's ``equal_size``), or one.
    """
    ranked = sorted(range(len(costs)), key=lambda one: (costs[one], one))
    rows = []
    for begin in range(0, len(costs), width):
        parts = [[one] for one in ranked[begin : begin + width]]
        rows.append([[]] * (num_bins - len(parts)) + parts)

    def spread(row):
        totals = [sum(costs[one] for one in part) for part in row]
        return max(totals) - min(totals)

    while len(rows) > 1:
        rows.sort(key=spread, reverse=True)
        left, right, *others = rows
        joined = [one + other for one, other in zip(left, reversed(right), strict=True)]
        rows = [sorted(joined, key=lambda part: sum(costs[one] for one in part)), *others]
    return [sorted(part) for part in rows[0]]


def dynamic_groups(lengths, num_ranks, capacity):
    """Return the sequences of each rank, micro-batch after micro-batch, of dynamic CP.

    The method of Megatron-Core's scheduler that verl calls, for a power of two of ranks: longest
    first, each into the group, old or new, where the most costly rank then costs least, up to 1.05
    times a full rank's cost; then the first of the narrowest groups becomes wider.
    """
    rest, slots = sorted(range(len(lengths)), key=lambda one: -lengths[one]), []
    while rest:
        groups, left = _dynamic_slot(rest, lengths, num_ranks, capacity)
        missing = num_ranks - sum(width for width, _ in groups)
        while missing:
            narrow = min(groups, key=lambda group: group[0])
            if narrow[0] > missing:  # no group has room to double: all ranks are one group
                groups, left = [[num_ranks, []]], []
                for one in rest:
                    total = sum(lengths[other] for other in groups[0][1]) + lengths[one]
                    (groups[0][1] if total <= capacity * num_ranks else left).append(one)
                break
            missing -= narrow[0]
            narrow[0] *= 2
        slots.append([held for width, held in groups for _ in range(width)])
        rest = left
    return slots


def _dynamic_slot(rest, lengths, num_ranks, capacity):
    """Return groups, ``[width, sequences]``, of one micro-batch, and the sequences left over."""
    most = 1.05 * lengths[rest[0]] * capacity
    groups, left = [], []
    for one in rest:
        choices = []
        costs = [sum(lengths[n] ** 2 for n in held) / width for width, held in groups]
        free = num_ranks - sum(width for width, _ in groups)
        for width in (1 << power for power in range(num_ranks.bit_length())):
            new = [[width, []]] if width <= free else []
            for group in [*(group for group in groups if group[0] == width), *new]:
                if sum(lengths[n] for n in [*group[1], one]) > capacity * width:
                    continue
                own = sum(lengths[n] ** 2 for n in [*group[1], one]) / width
                time = max(*costs, own) if groups else width
                if time <= most or not groups:
                    choices.append((time, len(choices), group))
        if not choices:
            left.append(one)
            continue
        group = min(choices)[2]
        if not group[1]:
            groups.append(group)
        group[1].append(one)
    return groups, left


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


PACKING = {"next_fit": next_fit, "best_fit_decreasing": best_fit_decreasing}


EVERY = list(get_args(Algorithm))


def held_by(plan):
    return [sequences.tolist() for sequences in plan]


def check_laws(plan, lengths, capacity, **asked):
    align = asked.get("align", 1)
    taken = -(-np.asarray(lengths, np.int64) // align) * align
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert all(np.all(np.diff(sequences) > 0) for sequences in plan)
    assert plan.loads.tolist() == [int(taken[held].sum()) for held in plan]
    assert len(plan) % asked.get("multiple_of", 1) == 0
    assert len(plan) >= max(asked.get("min_bins", 1), plan.lower_bound)
    assert plan.loads.max(initial=0) <= capacity
    most = asked.get("max_sequences")
    assert most is None or max(map(len, plan), default=0) <= most
    labels = asked.get("keep_together")
    if labels is not None:
        bin_of = {one: number for number, held in enumerate(held_by(plan)) for one in held}
        where = {}
        for sequence, label in enumerate(labels):
            where.setdefault(label, set()).add(bin_of[sequence])
        assert all(len(bins) == 1 for bins in where.values())
    units = len(lengths) if labels is None else len(where)
    assert len(plan) > units or not (np.diff(plan.cu_bins) == 0).any()
