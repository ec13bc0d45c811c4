"""Micro-batches on real hardware: those of the host, bit for bit, without a wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.conftest import no_waiting
from tests.packing.micro_batches.micro_batch_loops import (
    ALIGNMENTS,
    FIELDS,
    of_the_loss,
    some_batch,
)
from trajpack import GRPO, plan_micro_batches
from trajpack.kernels.rearrange.select_tokens import Segment, select_reference, select_tokens
from trajpack.testing import assert_same_bits

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def both(num_trajectories: int = 40) -> tuple[Any, Any]:
    """The same batch on the host and on the device, with advantages."""
    host = some_batch(num_trajectories).with_advantages(GRPO())
    return host, host.to(DEVICE)


@pytest.mark.parametrize("alignment", ALIGNMENTS.values(), ids=ALIGNMENTS.keys())
def test_they_are_those_of_the_host_and_nobody_waits(alignment: Any) -> None:
    host, device = both()
    tensors = of_the_loss(host)
    moved = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    plan = plan_micro_batches(
        host.seqlens, 300, align=alignment.sequence_multiple, max_sequences=9, multiple_of=4
    )
    device.split(plan, alignment, tensors=moved)  # compiles
    with no_waiting():
        actual = device.split(plan, alignment, tensors=moved)
        labels = [one.labels() for one in actual]
        merged = device.merge(plan, [one.rollout_logprobs for one in actual], alignment)
    for one, other, label in zip(
        actual, host.split(plan, alignment, tensors=tensors), labels, strict=True
    ):
        for name, tensor in other.tensors().items():
            assert_same_bits(one.tensors()[name], tensor, name)
        for name, tensor in other.fields.items():
            assert_same_bits(one.fields[name], tensor, name)
        assert_same_bits(label, other.labels())
    assert_same_bits(merged, host.rollout_logprobs)
    assert {field.name for field in FIELDS} < set(actual[0].fields)


def test_gradients_of_merged_outputs_are_those_of_the_host() -> None:
    host, device = both()
    plan = plan_micro_batches(host.seqlens, 300)
    grads = []
    for batch in (host, device):
        outputs = [
            one.rollout_logprobs.clone().requires_grad_() for one in batch.micro_batches(plan)
        ]
        merged = batch.merge(plan, outputs)
        (merged * torch.arange(len(merged), device=merged.device)).sum().backward()
        grads.append([output.grad.cpu() for output in outputs if output.grad is not None])
    for pair in zip(*grads, strict=True):
        assert_same_bits(*pair)


@pytest.mark.parametrize("positions", ["continue", "zero"])
def test_a_large_selection_is_that_of_the_reference(positions: Any) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4000, 3000)
    kept = rng.integers(0, lengths + 1)
    tokens = 10_000_000
    table = np.zeros((3, len(lengths) + 1), np.int32)
    table[Segment.START, 1:] = np.cumsum(lengths)
    table[Segment.SOURCE, :-1] = rng.integers(0, tokens - kept)
    table[Segment.LENGTH, :-1] = kept
    sources = [
        torch.arange(tokens, device=DEVICE),
        torch.rand(tokens, device=DEVICE) < 0.5,
        torch.rand(tokens, 3, device=DEVICE).bfloat16(),
    ]
    given = sources, torch.from_numpy(table).to(DEVICE), int(lengths.sum()), [-1, True, 0.5]
    selected = select_tokens(*given, positions)
    said = select_reference(*given, positions)
    for actual, wanted in zip(
        [*selected.rows, *selected[1:]], [*said.rows, *said[1:]], strict=True
    ):
        assert_same_bits(actual, wanted)
