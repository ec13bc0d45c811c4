"""Names of rows, which formats without trajectories know them by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from trajpack.packing.batch import PackedBatch
from trajpack.packing.rows import row_trajectories


def row_groups(batch: PackedBatch) -> list[str]:
    """Return for each sequence the group of its trajectory, or its id if it has none.

    Cost: that of `row_trajectories`.
    """
    names = [
        name if group is None else group
        for name, group in zip(batch.ids, batch.groups, strict=True)
    ]
    return [names[trajectory] for trajectory in row_trajectories(batch)]


def row_ids(op: str, ids: Iterable[str] | None, groups: Sequence[object]) -> list[str]:
    """Return names for rows: those given, or each row's group and its number in it.

    Raises:
        ValueError: If not every row is given a name.
    """
    if ids is not None:
        given = list(ids)
        if len(given) != len(groups):
            raise ValueError(f"{op}: ids must be {len(groups)}, one a row, got {len(given)}")
        return given
    seen: Counter[object] = Counter()
    names = []
    for group in groups:
        names.append(str(seen[group]) if group is None else f"{group}_{seen[group]}")
        seen[group] += 1
    return names
