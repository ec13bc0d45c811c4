import dataclasses
import json
import math
import os
import pickle

import numpy as np
import pytest
import torch

from trajpack import PackedBatch, TokenField, Trajectory, Turn, pack
from trajpack.testing import assert_batches_equal, random_trajectory


def some_trajectories(count=3):
    generator = np.random.default_rng(0)
    sizes = {"prompt": (1, 9), "completion": (1, 9), "vocabulary": 64}
    drawn = [random_trajectory(generator, f"t{i}", num_turns=1 + i, **sizes) for i in range(count)]
    broken = Trajectory("broken", [Turn([1], [2], [-1.0]), Turn([3], [4], [-1.0], truncated=True)])
    return [*drawn, dataclasses.replace(broken, group="g", task_id=3, birth_time_ms=2**45)]


def with_credit(batch):
    """What stands in for the advantages and metrics of an estimator."""
    return dataclasses.replace(
        batch,
        advantages=torch.linspace(-1, 1, batch.num_tokens),
        metrics=torch.tensor([0.5, float("nan")], dtype=torch.float64),
        metric_names=("clip", "kl"),
    )


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_a_saved_batch_is_loaded_exactly(tmp_path, layout):
    batch = pack(some_trajectories(), layout=layout)
    batch.save(tmp_path / "batch.safetensors")
    loaded = PackedBatch.load(tmp_path / "batch.safetensors")
    assert_batches_equal(batch, loaded)
    assert loaded.unpack() == some_trajectories()


def test_an_empty_batch_is_saved_and_loaded(tmp_path):
    pack([]).save(tmp_path / "batch.safetensors")
    assert_batches_equal(pack([]), PackedBatch.load(tmp_path / "batch.safetensors"))


def test_saving_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "batch.safetensors"
    pack(some_trajectories(1)).save(path)
    before = path.read_bytes()

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        pack(some_trajectories()).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_saving_into_a_missing_folder_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        pack([]).save(tmp_path / "nowhere" / "batch.safetensors")


def test_files_that_are_no_batch_are_refused(tmp_path):
    path = tmp_path / "batch.safetensors"
    with pytest.raises(FileNotFoundError):
        PackedBatch.load(path)
    path.write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="is not a readable packed batch"):
        PackedBatch.load(path)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"its format is None, expected 'trajpack.PackedBatch'"):
        PackedBatch.load(path)
    save_file(
        {"x": torch.zeros(1)}, path, {"format": "trajpack.PackedBatch", "schema_version": "9"}
    )
    with pytest.raises(ValueError, match="has schema version 9, this release reads version 2"):
        PackedBatch.load(path)
    save_file(
        {"x": torch.zeros(1)}, path, {"format": "trajpack.PackedBatch", "schema_version": "2"}
    )
    with pytest.raises(ValueError, match="is not a readable packed batch"):
        PackedBatch.load(path)


VALUES = TokenField("values", torch.float32)


def tampered(path, change):
    """Save a batch with one part changed, past every check."""
    from safetensors.torch import save_file

    batch = with_credit(pack(some_trajectories()))
    tensors = dict(batch.tensors())
    host = batch.host_values() | {"token_fields": []}
    tensors, host = change(tensors, host)
    metadata = {"format": "trajpack.PackedBatch", "schema_version": "2", "host": json.dumps(host)}
    save_file(tensors, path, metadata)
    return path


def odd_bools(mask):
    """Bytes that are no bools, but count as True."""
    return (mask.byte() * 0 + 90).view(torch.bool)


def other_host(**changes):
    return lambda tensors, host: (tensors, {**host, **changes})


def other_tensor(name, change):
    if change is None:
        return lambda tensors, host: ({**tensors, name: torch.zeros(1)}, host)
    return lambda tensors, host: ({**tensors, name: change(tensors[name])}, host)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, host: ({}, host), "input_ids is missing"),
        (lambda tensors, host: (tensors | {"x": torch.zeros(1)}, host), "'x' is no tensor of a"),
        (lambda tensors, host: (tensors, [1]), "its metadata must be a JSON object"),
        (
            other_host(token_fields=[{"name": "v"}]),
            "token_fields must describe fields: a field must",
        ),
        (other_host(token_fields=3), "token_fields must be a list, got 3"),
        (other_host(token_fields=[TokenField("v", torch.int8).as_json()]), "'v' is missing"),
        (other_tensor("fields.v", None), "field 'v' is not declared in token_fields"),
        (other_host(more=1), "its metadata must be .*, got .*'more'"),
        (other_host(layout="tree"), "layout must be one of .*, got 'tree'"),
        (other_host(layout=["merged"]), "layout must be one of"),
        (other_host(seqlens="abc"), "seqlens must be a list, got 'abc'"),
        (other_host(seqlens=[1, 2.0]), "seqlens must be int, got 2.0 at index 1"),
        (other_host(seqlens=[1, True]), "seqlens must be int, got True at index 1"),
        (other_host(seqlens=[1, 0]), "seqlens must be at least 1, got 0 at index 1"),
        (other_host(seqlens=[2**31]), "seqlens must come to at most"),
        (other_host(seqlens=[1]), r"must have shape \[1\], got"),
        (other_host(ids=[]), "groups must have 0 entries as ids has, got 4"),
        (other_host(ids=[1, "a", "b", "c"]), "ids must be str, got 1 at index 0"),
        (other_host(task_ids=[None, 2**70, 1, 1]), "task_ids must fit int64, got .* at index 1"),
        (other_host(task_ids=[None, [1], 1, 1]), r"task_ids must be int or NoneType, got \[1\] at"),
        (other_host(birth_times_ms=[-(2**63) - 1] * 4), "birth_times_ms must fit int64"),
        (other_host(turn_discounts=[1.0, 1e39, 1.0, 1.0]), "turn_discounts must be finite float32"),
        (other_host(turn_discounts=[1.0, 1, 1.0, 1.0]), "turn_discounts must be float, got 1 at"),
        (other_host(turn_discounts=[1.0] * 4), "turn_returns must be turn_rewards discounted"),
        (other_host(num_generated=1), "num_generated must be .*, as turn_spans say, got 1"),
        (other_host(num_generated="many"), "num_generated must be an integer, got 'many'"),
        (
            other_tensor("loss_mask", torch.Tensor.float),
            "loss_mask must be torch.bool, got torch.f",
        ),
        (other_tensor("returns", lambda returns: returns[:3].clone()), r"returns must have shape"),
        (
            other_tensor("cu_seqlens", lambda bounds: bounds * 100),
            "cu_seqlens must be .*seqlens say",
        ),
        (other_tensor("cu_turns", torch.ones_like), "cu_turns must grow from 0 to the"),
        (other_tensor("turn_sequence", lambda index: index + 99), "turn_sequence must number"),
        (other_tensor("turn_sequence", lambda index: -index), "turn_sequence must number"),
        (other_tensor("turn_spans", torch.zeros_like), "turn_spans must leave a prompt before it"),
        (other_tensor("turn_begin", lambda begin: begin + 9), "turn_begin must be 0 at index 0"),
        (other_tensor("turn_begin", torch.zeros_like), "turn_begin must be .*, as turn_spans say"),
        (
            other_tensor("turn_rewards", lambda r: r * math.inf),
            "turn_rewards must be finite float32",
        ),
        (
            other_tensor("turn_rewards", lambda rewards: -rewards),
            "turn_returns must be turn_rewards",
        ),
        (
            other_tensor("turn_version_start", lambda v: v - 9),
            "turn_version_start must be 0 or more",
        ),
        (
            other_tensor("turn_version_end", lambda v: v - 9),
            "turn_version_end must be no less than",
        ),
        (
            other_tensor("turn_version_start", lambda v: v * 0),
            "policy_versions must be from|must run from",
        ),
        (other_tensor("policy_versions", lambda v: v + 1), "policy_versions must be from"),
        (
            other_tensor("cu_generated", lambda bounds: bounds * 2),
            "cu_generated must be .*spans say",
        ),
        (
            other_tensor("cu_generated", lambda bounds: bounds + 1),
            "cu_generated must be 0 at index 0",
        ),
        (other_tensor("cu_generated", lambda b: b[1:].clone()), r"cu_generated must have shape"),
        (
            other_tensor("group_ids", torch.zeros_like),
            "group_ids must be 1 at index 1, as groups say",
        ),
        (other_tensor("group_ids", lambda ids: ids[1:].clone()), "group_ids must have shape"),
        (other_host(num_groups=3), "num_groups must be 4, as groups say, got 3"),
        (other_host(num_groups=4.0), "num_groups must be an integer, got 4.0"),
        (
            other_tensor("advantages", torch.Tensor.double),
            "advantages must be torch.float32, got to",
        ),
        (
            other_tensor("metrics", lambda m: m[1:].clone()),
            r"metrics must have shape \[2\], got \[1\]",
        ),
        (other_host(metric_names=["kl"]), r"metrics must have shape \[1\], got \[2\]"),
        (other_host(metric_names=[1, 2]), "metric_names must be str, got 1 at index 0"),
        (
            lambda tensors, host: ({n: t for n, t in tensors.items() if n != "metrics"}, host),
            "metric_names must be empty without metrics",
        ),
        (
            other_tensor("input_ids", lambda ids: ids - 2**40),
            "input_ids must be in .*, got -.* at in",
        ),
        (
            other_tensor("input_ids", lambda ids: ids + 2**40),
            "input_ids must be in .*, got 1.* at in",
        ),
        (
            other_tensor("position_ids", lambda ids: ids + 1),
            "position_ids must be 0 at index 0, as se",
        ),
        (
            other_tensor("sequence_ids", lambda ids: ids + 1),
            "sequence_ids must be 0 at index 0, as se",
        ),
        (
            other_tensor("turn_ids", lambda ids: ids * 0),
            "turn_ids must be -1 at index 0, as turn_spa",
        ),
        (
            other_tensor("loss_mask", lambda mask: mask & False),
            "loss_mask must be 1 at index .*, as t",
        ),
        (
            other_tensor("prompt_mask", lambda mask: ~mask),
            "prompt_mask must be 1 at index 0, as turn",
        ),
        (
            other_tensor("prompt_mask", lambda m: (m.byte() * 90).view(torch.bool)),
            "prompt_mask must",
        ),
        (
            other_tensor("turn_truncated", odd_bools),
            "turn_truncated must be bytes of 0 or 1, got 90",
        ),
        (
            other_tensor("rollout_logprobs", lambda p: p - 1),
            "rollout_logprobs must be 0.0 at index 0",
        ),
        (
            other_tensor("rollout_logprobs", lambda p: -p.abs()),
            "rollout_logprobs must be 0.0 at index",
        ),
        (
            other_tensor("rollout_logprobs", lambda p: p / 0),
            "rollout_logprobs must be finite, got nan",
        ),
    ],
)
def test_a_batch_whose_parts_disagree_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=f"is not a readable packed batch: .*{message}"):
        PackedBatch.load(tampered(tmp_path / "batch.safetensors", change))


def test_a_file_is_as_private_as_the_user_asks_and_links_stay_links(tmp_path):
    before = os.umask(0o077)
    try:
        (tmp_path / "link.safetensors").symlink_to(tmp_path / "batch.safetensors")
        pack([]).save(tmp_path / "link.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "link.safetensors").is_symlink()
    assert (tmp_path / "batch.safetensors").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_writing_to_a_turn_tensor_leaves_what_autograd_saved_of_another(device):
    batch = pack(some_trajectories(), device=device)
    before = batch.cu_seqlens._version
    batch.turn_rewards.sub_(1.0)
    assert batch.cu_seqlens._version == before


def test_a_pickled_batch_holds_its_tensors_alone():
    batch = pack([Trajectory(str(i), [Turn([1], [2], [0.0])]) for i in range(1000)])
    own = sum(tensor.nbytes for tensor in batch.tensors().values())
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
        "PackedBatch('merged': 1 trajectories, 2 turns in 2 sequences; 1,504 tokens, "
        "1,501 generated; longest 1,502; policy versions 0 to 2; cpu)"
    )
    assert "meta" in repr(batch.to("meta"))


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
