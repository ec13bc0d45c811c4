"""Names of rows, which formats without trajectories know them by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows.rows import row_trajectories


def row_groups(batch: PackedBatch) -> list[str]:
    """Return for each sequence the group of its trajectory, or its id if it has none.

    A trajectory without a group is one of its own: where its id is that of another, or another's
    group, its place in the batch stands behind the id, for no trainer to compare the two.

    Cost: that of `row_trajectories`.
    """
    names = [
        name if group is None else group
        for name, group in zip(batch.ids, batch.groups, strict=True)
    ]
    taken = Counter(names)
    for trajectory, group in enumerate(batch.groups):
        if group is None and taken[batch.ids[trajectory]] > 1:
            names[trajectory] = f"{batch.ids[trajectory]}#{trajectory}"
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


def given_groups(op: str, groups: Iterable[str] | None, num_rows: int) -> list[str | None]:
    """Return the groups of rows: those given, or none.

    Raises:
        ValueError: If not every row is given one.
    """
    if groups is None:
        return [None] * num_rows
    given: list[str | None] = list(groups)
    if len(given) != num_rows:
        raise ValueError(f"{op}: groups must be {num_rows}, one a row, got {len(given)}")
    return given


def check_field_names(op: str, batch: PackedBatch, taken: Iterable[str]) -> None:
    """Raise a `ValueError` where an extra field would stand in the place of a key of a format."""
    repeated = sorted(set(taken) & set(batch.fields))
    if repeated:
        raise ValueError(f"{op}: extra fields must not be named as other keys, got {repeated}")
