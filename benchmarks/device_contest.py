"""Contests on a device: each result checked, then measured every way there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.contest import Contender, Contest, Entry, as_record, check_once
from benchmarks.timing import copy_of, measure

COPY = "copy of as many bytes"
Record = dict[str, Any]


def hold_on_device(
    contest: Contest, contenders: Sequence[Contender], num_bytes: int, device: str = "cuda"
) -> Record:
    """Return the record of a contest: what each contender costs, and its share of a copy.

    Args:
        contest: The job and the check of its result.
        contenders: Ours first.
        num_bytes: Bytes that the job must read and write, by which ``of_copy`` is computed: the
            time of a copy that moves as many, measured here, over the contender's.
        device: ``"cuda"``; on ``"cpu"`` only wall time is measured.

    Raises:
        AssertionError: If the result of one of ours differs from the reference.
    """
    copy, check_copy = copy_of(num_bytes, device)
    everyone = [*contenders, Contender(COPY, copy, f"{num_bytes:,} bytes", check_copy)]
    entries = [Entry(contender.name, contender.wrote) for contender in everyone]
    measured: list[dict[str, Any]] = []
    for contender, entry in zip(everyone, entries, strict=True):
        found = measure(contender, device) if check_once(contest, contender, entry) else {}
        measured.append(found)
        if entry.checked:
            # what the host does first is not in the time of the device
            compared = found["wall_ms"] if contenders[0].on_host else _on_device(found)
            entry.seconds = [1e-3 * compared]
    record = as_record(contest, entries)
    limit = _on_device(measured[-1])
    for row, found in zip(record["entries"], measured, strict=True):
        row.update({name: _rounded(value) for name, value in found.items()})
        if found:
            row["of_copy"] = _rounded(limit / _on_device(found))
    return record | {"device": device, "bytes": num_bytes}


def _on_device(found: Record) -> float:
    """Return the cold GPU time where there is one, and wall time elsewhere."""
    milliseconds: float = found.get("cold_ms") or found["wall_ms"]
    return milliseconds


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value
