"""A captured model step that micro-batches of a fixed shape replay; without a device, plain calls.

The functions are those of docs/devices.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.conftest import capture, no_waiting
from trajpack import GRPO, Alignment, MicroBatch, PackedBatch, Plan, pack, plan_micro_batches
from trajpack.testing import random_trajectory

ROOM = 96
ALIGNMENT = Alignment(total=ROOM, max_sequences=6, max_generated=ROOM)
VOCABULARY, WIDTH = 64, 16


def some_batch(device: str) -> PackedBatch:
    rng = np.random.default_rng(3)
    sizes = {"prompt": (1, 9), "completion": (1, 9), "vocabulary": VOCABULARY}
    conversations = [random_trajectory(rng, str(i), num_turns=2, **sizes) for i in range(20)]
    grouped = [dataclasses.replace(one, group=str(int(one.id) % 3)) for one in conversations]
    return pack(grouped, device=device).with_advantages(GRPO())


def static_copy(micro_batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch in memory of its own."""
    tensors: dict[str, Any] = {name: one.clone() for name, one in micro_batch.tensors().items()}
    fields = {name: one.clone() for name, one in micro_batch.fields.items()}
    return dataclasses.replace(micro_batch, **tensors, fields=fields)


def copy_into(static: MicroBatch, micro_batch: MicroBatch) -> None:
    """Copy the tensors of a micro-batch of the same shape into ``static``."""
    for name, tensor in micro_batch.tensors().items():
        static.tensors()[name].copy_(tensor)
    for name, tensor in micro_batch.fields.items():
        static.fields[name].copy_(tensor)


class Model(torch.nn.Module):
    """Tokens, positions, and a sum over the sequence before each place: what a model may read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(ROOM, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(self, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        x = self.embedding(input_ids) + self.positions(inputs["position_ids"])
        sums = torch.nn.functional.pad(x.cumsum(1), (0, 0, 1, 0))
        starts = inputs["cu_seq_lens_q"][inputs["seq_idx"][0].long()].long()
        return torch.tanh(x + (sums[:, 1:] - sums[:, starts]) / ROOM)


def step_of(model: Model) -> Callable[[MicroBatch], torch.Tensor]:
    """Return a step that adds the gradients of a micro-batch and returns its loss."""

    def step(static: MicroBatch) -> torch.Tensor:
        hidden = model.hidden(**static.model_inputs())
        generated, logprobs = static.generated, static.logprobs(hidden, model.head)
        loss = -(logprobs * generated.advantages * generated["weights"]).sum()
        loss.backward()
        return loss.detach()

    return step


def plan_of(batch: PackedBatch) -> Plan:
    return plan_micro_batches(batch.seqlens, ROOM, max_sequences=ALIGNMENT.max_sequences)


def gradients_of(model: Model) -> list[torch.Tensor]:
    return [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]


def check_a_step_of_fixed_shape(device: str) -> None:
    """Compare replays over static tensors with calls on the micro-batches themselves."""
    torch.manual_seed(0)
    batch, model = some_batch(device), Model().to(device)
    plan, weights = plan_of(batch), {"weights": batch.loss_weights("token_mean")}
    parts = batch.split(plan, ALIGNMENT, tensors=weights)
    assert len(parts) > 3
    assert len({tuple(map(tuple, (t.shape for t in p.tensors().values()))) for p in parts}) == 1
    step = step_of(model)
    expected = torch.stack([step(part) for part in parts]).cpu()
    plain = gradients_of(model)
    static = static_copy(parts[0])
    if device == "cuda":
        graph, loss = capture(lambda: step(static))
        replay: Callable[[], Any] = graph.replay
    else:
        loss, replay = torch.zeros(()), lambda: loss.copy_(step(static))
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()  # in place: the graph adds to these tensors
    losses = []
    for part in parts:
        copy_into(static, part)
        replay()
        losses.append(loss.clone())
    torch.testing.assert_close(torch.stack(losses).cpu(), expected, rtol=1e-5, atol=1e-6)
    for got, wanted in zip(gradients_of(model), plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_micro_batches_of_a_fixed_shape_share_static_tensors() -> None:
    check_a_step_of_fixed_shape("cpu")


@pytest.mark.gpu
def test_a_captured_step_takes_micro_batch_after_micro_batch() -> None:
    check_a_step_of_fixed_shape("cuda")


@pytest.mark.gpu
def test_copies_and_replays_do_not_wait() -> None:
    batch, model = some_batch("cuda"), Model().cuda()
    parts = batch.split(
        plan_of(batch), ALIGNMENT, tensors={"weights": batch.loss_weights("token_mean")}
    )
    static, step = static_copy(parts[0]), step_of(model)
    graph, _ = capture(lambda: step(static))
    with no_waiting():
        for part in parts:
            copy_into(static, part)
            graph.replay()
