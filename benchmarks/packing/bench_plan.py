"""Plans from lengths: ours beside binpacking and the usual loops.

The last column says what a contender made of each size: how many micro-batches, or the largest
load over the mean.
"""

import pytest

from benchmarks.contest import OURS, as_record, race
from benchmarks.packing.plan_job import MIXES, SIZES, even_contest, fewest_contest

SECONDS = 0.1
"""That 100,000 lengths may take on a good machine; see `SLOWER`."""
SLOWER = 5
"""How many times slower a machine may be, and how busy."""


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("make", [fewest_contest, even_contest])
def bench_plans(keep, make, mix):
    records = hold_all(keep, make, mix, SIZES)
    ours = next(one for one in records[-1]["entries"] if one["contender"] == OURS)
    assert ours["best_ms"] < 1e3 * SECONDS * SLOWER


def hold_all(keep, make, mix, sizes, **options):
    """Run the contests of all sizes, and write down what each contender made of each size."""
    records, notes = [], []
    for count in sizes:
        noted = {}
        contest, contenders = make(mix, count, noted, **options)
        records.append(as_record(contest, race(contest, contenders)))
        notes.append(noted)
        keep(records[-1])
    for record in records:
        for entry in record["entries"]:
            name = entry["contender"]
            entry["wrote"] = " / ".join(str(noted.get(name, "-")) for noted in notes)
    return records
