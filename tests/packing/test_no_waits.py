"""What says that it does not synchronise reads no tensor of a batch, and makes no blocking copy.

Tensors are on the meta device. It has no values, so a read raises. A blocking copy is found by its
flag, an index that lies on the host by its device.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.packing.credit.credit_cases import EVERY, given_beside, inputs_of, some_trajectories
from trajpack import GRPO, Alignment, Correction, PackedBatch, pack, pack_tree, plan_micro_batches
from trajpack.packing.adapters import (
    areal,
    flash_attention,
    huggingface,
    nemo_rl,
    prime_rl,
    torchtitan,
    trl,
    trl_tree,
)
from trajpack.packing.conversion import sent

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Raises at a blocking copy between devices, and at an index that is copied to a device."""

    def __torch_dispatch__(
        self, op: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        named = keywords or {}
        if op.overloadpacket is torch.ops.aten._to_copy:
            kept = arguments[0].device
            self.check(kept, torch.device(named.get("device") or kept), named)
        elif op.overloadpacket is torch.ops.aten.copy_:
            waits = {"non_blocking": arguments[2]} if len(arguments) > 2 else named
            self.check(arguments[1].device, arguments[0].device, waits)
        elif op.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            for index in arguments[1]:
                if index is not None and index.ndim:
                    self.check(index.device, arguments[0].device, {})
        return op(*arguments, **named)

    def check(self, begin: torch.device, end: torch.device, named: dict[str, Any]) -> None:
        assert begin == end or named.get("non_blocking"), f"a copy from {begin} to {end} waits"


class Constants(TorchFunctionMode):
    """Raises where numbers of the host become a tensor of a device, by a blocking copy.

    A number that is assigned to one element is copied; to a slice it is an argument of a kernel.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        named = keywords or {}
        if function in (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor):
            is_sent = torch.device(named.get("device") or "cpu") != torch.device("cpu")
            is_sent |= function is torch.Tensor.new_tensor and arguments[0].device == META
            assert not is_sent, f"{function.__name__} waits for its copy"
        if function is torch.Tensor.__setitem__ and not isinstance(arguments[2], torch.Tensor):
            tensor, index, _ = arguments
            waits = tensor.device == META and tensor[index].ndim == 0
            assert not waits, "an assignment of a number to one element waits for its copy"
        return function(*arguments, **named)


TRAJECTORIES = [
    dataclasses.replace(one, task_id=3, birth_time_ms=5) for one in some_trajectories(12, 9)
]
HOST = pack(TRAJECTORIES, device="cpu").with_advantages(GRPO())
TREE = pack_tree(TRAJECTORIES, boundary="duplicate").with_advantages(GRPO())
PLAN = plan_micro_batches(HOST.seqlens, 80, align=4)
CHAINS = TREE.plan_micro_batches(80)


def cut(batch: PackedBatch) -> torch.Tensor:
    """Cut a batch into micro-batches, read what a model and a loss take, and merge."""
    alignment = Alignment(sequence_multiple=4, total_multiple=16)
    parts = batch.split(PLAN, alignment)
    for part in parts:
        part.labels(), part.model_inputs()
    return batch.merge(PLAN, [part.rollout_logprobs for part in parts], alignment)


OF_BATCHES: dict[str, Callable[[Any], Any]] = {
    "areal": areal.to_padded_dict,
    "areal, update": areal.to_update_dict,
    "flash attention": flash_attention.to_varlen,
    "huggingface": huggingface.to_padding_free,
    "nemo_rl": nemo_rl.to_loss_inputs,
    "prime_rl": prime_rl.to_tensor_micro_batch,
    "torchtitan": torchtitan.to_training_microbatch,
    "trl": trl.to_async_row,
    "micro-batches": cut,
    "labels": PackedBatch.labels,
    "model_inputs": PackedBatch.model_inputs,
    "generated": lambda batch: batch.with_loss_mask(batch.loss_mask).generated.advantages,
    "loss_weights": lambda batch: batch.loss_weights("sequence_mean_token_mean"),
    "importance_weights": lambda batch: batch.importance_weights(
        batch.rollout_logprobs, Correction.mis()
    ),
}
OF_TREES: dict[str, Callable[[Any], Any]] = {
    "trl": trl_tree.to_tree_kwargs,
    "trl, row": trl.to_async_row,
    "advantages": lambda tree: tree.with_advantages(GRPO()),
    "loss_weights": lambda tree: tree.loss_weights("token_mean"),
    "entry_weights": lambda tree: dataclasses.replace(tree, share="sum").entry_weights,
    "labels": lambda tree: tree.labels(),
    "generated": lambda tree: tree.with_loss_mask(tree.advantages > 0).generated.advantages,
    "micro-batches": lambda tree: list(tree.micro_batches(CHAINS)),
}


def without_waits(work: Callable[[], Any]) -> Any:
    with Constants(), Copies():
        return work()


@pytest.mark.parametrize("name", OF_BATCHES)
def test_a_batch_on_a_device_is_neither_read_nor_waited_for(name: str) -> None:
    packed = pack(TRAJECTORIES, device=META).with_advantages(GRPO())
    for batch in (HOST.to(META), packed):
        without_waits(lambda batch=batch: OF_BATCHES[name](batch))


@pytest.mark.parametrize("name", OF_TREES)
def test_a_tree_on_a_device_is_neither_read_nor_waited_for(name: str) -> None:
    packed = pack_tree(TRAJECTORIES, boundary="duplicate", device=META).with_advantages(GRPO())
    for tree in (TREE.to(META), packed):
        without_waits(lambda tree=tree: OF_TREES[name](tree))


@pytest.mark.parametrize("name", EVERY)
def test_no_estimator_reads_a_batch(name: str) -> None:
    batch, given = HOST.to(META), given_beside(TRAJECTORIES)
    inputs = {key: one.to(META) for key, one in inputs_of(HOST, EVERY[name], given).items()}
    credited = without_waits(lambda: batch.with_advantages(EVERY[name], **inputs))
    assert credited.advantages.device == META


def test_a_batch_that_was_moved_knows_its_lengths() -> None:
    loaded = pickle.loads(pickle.dumps(HOST))
    lengths = HOST.tables.generated_lens
    for batch in (pack(TRAJECTORIES, device="cpu"), loaded):
        moved = batch.to(META)
        assert moved.tables.generated_lens == lengths
        assert moved.seqlens == HOST.seqlens


def test_an_array_is_sent_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        steps.append("pin")
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        steps.append((str(device), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    sent(np.arange(3), torch.device("cuda", 1))
    sent(np.arange(3), torch.device("cpu"))
    assert steps == ["pin", ("cuda:1", True), ("cpu", True)]


WAITS: list[tuple[str, Callable[[], Any]]] = [
    ("a copy from cpu to meta waits", lambda: torch.zeros(3).to(META)),
    ("a copy from cpu to meta waits", lambda: torch.empty(3, device=META).copy_(torch.zeros(3))),
    ("a copy from meta to cpu waits", lambda: torch.empty(3, device=META).tolist()),
    ("a copy from cpu to meta waits", lambda: torch.empty(3, device=META)[torch.arange(2)]),
    ("tensor waits for its copy", lambda: torch.tensor([1, 2], device=META)),
    ("asarray waits for its copy", lambda: torch.asarray([1, 2], device=META)),
    ("to one element waits", lambda: torch.empty(3, 2, device=META).__setitem__((-1, 0), 7)),
    ("new_tensor waits for its copy", lambda: torch.empty(0, device=META).new_tensor([1])),
]


@pytest.mark.parametrize(("message", "work"), WAITS)
def test_what_would_wait_is_found(message: str, work: Callable[[], Any]) -> None:
    with pytest.raises(AssertionError, match=message):
        without_waits(work)
