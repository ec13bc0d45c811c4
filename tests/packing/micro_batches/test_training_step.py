"""The training step of the guide on micro-batches, held against one without packing."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from trajpack import GRPO, PackedBatch, Trajectory, Turn, pack, plan_micro_batches
from trajpack.agent.models.tiny_model import build_tiny_model

PAGE = Path(__file__).parents[3] / "docs" / "micro_batches.md"
CLIP = (0.2, 0.28)


@pytest.fixture(scope="module")
def train_step() -> Any:
    (source,) = re.findall(r"```python\n(def train_step.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"torch": torch}
    exec(compile(source, str(PAGE), "exec"), names)
    return names["train_step"]


def trajectories() -> list[Trajectory]:
    """Return some of one turn and of several; their log-probabilities are another policy's."""
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 300, (count,), generator=generator).tolist()

    def logprobs(count: int) -> list[float]:
        return (-10 * torch.rand(count, generator=generator)).tolist()

    found = []
    for index, num_turns in enumerate((1, 3, 2, 1, 2)):
        context, turns = ids(4 + index), []
        for turn in range(num_turns):
            said = ids(3 + turn)
            turns.append(Turn(context, said, logprobs(len(said)), float(index % 3)))
            context = [*context, *said, *ids(2)]
        found.append(Trajectory(str(index), turns, group="xy"[index % 2]))
    return found


def plain_loss(model: Any, batch: PackedBatch) -> torch.Tensor:
    """Return the loss with a forward pass for each sequence and a loop over its tokens."""
    total = torch.zeros(())
    begin = 0
    for length in batch.seqlens:
        of = slice(begin, begin + length)
        logits = model(input_ids=batch.input_ids[None, of]).logits[0].float()
        logprobs = torch.log_softmax(logits, -1)
        for at in range(1, length):
            token = begin + at
            if not batch.loss_mask[token]:
                continue
            assert batch.advantages is not None
            logprob = logprobs[at - 1, batch.input_ids[token]]
            ratio = (logprob - batch.rollout_logprobs[token]).exp()
            clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
            advantage = batch.advantages[token]
            total = total - torch.minimum(ratio * advantage, clipped * advantage)
        begin += length
    return total / batch.num_generated


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([value.grad.reshape(-1) for value in model.parameters()])


@pytest.fixture(scope="module")
def packed() -> PackedBatch:
    return pack(trajectories(), device="cpu").with_advantages(GRPO())


@pytest.mark.parametrize("capacity", [24, 1000])
def test_its_loss_and_gradient_are_those_of_a_loop_over_tokens(
    train_step: Any, packed: PackedBatch, capacity: int
) -> None:
    model, _ = build_tiny_model(seed=1)
    plain = copy.deepcopy(model)
    plan = plan_micro_batches(packed.seqlens, capacity)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss, norm = train_step(model, optimizer, packed, plan, CLIP)
    expected = plain_loss(plain, packed)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    wanted = gradients(plain)
    assert norm == pytest.approx(wanted.norm().item(), rel=1e-4)
    scale = min(1.0, 1.0 / norm)  # the step scales a long gradient down
    torch.testing.assert_close(gradients(model), wanted * scale, rtol=1e-3, atol=1e-5)


def test_a_second_call_has_the_same_gradient(train_step: Any, packed: PackedBatch) -> None:
    model, _ = build_tiny_model(seed=1)
    plan = plan_micro_batches(packed.seqlens, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    first, second, third = (train_step(model, optimizer, packed, plan) for _ in range(3))
    assert first == second == third
    assert first[1] > 0


def test_it_learns(train_step: Any, packed: PackedBatch) -> None:
    model, _ = build_tiny_model(seed=1)
    plan = plan_micro_batches(packed.seqlens, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = [train_step(model, optimizer, packed, plan)[0] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
