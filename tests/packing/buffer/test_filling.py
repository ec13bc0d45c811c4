"""However a buffer is filled, it holds and packs the same, and packing costs the host the same."""

import asyncio
import copy
import cProfile
import gc
import pickle
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from trajpack import Trajectory, TrajectoryBuffer, Turn, pack, pack_resident, pack_tree
from trajpack.packing.buffer import buffer as buffer_module, tables as tables_module
from trajpack.testing import assert_batches_equal, random_trajectory, trajectory_lists

LAYOUTS = ["merged", "turns"]


def assert_same(buffer, layout, kept):
    """Check that the buffer packs what one call packs, and what the host knows beside."""
    batch, expected = buffer.pack(layout), pack(kept, layout, device="cpu")
    assert_batches_equal(batch, expected)
    assert batch.tables.longest == expected.tables.longest
    assert batch.tables.generated_lens == expected.tables.generated_lens
    assert torch.equal(batch.tables.cu_new, expected.tables.cu_new)
    assert all(map(torch.equal, batch.tables.group_order, expected.tables.group_order))
    order = batch.tables.group_order
    assert torch.equal(order.trajectories.long(), batch.group_ids.argsort(stable=True))
    assert torch.equal(order.owners.bincount(), batch.cu_turns.diff())


@pytest.mark.usefixtures("either_take")
def test_any_mixture_of_calls_packs_what_one_call_packs():
    @given(drawn=trajectory_lists(max_size=9), choices=st.randoms(use_true_random=True))
    @settings(max_examples=20)
    def check(drawn, choices):
        buffer = TrajectoryBuffer(device="cpu")
        kept = []
        while len(kept) < len(drawn):
            some = drawn[len(kept) :][: choices.randint(0, 3)]
            (buffer.extend if len(some) != 1 else lambda one: buffer.add(*one))(some)
            kept += some
            if choices.random() < 0.5:
                layout = choices.choice(LAYOUTS)
                assert_same(buffer, layout, kept)
            if choices.random() < 0.2:
                buffer.clear()
                drawn, kept = drawn[len(kept) :], []
        for layout in LAYOUTS:
            assert_same(buffer, layout, kept)
            assert buffer.pack(layout).unpack() == kept

    check()


def filled(num_trajectories, device="meta"):
    rng = np.random.default_rng(0)
    sizes = {"prompt": (1, 9), "completion": (1, 9)}
    buffer = TrajectoryBuffer(device=device)
    buffer.extend(
        random_trajectory(rng, str(i), num_turns=2, **sizes) for i in range(num_trajectories)
    )
    return buffer


def calls_of(work):
    """Functions of the product called while ``work`` runs, how often; meta kernels are torch's."""
    profile = cProfile.Profile()
    profile.runcall(work)
    counts = ((str(entry.code), entry.callcount) for entry in profile.getstats())
    return sorted((code, count) for code, count in counts if "/trajpack/" in code)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_does_the_same_for_a_pack_of_any_size(layout):
    small, large = filled(40), filled(4000)
    filled(2).pack(layout)  # imports
    for _ in range(2):  # the first pack makes the tables, the second has them
        few, many = (calls_of(lambda b=buffer: b.pack(layout)) for buffer in (small, large))
        assert few == many
        assert 0 < sum(count for _, count in few) < 300


def test_a_host_that_does_more_for_more_would_be_noticed():
    small, large = filled(40), filled(4000)
    few, many = (calls_of(lambda b=b: [b.num_turns for _ in b.pack().ids]) for b in (small, large))
    assert few != many


@pytest.mark.parametrize("num_turns", [1, 3])
@pytest.mark.parametrize("way", ["add", "extend"])
def test_a_filled_buffer_takes_few_bytes_of_a_turn(way, num_turns):
    rng = np.random.default_rng(0)
    sizes = {"num_turns": num_turns, "prompt": (1, 9), "completion": (1, 9)}
    given = [random_trajectory(rng, str(i), **sizes) for i in range(3000)]
    TrajectoryBuffer(device="cpu").extend(given)  # arrays keep what their first reader learns
    gc.collect()
    tracemalloc.start()
    buffer = TrajectoryBuffer(device="cpu")
    for some in [given] if way == "extend" else ([one] for one in given):
        buffer.extend(some)
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stream = buffer._staging.region.stream.nbytes
    generated = sum(len(turn.completion_ids) for one in given for turn in one.turns)
    assert buffer.num_bytes == 4 * (buffer.num_tokens + generated)
    assert buffer.num_bytes <= stream <= buffer.num_bytes * (1 if way == "extend" else 2)
    assert 0 < taken - stream <= 150 * buffer.num_turns


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_keep_what_they_were_packed_with_while_the_buffer_goes_on(layout):
    rng = np.random.default_rng(1)
    everything = [random_trajectory(rng, str(i), num_turns=2, prompt=(1, 5)) for i in range(300)]
    buffer = TrajectoryBuffer(device="cpu")
    batches = []
    for begin in range(0, 300, 75):
        buffer.extend(everything[begin : begin + 75])
        batches.append(buffer.pack(layout))  # its host tuples are asked for at the end
    buffer.clear()
    buffer.extend(everything[:200])
    buffer.pack("turns" if layout == "merged" else "merged")
    for number, batch in enumerate(batches):
        assert batch.unpack() == everything[: 75 * (number + 1)]
        assert batch.ids == tuple(str(i) for i in range(75 * (number + 1)))
        assert sum(batch.seqlens) == batch.num_tokens
        assert len(batch.turn_discounts) == len(batch.ids)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packs_of_the_same_are_the_same_bits(layout, impl):
    buffer = filled(30, "cpu")
    first = buffer.pack(layout, impl)
    for _ in range(20 if impl == "torch" else 4):  # the executor takes its time
        assert_batches_equal(buffer.pack(layout, impl), first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_to_a_batch_leaves_the_buffer_and_its_other_batches(layout):
    buffer = filled(30, "cpu")
    first, second = buffer.pack(layout), buffer.pack(layout)
    for tensor in (*first.tensors().values(), *first.tables.group_order, first.tables.runs):
        tensor.zero_()
    assert_batches_equal(second, pack(second.unpack(), layout, device="cpu"))
    assert_batches_equal(buffer.pack(layout), second)


def test_attributes_that_a_batch_lacks_are_named():
    batch = filled(3).pack()
    with pytest.raises(AttributeError, match="'PackedBatch' object has no attribute 'advantage'"):
        _ = batch.advantage
    assert batch.turn_rewards is batch.turn_rewards, "made once"


def test_a_buffer_is_neither_copied_nor_pickled():
    buffer = filled(3, "cpu")
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="send trajectories or packed batches"):
            copying(buffer)


def test_an_interrupted_change_of_layout_leaves_the_buffer_whole(monkeypatch):
    buffer = filled(100, "cpu")
    expected = {layout: buffer.pack(layout) for layout in LAYOUTS}
    for layout in (*LAYOUTS, *LAYOUTS):
        with monkeypatch.context() as patch:

            def interrupted(*given):
                raise KeyboardInterrupt

            patch.setattr(buffer_module, "tables_of", interrupted)
            with pytest.raises(KeyboardInterrupt):
                buffer.pack("turns" if buffer._packed.layout == "merged" else "merged")
        assert_batches_equal(buffer.pack(layout), expected[layout])


def test_a_batch_too_long_for_one_layout_is_packed_in_another(monkeypatch):
    monkeypatch.setattr(tables_module, "MAX_TOKENS", 50)
    turns = [Turn([1] * n, [1], [0.0]) for n in range(1, 12)]
    buffer = TrajectoryBuffer(device="cpu")
    buffer.add(Trajectory("a", turns[:1]))
    buffer.pack("turns")
    buffer.add(Trajectory("b", turns))
    with pytest.raises(ValueError, match="layout 'turns' needs"):
        buffer.pack("turns")
    assert buffer.pack("merged").ids == ("a", "b")


@pytest.mark.usefixtures("either_take")
def test_the_callers_arrays_are_not_held():
    prompt = np.arange(1000, dtype=np.int32)
    buffer = TrajectoryBuffer(device="cpu")
    before = sys.getrefcount(prompt)
    buffer.add(Trajectory("a", [Turn(prompt, [1], [0.0])]))
    assert sys.getrefcount(prompt) == before


@pytest.mark.parametrize("call", [TrajectoryBuffer().extend, pack, pack_tree, pack_resident])
def test_one_trajectory_is_not_a_list(call):
    said = r"expected a list of Trajectory, got one Trajectory; write pack\(\[trajectory\]\)"
    with pytest.raises(TypeError, match=said):
        call(Trajectory("a", [Turn([1], [2], [0.0])]))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_batch_keeps_its_runs_when_the_buffer_is_filled_again(impl, executor):
    given, others = (
        [Trajectory(name, [Turn([1] * context, ids, [-0.5] * len(ids))]) for name in "ab"]
        for context, ids in ((2, [3, 4]), (1, [3, 4, 5]))
    )
    buffer = TrajectoryBuffer(device="cpu", capacity=100)
    buffer.extend(given)
    batch = buffer.pack(impl=impl)
    buffer.clear()
    buffer.extend(others)
    buffer.pack()
    assert torch.equal(batch.tables.runs, pack(given, device="cpu", impl=impl).tables.runs)


@pytest.mark.usefixtures("either_take")
def test_an_event_loop_stores_long_and_short_trajectories_in_the_order_of_its_calls(monkeypatch):
    monkeypatch.setattr(buffer_module, "LONG", 20)
    rng, buffer = np.random.default_rng(3), TrajectoryBuffer(device="cpu")
    given = [random_trajectory(rng, str(i), num_turns=2, prompt=(1, 12)) for i in range(40)]
    wrong = Trajectory("it", [Turn([1] * size, [2], [float("nan")]) for size in (1, 50)])

    async def main():
        ends = await asyncio.gather(
            *map(buffer.aadd, [*given[:20], wrong, None, *given[20:]]), return_exceptions=True
        )
        assert [str(end)[:9] for end in ends if end is not None] == ["trajector", "expected "]
        cancelled = asyncio.create_task(buffer.aadd(given[0]))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        buffer.add(given[1])

    asyncio.run(main())
    assert buffer.pack().unpack() == [*given, *given[:2]]


@pytest.mark.parametrize("way", [TrajectoryBuffer.pack, pack_tree])
def test_a_pack_waits_for_what_a_thread_stores(monkeypatch, way):
    monkeypatch.setattr(buffer_module, "LONG", 0)
    buffer, is_awaited = TrajectoryBuffer(device="cpu"), threading.Event()
    given = [Trajectory("a", [Turn([1], [2], [-0.5])])]
    store, wait = buffer_module.take, buffer_module.wait

    def waits(futures):
        is_awaited.set()
        wait(futures)

    async def main():
        storing = asyncio.create_task(buffer.aadd(*given))
        await asyncio.sleep(0)  # the thread has it
        batch = way(buffer)
        is_awaited.set()
        await storing
        return batch

    monkeypatch.setattr(buffer_module, "take", lambda *call: is_awaited.wait() and store(*call))
    monkeypatch.setattr(buffer_module, "wait", waits)
    assert asyncio.run(main()).unpack() == given
