"""Contests on a device: each result checked, then measured every way there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.contest import Contender, Contest, Entry, as_record, check_once, guarded
from benchmarks.timing import copy_of, measure, sending

COPY = "copy of as many bytes"
SENT = "copy to the device"
Record = dict[str, Any]


def hold_on_device(
    contest: Contest,
    contenders: Sequence[Contender],
    num_bytes: int,
    device: str = "cuda",
    *,
    sent: bool = False,
    writes: int = 1,
) -> Record:
    """Return the record of a contest: what each contender costs, and its share of a copy.

    Args:
        contest: The job and the check of its result.
        contenders: Ours first.
        num_bytes: Bytes that the job must read and write on the device, or, if ``sent``, bring
            there. ``of_copy`` is the time of a copy that moves as many, measured here, over the
            contender's.
        device: ``"cuda"``; on ``"cpu"`` only wall time is measured.
        sent: Whether the copy is one from pinned memory to the device.
        writes: Bytes that the copy on the device writes for each byte that it reads.

    Raises:
        AssertionError: If the result of one of ours differs from the reference.
    """
    copy, check_copy = sending(num_bytes, device) if sent else copy_of(num_bytes, device, writes)
    limit = Contender(SENT if sent else COPY, copy, f"{num_bytes:,} bytes", check_copy)
    everyone = [*contenders, limit]
    entries = [Entry(contender.name, contender.wrote) for contender in everyone]
    measured: list[Record] = []
    for contender, entry in zip(everyone, entries, strict=True):
        found: Record = {}
        if check_once(contest, contender, entry):
            entry.seconds = []
            guarded(contender, entry, _nothing, _measure_into, found, contender, device)
        measured.append(found)
        if found:
            # what the host does first is not in the time of the device
            compared = found["wall_ms"] if contenders[0].on_host else _on_device(found)
            entry.seconds = [1e-3 * compared]
    record = as_record(contest, entries)
    limit_ms = _on_device(measured[-1]) if measured[-1] else None
    for row, found in zip(record["entries"], measured, strict=True):
        row.update({name: _rounded(value) for name, value in found.items()})
        if found and limit_ms is not None:
            row["of_copy"] = _rounded(limit_ms / _on_device(found))
    return record | {"device": device, "bytes": num_bytes, "sent": sent, "writes": writes}


def _measure_into(found: Record, contender: Contender, device: str) -> None:
    found.update(measure(contender, device))


def _nothing() -> None:
    """Do nothing: a release that is not needed."""


def _on_device(found: Record) -> float:
    """Return the cold GPU time where there is one, and wall time elsewhere."""
    milliseconds: float = found.get("cold_ms") or found["wall_ms"]
    return milliseconds


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value
