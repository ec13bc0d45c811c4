"""Batches of fixed size: the same values as a pack, then padding, at addresses that stay."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from trajpack import PackedBatch, StaticBatch, TokenField, Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.kernels.fields.build import FIELD_DTYPES
from trajpack.packing.adapters.areal import to_sequence_sample
from trajpack.packing.turn_fields import TURN_FIELDS
from trajpack.testing import (
    assert_batches_equal,
    assert_same_bits,
    random_trajectory,
    trajectory_lists,
)

LAYOUTS = ["merged", "turns"]
PADDING = {
    "input_ids": 0,
    "turn_ids": -1,
    "prompt_mask": True,
    "loss_mask": False,
    "rollout_logprobs": 0.0,
    "policy_versions": -1,
    "returns": 0.0,
}


def filled(trajectories, **options):
    buffer = TrajectoryBuffer(device="cpu", **options)
    buffer.extend(trajectories)
    return buffer


def assert_padded(batch, plain):
    """``batch`` is ``plain`` and padding behind it."""
    tokens, turns, sequences = plain.num_tokens, plain.num_turns, len(plain)
    for name in FIELD_DTYPES:
        assert_same_bits(getattr(batch, name)[:tokens], getattr(plain, name), name)
    rest = batch.num_tokens - tokens
    for name, value in PADDING.items():
        assert getattr(batch, name)[tokens:].tolist() == [value] * rest, name
    assert batch.position_ids[tokens:].tolist() == list(range(rest))
    assert batch.sequence_ids[tokens:].tolist() == [sequences] * rest
    assert batch.cu_seqlens[: sequences + 1].tolist() == plain.cu_seqlens.tolist()
    assert set(batch.cu_seqlens[sequences + 1 :].tolist()) == {batch.num_tokens}
    assert batch.seqlens == tuple(batch.cu_seqlens.diff().tolist())
    for name in (
        *(field.name for field in TURN_FIELDS),
        "turn_returns",
        "turn_sequence",
        "turn_spans",
        "turn_begin",
    ):
        assert_same_bits(getattr(batch, name)[:turns], getattr(plain, name), name)
    assert not batch.turn_returns[turns:].any()
    for name in ("turn_spans", "turn_begin"):  # empty, behind the last token
        assert (getattr(batch, name)[turns:] == tokens).all(), name
    assert batch.cu_generated.shape == (batch.num_turns + 1,)
    assert_same_bits(batch.cu_generated[: turns + 1], plain.cu_generated)
    assert (batch.cu_generated[turns:] == plain.num_generated).all()
    trajectories = len(plain.ids)
    assert batch.group_ids.shape == (batch.num_turns,)
    assert_same_bits(batch.group_ids[:trajectories], plain.group_ids)
    assert (batch.group_ids[trajectories:] == -1).all()
    for name in ("ids", "num_generated", "num_groups"):
        assert getattr(batch, name) == getattr(plain, name)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_memory_takes_batch_after_batch(impl, layout):
    static = StaticBatch(capacity=120, max_turns=16, max_runs=30, device="cpu")
    addresses = None

    @given(drawn=trajectory_lists(max_size=2))
    @settings(max_examples=12 if impl == "torch" else 5)
    def check(drawn):
        nonlocal addresses
        plain = pack(drawn, layout, device="cpu")
        buffer = filled(drawn)
        if plain.num_tokens > 120 or plain.num_turns > 16:
            with pytest.raises(ValueError, match="the static batch has"):
                static.fill(buffer, layout)
            return
        static.fill(buffer, layout)
        batch = static.run(impl)
        assert_padded(batch, plain)
        assert batch.unpack() == drawn
        now = [getattr(batch, name).data_ptr() for name in (*FIELD_DTYPES, "cu_seqlens")]
        inputs = batch.model_inputs()
        assert inputs["seq_idx"].shape == inputs["position_ids"].shape == (1, 120)
        now += [value.data_ptr() for value in inputs.values() if isinstance(value, torch.Tensor)]
        addresses = addresses or now
        assert now == addresses

    check()


def test_a_batch_may_fill_it_to_the_last_token_and_turn():
    trajectories = [Trajectory(str(i), [Turn([1, 2], [3], [0.0])]) for i in range(4)]
    static = StaticBatch(capacity=12, max_turns=4, device="cpu")
    batch = filled(trajectories).pack_into(static)
    assert_padded(batch, pack(trajectories, device="cpu"))
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 9, 12, 12]


def test_nothing_of_a_larger_batch_stays_behind():
    rng = np.random.default_rng(0)
    field = TokenField("v", torch.uint8, (3,), fill=9, generated_only=False)

    def with_rows(trajectory):
        turns = [
            Turn(t.prompt_ids, t.completion_ids, t.completion_logprobs, 1.0, fields={
                "v": np.ones((len(t.prompt_ids) + len(t.completion_ids), 3), np.uint8)})
            for t in trajectory.turns
        ]  # fmt: skip
        return Trajectory(trajectory.id, turns)

    small, large = (
        [with_rows(random_trajectory(rng, str(i), num_turns=3, prompt=(1, 9), completion=(1, 9)))
         for i in range(count)]
        for count in (2, 20)
    )  # fmt: skip
    static = StaticBatch(capacity=3000, max_turns=70, device="cpu", fields=[field])
    for trajectories in (large, small, [], large):
        batch = filled(trajectories, fields=[field]).pack_into(static)
        plain = pack(trajectories, device="cpu", fields=[field])
        assert_padded(batch, plain)
        assert_same_bits(batch.fields["v"][: plain.num_tokens], plain.fields["v"])
        assert (batch.fields["v"][plain.num_tokens :] == 9).all()
        assert batch.unpack() == trajectories


def test_the_device_part_reads_nothing():
    static = StaticBatch(capacity=50, max_turns=4, device="meta")
    batch = filled([Trajectory("a", [Turn([1, 2], [3], [0.0])])]).pack_into(static)
    assert (batch.device.type, batch.num_tokens, batch.ids) == ("meta", 50, ("a",))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"capacity": 5, "max_turns": 9}, "needs capacity 6, the static batch has 5"),
        ({"capacity": 9, "max_turns": 1}, "needs max_turns 2, the static batch has 1"),
        ({"capacity": 9, "max_turns": 2, "max_runs": 1}, "needs max_runs 2, the static batch has"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_last_batch(sizes, message):
    static = StaticBatch(**sizes, device="cpu")
    fits = [Trajectory("fits", [Turn([1], [2], [0.0])])]
    kept = filled(fits).pack_into(static)
    large = filled([Trajectory(str(i), [Turn([1, 2], [3], [0.0])]) for i in range(2)])
    with pytest.raises(ValueError, match=message):
        large.pack_into(static)
    assert static.batch.ids == kept.ids
    assert kept.unpack() == fits


def test_wrong_use_is_named():
    static = StaticBatch(capacity=9, max_turns=2, device="cpu")
    with pytest.raises(RuntimeError, match="no batch was written yet"):
        _ = static.batch
    with pytest.raises(RuntimeError, match="nothing to write: fill first"):
        static.run()
    with pytest.raises(ValueError, match=r"fields must be those of the static batch, \[\]"):
        static.fill(TrajectoryBuffer(fields=[TokenField("v", torch.int8)]))
    for sizes in ({"capacity": 0, "max_turns": 1}, {"capacity": 1, "max_turns": 0}):
        with pytest.raises(ValueError, match=r"must be (in \[1,|at least 1)"):
            StaticBatch(**sizes)


def two_batches():
    return [
        [Trajectory(f"{count}{i}", [Turn([1] * (i + 1), [2], [-1.0], 1.0)]) for i in range(count)]
        for count in (3, 5)
    ]


def test_a_fill_changes_nothing_that_was_run():
    first, second = two_batches()
    static = StaticBatch(capacity=40, max_turns=8, device="cpu")
    batch = filled(first).pack_into(static)
    before = {name: tensor.clone() for name, tensor in batch.tensors().items()}
    static.fill(filled(second))
    for name, tensor in before.items():
        assert_same_bits(batch.tensors()[name], tensor, name)
    batch.turn_rewards.fill_(7.0)  # a trainer's own scaling
    static.fill(filled(first))
    assert_padded(static.run(), pack(first, device="cpu"))


def test_every_tensor_stays_where_it_is():
    first, second = two_batches()
    static = StaticBatch(capacity=40, max_turns=8, device="cpu")
    places = [
        {name: tensor.data_ptr() for name, tensor in batch.tensors().items()}
        for batch in (filled(first).pack_into(static), filled(second).pack_into(static))
    ]
    assert places[0] == places[1]


def test_without_padding_it_goes_to_files_and_adapters(tmp_path):
    _, trajectories = two_batches()
    static = StaticBatch(capacity=40, max_turns=8, device="cpu")
    batch = filled(trajectories).pack_into(static, "turns")
    with pytest.raises(ValueError, match=r"the batch is padded: take StaticBatch.unpadded"):
        batch.save(tmp_path / "batch")
    with pytest.raises(ValueError, match="the batch is padded"):
        to_sequence_sample(batch)
    plain = pack(trajectories, "turns", device="cpu")
    assert_batches_equal(static.unpadded(), plain)
    static.unpadded().save(tmp_path / "batch")
    assert_batches_equal(PackedBatch.load(tmp_path / "batch"), plain)
    assert "policy version 0" in repr(batch)


def test_prefix_breaks_of_a_padded_batch_are_not_counted():
    _, trajectories = two_batches()
    static = StaticBatch(capacity=40, max_turns=8, device="cpu")
    assert filled(trajectories).pack_into(static, "merged").num_prefix_breaks is None
    assert static.unpadded().num_prefix_breaks == pack(trajectories).num_prefix_breaks


def test_a_static_batch_has_room_for_the_gaps_between_rows():
    """Rows of each call begin at a multiple of 16 bytes."""
    field = TokenField("v", torch.uint8, generated_only=False)
    buffer = TrajectoryBuffer(device="cpu", fields=[field])
    for i in range(9):
        rows = {"v": np.array([i] * 3, np.uint8)}
        buffer.add(Trajectory(str(i), [Turn([1], [2, 3], [0.0, 0.0], fields=rows)]))
    static = StaticBatch(capacity=27, max_turns=9, device="cpu", fields=[field])
    batch = buffer.pack_into(static)
    assert batch.fields["v"].tolist() == [i for i in range(9) for _ in range(3)]


def test_what_the_host_knows_of_a_batch_is_of_its_own_fill():
    second, first = two_batches()
    static = StaticBatch(capacity=40, max_turns=8, device="cpu")
    buffer, plain = filled(first), pack(first, device="cpu")
    batch = buffer.pack_into(static)  # its host values are asked for at the end
    buffer.extend(second)
    static.fill(buffer, "turns")
    static.fill(filled(second[::-1]), "turns")
    for name in ("num_generated", "num_groups", "ids", "groups", "turn_discounts", "layout"):
        assert getattr(batch, name) == getattr(plain, name), name
    assert batch.seqlens[: len(plain)] == plain.seqlens
    assert sum(batch.seqlens) == 40
