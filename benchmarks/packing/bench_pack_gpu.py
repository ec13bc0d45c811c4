"""Packing to a GPU: trajectories in, all ten fields on the device out.

``make bench-gpu`` runs it on a machine with a CUDA device. Beside ours, which checks, stores,
copies once and launches twice, the usual ways; every result is compared with the host's.
"""

import functools

import pytest

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.device_contest import hold_on_device
from benchmarks.packing.bench_sizes import sent_bytes, sized
from benchmarks.packing.device_job import RIVALS, by_concatenation
from benchmarks.packing.resident_turns import on_device
from benchmarks.packing.whole_job import WROTE, Fields, assert_same_fields, by_numpy
from benchmarks.promises import PACK_ONLY
from benchmarks.workloads import WORKLOADS, conversations, filled
from trajpack import TrajectoryBuffer, pack_resident

pytestmark = pytest.mark.gpu
JOB = "pack to the device"
SIZES_JOB = "cost against size"
RESIDENT = f"{OURS}, turns on the device"
SIZES = [2**power for power in range(10, 27)]


def end_to_end(trajectories, device):
    buffer = TrajectoryBuffer(device=device)

    def work():
        buffer.clear()
        buffer.extend(trajectories)
        return buffer.pack(layout="turns")

    return Contender(OURS, work, WROTE, on_host=True)


def pack_only(trajectories, device, layout="turns"):
    buffer = filled(trajectories, device)

    def refill():
        buffer.clear()
        buffer.extend(trajectories)

    return Contender(PACK_ONLY, functools.partial(buffer.pack, layout), WROTE, release=refill)


def resident(trajectories, device):
    """Return packing of turns whose tensors are on the device before."""
    given = on_device(trajectories, device)
    work = functools.partial(pack_resident, given, layout="turns")
    return Contender(RESIDENT, work, WROTE, on_host=True)


def check_against(expected):
    def check(got):
        moved = {name: getattr(got, name).cpu() for name in Fields._fields}
        assert_same_fields(Fields(**moved), expected)

    return check


def contest(job, workload, trajectories, ways, device):
    """Return what `hold_on_device` takes, but for ``sent``."""
    expected = by_numpy(trajectories)
    tokens = len(expected.input_ids)
    entrants = [end_to_end(trajectories, device), pack_only(trajectories, device)]
    if job == JOB:
        entrants.append(resident(trajectories, device))
    entrants += [
        Contender(name, functools.partial(way, trajectories, device), WROTE, on_host=True)
        for name, way in ways.items()
    ]
    contest = Contest(job, workload, tokens, check_against(expected))
    return contest, entrants, (0, sent_bytes(trajectories)), device


@pytest.mark.parametrize("workload", WORKLOADS)
def bench_pack_on_the_device(keep, size, workload):
    given = conversations(workload, size.scale)
    keep(hold_on_device(*contest(JOB, workload, given, RIVALS, size.device), sent=True))


@pytest.mark.parametrize("tokens", SIZES)
def bench_size_on_the_device(keep, size, tokens):
    ways, given = {"numpy.concatenate, then a copy": by_concatenation}, sized(size.scaled(tokens))
    keep(hold_on_device(*contest(SIZES_JOB, f"{tokens:,}", given, ways, size.device), sent=True))
