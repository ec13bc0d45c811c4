"""A tree holds each distinct prefix once, and everything that the trajectories hold."""

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import trajpack
from tests.packing.tree import tree_oracle as oracle
from tests.ptx.executor import on_executor
from trajpack import (
    TokenField,
    Trajectory,
    TrajectoryBuffer,
    Turn,
    load,
    load_tree,
    pack,
    pack_tree,
    save,
)
from trajpack.kernels.runs import TILE
from trajpack.packing.tree.trie import expanded
from trajpack.testing import assert_batches_equal, assert_same_bits, trajectory_lists

ROUTES = TokenField("routes", torch.uint8, (2,), generated_only=False)
VALUES = TokenField("values", torch.bfloat16, fill=-1.0)


def assert_trees_equal(actual: Any, expected: Any, name: str = "tree") -> None:
    """Raise unless two trees agree in every tensor and host value, bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert_same_bits(actual, expected, name)
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(actual, expected), name
    elif isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), name
        for key, value in expected.items():
            assert_trees_equal(actual[key], value, f"{name}.{key}")
    elif dataclasses.is_dataclass(expected) or hasattr(expected, "_fields"):
        names = getattr(expected, "_fields", None) or [
            of.name for of in dataclasses.fields(expected)
        ]
        for key in {*names} - {"runs"}:  # their sources depend on what a buffer held before
            assert_trees_equal(getattr(actual, key), getattr(expected, key), f"{name}.{key}")
    else:
        assert actual == expected, name


@given(trajectory_lists())
def test_nodes_are_the_distinct_prefixes_depth_first(trajectories):
    batch = pack_tree(trajectories)
    expected = oracle.prefixes(trajectories)
    assert oracle.paths_of(batch) == expected
    assert batch.position_ids.tolist() == [len(path) - 1 for path in expected]
    turns = [oracle.path_of(turn) for turn in oracle.turns_of(trajectories)]
    assert batch.num_nodes == oracle.sum_of_lengths_without_common(turns)
    roots = [node for node, path in enumerate(expected) if len(path) == 1]
    assert batch.cu_seqlens.tolist() == [*roots, len(expected)]
    assert batch.seqlens == tuple(batch.cu_seqlens.diff().tolist())


@given(trajectory_lists())
def test_a_query_sees_its_ancestors_and_itself(trajectories):
    batch = pack_tree(trajectories)
    paths = oracle.prefixes(trajectories)
    closure = [[query[: len(key)] == key for key in paths] for query in paths]
    mask = oracle.mask_of(batch)
    assert mask.tolist() == closure
    assert mask.sum(1).tolist() == (batch.position_ids + 1).tolist()


@given(trajectory_lists())
def test_entries_are_the_generated_tokens_in_the_order_of_turns(trajectories):
    batch = pack_tree(trajectories)
    nodes = {path: node for node, path in enumerate(oracle.prefixes(trajectories))}
    paths = oracle.entries(trajectories)
    assert batch.entry_node.tolist() == [nodes[path] for path in paths]
    assert batch.entry_parent.tolist() == [nodes[path[:-1]] for path in paths]
    assert batch.entries.input_ids.tolist() == [path[-1] for path in paths]
    assert batch.loss_mask.nonzero()[:, 0].tolist() == sorted({nodes[path] for path in paths})
    assert batch.num_trained == len(set(paths))
    turns = oracle.turns_of(trajectories)
    prompts = [oracle.path_of(turn)[: len(turn.prompt_ids)] for turn in turns]
    assert batch.turn_prompt_node.tolist() == [nodes[prompt] for prompt in prompts]
    logprobs = [float(np.float32(p)) for turn in turns for p in turn.completion_logprobs]
    assert batch.rollout_logprobs.tolist() == logprobs
    bounds = itertools.accumulate((len(turn.completion_ids) for turn in turns), initial=0)
    assert batch.entries.cu_generated.tolist() == [*bounds]
    assert batch.entries.tables.generated_lens == tuple(len(turn.completion_ids) for turn in turns)


@given(trajectory_lists())
def test_the_host_knows_the_chain_of_each_turn_and_what_it_generated(trajectories):
    batch = pack_tree(trajectories)
    chains, turns = batch.chains, oracle.turns_of(trajectories)
    chain = chains.trie.order[chains.place]
    assert chain.tolist() == pack(trajectories).turn_sequence.tolist()
    assert chains.begin.tolist() == [len(turn.prompt_ids) for turn in turns]
    assert chains.end.tolist() == [len(oracle.path_of(turn)) for turn in turns]
    owners = [number for number, one in enumerate(trajectories) for _ in one.turns]
    assert chains.trajectory.tolist() == owners
    generated = chains.generated()
    assert expanded(generated.node, generated.length).tolist() == batch.entry_node.tolist()
    of = np.repeat(generated.stretch, generated.length)
    assert of.tolist() == batch.entries.turn_ids.tolist()


@given(trajectory_lists())
def test_a_tree_holds_what_the_merged_layout_holds(trajectories):
    batch = pack_tree(trajectories)
    assert batch.unpack() == trajectories
    assert_batches_equal(batch.merged(), pack(trajectories))


@given(trajectories=trajectory_lists(), share=st.sampled_from(["once", "sum"]))
@settings(max_examples=10)
def test_a_file_holds_the_tree(trajectories, share, tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "tree.safetensors"
    batch = pack_tree(trajectories, share).with_advantages(trajpack.TurnReturns())
    save(batch, path)
    assert_trees_equal(load_tree(path), batch)
    assert_batches_equal(load(path), batch.merged())


@given(trajectory_lists())
@settings(max_examples=10)
def test_the_kernel_writes_the_bits_of_the_reference(trajectories):
    with on_executor() as executor:
        on_device = pack_tree(trajectories, impl="triton")
    assert_trees_equal(on_device, pack_tree(trajectories, impl="torch"))
    launched = ["scan_kernel", *["build_kernel"] * (1 + (on_device.num_entries > 0))]
    assert sorted(executor.launched) == (sorted(launched) if on_device.num_nodes else [])


@given(trajectory_lists())
def test_shares_count_the_chains_through_the_node(trajectories):
    batch = pack_tree(trajectories, "sum")
    expected = torch.tensor(oracle.chain_weights(trajectories))
    torch.testing.assert_close(batch.entry_weights, expected)
    assert torch.equal(pack_tree(trajectories).entry_weights, torch.ones(batch.num_entries))
    weights = pack(trajectories).loss_weights("token_mean")
    assert batch.loss_weights("token_mean").shape == batch.entry_weights.shape
    if batch.num_entries:
        total = float((weights.max() * expected).sum())
        assert float(batch.loss_weights("token_mean").sum()) == pytest.approx(total)


def with_fields(trajectories, random):
    """Give turns rows of both kinds; routes repeat or break, at random."""
    made = []
    for trajectory in trajectories:
        turns = []
        for turn in trajectory.turns:
            prompt, size = len(turn.prompt_ids), len(turn.completion_ids)
            routes = np.zeros((prompt + size, 2), np.uint8)
            if random.random() < 0.5:
                routes[random.randrange(prompt + size)] = random.randrange(3), 1
            values = torch.arange(size, dtype=torch.bfloat16) + len(turns)
            fields = {"routes": routes, "values": values}
            turns.append(
                Turn(
                    turn.prompt_ids,
                    turn.completion_ids,
                    turn.completion_logprobs,
                    turn.reward,
                    fields=fields,
                )
            )
        made.append(Trajectory(trajectory.id, turns, trajectory.group))
    return made


@given(trajectory_lists(3), st.randoms(use_true_random=False))
def test_tokens_share_a_node_only_where_their_rows_agree(trajectories, random):
    given_fields = with_fields(trajectories, random)
    fields = [VALUES, ROUTES]
    batch = pack_tree(given_fields, fields=fields)
    expected = {
        tuple(zip(oracle.path_of(turn), map(tuple, turn.fields["routes"].tolist()), strict=True))
        for turn in oracle.turns_of(given_fields)
    }
    nodes = {path[:end] for path in expected for end in range(1, len(path) + 1)}
    rows = list(map(tuple, batch.fields["routes"].tolist()))
    found: list[tuple] = []
    for node, parent in enumerate(batch.tree_parent.tolist()):
        above = found[parent] if parent >= 0 else ()
        found.append((*above, (int(batch.input_ids[node]), rows[node])))
    assert len(found) == len(set(found))
    assert set(found) == nodes
    assert batch.unpack() == given_fields
    assert_batches_equal(batch.merged(), pack(given_fields, fields=fields))


def test_fields_are_written_by_one_launch_each_kind_and_saved(tmp_path):
    turns = [
        Turn([1, 2], [3], [-0.5], fields={"routes": [[0, 0], [1, 1], [2, 2]], "values": [0.5]}),
        Turn([1, 2], [3], [-0.5], fields={"routes": [[0, 0], [1, 0], [2, 2]], "values": [0.25]}),
    ]
    given_fields = [Trajectory("a", turns)]
    fields = [VALUES, ROUTES]
    with on_executor() as executor:
        batch = pack_tree(given_fields, fields=fields, impl="triton")
    launched = [*["build_kernel"] * 2, *["gather_fields_kernel"] * 2, "scan_kernel"]
    assert sorted(executor.launched) == launched
    assert batch.fields["routes"].tolist() == [[0, 0], [1, 0], [2, 2], [1, 1], [2, 2]]
    assert batch.entries.fields["values"].tolist() == [0.5, 0.25]
    save(batch, tmp_path / "tree")
    assert_trees_equal(load_tree(tmp_path / "tree"), batch)
    assert_trees_equal(pack_tree(given_fields, fields=fields), batch)


@pytest.mark.parametrize("length", [TILE - 2, TILE - 1, TILE])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_entries_begin_behind_whole_tiles_of_nodes(length, impl):
    turns = [Turn(range(length), [1], [-1.0]), Turn(range(length), [1, 2], [-1.0, -2.0])]
    batch = pack_tree([Trajectory("a", turns)], impl=impl)
    assert batch.input_ids.tolist() == [*range(length), 1, 2]
    assert batch.tree_end.tolist() == [length + 2] * (length + 2)
    assert batch.rollout_logprobs.tolist() == [-1.0, -1.0, -2.0]


@given(trajectory_lists(), trajectory_lists())
@settings(max_examples=10)
def test_a_buffer_packs_trees_between_other_packs(first, later):
    buffer = TrajectoryBuffer()
    buffer.extend(first)
    tree = pack_tree(buffer)
    assert_trees_equal(tree, pack_tree(first))
    turns = buffer.pack("turns")
    buffer.extend(later)
    assert_trees_equal(pack_tree(buffer, "sum"), pack_tree([*first, *later], "sum"))
    assert_batches_equal(buffer.pack(), pack([*first, *later]))
    buffer.clear()
    buffer.extend(later)
    assert_trees_equal(pack_tree(buffer), pack_tree(later))
    with pytest.raises(ValueError, match="device and fields are those of the buffer"):
        pack_tree(buffer, device="cpu")
    assert_trees_equal(tree, pack_tree(first))
    assert_batches_equal(turns, pack(first, "turns"))


def test_the_path_runs_where_no_value_can_be_read():
    trajectories = [Trajectory("a", [Turn([1, 2], [3], [-0.5]), Turn([1], [4], [-0.5])])]
    batch, host = pack_tree(trajectories, device="meta"), pack_tree(trajectories)
    for part, of_host in ((batch, host), (batch.entries, host.entries)):
        tensors = {key: one for key, one in vars(of_host).items() if isinstance(one, torch.Tensor)}
        for name, tensor in tensors.items():
            other = getattr(part, name)
            assert other.is_meta
            assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype), name


def test_nodes_and_entries_are_tensors_of_their_own():
    batch = pack_tree([Trajectory("a", [Turn([1], [2], [-0.5])])])
    version = batch.input_ids._version
    batch.entries.input_ids.add_(1)
    assert batch.input_ids._version == version
    assert batch.input_ids.tolist() == [1, 2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_copies_are_equal(copied):
    batch = pack_tree([Trajectory("a", [Turn([1], [2], [-0.5]), Turn([1], [3], [-0.5])])], "sum")
    assert_trees_equal(copied(batch), batch)


def test_a_tree_says_what_it_is():
    batch = pack_tree([Trajectory("a", [Turn([1], [2], [-0.5]), Turn([1], [3], [-0.5])])])
    assert repr(batch) == (
        "TreeBatch(1 trajectories, 2 turns in 1 trees, 1 prefix break; 3 nodes, 2 entries; "
        "share 'once', boundary 'shared'; cpu)"
    )
    assert (len(batch), batch.num_nodes, batch.num_entries, batch.num_turns) == (1, 3, 2, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_named():
    turns = [Turn([1], [2], [-0.5])]
    with pytest.raises(ValueError, match=r"device must be one that torch finds here, got 'cuda'"):
        pack_tree([Trajectory("a", turns)], device="cuda")


ONE = [Trajectory("a", [Turn([1], [2], [-0.5])])]
HIDDEN, HEAD = torch.zeros(2, 3), torch.zeros(5, 3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: pack_tree(ONE, "mean"), ValueError, "share must be one of 'once', 'sum', got 'me"),
        (lambda: pack_tree(ONE, impl="cuda"), ValueError, "impl must be 'auto', 'torch' or 'tri"),
        (lambda: pack_tree([Trajectory("b", [])]), ValueError, "'b': must have at least one turn"),
        (
            lambda: pack_tree(ONE, boundary="twice"),
            ValueError,
            "'shared', 'duplicate', got 'twice'",
        ),
        (
            lambda: pack_tree(ONE, "sum", boundary="duplicate"),
            ValueError,
            "needs share='once', got",
        ),
        (
            lambda: pack_tree(ONE).labels(),
            ValueError,
            r"needs pack_tree\(..., boundary='duplicate'",
        ),
        (lambda: pack_tree(ONE).attention_mask(torch.int64), TypeError, "must be bool or a float"),
        (lambda: pack_tree(ONE).attention_mask(window=0), ValueError, "at least 1, got 0"),
        (lambda: pack_tree(ONE).logprobs(HIDDEN[1:], HEAD), ValueError, "hidden must have one en"),
        (lambda: pack_tree(ONE).logprobs(HIDDEN[1:]), ValueError, "logits must have one entry for"),
        (lambda: pack_tree(ONE).logprobs(HIDDEN, support="m"), TypeError, "need hidden .* logits"),
        (lambda: pack_tree(ONE).logprobs([HIDDEN], HEAD), TypeError, "hidden must be a"),
    ],
)
def test_wrong_arguments_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_file_of_turns_is_no_tree(tmp_path):
    save(pack(ONE, "turns"), tmp_path / "turns")
    with pytest.raises(ValueError, match="made of layout 'merged', the batch has 'turns'"):
        load_tree(tmp_path / "turns")
