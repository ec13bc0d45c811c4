import dataclasses
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from tests.packing.adapters.cases import padded, random_batch, some_batch
from trajpack import TokenField, Trajectory, Turn, pack
from trajpack.packing.adapters.prime_rl import (
    from_traces,
    from_training_samples,
    to_micro_batch,
    to_tensor_micro_batch,
    to_training_samples,
)
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.ragged import ragged_rows
from trajpack.testing import assert_same_bits

FORM = {"array_like": True, "gc": False, "omit_defaults": True}
RoutedExperts = msgspec.defstruct(
    "RoutedExperts", [("data", bytes), ("shape", list[int]), ("dtype", str)], **FORM
)
SamplingMask = msgspec.defstruct("SamplingMask", [("ids", bytes), ("counts", bytes)], **FORM)
FLOATS, INTS, BOOLS = list[float], list[int], list[bool]
STREAMS = [
    ("ref_logprobs", FLOATS | None, None),
    ("routed_experts", RoutedExperts | None, None),
    ("mm_token_type_ids", INTS | None, None),
    *((name, FLOATS | None, None) for name in ("rl_weights", "ce_weights", "ref_kl_weights")),
]
TrainingSample = msgspec.defstruct(
    "TrainingSample",
    [
        ("token_ids", INTS), ("mask", BOOLS), ("logprobs", FLOATS), ("temperatures", FLOATS),
        ("env_name", str), *STREAMS, ("advantages", FLOATS | None, None),
        ("sampling_mask", SamplingMask | None, None),
    ],
    **FORM,
)  # fmt: skip
"""As published; images are left out."""
MicroBatch = msgspec.defstruct(
    "MicroBatch",
    [
        ("input_ids", INTS), ("loss_mask", BOOLS), ("advantages", FLOATS),
        ("inference_logprobs", FLOATS), ("position_ids", INTS), ("sequence_lengths", INTS),
        ("temperatures", FLOATS), ("env_names", list[str]), ("seq_lens", INTS), *STREAMS,
        ("sampling_mask", SamplingMask | None, None),
    ],
    **FORM,
)  # fmt: skip
"""As published; images are left out."""
TENSORS = {
    "input_ids": torch.int64, "position_ids": torch.int64, "advantages": torch.float32,
    "inference_logprobs": torch.float32, "temperatures": torch.float32, "loss_mask": torch.bool,
    "seq_lens": torch.int64, "lora_num_tokens": torch.int32, "routed_experts": torch.int32,
    "ref_logprobs": torch.float32, "mm_token_type_ids": torch.int64, "rl_weights": torch.float32,
    "ce_weights": torch.float32, "ref_kl_weights": torch.float32,
}  # fmt: skip
OTHERS = {"sequence_lengths", "env_names", "mm_kwargs", "mm_refs", "trace_ids", "branch_indices"}
OTHERS |= {"sampling_mask"}
MASK = TokenField("sampling_mask", torch.int32, ragged=True)


def sent(struct, fields):
    """Send it as prime-rl does: typed, packed, and unpacked on the other side."""
    fields = dict(fields)
    if fields["routed_experts"] is not None:
        fields["routed_experts"] = RoutedExperts(**fields["routed_experts"])
    if "sampling_mask" in fields:
        fields["sampling_mask"] = SamplingMask(**fields["sampling_mask"])
    return msgspec.msgpack.decode(msgspec.msgpack.encode(struct(**fields)), type=struct)


def packed_by_loop(samples, *, to=None, pad_token=1):
    """Put samples side by side, list by list, and pad the last one: what prime-rl's packer does."""
    micro_batch = {
        ours: [value for sample in samples for value in getattr(sample, theirs)]
        for ours, theirs in {
            "input_ids": "token_ids",
            "loss_mask": "mask",
            "advantages": "advantages",
            "inference_logprobs": "logprobs",
            "temperatures": "temperatures",
            "ref_logprobs": "ref_logprobs",
        }.items()
    }
    lengths = [len(sample.token_ids) for sample in samples]
    micro_batch["position_ids"] = [at for length in lengths for at in range(length)]
    micro_batch["env_names"] = [
        sample.env_name for sample, n in zip(samples, lengths, strict=True) for _ in range(n)
    ]
    micro_batch["sequence_lengths"] = lengths
    size = 0 if to is None else to - len(micro_batch["input_ids"])
    padding = {
        "input_ids": [pad_token] * size, "loss_mask": [False] * size, "advantages": [0.0] * size,
        "inference_logprobs": [0.0] * size, "position_ids": list(range(size)),
        "temperatures": [1.0] * size, "env_names": [""] * size, "ref_logprobs": [0.0] * size,
    }  # fmt: skip
    for name, values in padding.items():
        micro_batch[name] += values
    micro_batch["sequence_lengths"][-1] += size
    return micro_batch | {"seq_lens": micro_batch["sequence_lengths"]}


@pytest.mark.parametrize("padded", [False, True])
def test_a_micro_batch_equals_the_packed_samples(padded):
    batch = some_batch()
    names = [f"env {index % 2}" for index in range(len(batch))]
    samples = [
        sent(TrainingSample, sample) for sample in to_training_samples(batch, env_names=names)
    ]
    chosen = [3, 0, 5]
    alignment = Alignment(total=64, token_id=1) if padded else Alignment()
    wire = to_micro_batch(
        batch.select(chosen, alignment), env_names=[names[index] for index in chosen]
    )
    ours = sent(MicroBatch, wire)
    expected = packed_by_loop([samples[index] for index in chosen], to=64 if padded else None)
    for name, values in expected.items():
        assert getattr(ours, name) == values, name
    experts = b"".join(samples[index].routed_experts.data for index in chosen)
    assert ours.routed_experts.data[: len(experts)] == experts
    assert not any(ours.routed_experts.data[len(experts) :])
    assert ours.routed_experts.shape == [len(ours.input_ids), 2, 3]
    assert ours.routed_experts.dtype == "uint8"


@pytest.mark.parametrize("alignment", [None, Alignment(total=64, token_id=1)], ids=str)
def test_tensors_equal_the_lists(alignment):
    batch = some_batch()
    if alignment is not None:
        batch = batch.select([3, 0, 5], alignment)
    tensors = to_tensor_micro_batch(batch, num_loras=2)
    assert set(tensors) == set(TENSORS) | OTHERS
    wire = to_micro_batch(batch)
    assert {*wire, "sampling_mask"} == set(MicroBatch.__struct_fields__)
    assert all(tensors[name] is None for name in OTHERS - {"sequence_lengths", "env_names"})
    for name, dtype in TENSORS.items():
        if name == "lora_num_tokens":
            assert_same_bits(tensors[name], torch.tensor([batch.num_tokens, 0], dtype=dtype))
        elif name == "routed_experts":
            sent_bytes = wire[name]
            array = np.frombuffer(sent_bytes["data"], sent_bytes["dtype"])
            array = array.reshape(sent_bytes["shape"])
            assert_same_bits(tensors[name], torch.tensor(array, dtype=dtype)[None], name)
        elif wire[name] is None:
            assert tensors[name] is None, name
        else:
            expected = torch.tensor(wire[name], dtype=dtype)
            expected = expected if name == "seq_lens" else expected[None]
            assert_same_bits(tensors[name], expected, name)
    assert tensors["sequence_lengths"] == wire["sequence_lengths"]
    assert sum(tensors["sequence_lengths"]) == len(tensors["env_names"]) == batch.num_tokens


@pytest.mark.parametrize(("chosen", "lengths"), [([3, 0, 5], [20, 16, 60]), ([], [96])], ids=str)
@pytest.mark.parametrize("tail", ["sequence", "extend", "separate"])
def test_padding_belongs_to_the_last_sequence_and_no_loss_reads_it(tail, chosen, lengths):
    alignment = Alignment(sequence_multiple=4, total=96, tail=tail, max_sequences=9)
    micro_batch = some_batch().select(chosen, alignment)
    tensors = to_tensor_micro_batch(micro_batch, env_names="arithmetic")
    assert tensors["sequence_lengths"] == tensors["seq_lens"].tolist() == lengths
    padding = ~(micro_batch.prompt_mask | micro_batch.loss_mask)
    assert int(padding.sum()) == micro_batch.num_padding
    assert tensors["temperatures"][0, padding].tolist() == [1.0] * micro_batch.num_padding
    assert not tensors["loss_mask"][0, padding].any()
    names = np.array(tensors["env_names"])
    assert set(names[padding.numpy()]) == {""}
    assert set(names[~padding.numpy()]) == ({"arithmetic"} if chosen else set())
    with pytest.raises(ValueError, match=f"env_names must be of {len(chosen)} sequences, got 1"):
        to_tensor_micro_batch(micro_batch, env_names=["one"])


def as_the_trainer_reads(mask):
    """Return a mask that arrived as rows, as wide as the longest, -1 behind."""
    ids, counts = (np.frombuffer(of, np.int32).tolist() for of in (mask.ids, mask.counts))
    rows = []
    for count in counts:
        rows.append(padded(ids[:count], max(counts), -1))
        del ids[:count]
    assert not ids
    return rows


@pytest.mark.parametrize("alignment", [None, Alignment(total_multiple=64, token_id=1)], ids=str)
def test_sampling_masks_are_tokens_and_counts_on_the_way_and_rows_at_the_trainer(alignment):
    batch = random_batch(np.random.default_rng(26), fields=[MASK])
    whole = range(len(batch))
    packed = batch if alignment is None else batch.select(whole, alignment)
    arrived = as_the_trainer_reads(sent(MicroBatch, to_micro_batch(packed)).sampling_mask)
    tensor = to_tensor_micro_batch(packed)["sampling_mask"]
    assert tensor.dtype == torch.int32
    assert tensor.shape == (1, packed.num_tokens, 4)  # as many as the longest row has
    assert [padded(row, 4, -1) for row in arrived] == tensor[0].tolist()
    cu, values = ragged_rows(batch, MASK.name)
    expected = [padded(row.tolist(), 4, -1) for row in values.split(cu.diff().tolist())]
    assert tensor[0, : batch.num_tokens].tolist() == expected
    assert (tensor[0, batch.num_tokens :] == -1).all()
    rows = []
    for sample in to_training_samples(batch):
        mask = as_the_trainer_reads(sent(TrainingSample, sample).sampling_mask)
        rows += [padded(row, 4, -1) for row in mask]
    assert rows == expected


def test_labels_that_samples_lack_are_given():
    batch = some_batch()
    samples = to_training_samples(batch)
    numbers = list(range(len(samples)))
    ids, groups = [f"name {n}" for n in numbers], [f"group {n % 2}" for n in numbers]
    trajectories = from_training_samples(
        samples, ids=ids, groups=groups, rewards=numbers, versions=numbers
    )
    for n, trajectory in zip(numbers, trajectories, strict=True):
        assert (trajectory.id, trajectory.group) == (ids[n], groups[n])
        *before, last = (turn.reward for turn in trajectory.turns)
        assert (set(before) - {0.0}, last) == (set(), n)
        assert {turn.version_end for turn in trajectory.turns} == {n}


def one_turn(**rows):
    """Return a batch of a prompt of one token, two generated ones, and fields filled with 1."""
    integers = {"mm_token_type_ids"}
    fields = [
        TokenField(name, torch.int64 if name in integers else torch.float32, fill=1)
        for name in rows
    ]
    turn = Turn([1], [2, 3], [-0.5, -0.5], fields=rows or None)
    batch = pack([Trajectory("a", [turn])], device="cpu", fields=fields)
    return dataclasses.replace(batch, advantages=batch.returns)


@pytest.mark.parametrize(("rows", "expected"), [({}, [0.25] * 3), ([0.5, 0.75], [0.25, 0.5, 0.75])])
def test_temperatures_of_prompts_and_padding_are_not_those_of_the_field(rows, expected):
    batch = one_turn(**{"temperatures": rows} if rows else {})
    padded_batch = batch.select([0], Alignment(total=5))
    given = to_tensor_micro_batch(padded_batch, temperature=0.25)["temperatures"]
    assert given.tolist() == [[*expected, 1.0, 1.0]]
    (sample,) = to_training_samples(batch, temperature=0.25)
    assert sample["temperatures"] == expected
    assert sample["routed_experts"] is sample["ref_logprobs"] is None


@pytest.mark.parametrize("name", ["rl_weights", "ce_weights", "mm_token_type_ids"])
def test_padding_has_no_weight(name):
    batch = one_turn(**{name: [3, 4]})
    values = to_tensor_micro_batch(batch.select([0], Alignment(total=5)))[name]
    assert values.tolist() == [[1, 3, 4, 0, 0]]
    assert values.dtype == TENSORS[name]
    (sample,) = to_training_samples(dataclasses.replace(batch, advantages=None))
    assert sample[name] == [1, 3, 4]
    assert sample["advantages"] is None


def random_trace(rng, fields=()):
    """Return a message graph of verifiers: nodes with parents, of which branches are the paths."""
    nodes = []
    for index in range(int(rng.integers(2, 12))):
        sampled = bool(index and rng.random() < 0.6)
        length = int(rng.integers(1, 5))
        scaffold = int(rng.integers(0, length + 1)) if sampled else length
        count = length - scaffold
        nodes.append(SimpleNamespace(
            parent=None if not index or rng.random() < 0.1 else int(rng.integers(0, index)),
            sampled=sampled, token_ids=rng.integers(9, 99, length).tolist(),
            mask=[False] * scaffold + [True] * count, logprobs=(-rng.random(count)).tolist(),
            routed_experts=rng.random((length, 2, 8)).argsort(-1)[..., :3].astype(np.uint8),
            sampling_mask=SimpleNamespace(
                ids=rng.integers(0, 9, 2 * count, np.int32), counts=np.full(count, 2, np.int32)
            ) if sampled else None,
        ))  # fmt: skip
        if nodes[-1].parent is None:
            nodes[-1].sampled, nodes[-1].mask = False, [False] * length
            nodes[-1].logprobs, nodes[-1].sampling_mask = [], None
    branches = []
    for leaf in set(range(len(nodes))) - {node.parent for node in nodes}:
        path, at = [], leaf
        while at is not None:
            path.append(nodes[at])
            at = nodes[at].parent
        trainable = bool(rng.random() < 0.8)
        branches.append(
            SimpleNamespace(nodes=path[::-1], trainable=trainable, multi_modal_data=None)
        )
    return SimpleNamespace(
        id="trace", nodes=nodes, branches=branches, rewards={"right": 1.0}, reward=1.0,
        is_truncated=True, agent=SimpleNamespace(trainable=True),
        task=SimpleNamespace(key=None, hash="sums"),
    )  # fmt: skip


def trained_terms(trajectories):
    """Return context, token and log-probability of every token that is trained."""
    return sorted(
        ((*turn.prompt_ids, *turn.completion_ids[:index]), token, logprob)
        for trajectory in trajectories
        for turn in trajectory.turns
        for index, (token, logprob) in enumerate(
            zip(turn.completion_ids, turn.completion_logprobs, strict=True)
        )
    )


def test_a_trace_trains_what_prime_rls_samples_of_it_train():
    rng = np.random.default_rng(6)
    names = ["routed_experts", "sampling_mask"]
    fields = [TokenField("routed_experts", torch.uint8, (2, 3), generated_only=False), MASK]
    for _ in range(60):
        trace = random_trace(rng)
        samples, done = [], set()
        for branch in trace.branches:  # as prime-rl's `iter_trainable_branches`
            new = [id(node) not in done for node in branch.nodes]
            done |= {id(node) for node in branch.nodes} if branch.trainable else set()
            mask = [
                of and fresh
                for node, fresh in zip(branch.nodes, new, strict=True)
                for of in node.mask
            ]
            logprobs = np.zeros(len(mask))
            logprobs[[of for node in branch.nodes for of in node.mask]] = [
                logprob for node in branch.nodes for logprob in node.logprobs
            ]
            if branch.trainable and any(mask):
                ids = [token for node in branch.nodes for token in node.token_ids]
                samples.append({"token_ids": ids, "mask": mask, "logprobs": logprobs})
        back = from_traces([trace], fields=names)
        assert trained_terms(back) == trained_terms(
            from_training_samples(samples, missing_reward=0)
        )
        for trajectory in back:
            assert (trajectory.id, trajectory.group, trajectory.turns[-1].truncated) == (
                "trace",
                "sums",
                True,
            )
            assert [turn.reward for turn in trajectory.turns][-1] == 1.0
            assert pack([trajectory], fields=fields).num_generated == len(trained_terms(back))


def test_traces_that_cannot_be_read_are_refused():
    trace = random_trace(np.random.default_rng(2))
    (node, *_) = [node for node in trace.nodes if node.sampled and any(node.mask)]
    for change, options, message in (
        ({"rewards": {"right": None}}, {}, "the reward of trajectory 'trace' is missing"),
        ({}, {"groups": []}, "groups must be 1, one a row, got 0"),
        ({}, {"fields": ["values"]}, r"fields must be of \['routed_experts', 'sampling_mask'\]"),
        ({}, {"fields": []}, "sampling_mask are there: name sampling_mask in fields"),
    ):
        with pytest.raises(ValueError, match=message):
            from_traces(
                [SimpleNamespace(**vars(trace) | change)], **{"fields": ["sampling_mask"]} | options
            )
    assert (
        from_traces([SimpleNamespace(**vars(trace) | {"agent": SimpleNamespace(trainable=False)})])
        == []
    )
    node.logprobs = [*node.logprobs, 0.0]
    with pytest.raises(ValueError, match=r"'trace': \d+ values are there for \d+ sampled tokens"):
        from_traces([trace], fields=["sampling_mask"])
    trace.branches[0].multi_modal_data = {}
    with pytest.raises(ValueError, match="'trace': images are there"):
        from_traces([trace])
