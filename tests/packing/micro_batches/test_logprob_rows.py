"""`logprob_rows` and `logprobs` of batches and micro-batches, against all logits of each turn."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from tests.packing.isolation.tiny_models import tiny_model
from trajpack import GRPO, TokenField, Trajectory, Turn, pack
from trajpack.kernels.validation import HOSTS
from trajpack.packing.adapters.huggingface import LMHead
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.plan.plan import plan_micro_batches

VOCABULARY = 40


def turn(prompt: list[int], sizes: int) -> Turn:
    ids = [(prompt[-1] + 7 * index) % VOCABULARY for index in range(sizes)]
    return Turn(prompt, ids, [-0.1 * index for index in range(sizes)])


def trajectories(sizes: list[list[int]], *, forgets: bool) -> list[Trajectory]:
    """Return conversations; every other turn forgets the history if ``forgets``."""
    found = []
    for number, own in enumerate(sizes):
        turns, seen = [], [number + 1, 2]
        for index, size in enumerate(own):
            turns.append(turn(seen, size))
            seen = [*seen, *turns[-1].completion_ids, 5]
            if forgets and index % 2:
                seen = [number + 1, 3, index]
        found.append(Trajectory(str(number), turns))
    return found


SIZES = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4)


@given(SIZES, st.booleans(), st.sampled_from(["merged", "turns"]))
def test_rows_are_one_before_each_generated_token(sizes: Any, forgets: bool, layout: Any) -> None:
    batch = pack(trajectories(sizes, forgets=forgets), layout, device="cpu")
    rows, targets = batch.logprob_rows()
    assert len(rows) == batch.num_generated == sum(map(sum, sizes))
    assert batch.loss_mask.nonzero()[:, 0].tolist() == (rows + 1).tolist()
    assert batch.input_ids[batch.loss_mask].tolist() == targets.tolist()
    assert (batch.sequence_ids[rows] == batch.sequence_ids[rows + 1]).all()
    of_sequences = torch.zeros(len(batch)).index_add_(
        0, batch.sequence_ids.long(), batch.loss_mask.float()
    )
    assert batch.tables.generated_lens == tuple(of_sequences.int().tolist())


@given(SIZES, st.integers(0, 3))
def test_rows_of_micro_batches_come_to_those_of_the_batch(sizes: Any, cut: int) -> None:
    batch = pack(trajectories(sizes, forgets=True), device="cpu")
    capacity = max(batch.max_seqlen - cut, 2)
    plan = plan_micro_batches(
        batch.seqlens, capacity, oversized="truncate_at_turn", turn_ends=batch.turn_ends()
    )
    found = []
    for piece in batch.split(plan, Alignment(total_multiple=8)):
        rows, targets = piece.logprob_rows()
        assert len(rows) == piece.num_generated >= int(piece.loss_mask.sum())
        is_row = rows >= 0
        assert piece.loss_mask.nonzero()[:, 0].tolist() == (rows[is_row] + 1).tolist()
        assert piece.input_ids[piece.loss_mask].tolist() == targets[is_row].tolist()
        found += targets[is_row].tolist()
    if not cut:
        assert sorted(found) == sorted(batch.logprob_rows()[1].tolist())


def test_shapes_that_must_not_change_have_rows_that_are_left_over() -> None:
    batch = pack(trajectories([[2], [1]], forgets=False), device="cpu")
    rows, targets = batch.logprob_rows(most=5)
    assert rows.tolist() == [*batch.logprob_rows()[0].tolist(), -1, -1]
    assert targets[3:].tolist() == [0, 0]
    hidden = torch.randn(batch.num_tokens, 3, requires_grad=True)
    found = batch.logprobs(hidden, torch.randn(VOCABULARY, 3), most=5)
    assert (found[:3] < 0).all()
    assert not found[3:].any()
    (grad,) = torch.autograd.grad(found[3:].sum(), hidden)
    assert not grad.any()
    with pytest.raises(ValueError, match="most must be at least 3, got 2"):
        batch.logprob_rows(most=2)


def test_a_batch_knows_its_generated_tokens_without_reading_a_device(monkeypatch) -> None:
    batch = pack(trajectories([[2, 3], [1, 4]], forgets=True), device="cpu")
    expected = batch.tables.generated_lens
    for one in (pack(batch.unpack(), device="cpu"), batch.to("meta")):
        credited = one.with_advantages(GRPO()) if one.device.type in HOSTS else one
        if one is not credited:
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "cpu", None)
                assert credited.tables.generated_lens == expected


def test_log_probabilities_read_nothing_from_a_device() -> None:
    field = TokenField("sampling_mask", torch.int32, ragged=True)
    turn = Turn([1, 2], [3, 4, 5], [-0.5] * 3, fields={"sampling_mask": [[3, 8], [4], [5]]})
    batch = pack([Trajectory(name, [turn]) for name in "abc"], device="meta", fields=[field])
    batch = batch.with_advantages(GRPO())
    weight = torch.zeros(9, 4, device="meta", requires_grad=True)
    for one in (batch, batch.select([2, 0], Alignment(total_multiple=8))):
        hidden = torch.zeros(one.num_tokens, 4, device="meta", requires_grad=True)
        num_rows = one.num_generated
        temperature = torch.ones(num_rows, device="meta")
        # a meta tensor whose value is read raises
        found = one.logprobs(
            hidden, weight, entropy=True, support="sampling_mask", temperature=temperature
        )
        assert [len(values) for values in found] == [num_rows] * 2
        grads = torch.autograd.grad(found[0].sum() + found[1].sum(), (hidden, weight))
        assert [grad.shape for grad in grads] == [hidden.shape, weight.shape]
        own, rest = one.logprobs(hidden, weight, tokens="sampling_mask")
        assert (len(own), len(rest)) == (4 * num_rows // 3, num_rows)


def test_an_empty_batch_has_no_rows() -> None:
    batch = pack([], device="cpu")
    assert [len(one) for one in batch.logprob_rows()] == [0, 0]
    assert len(batch.logprobs(torch.zeros(0, 3), torch.zeros(5, 3))) == 0


def test_hidden_states_of_another_size_are_refused() -> None:
    batch = pack(trajectories([[2]], forgets=False), device="cpu")
    with pytest.raises(ValueError, match="hidden must have one entry for each of 4 token"):
        batch.logprobs(torch.zeros(3, 2), torch.zeros(5, 2))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "cohere", "granite"])
def test_a_head_gives_the_log_probabilities_of_the_model(name: str) -> None:
    model = tiny_model(name).eval()
    batch = pack(trajectories([[2, 3], [1, 4]], forgets=True), "turns", device="cpu")
    found, entropies = LMHead(model).logprobs(batch, entropy=True)
    rows, targets = batch.logprob_rows()
    for sequence, (begin, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        ids = batch.input_ids[begin:end]
        logprobs = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
        own = batch.sequence_ids[rows] == sequence
        alone = logprobs[rows[own] - begin]
        expected = alone.gather(1, targets[own, None])[:, 0]
        torch.testing.assert_close(found[own], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            entropies[own], -(alone.exp() * alone).sum(1), rtol=1e-4, atol=1e-5
        )


class AdaptedHead(torch.nn.Module):
    """A linear layer with an adapter of low rank, as of peft."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.ones(2, base.in_features))
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, 2))

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def test_a_model_whose_logits_are_made_otherwise_is_refused() -> None:
    model = tiny_model("llama").eval()
    head = model.lm_head
    hook = head.register_forward_hook(lambda *call: call[-1] * 1)  # that it changes no number
    with pytest.raises(TypeError, match="without hooks, got Linear with hooks"):
        LMHead(model)
    hook.remove()
    adapted = AdaptedHead(head)  # B = 0, as LoRA begins: a comparison alone would pass
    model.set_output_embeddings(adapted)
    with pytest.raises(TypeError, match="got AdaptedHead: only weight and bias are read"):
        LMHead(model)
    model.set_output_embeddings(head)
    model.config.final_logit_softcapping = 1e-3
    with pytest.raises(ValueError, match="LlamaForCausalLM makes its logits in another way"):
        LMHead(model)
    with pytest.raises(TypeError, match="got Linear"):
        LMHead(head)
