"""What is promised of packing, job by job, each beside its anchor in one run.

Anchors are fast ways by hand: arrays that are listed and concatenated per field, lists of three
fields, SkyRL's own vectorised rows, and safetensors of all fields, which is synchronised with the
disk as ours is. Files take wall time, other jobs processor time of one thread, which a busy machine
changes least.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from benchmarks.contest import OURS, Contender, Contest, processor_clock
from benchmarks.packing.bench_pack import check_three, end_to_end, inputs
from benchmarks.packing.whole_job import (
    WROTE,
    assert_equal,
    assert_same_fields,
    by_numpy,
    three_fields_by_lists,
)
from benchmarks.promises import (
    BY_NUMPY,
    BY_THREE,
    IN_SAFETENSORS,
    LOADED,
    OF_LISTS,
    OF_SKYRL,
    ROWS,
    SAVED,
    WHOLE,
)
from benchmarks.rivals import peer_module
from benchmarks.workloads import WORKLOADS, conversations
from trajpack import Trajectory, Turn, load, pack, save
from trajpack.packing.adapters import skyrl, verl
from trajpack.testing import assert_batches_equal

QUARTER = 0.25
NUM_ROWS = 1024
SECONDS = 3.0
"""Share of each contender: several rounds, also on a busy machine."""


def from_arrays(workload, scale=1.0):
    trajectories, _, expected = inputs(workload, scale)
    return Contest(
        WHOLE, workload, len(expected.input_ids), _same(expected), clock=processor_clock
    ), [
        Contender(OURS, end_to_end(trajectories), WROTE),
        Contender(BY_NUMPY, lambda: by_numpy(trajectories), WROTE),
    ]


def from_lists(workload, scale=1.0):
    _, lists, expected = inputs(workload, scale)
    return Contest(
        OF_LISTS, workload, len(expected.input_ids), _same(expected), clock=processor_clock
    ), [
        Contender(OURS, end_to_end(lists), WROTE),
        Contender(
            BY_THREE, lambda: three_fields_by_lists(lists), "3 fields", check_three(expected)
        ),
    ]


def rows_of(trainer, scale=1.0):
    """Rows of responses of 100 to 4,000 tokens, as an engine's JSON holds them."""
    rng = np.random.default_rng(0)
    count = max(1, round(NUM_ROWS * scale))
    sizes = zip(rng.integers(100, 400, count), rng.integers(100, 4000, count), strict=True)
    columns = [
        (
            rng.integers(0, 1000, prompt).tolist(),
            rng.integers(0, 1000, response).tolist(),
            (-rng.random(response)).astype(np.float32).tolist(),
        )
        for prompt, response in sizes
    ]
    prompts, responses, logprobs = map(list, zip(*columns, strict=True))
    trajectories = [Trajectory(str(i), [Turn(*row, reward=1.0)]) for i, row in enumerate(columns)]
    to_rows = {"SkyRL": skyrl.to_training_input, "verl": verl.to_data_proto_dict}[trainer]
    module, why = peer_module("skyrl", "skyrl.train.dataset.preprocess")

    def collated():
        rewards = [[0.0] * (len(one) - 1) + [1.0] for one in responses]
        masks = [[1] * len(one) for one in responses]
        collate = module.convert_prompts_responses_to_batch_tensors
        return collate(0, prompts, responses, rewards, masks, logprobs)

    def check(found):
        tokens = found.get("sequences", found.get("tensors", {}).get("input_ids"))
        assert int((tokens != 0).sum()) == sum(
            sum(map(bool, part)) for row in columns for part in row[:2]
        )

    def check_collated(found):
        mine = skyrl.to_training_input(pack(trajectories, device="cpu"))
        assert_equal(found[0], mine["sequences"], "sequences")
        assert_equal(found[5], mine["rollout_logprobs"], "logprobs")

    tokens = sum(len(row[0]) + len(row[1]) for row in columns)
    return Contest(ROWS, trainer, tokens, check, clock=processor_clock, seconds=SECONDS), [
        Contender(OURS, lambda: to_rows(pack(trajectories, device="cpu")), "all rows"),
        Contender(OF_SKYRL, module and collated, "SkyRL's rows", check_collated, missing=why),
    ]


def of_files(job, workload, folder, scale=1.0):
    batch = pack(conversations(workload, QUARTER * scale), "merged", "cpu")
    mine, theirs = Path(folder) / "ours.safetensors", Path(folder) / "all.safetensors"

    def written():
        safetensors.torch.save_file(batch.tensors(), theirs)
        descriptor = os.open(theirs, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        return theirs

    def read():
        tensors = safetensors.torch.load_file(theirs)
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def saved():
        save(batch, mine)
        return mine

    def check_bytes(place):
        if place == mine:
            assert place.stat().st_size <= 12 * batch.num_tokens
            assert_batches_equal(load(place), batch)

    def check_read(found):
        tensors = found if isinstance(found, dict) else found.tensors()
        for name, tensor in batch.tensors().items():
            assert_equal(tensors[name], tensor, name)

    saved()
    written()
    works = (saved, written) if job == SAVED else (lambda: load(mine), read)
    check = check_bytes if job == SAVED else check_read
    size = {place: place.stat().st_size / batch.num_tokens for place in (mine, theirs)}
    return Contest(job, workload, batch.num_tokens, check, seconds=SECONDS), [
        Contender(OURS, works[0], f"{size[mine]:.1f} bytes a token"),
        Contender(IN_SAFETENSORS, works[1], f"{size[theirs]:.1f} bytes a token"),
    ]


def _same(expected):
    return lambda found: assert_same_fields(found, expected)


@pytest.mark.parametrize("workload", WORKLOADS)
def bench_from_arrays(hold, workload):
    hold(*from_arrays(workload))


@pytest.mark.parametrize("workload", WORKLOADS)
def bench_from_lists(hold, workload):
    hold(*from_lists(workload))


@pytest.mark.parametrize("trainer", ["SkyRL", "verl"])
def bench_rows(hold, trainer):
    hold(*rows_of(trainer))


@pytest.mark.parametrize("job", [SAVED, LOADED])
@pytest.mark.parametrize("workload", WORKLOADS)
def bench_files(hold, job, workload, tmp_path):
    hold(*of_files(job, workload, tmp_path))
