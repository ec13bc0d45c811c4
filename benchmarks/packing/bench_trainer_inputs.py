"""The smaller job that collators do: flat ids, labels, positions and boundaries.

The collators are given their own input format, made beforehand and not timed; ours begins at
the trajectories, checks them, packs all ten fields and derives the labels. So ours does more.
"""

import functools
import os
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.packing.bench_pack import end_to_end, pack_only
from benchmarks.packing.whole_job import assert_equal
from benchmarks.rivals import contender, find
from benchmarks.workloads import EVEN_SEQUENCES, MULTI_TURN, as_lists, conversations

FROM_ARRAYS = "ids, labels, positions, boundaries, from arrays"
FROM_LISTS = "ids, labels, positions, boundaries, from lists"
IGNORED = -100
FIELDS = "input_ids, labels, position_ids, cu_seqlens"
TRL_CAPACITY = 32_768
PLANNED = (EVEN_SEQUENCES[1], MULTI_TURN)
"""Workloads on which TRL's packing runs; its data set takes longest to make."""


@functools.lru_cache(maxsize=1)
def inputs(workload, scale=1.0):
    trajectories = conversations(workload, scale)
    return trajectories, as_lists(trajectories), expected_of(trajectories)


def expected_of(trajectories):
    """Return the four tensors, made turn by turn."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    ids = [np.concatenate((turn.prompt_ids, turn.completion_ids)) for turn in turns]
    labels = [row.copy() for row in ids]
    for row, turn in zip(labels, turns, strict=True):
        row[: len(turn.prompt_ids)] = IGNORED
    return {
        "input_ids": torch.from_numpy(np.concatenate(ids)).long(),
        "labels": torch.from_numpy(np.concatenate(labels)).long(),
        "position_ids": torch.from_numpy(np.concatenate([np.arange(len(row)) for row in ids])),
        "cu_seq_lens_q": torch.tensor(np.cumsum([0, *map(len, ids)]), dtype=torch.int32),
    }


def check(batch, expected):
    for name, want in expected.items():
        assert_equal(batch[name].reshape(-1), want, name)


def as_features(trajectories, kind):
    """Return what a collator takes: a dict for each sequence, of lists or arrays."""
    features = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            ids = np.concatenate((turn.prompt_ids, turn.completion_ids)).astype(np.int64)
            labels = ids.copy()
            labels[: len(turn.prompt_ids)] = IGNORED
            row = {"input_ids": ids, "labels": labels}
            features.append(
                row if kind == "arrays" else {name: value.tolist() for name, value in row.items()}
            )
    return features


def with_labels(batch):
    labels = torch.where(batch.loss_mask, batch.input_ids, IGNORED)
    return {
        "input_ids": batch.input_ids,
        "labels": labels,
        "position_ids": batch.position_ids,
        "cu_seq_lens_q": batch.cu_seqlens,
    }


def ours(trajectories):
    wrote = f"{FIELDS}; 7 fields more"
    pack, alone = end_to_end(trajectories), pack_only(trajectories)
    return [
        Contender(OURS, lambda: with_labels(pack()), wrote),
        replace(alone, work=lambda: with_labels(alone.work()), wrote=wrote),
    ]


def flattening(features):
    """Hugging Face's collator; numpy output is its fastest, and torch shares that memory."""

    def make(module):
        collator = module.DataCollatorWithFlattening(return_flash_attn_kwargs=True)

        def work():
            batch = collator(features, return_tensors="np")
            return {
                name: torch.from_numpy(value)
                for name, value in batch.items()
                if isinstance(value, np.ndarray)
            }

        return work

    return contender("transformers", "transformers DataCollatorWithFlattening", make, FIELDS)


def padding_free(features):
    """TRL's padding-free collator: takes arrays (one copy each) as well as lists."""

    def make(module):
        collator = module.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
        return lambda: collator(features)

    name = "trl padding-free collator"
    return contender("trl.trainer.sft_trainer", name, make, f"{FIELDS}, seq_idx")


def packing(trajectories, expected):
    """TRL's packing of a data set by best fit decreasing, and then its collator.

    The data set is in Arrow memory before. What comes out is in another order: it is compared
    sequence by sequence, after both are sorted.
    """
    lengths = expected["cu_seq_lens_q"].diff()
    capacity = max(TRL_CAPACITY, int(lengths.max()))

    def make(module):
        datasets, _ = find("datasets")
        datasets.disable_progress_bars()
        dataset = datasets.Dataset.from_dict(_columns(as_features(trajectories, "arrays")))
        collator = module.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
        options = {"batch_size": None, "keep_in_memory": True, "load_from_cache_file": False}

        def work():
            packed = find("trl")[0].pack_dataset(dataset, capacity, "bfd", map_kwargs=options)
            return collator(list(packed.with_format("numpy")))

        return work

    def check_any_order(batch):
        got = _sequences(batch)
        assert got == _sequences(expected), "the sequences are not those that were given"

    name = "trl pack_dataset (bfd), then its collator"
    wrote = f"{FIELDS}, seq_idx; planned into bins"
    return contender("trl.trainer.sft_trainer", name, make, wrote, check=check_any_order)


def _columns(features):
    return {name: [row[name] for row in features] for name in features[0]}


def _sequences(batch):
    """Return ids, labels and positions of each sequence as bytes, in sorted order."""
    bounds = batch["cu_seq_lens_q"].tolist()
    stacked = torch.stack(
        [batch[name].reshape(-1) for name in ("input_ids", "labels", "position_ids")]
    ).T.contiguous()
    return sorted(stacked[begin:end].numpy().tobytes() for begin, end in pairwise(bounds))


def contest(job, workload, scale=1.0):
    arrays, lists, expected = inputs(workload, scale)
    contest = Contest(
        job,
        workload,
        len(expected["input_ids"]),
        functools.partial(check, expected=expected),
    )
    if job == FROM_LISTS:
        features = as_features(arrays, "lists")
        return contest, [*ours(lists), flattening(features), padding_free(features)]
    features = as_features(arrays, "arrays")
    rivals = [flattening(features), padding_free(features)]
    if workload in PLANNED:
        rivals.append(packing(arrays, expected))
    return contest, [*ours(arrays), *rivals]


CASES = [(workload, FROM_ARRAYS) for workload in (*EVEN_SEQUENCES, MULTI_TURN)]
CASES += [(workload, FROM_LISTS) for workload in (EVEN_SEQUENCES[2], MULTI_TURN)]


@pytest.mark.parametrize(("workload", "job"), CASES)
def bench_trainer_inputs(hold, workload, job):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    hold(*contest(job, workload))
