"""`generated` and `logprobs` of batches, micro-batches and trees, against loops over the turns."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.isolation.tiny_models import tiny_model
from trajpack import GRPO, RLOO, TokenField, Trajectory, Turn, pack, pack_tree
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
SEEDS = st.integers(0, 2**16)


def hidden_of(piece: Any, embedding: torch.Tensor) -> torch.Tensor:
    """Return states that depend on all tokens of a path, as those of a causal model do."""
    is_first = piece.position_ids == 0
    parents = torch.where(is_first, -1, torch.arange(len(is_first)) - 1)
    if hasattr(piece, "tree_parent"):
        parents = piece.tree_parent
    states: list[torch.Tensor] = []
    for parent, of_token in zip(parents.tolist(), embedding[piece.input_ids], strict=True):
        states.append(of_token + (states[parent] / 2 if parent >= 0 else 0))
    return torch.stack(states) if states else embedding[:0]


def loss_of(piece: Any, logprobs: torch.Tensor) -> torch.Tensor:
    """The clipped policy gradient: one function for rows, dropped tokens and trees."""
    generated = piece.generated
    ratio = (logprobs - generated.rollout_logprobs).exp()
    gain = ratio * generated.advantages
    clipped = ratio.clamp(0.8, 1.28) * generated.advantages
    return -(torch.minimum(gain, clipped) * generated["weights"]).sum()


def loss_by_loop(
    given: list[Trajectory], keep: list[bool], advantages: list[float], weights: Any
) -> torch.Tensor:
    """The same of the tokens that are kept, one after the other from the turns."""
    embedding, head = weights
    each, total = zip(keep, advantages, strict=True), embedding.new_zeros(())
    for turn in (turn for trajectory in given for turn in trajectory.turns):
        path = list(turn.prompt_ids)
        for token, old in zip(turn.completion_ids, turn.completion_logprobs, strict=True):
            is_kept, advantage = next(each)
            if is_kept:
                state = embedding.new_zeros(embedding.shape[1])
                for before in path:
                    state = embedding[before] + state / 2
                ratio = ((head @ state).log_softmax(0)[token] - float(old)).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                total = total - gain / sum(keep)
            path.append(int(token))
    return total


def drawn(sizes: Any, seed: int) -> tuple[list[Trajectory], list[bool], Any]:
    """Return trajectories, which tokens to keep, and the weights of a model.

    The sampling policy gave tokens that are dropped a probability of almost 0: in no sum may their
    ratio, which is infinite, meet their weight of 0.
    """
    generator = torch.Generator().manual_seed(seed)
    keep = (torch.rand(sum(map(sum, sizes)), generator=generator) < 0.6).tolist()
    each, given = iter(keep), []
    for trajectory in trajectories(sizes, forgets=bool(seed % 2)):
        turns = []
        for turn in trajectory.turns:
            old = [value if next(each) else -999.0 for value in turn.completion_logprobs]
            reward = float(torch.randn((), generator=generator))
            turns.append(replace(turn, completion_logprobs=old, reward=reward))
        given.append(replace(trajectory, turns=turns, group="task"))
    shapes = (VOCABULARY, 5), (VOCABULARY, 5)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return given, keep, [one.requires_grad_() for one in weights]


def pieces_of(batch: Any, seed: int) -> list[Any]:
    """Return micro-batches of a batch, with weights that are those of the whole."""
    tensors = {"weights": batch.loss_weights("token_mean")}
    if hasattr(batch, "tree_parent"):
        plan = batch.plan_micro_batches(40 + seed % 40)
        return list(batch.micro_batches(plan, Alignment(total_multiple=4), tensors=tensors))
    plan = plan_micro_batches(batch.seqlens, batch.max_seqlen + seed % 40)
    return batch.split(plan, Alignment(total_multiple=4), tensors=tensors)


@pytest.mark.parametrize("layout", ["merged", "turns", "tree"])
@given(SIZES, SEEDS)
@settings(max_examples=20)
def test_one_loss_serves_rows_dropped_tokens_and_trees(layout: Any, sizes: Any, seed: int) -> None:
    given, keep, weights = drawn(sizes, seed)
    mask = torch.tensor(keep, dtype=torch.bool)
    if layout == "tree":
        batch: Any = pack_tree(given, device="cpu").with_advantages(RLOO())
        advantages = batch.advantages.tolist()
    else:
        batch = pack(given, layout, device="cpu").with_advantages(RLOO())
        spans = [torch.arange(*span) for span in batch.turn_spans.tolist()]
        tokens = torch.cat(spans)  # generated tokens in the order of the turns
        advantages = batch.advantages[tokens].tolist()
        mask = torch.zeros(batch.num_tokens, dtype=torch.bool).index_put((tokens,), mask)
    before = batch.generated.input_ids, layout != "tree" and batch.labels(generated_only=False)
    batch = batch.with_loss_mask(mask)
    assert torch.equal(batch.generated.input_ids, before[0])
    assert layout == "tree" or torch.equal(batch.labels(generated_only=False), before[1])
    assert int(batch.generated.loss_mask.sum()) == sum(keep)
    found = torch.zeros((), dtype=torch.float64)
    for piece in pieces_of(batch, seed):
        logprobs = piece.logprobs(hidden_of(piece, weights[0]), weights[1])
        generated = piece.generated
        assert len(generated) == len(logprobs)
        for unused in (logprobs, generated["weights"], generated.returns, generated.turn_ids + 1):
            assert not unused[~generated.loss_mask].any()
        found = found + loss_of(piece, logprobs)
    expected = loss_by_loop(given, keep, advantages, weights)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    if sum(keep):
        gradients = (torch.autograd.grad(one, weights) for one in (found, expected))
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@given(SIZES, st.booleans(), st.sampled_from(["merged", "turns"]))
def test_a_token_is_predicted_by_the_one_before_it(sizes: Any, forgets: bool, layout: Any) -> None:
    batch = pack(trajectories(sizes, forgets=forgets), layout, device="cpu")
    generated = batch.generated
    assert len(generated) == batch.num_generated == sum(map(sum, sizes))
    assert batch.loss_mask.nonzero()[:, 0].tolist() == generated.place.tolist()
    assert (generated.place - 1).tolist() == generated.predicted_by.tolist()
    assert batch.input_ids[batch.loss_mask].tolist() == generated.input_ids.tolist()
    assert torch.equal(generated.of(batch.sequence_ids), batch.sequence_ids[generated.predicted_by])
    of_sequences = torch.bincount(batch.sequence_ids[generated.place], minlength=len(batch))
    assert batch.tables.generated_lens == tuple(of_sequences.tolist())


@given(SIZES, st.integers(1, 3))
def test_tokens_that_were_cut_off_have_rows_at_the_end(sizes: Any, cut: int) -> None:
    batch = pack(trajectories(sizes, forgets=True), device="cpu")
    capacity = max(batch.max_seqlen - cut, 2)
    plan = plan_micro_batches(
        batch.seqlens, capacity, oversized="truncate_at_turn", turn_ends=batch.turn_ends()
    )
    for piece in batch.split(plan, Alignment(total_multiple=8)):
        generated, num_trained = piece.generated, int(piece.loss_mask.sum())
        assert len(generated) == piece.num_generated >= num_trained
        assert generated.loss_mask.tolist() == [
            row < num_trained for row in range(piece.num_generated)
        ]
        assert (
            generated.input_ids[:num_trained].tolist() == piece.input_ids[piece.loss_mask].tolist()
        )
        assert not generated.input_ids[num_trained:].any()


def test_shapes_that_must_not_change_have_rows_without_a_token() -> None:
    batch = pack(trajectories([[2], [1]], forgets=False), device="cpu")
    alignment = Alignment(total=16, max_sequences=2, max_generated=5)
    piece = batch.select([1, 0], alignment)
    assert piece.generated.loss_mask.tolist() == [True] * 3 + [False] * 2
    hidden = torch.randn(piece.num_tokens, 3, requires_grad=True)
    found = piece.logprobs(hidden, torch.randn(VOCABULARY, 3))
    assert (found[:3] < 0).all()
    assert not found[3:].any()
    (grad,) = torch.autograd.grad(found[3:].sum(), hidden)
    assert not grad.any()
    assert len(batch.select([], alignment).generated) == 5
    with pytest.raises(ValueError, match="at most max_generated=2 generated tokens, got 3"):
        batch.select([0, 1], Alignment(max_generated=2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda batch: batch.generated["weigths"],
            KeyError,
            r"no 'weigths' .*: \['teacher'\]; send",
        ),
        (lambda batch: batch.select([0]).fields["w"], KeyError, r"no 'w' .*: \['teacher'\]; send"),
        (lambda batch: batch.generated.advantages, ValueError, "call with_advantages first"),
        (lambda batch: batch.generated.of(torch.zeros(2)), ValueError, "of: x must have one entry"),
        (lambda batch: batch.generated.of(None), TypeError, "of: x must be a tensor, got NoneType"),
    ],
)
def test_what_is_not_there_is_named(call: Any, error: Any, message: str) -> None:
    batch = pack(trajectories([[2]], forgets=False), device="cpu")
    field = TokenField("teacher", torch.float32)
    with pytest.raises(error, match=message):
        call(batch.with_field(field, torch.zeros(batch.num_tokens)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bool, torch.bfloat16])
def test_fields_of_every_dtype_are_0_where_tokens_are_dropped(dtype: torch.dtype) -> None:
    batch = pack(trajectories([[3]], forgets=False), device="cpu")
    sent = {"x": torch.ones(batch.num_tokens, 2).to(dtype)}
    batch = batch.with_loss_mask(torch.arange(batch.num_tokens) != 3)
    found = batch.select([0], tensors=sent).generated["x"]
    assert found.dtype == dtype
    assert found.float().tolist() == [[1, 1], [0, 0], [1, 1]]


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
    assert len(batch.generated) == len(batch.generated.returns) == 0
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
    rows, targets = batch.generated.predicted_by, batch.generated.input_ids
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
