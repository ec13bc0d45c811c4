import dataclasses
import inspect
import re
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.packing.adapters.cases import (
    FIELDS,
    clipped_loss,
    packed_logprobs,
    plain_batch,
    random_batch,
    some_batch,
    some_trajectories,
)
from trajpack import GRPO, GroupEstimator, Trajectory, Turn, pack, plan_micro_batches
from trajpack.agent import build_tiny_model
from trajpack.packing.adapters.trl import (
    from_grpo_inputs,
    to_async_row,
    to_async_samples,
    to_grpo_inputs,
)
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.testing import assert_same_bits

PAD = 0


@pytest.fixture(scope="module")
def trainer(trl, tmp_path_factory):
    from datasets import Dataset

    model, tokenizer = build_tiny_model(seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = trl.GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False,
            report_to=[], per_device_train_batch_size=2, num_generations=2, loss_type="dapo",
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "1"}, {"prompt": "2"}]),
            processing_class=tokenizer,
        )
    trainer.current_gradient_accumulation_steps = 1  # which training sets
    return trainer


def test_the_trainers_loss_of_the_rows_is_that_of_the_packed_tokens(trainer):
    batch = some_batch()
    inputs = to_grpo_inputs(batch, pad_token_id=PAD, old_per_token_logps=batch.rollout_logprobs)
    loss = trainer._compute_loss(trainer.model, inputs)
    ours = clipped_loss(
        packed_logprobs(trainer.model, batch),
        batch.rollout_logprobs,
        batch.advantages,
        batch.loss_mask,
    )
    torch.testing.assert_close(loss, ours, rtol=1e-4, atol=1e-5)
    of_turns = torch.autograd.grad(ours, trainer.model.model.embed_tokens.weight)[0]
    theirs = torch.autograd.grad(loss, trainer.model.model.embed_tokens.weight)[0]
    torch.testing.assert_close(theirs, of_turns, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_a_mean_over_rows_is_the_trainers_loss_of_type_grpo(trainer, monkeypatch, layout):
    """It counts the rows that it is given, those without a generated token too."""
    monkeypatch.setattr(trainer, "loss_type", "grpo")
    for seed in range(4):
        batch = pack(some_trajectories(seed), layout, device="cpu", fields=FIELDS)
        noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
        batch = dataclasses.replace(batch, advantages=torch.where(batch.loss_mask, noise, 0.0))
        old = batch.rollout_logprobs
        inputs = to_grpo_inputs(batch, pad_token_id=PAD, old_per_token_logps=old)
        loss = trainer._compute_loss(trainer.model, inputs)
        ratio = (packed_logprobs(trainer.model, batch) - old).exp()
        gains = torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
        weights = batch.loss_weights("sequence_mean_token_mean", per="row", denominator=len(batch))
        torch.testing.assert_close(loss, -(weights * gains).sum(), rtol=1e-4, atol=1e-5)


def test_the_trainer_trains_on_our_rows(trl, tmp_path):
    """A step of its own loop: its optimizer, its loss, our dictionary for what it generates."""
    from datasets import Dataset

    batch = some_batch()

    class OurTrainer(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            assert len(inputs) == len(batch)
            return to_grpo_inputs(batch, pad_token_id=PAD)

    model, tokenizer = build_tiny_model(seed=0)
    before = packed_logprobs(model, batch)[batch.loss_mask].detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = trl.GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_steps=1,
            per_device_train_batch_size=len(batch), num_generations=2, learning_rate=1e-2,
            warmup_steps=0, save_strategy="no", disable_tqdm=True, logging_steps=1,
            loss_type="dapo",
        )  # fmt: skip
        prompts = Dataset.from_list([{"prompt": str(n)} for n in range(len(batch))])
        trainer = OurTrainer(
            model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=prompts,
            processing_class=tokenizer,
        )
        trainer.train()
    advantages = batch.advantages[batch.loss_mask]
    # before the first step the policy is the one that it is compared with, and all ratios are 1
    assert trainer.state.log_history[0]["loss"] == pytest.approx(-advantages.mean().item(), 1e-3)
    after = packed_logprobs(model, batch)[batch.loss_mask].detach()
    assert ((after - before) * advantages).sum() > 0.1


def test_an_advantage_of_the_sequence_gives_the_same_loss_as_those_of_its_tokens(trainer):
    batch = some_batch(level="sequence")
    losses = []
    for level, shape in (("token", 2), ("sequence", 1)):
        inputs = to_grpo_inputs(batch, pad_token_id=PAD, advantages=level)
        assert inputs["advantages"].ndim == shape
        losses.append(trainer._compute_loss(trainer.model, inputs))
    torch.testing.assert_close(*losses)
    assert losses[0] != 0


def test_the_trainer_can_shuffle_and_split_the_dictionary(trl):
    batch = some_batch().to("cpu")
    inputs = to_grpo_inputs(batch, pad_token_id=PAD)
    halves = trl.utils.split_tensor_dict(trl.utils.shuffle_sequence_dict(inputs), 2)
    assert [list(half) for half in halves] == [list(inputs)] * 2
    rows = torch.cat([half["completion_ids"] for half in halves]).tolist()
    assert sorted(rows) == sorted(inputs["completion_ids"].tolist())
    assert halves[0]["num_items_in_batch"] == batch.num_generated


def test_keys_are_those_of_the_trainer(trl):
    """Whose code is read: what it returns, and what its loss looks up."""
    code = inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)
    batch = some_batch()
    optional = dict.fromkeys(
        ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio"),
        batch.rollout_logprobs,
    )
    inputs = to_grpo_inputs(batch, pad_token_id=PAD, **optional)
    for key in inputs:
        assert f'output["{key}"]' in code or f'"{key}": ' in code, key


def test_no_deprecated_argument_is_used(trl):
    """Whose code is read: which arguments it says are deprecated."""
    modules = [sys.modules[trl.GRPOConfig.__module__], sys.modules[trl.GRPOTrainer.__module__]]
    code = "".join(inspect.getsource(module) for module in modules)
    deprecated = set(re.findall(r"`(\w+)(?:=\w+)?` (?:argument )?is deprecated", code))
    assert "use_liger_kernel" in deprecated
    root = Path(__file__).parents[3]
    ours = [root / "examples" / "trl_grpo.py", root / "docs" / "trl.md"]
    ours += [root / "docs" / "formats" / "trl.md", *root.glob("tests/**/test_trl*.py")]
    for path in ours:
        used = set(re.findall(r"(\w+) ?=", path.read_text()))
        assert not used & deprecated, path


def test_an_advantage_of_the_sequence_that_is_not_a_number_stays_so():
    turns = [Turn([1], [2, 3], [-0.5, -0.5]), Turn([4], [5], [-0.5])]
    batch = pack([Trajectory("a", turns), Trajectory("b", turns[:1])], device="cpu")
    advantages = torch.tensor([0.0, float("nan"), float("nan"), 0.0, 2.0, 0.0, 3.0, 3.0])
    batch = batch.with_advantages(advantages)
    batch = batch.with_loss_mask(batch.input_ids != 5)
    found = to_grpo_inputs(batch, pad_token_id=PAD, advantages="sequence")["advantages"]
    assert_same_bits(found, torch.tensor([float("nan"), 0.0, 3.0]))


def test_other_options_and_tensors_are_refused():
    batch = some_batch()
    with pytest.raises(ValueError, match="advantages must be 'token' or 'sequence', got 'turn'"):
        to_grpo_inputs(batch, pad_token_id=PAD, advantages="turn")
    with pytest.raises(ValueError, match=r"a sequence must be equal, got .* in sequence 0"):
        to_grpo_inputs(batch, pad_token_id=PAD, advantages="sequence")
    with pytest.raises(TypeError, match=r"expected one of old_per_token_logps, .*, got values"):
        to_grpo_inputs(batch, pad_token_id=PAD, values=batch.returns)
    with pytest.raises(
        ValueError, match="old_per_token_logps must be over 58 tokens on cpu, got shape"
    ):
        to_grpo_inputs(batch, pad_token_id=PAD, old_per_token_logps=batch.returns[1:])


def collate(trl, rows_of_samples):
    rows = []
    for samples in rows_of_samples:
        rows.append(trl.TreeRow())
        for sample in samples:
            rows[-1].add(sample)
    return trl.DataCollatorForRollout(PAD, num_processes=len(rows))([rows])


def test_the_row_equals_the_collated_samples(trl):
    batch = some_batch(level="sequence")
    ours, theirs = to_async_row(batch), collate(trl, [to_async_samples(batch)])
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        assert_same_bits(ours[key], tensor, key)


def test_samples_with_a_common_prefix_have_equal_terms_folded_or_not(trl):
    """The collator folds the prompt; which token predicts what, and its worth, stay the same."""
    turns = [Turn([1, 2], [3, 4], [-0.5, -0.25]), Turn([1, 2], [3, 5], [-0.5, -0.75], reward=1.0)]
    batch = pack([Trajectory(str(n), [turn], "g") for n, turn in enumerate(turns)], device="cpu")
    batch = batch.with_advantages(GroupEstimator("dr_grpo"))
    ours, theirs = to_async_row(batch), collate(trl, [to_async_samples(batch)])
    assert theirs["input_ids"].shape[1] < ours["input_ids"].shape[1]
    terms = []
    for row in (ours, theirs):
        at = row["token_index"][0]
        keys = ("old_log_probs", "advantages", "segment_id")
        given = [row["position_ids"][0, at], row["shift_labels"][0, at]]
        columns = [*given, *(row[key][0] for key in keys)]
        terms.append(sorted(zip(*(column.tolist() for column in columns), strict=True)))
    assert terms[0] == terms[1]
    assert len(terms[0]) == batch.num_generated


class Scorer(torch.nn.Module):
    """A model as the asynchronous trainer calls it, with attention that this machine has.

    The trainer's own gathers keys for a kernel of flash attention; over sequences side by side
    that is attention within each, which the model also does by position ids.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids, shift_labels, fused_lm_head, **tree):
        places = tree["tree_cu_seqlens_q"]
        assert torch.equal(places, tree["tree_cu_seqlens_k"])
        assert tree["tree_max_seqlen_q"] == tree["tree_max_seqlen_k"] == int(places.diff().max())
        starts = torch.nonzero(position_ids[0] == 0)[:, 0]
        assert set(places[:-1].tolist()) >= set(starts.tolist())
        output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        logprobs = output.logits.float().log_softmax(-1)
        chosen = logprobs.gather(2, shift_labels.clamp(min=0)[..., None])[..., 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return SimpleNamespace(log_probs=chosen, entropy=entropy)


def async_loss(trl, scorer, row):
    from accelerate import Accelerator

    state = SimpleNamespace(
        aux_loss_enabled=False, epsilon_low=0.2, epsilon_high=0.2,
        accelerator=Accelerator(cpu=True), current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)}, _step_forward_tokens=0.0,
        _step_trained_tokens=0.0, _step_seq_len_weighted=0.0, _step_samples=0.0,
        _step_forward_s=0.0,
    )  # fmt: skip
    loss = trl.AsyncGRPOTrainer.compute_loss(state, scorer, row)
    return loss, state


@pytest.mark.parametrize("padded", [False, True])
def test_the_asynchronous_trainers_loss_of_the_row_is_that_of_the_packed_tokens(trl, padded):
    model, _ = build_tiny_model(seed=0)
    batch = some_batch()
    expected = clipped_loss(
        packed_logprobs(model, batch), batch.rollout_logprobs, batch.advantages, batch.loss_mask
    )
    row = batch
    if padded:
        row = batch.select([5, 3, 4, 1, 0, 2], Alignment(sequence_multiple=4, total=128))
    loss, state = async_loss(trl, Scorer(model), to_async_row(row))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert state._step_trained_tokens == batch.num_generated
    assert state._step_forward_tokens == row.num_tokens
    several = to_async_row(row, num_trained=torch.tensor(2 * batch.num_generated))
    torch.testing.assert_close(async_loss(trl, Scorer(model), several)[0], loss / 2)


@pytest.mark.parametrize("tail", ["sequence", "extend", "separate"])
def test_rows_of_micro_batches_have_the_terms_of_the_batch_and_a_dummy_none(tail):
    batch = some_batch()
    plan = plan_micro_batches(batch.seqlens, 32, align=4, multiple_of=8)
    alignment = Alignment(sequence_multiple=4, total=40, tail=tail, max_sequences=9)
    rows = [to_async_row(micro_batch) for micro_batch in batch.micro_batches(plan, alignment)]
    assert any(len(chosen) == 0 for chosen in plan)
    terms = []
    for row in [to_async_row(batch), *rows]:
        holds = row["token_index"][0] >= 0
        at = row["token_index"][0, holds]
        columns = [row[key][0, at] for key in ("input_ids", "shift_labels", "position_ids")]
        columns += [row[key][0, holds] for key in ("old_log_probs", "advantages")]
        terms.append(list(zip(*(column.tolist() for column in columns), strict=True)))
        assert len(terms[-1]) == int((row["shift_labels"] >= 0).sum()) == row["global_n_tokens"]
    whole, *parts = terms
    assert sorted(whole) == sorted(term for part in parts for term in part)
    assert [] in parts


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rows_of_the_dictionary_are_the_sequences_again(level):
    rng = np.random.default_rng(5)
    for number in range(20):
        batch = random_batch(rng)
        if level == "sequence":
            batch = dataclasses.replace(batch, advantages=torch.zeros(batch.num_tokens))
        inputs = to_grpo_inputs(batch, pad_token_id=3, advantages=level)
        if number % 2:
            inputs["old_per_token_logps"] = inputs.pop("sampling_per_token_logps")
        count = len(batch)
        groups, rewards = [f"task {row % 2}" for row in range(count)], [*map(float, range(count))]
        back = from_grpo_inputs(inputs, groups=groups, rewards=rewards)
        again = pack(back)
        for name in ("loss_mask", "rollout_logprobs", "input_ids"):
            for row, piece in enumerate(getattr(batch, name).split(batch.seqlens)):
                found = getattr(again, name).split(again.seqlens)[row]
                assert torch.equal(found, piece[: len(found)]), name  # up to the last generated
        assert again.num_generated == batch.num_generated
        assert [one.group for one in back] == groups
        assert [one.turns[-1].reward for one in back] == rewards


def test_dictionaries_that_cannot_be_read_are_refused():
    inputs = to_grpo_inputs(plain_batch().with_advantages(GRPO()), pad_token_id=0)
    for changes, options, message in (
        ({}, {}, "the reward of trajectory '0' is missing, expected the argument rewards"),
        ({}, {"rewards": [1.0]}, "rewards must be 3, one a row, got 1"),
        ({"sampling_per_token_logps": None}, {}, r"\['sampling_per_token_logps'\] are missing"),
        ({"tool_mask": torch.ones(3, 1)}, {}, r"tool_mask must have shape \[3, 10\], got \[3, 1\]"),
        ({"prompt_mask": torch.ones(2, 2)}, {}, r"prompt_mask must have shape \[3, 2\]"),
        ({"pixel_values": torch.ones(1)}, {}, "pixel_values are there, which are not carried"),
        ({"tool_mask": inputs["tool_mask"] * 0}, {"missing_reward": 0.0}, None),
    ):
        if message is None:
            assert not any(
                turn.completion_ids.size
                for one in from_grpo_inputs(inputs | changes, **options)
                for turn in one.turns
            )
            continue
        with pytest.raises(ValueError, match=message):
            from_grpo_inputs(inputs | changes, **options)
