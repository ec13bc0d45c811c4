"""Trees from trajectories: ours beside the merged layout, TRL's row and AReaL's tries of the same.

The last column says how many tokens a model computes in each workload. Two promises are asserted:
without anything shared a tree costs at most `MOST_TIMES` the merged layout, and the plan of a
million tokens of long conversations takes at most `PLAN_NS` a token.
"""

import warnings
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch

from benchmarks.contest import OURS, Contender, Contest, as_record, race
from benchmarks.rivals import peer_module
from benchmarks.workloads import many_turns, multi_turn
from trajpack import Trajectory, TrajectoryBuffer, Turn, pack_tree
from trajpack.packing.tree.pack_tree import arrange_tree

JOB = "pack as trees"
MERGED = f"{OURS}, merged layout"
PLAN = f"{OURS}, plan only"
TREE_ROW = "trl TreeRow"
TRIES = "areal tries and parents"
MOST_TIMES = 1.3
PLAN_NS = 10.0
SLOWER = 2
"""How many times slower a machine may be, and how busy."""


def drawn(generator, size):
    return generator.integers(0, 32_000, size, dtype=np.int32)


def turn_of(generator, prompt, size):
    return Turn(prompt, drawn(generator, size), -generator.random(size, dtype=np.float32))


def groups(scale=1.0):
    """4 groups of 16 answers of 1,024 tokens to a prompt of 8,192."""
    generator, found = np.random.default_rng(11), []
    for group in range(4):
        prompt = drawn(generator, round(8192 * scale))
        found += [
            Trajectory(
                f"{group}.{i}", [turn_of(generator, prompt, round(1024 * scale))], str(group)
            )
            for i in range(16)
        ]
    return found


def stripped(scale=1.0):
    """8 conversations of 32 turns; later prompts hold 200 of the 600 tokens of an answer."""
    generator, found = np.random.default_rng(12), []
    for index in range(8):
        heard, turns = drawn(generator, round(500 * scale)), []
        for _ in range(32):
            turns.append(turn_of(generator, heard, round(600 * scale)))
            said = turns[-1].completion_ids[-round(200 * scale) :]
            heard = np.concatenate([heard, said, drawn(generator, round(100 * scale))])
        found.append(Trajectory(str(index), turns))
    return found


def compacted(scale=1.0):
    """8 conversations of 32 turns; after each 8 the history becomes a summary behind the task."""
    generator, found = np.random.default_rng(13), []
    for index in range(8):
        task = drawn(generator, round(2000 * scale))
        heard, turns = task, []
        for number in range(32):
            turns.append(turn_of(generator, heard, round(400 * scale)))
            new = drawn(generator, round(200 * scale))
            kept = task if number % 8 == 7 else np.concatenate([heard, turns[-1].completion_ids])
            heard = np.concatenate([kept, new])
        found.append(Trajectory(str(index), turns))
    return found


LONG, NOTHING = "conversations of 32 turns", "nothing shared"
WORKLOADS = {
    "groups of 16, long prompt": groups,
    LONG: lambda scale=1.0: many_turns(max(1, round(512 * scale))),
    "thinking stripped": stripped,
    "compaction": compacted,
    NOTHING: lambda scale=1.0: multi_turn(max(1, round(256 * scale))),
}


def with_tree_row(batch):
    """Return TRL's tensors of one row that holds all sequences of the merged layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is experimental
        from trl.experimental.async_grpo.packing import TreeRow
    row = TreeRow()
    for begin, end in zip(
        batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True
    ):
        row.add(
            {
                "input_ids": batch.input_ids[begin:end],
                "completion_mask": batch.loss_mask[begin:end],
                "old_log_probs": batch.rollout_logprobs[begin:end],
                "advantage": 1.0,
                "group_id": 0,
            }
        )
    return row.pack()


def has_trl():
    """Return whether TRL is installed."""
    return find_spec("trl") is not None


def by_tries(module, rows):
    """Return ids and parents of AReaL's one tree: its functions, without its dense masks."""
    (trie,), (size,) = module._greedy_build_tries(rows, 2**40)
    ids = module._pack_input_ids(trie, rows["input_ids"], size)
    return ids[0], module.trie_to_parent_array(trie, size)[0]


def padded(batch):
    """Return a batch as AReaL takes it: rows of one length, and a mask."""
    rows = batch.input_ids.split(batch.seqlens)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor(batch.seqlens)
    return {"input_ids": ids, "attention_mask": torch.arange(ids.shape[1]) < lengths[:, None]}


def contenders(trajectories):
    """Return who packs the trajectories, and the notes of what they wrote."""
    buffer = TrajectoryBuffer(device="cpu")
    filled = TrajectoryBuffer(device="cpu")
    filled.extend(trajectories)
    batch, tree = filled.pack(), pack_tree(filled)

    def whole(pack):
        def work():
            buffer.clear()
            buffer.extend(trajectories)
            return pack()

        return work

    def check_tree(got):
        assert got.unpack() == trajectories

    def check_plan(got):
        assert got[1].trie.num_nodes == tree.num_nodes

    def check_row(got):
        assert torch.equal(got["old_log_probs"].sort().values, tree.rollout_logprobs.sort().values)
        leaves = int((tree.tree_end == torch.arange(tree.num_nodes) + 1).sum())
        assert tree.num_nodes <= len(got["input_ids"]) <= tree.num_nodes + batch.num_turns + leaves

    def check_tries(got):
        ids, parents = got
        assert torch.equal(ids.sort().values, tree.input_ids.sort().values)
        assert torch.equal((parents < 0).sum(), (tree.tree_parent < 0).sum())

    areal, missing = peer_module("areal", "areal.models.tree_attn.tree")
    tries = partial(by_tries, areal, padded(batch)) if areal else None
    nodes, tokens = f"{tree.num_nodes:,}", f"{batch.num_tokens:,}"
    return [
        Contender(OURS, whole(partial(pack_tree, buffer)), nodes, check_tree),
        Contender(MERGED, whole(buffer.pack), tokens, check_tree),
        Contender(PLAN, partial(arrange_tree, filled), nodes, check_plan),
        Contender(TREE_ROW, partial(with_tree_row, batch), "more", check_row),
        Contender(TRIES, tries, nodes, check_tries, missing=missing),
    ]


def contest(workload, scale=1.0):
    trajectories = WORKLOADS[workload](scale)
    entrants = contenders(trajectories)
    tokens = int(entrants[1].wrote.replace(",", ""))
    return Contest(JOB, workload, tokens, lambda _: None), entrants


def bench_trees(keep):
    records = []
    for workload in WORKLOADS:
        held, entrants = contest(workload)
        records.append(as_record(held, race(held, entrants)))
        keep(records[-1])
        best = {entry["contender"]: entry["best_ms"] for entry in records[-1]["entries"]}
        if workload == NOTHING:
            assert best[OURS] <= MOST_TIMES * best[MERGED]
        if workload == LONG:
            assert best[PLAN] * 1e6 <= PLAN_NS * SLOWER * held.tokens
    join_wrote(records)


def join_wrote(records):
    """Let each contender say what it wrote on all workloads."""
    for entries in zip(*(record["entries"] for record in records), strict=True):
        wrote = " / ".join(entry["wrote"] for entry in entries)
        for entry in entries:
            entry["wrote"] = wrote
