"""Policy gradients on packed batches: what a step does, and what it measures."""

from __future__ import annotations

import copy
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.packing.isolation.tiny_models import tiny_model
from tests.packing.tree.test_tree_models import branching, distance, exact
from trajpack import GRPO, PackedBatch, Trajectory, TrajectoryBuffer, Turn, pack, pack_tree
from trajpack.agent.models.tiny_model import build_arithmetic_model
from trajpack.agent.training.arithmetic import lazy_demonstrations
from trajpack.agent.training.policy_trainer import (
    PolicyTrainer,
    StepOutcome,
    pack_as,
    warm_up,
)
from trajpack.packing.adapters.huggingface import LMHead

torch.set_num_threads(1)
MODEL, TOKENIZER = build_arithmetic_model()


def fresh_model() -> Any:
    return copy.deepcopy(MODEL)


def packed(trajectories: list[Trajectory]) -> PackedBatch:
    buffer = TrajectoryBuffer()
    buffer.extend(trajectories)
    return buffer.pack()


def sampled(version: int = 0, age: int = 0) -> PackedBatch:
    """Return groups of a right and a wrong answer, with the log-probabilities of `MODEL`."""
    turns = {
        (number, reward): Turn([1, 20 + number, 2], [20 + number + int(reward > 0), 3], [0.0, 0.0],
                               reward)
        for number in range(4)
        for reward in (1.0, -1.0)
    }  # fmt: skip
    batch = packed([Trajectory(str(key), [turn]) for key, turn in turns.items()])
    with torch.no_grad():
        logprobs = LMHead(MODEL).logprobs(batch)
    trajectories = []
    for index, (key, turn) in enumerate(turns.items()):
        of_turn = Turn(
            turn.prompt_ids, turn.completion_ids, logprobs[2 * index :][:2].tolist(), key[1],
            version_start=version - age, version_end=version,
            version_spans=[(version - age, 0, 1), (version, 1, 2)] if age else None,
        )  # fmt: skip
        trajectories.append(Trajectory(str(key), [of_turn], group=str(key[0])))
    return packed(trajectories).with_advantages(GRPO())


def completions(model: Any, batch: PackedBatch) -> torch.Tensor:
    with torch.no_grad():
        logprobs = LMHead(model).logprobs(batch)
    owners = batch.sequence_ids[batch.loss_mask].long()
    return torch.zeros(len(batch)).index_add_(0, owners, logprobs)


@pytest.mark.parametrize("is_warm_up", [False, True])
def test_gradients_from_before_are_not_used(is_warm_up: bool) -> None:
    shown = lazy_demonstrations(4, TOKENIZER, num_turns=1)

    def weights(*, has_gradients: bool) -> torch.Tensor:
        model = fresh_model()
        for value in model.parameters():
            value.grad = torch.full_like(value, 3.0) if has_gradients else None
        if is_warm_up:
            list(warm_up(model, shown, num_steps=1, learning_rate=1e-3, capacity=64))
        else:
            PolicyTrainer(model, learning_rate=1e-3, capacity=64).step(sampled())
        return torch.cat([value.detach().reshape(-1) for value in model.parameters()])

    assert torch.equal(weights(has_gradients=True), weights(has_gradients=False))


def test_log_probabilities_are_those_of_each_sequence_by_itself() -> None:
    batch = packed(lazy_demonstrations(12, TOKENIZER, num_turns=3))
    with torch.no_grad():
        alone = []
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            ids = batch.input_ids[start:end]
            scores = MODEL(ids[None], use_cache=False).logits[0].log_softmax(-1)
            of_next = scores[:-1].gather(1, ids[1:, None])[:, 0]
            alone.append(of_next[batch.loss_mask[start + 1 : end]])
        torch.testing.assert_close(
            LMHead(MODEL).logprobs(batch), torch.cat(alone), atol=1e-5, rtol=0
        )


def test_a_step_makes_right_answers_likelier_and_wrong_ones_less_likely() -> None:
    model, batch = fresh_model(), sampled()
    before = completions(model, batch)
    trainer = PolicyTrainer(model, learning_rate=1e-3, capacity=64, num_epochs=3)
    trainer.step(batch)
    change = completions(model, batch) - before
    assert (change[0::2] > 0).all()
    assert (change[1::2] < 0).all()
    assert trainer.version == 1


def test_micro_batches_add_up_to_the_step_of_the_whole_batch() -> None:
    batch, models, outcomes = sampled(), [fresh_model(), fresh_model()], []
    for model, capacity in zip(models, (1000, 11), strict=True):
        # Momentum alone: AdamW's first step is the sign of a gradient, whatever its size.
        trainer = PolicyTrainer(model, learning_rate=0.1, capacity=capacity)
        trainer._optimizer = torch.optim.SGD(model.parameters())
        outcomes.append(trainer.step(batch))
    whole, pieces = outcomes
    assert (whole.num_micro_batches, pieces.num_micro_batches) == (1, 4)
    assert pieces.loss == pytest.approx(whole.loss, abs=1e-6)
    assert pieces.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-4)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def step_of(layout: Any, capacity: int) -> tuple[torch.Tensor, StepOutcome, int]:
    """Return the gradient of a step in float64, its outcome, and the tokens of the batch."""
    silent = Trajectory("silent", [Turn([3, 4] * 25, [], [])])
    batch = pack_as([*branching(), silent], layout).with_advantages(GRPO())
    model = exact(fresh_model())
    trainer = PolicyTrainer(
        model, learning_rate=1e-3, capacity=capacity, max_gradient_norm=1e9, layout=layout
    )
    outcome = trainer.step(batch)
    gradient = torch.cat([weight.grad.reshape(-1) for weight in model.parameters()])
    return gradient, outcome, len(batch.input_ids)


@pytest.mark.parametrize("layout", ["turns", "tree"])
@pytest.mark.parametrize("capacity", [1000, 50])
def test_a_step_is_the_same_in_every_layout(layout: Any, capacity: int) -> None:
    wanted, expected, num_merged = step_of("merged", 1000)
    gradient, outcome, num_tokens = step_of(layout, capacity)
    assert distance(gradient, wanted) < 1e-10
    assert expected.gradient_norm > 0.01
    assert 0 < expected.clip_fraction < 1
    cut = ("num_micro_batches", "fill")
    assert {name: value for name, value in asdict(outcome).items() if name not in cut} == {
        name: pytest.approx(value, rel=1e-10)
        for name, value in asdict(expected).items()
        if name not in cut
    }
    num_computed = round(outcome.fill * outcome.num_micro_batches * capacity)
    assert (outcome.num_micro_batches == 1) == (capacity == 1000)
    assert (num_computed == num_tokens) == (layout == "turns" or capacity == 1000)
    assert (num_computed < num_merged) == (layout == "tree")


def test_tokens_of_older_weights_are_not_on_policy() -> None:
    trainer = PolicyTrainer(fresh_model(), learning_rate=1e-9, capacity=64)
    outcome = trainer.step(sampled())
    assert outcome.num_on_policy == 16
    assert outcome.logprob_gap < 1e-5
    assert (outcome.mean_staleness, outcome.max_staleness) == (0.0, 0)
    trainer.version = 7
    outcome = trainer.step(sampled(version=7, age=2))
    assert outcome.num_on_policy == 0
    assert (outcome.mean_staleness, outcome.max_staleness) == (1.0, 2)


def test_log_probabilities_of_other_weights_show() -> None:
    model = fresh_model()
    with torch.no_grad():
        model.lm_head.weight[21] += 0.01
    outcome = PolicyTrainer(model, learning_rate=1e-9, capacity=64).step(sampled())
    assert outcome.logprob_gap > 1e-5


def test_the_clip_limits_later_epochs() -> None:
    batch = sampled()
    few, many = (
        PolicyTrainer(fresh_model(), learning_rate=0.05, capacity=64, num_epochs=count).step(batch)
        for count in (1, 6)
    )
    assert few.clip_fraction == 0
    assert many.clip_fraction > 0.2


def test_a_batch_without_advantages_or_generated_tokens_is_refused() -> None:
    trainer = PolicyTrainer(fresh_model(), learning_rate=1e-3, capacity=8)
    with pytest.raises(ValueError, match="the batch has no advantages; call with_advantages"):
        trainer.step(pack([Trajectory("a", [Turn([1], [2], [-0.1])])]))
    silent = pack([Trajectory("a", [Turn([1], [], [])])]).with_advantages(GRPO())
    with pytest.raises(ValueError, match="no generated tokens to learn from"):
        trainer.step(silent)
    long = pack([Trajectory("a", [Turn([1] * 8, [2], [-0.1])])]).with_advantages(GRPO())
    with pytest.raises(ValueError, match="9"):
        trainer.step(long)
    assert trainer.version == 0


def test_another_layout_than_the_trainers_is_refused() -> None:
    options = {"learning_rate": 1e-3, "capacity": 64}
    with pytest.raises(ValueError, match="'merged', 'turns', 'tree', got 'rows'"):
        PolicyTrainer(fresh_model(), layout="rows", **options)  # type: ignore[arg-type]
    tree = pack_tree(branching()).with_advantages(GRPO())
    with pytest.raises(TypeError, match="layout takes a PackedBatch, got TreeBatch"):
        PolicyTrainer(fresh_model(), **options).step(tree)
    with pytest.raises(TypeError, match="layout takes a TreeBatch, got PackedBatch"):
        PolicyTrainer(fresh_model(), layout="tree", **options).step(sampled())


def test_warming_up_learns_the_demonstrations_in_one_pass() -> None:
    model = fresh_model()
    lessons = lazy_demonstrations(12 * 16, TOKENIZER, num_turns=2, skill=1.0)
    losses = list(warm_up(model, lessons, num_steps=12, learning_rate=1e-2, capacity=128))
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 3
    with pytest.raises(ValueError, match="13 steps need as many trajectories, got 12"):
        next(warm_up(model, lessons[:12], num_steps=13, learning_rate=1e-2, capacity=128))


def test_a_model_whose_sequences_see_each_other_is_refused_before_any_step() -> None:
    model = tiny_model("lfm3")
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(ValueError, match=r"Lfm3ForCausalLM lets .* \(Lfm3ShortConv\)"):
        PolicyTrainer(model, learning_rate=1e-3, capacity=64)
    assert all(map(torch.equal, model.parameters(), before))


def test_a_model_that_cannot_compute_trees_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Lfm3ForCausalLM cannot take a tree: .*conv"):
        PolicyTrainer(tiny_model("lfm3"), learning_rate=1e-3, capacity=64, layout="tree")
