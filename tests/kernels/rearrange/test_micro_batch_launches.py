"""Device work of micro-batches: a launch each, one copy for all, no synchronisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.kernels.credit.test_credit_launches import torch_ops, unexecuted
from tests.kernels.test_launches import VIEWS, RecordedOps
from tests.packing.micro_batches.micro_batch_loops import ALIGNMENTS, of_the_loss, some_batch
from trajpack.kernels.rearrange.select_tokens import TokenSources
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.plan.plan import plan_micro_batches

CAPACITIES = (48, 64, 200, 10_000)
MORE_VIEWS = {
    "aten.split_with_sizes.default",
    "aten.view.dtype",
    "aten.select.int",
    "aten.alias.default",
}


def counts_of(work: Any) -> dict[str, int]:
    with RecordedOps("meta") as recorded:
        work()
    return {op: n for op, n in recorded.counts.items() if op not in VIEWS | MORE_VIEWS}


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("alignment", ALIGNMENTS.values(), ids=ALIGNMENTS.keys())
def test_a_plan_is_one_copy_and_a_launch_for_each_micro_batch(
    capacity: int, alignment: Alignment
) -> None:
    batch = some_batch(device="meta")
    tensors = of_the_loss(some_batch())
    tensors = {name: tensor.to("meta") for name, tensor in tensors.items()}
    plan = plan_micro_batches(
        batch.seqlens, capacity, align=alignment.sequence_multiple, oversized="own_bin"
    )
    counts = counts_of(lambda: batch.split(plan, alignment, tensors=tensors))
    assert counts == {"aten._to_copy.default": 1, "trajpack.select_tokens.default": len(plan)}


def test_merging_is_one_copy_one_concatenation_and_one_launch() -> None:
    batch = some_batch(device="meta")
    plan = plan_micro_batches(batch.seqlens, 100)
    outputs = [one.rollout_logprobs for one in batch.split(plan)]
    assert len(outputs) > 2
    counts = counts_of(lambda: batch.merge(plan, outputs))
    assert counts == {
        "aten._to_copy.default": 1,
        "aten.cat.default": 1,
        "trajpack.merge_tokens.default": 1,
    }


def test_micro_batches_and_labels_need_no_value_from_the_device() -> None:
    on_host, on_meta = (some_batch(device=device) for device in ("cpu", "meta"))
    plan = plan_micro_batches(on_host.seqlens, 64, align=8)
    for alignment in (Alignment(), Alignment(sequence_multiple=8, total_multiple=64)):
        pairs = zip(on_host.split(plan, alignment), on_meta.split(plan, alignment), strict=True)
        for host, meta in pairs:
            for name, tensor in host.tensors().items():
                same = meta.tensors()[name]
                assert (same.shape, same.dtype) == (tensor.shape, tensor.dtype), name
                assert same.device.type == "meta"
            for convention in ("next", "own", "drop_last"):
                assert meta.labels(convention).shape == host.labels(convention).shape
            assert meta.max_seqlen == host.max_seqlen
            if alignment.sequence_multiple > 1:
                assert meta.shard(4, 0).keys() == host.shard(4, 0).keys()


def test_a_value_read_from_the_device_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    select = TokenSources.select

    def reading(self: Any, table: torch.Tensor, num_tokens: int, *rest: Any) -> Any:
        return select(self, table, int(table[0, -1].item()), *rest)

    monkeypatch.setattr(TokenSources, "select", reading)
    assert some_batch(2).select([0, 1]).num_tokens
    with pytest.raises(RuntimeError, match="meta"):
        some_batch(2, device="meta").select([0, 1])


def test_the_kernel_is_all_that_is_launched() -> None:
    batch = some_batch()
    plan = plan_micro_batches(batch.seqlens, 64)
    tensors = of_the_loss(batch)
    with unexecuted():
        batch.split(plan, tensors=tensors, impl="triton")  # which makes what is made once
    with unexecuted() as launched, profile(activities=[ProfilerActivity.CPU]) as profiled:
        batch.split(plan, Alignment(total_multiple=64), tensors=tensors, impl="triton")
    assert launched == ["select_tokens_kernel"] * len(plan)
    on_host = {"aten::to", "aten::resolve_neg", "aten::zeros"}  # the table's memory; no-ops here
    assert set(torch_ops(profiled)) <= on_host
