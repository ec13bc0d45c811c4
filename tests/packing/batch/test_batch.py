import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

import trajpack
from trajpack import Trajectory, Turn, pack
from trajpack.testing import assert_batches_equal, random_trajectory


def some_trajectories(count=3):
    generator = np.random.default_rng(0)
    sizes = {"prompt": (1, 9), "completion": (1, 9), "vocabulary": 64}
    drawn = [random_trajectory(generator, f"t{i}", num_turns=1 + i, **sizes) for i in range(count)]
    broken = Trajectory("broken", [Turn([1], [2], [-1.0]), Turn([3], [4], [-1.0], truncated=True)])
    return [*drawn, dataclasses.replace(broken, group="g", task_id=3, birth_time_ms=2**45)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_writing_to_a_turn_tensor_leaves_what_autograd_saved_of_another(device):
    batch = pack(some_trajectories(), device=device)
    before = batch.cu_seqlens._version
    batch.turn_rewards.sub_(1.0)
    assert batch.cu_seqlens._version == before


def test_a_pickled_batch_holds_its_tensors_alone():
    batch = pack([Trajectory(str(i), [Turn([1], [2], [0.0])]) for i in range(1000)])
    tables = batch.tables
    tensors = *batch.tensors().values(), tables.runs, tables.cu_new, *tables.group_order
    own = sum(tensor.nbytes for tensor in tensors)
    pickled = pickle.dumps(batch)
    assert len(pickled) < own + 40_000
    assert_batches_equal(pickle.loads(pickled), batch)


def test_unpacked_turns_share_nothing_with_the_batch():
    batch = pack(some_trajectories())
    unpacked = batch.unpack()
    for tensor in batch.tensors().values():
        tensor.zero_()
    assert unpacked == some_trajectories()


def test_a_batch_moves_between_devices_with_all_its_fields():
    batch = pack(some_trajectories())
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    assert all(tensor.is_meta for tensor in moved.tensors().values())
    assert moved.ids == batch.ids


def test_a_batch_says_what_it_holds():
    turns = [Turn([1, 2], [3] * 1500, [0.0] * 1500, version_end=2), Turn([4], [5], [0.0])]
    batch = pack([Trajectory("a", turns)])
    assert repr(batch) == (
        "PackedBatch('merged': 1 trajectories, 2 turns in 2 sequences, 1 prefix break; "
        "1,504 tokens, 1,501 generated; longest 1,502; policy versions 0 to 2; cpu)"
    )
    assert "meta" in repr(batch.to("meta"))


@pytest.mark.parametrize("kind", ["batch", "micro-batch"])
def test_names_of_other_libraries_are_answered_with_ours(kind):
    batch = pack(some_trajectories())
    owner = batch if kind == "batch" else batch.select([0])
    rewards = "turn_rewards" if kind == "batch" else "turn_rewards and is in the packed batch"
    for name, ours in [("response_mask", "loss_mask"), ("rewards", rewards)]:
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; it is called {ours}$"):
            getattr(owner, name)
    with pytest.raises(AttributeError, match=r"'attention_mask'; it is called model_inputs\(\)"):
        owner.attention_mask  # noqa: B018
    with pytest.raises(
        AttributeError, match=f"'{type(owner).__name__}' .* no attribute 'nothing'$"
    ):
        owner.nothing  # noqa: B018
    assert all(hasattr(owner, name) and not name.startswith("_") for name in dir(owner))
    assert {"input_ids", "seqlens", "model_inputs", "logprobs"} <= {*dir(owner)}
    assert not {"tables", "host_lengths", "value_counts"} & {*dir(owner)}
    assert_batches_equal(copy.deepcopy(batch), batch)


@pytest.mark.parametrize("call", ["select", "split", "merge"])
def test_tensors_in_place_of_an_alignment_are_named(call):
    batch = pack(some_trajectories())
    plan = trajpack.plan_micro_batches(batch.seqlens, 100)
    before = {"select": [[0]], "split": [plan], "merge": [plan, []]}[call]
    words = r"alignment must be an Alignment, got dict; pass tensors=\.\.\. by name"
    with pytest.raises(TypeError, match=words):
        getattr(batch, call)(*before, {"weights": batch.returns})
    with pytest.raises(
        TypeError, match=r"seqlens must be lengths, got PackedBatch; pass its \.seq"
    ):
        trajpack.plan_micro_batches(batch, 100)


def make_model(family, attention):
    import transformers

    config = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attn_implementation": attention,
    }
    torch.manual_seed(0)
    if family == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_a_packed_batch_gives_the_logits_of_its_separate_sequences(family, attention, layout):
    model = make_model(family, attention)
    single = Trajectory("single", [Turn([5], [], [])])  # a sequence of one token
    batch = pack([single, *some_trajectories(), single], layout=layout)
    with torch.no_grad():
        packed = model(**batch.model_inputs()).logits[0]
        alone = [model(ids[None]).logits[0] for ids in batch.input_ids.split(batch.seqlens)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-5)


def test_model_inputs_leave_no_room_for_the_silent_traps():
    inputs = pack(some_trajectories()).model_inputs()
    assert "attention_mask" not in inputs
    assert inputs["use_cache"] is False
    assert inputs["input_ids"].shape == inputs["position_ids"].shape
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert isinstance(inputs["max_length_q"], int)
    assert inputs["seq_idx"].dtype == torch.int32
    assert inputs["seq_idx"].is_contiguous()


def test_model_inputs_are_views_and_say_one_story():
    batch = pack([Trajectory("single", [Turn([5], [], [])]), *some_trajectories()])
    inputs = batch.model_inputs()
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"] is batch.cu_seqlens
    for name, field in (
        ("input_ids", batch.input_ids),
        ("position_ids", batch.position_ids),
        ("seq_idx", batch.sequence_ids),
    ):
        assert inputs[name].shape == (1, batch.num_tokens)
        assert inputs[name].data_ptr() == field.data_ptr()
    counts = torch.bincount(inputs["seq_idx"][0])
    assert torch.equal(counts.cumsum(0).int(), batch.cu_seqlens[1:])
    assert torch.equal(inputs["seq_idx"][0].diff() == 1, inputs["position_ids"][0, 1:] == 0)


def test_model_inputs_read_nothing_from_a_device():
    inputs = pack(some_trajectories(), device="meta").model_inputs()
    assert inputs["seq_idx"].device.type == "meta"


@pytest.mark.parametrize("change", [{"use_cache": True}, {"attention_mask": None}])
def test_the_traps_are_real(change):
    """A cache or a mask of ones lets sequences see each other: why `model_inputs` excludes them."""
    model = make_model("qwen3", "sdpa")
    batch = pack(some_trajectories())
    if "attention_mask" in change:
        change = {"attention_mask": torch.ones(1, batch.num_tokens, dtype=torch.long)}
    with torch.no_grad():
        right = model(**batch.model_inputs()).logits
        wrong = model(**batch.model_inputs() | change).logits
    assert (right - wrong).abs().max() > 1e-3
