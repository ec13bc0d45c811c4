import ast
import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tests.packing.adapters.cases import sequences_of, some_batch
from trajpack.packing.adapters.megatron import packed_seq_params_kwargs, to_packed_seq_params
from trajpack.packing.micro_batches.alignment import Alignment

ALIGNED = Alignment(sequence_multiple=8, total_multiple=64, tail="separate")


@pytest.fixture
def params_class(peer):
    """The real class, of a package whose first module is not run: it imports all of Megatron."""
    return peer("megatron-core").load("megatron.core.packed_seq_params").PackedSeqParams


def aligned(lengths_of=(3, 0, 5)):
    return some_batch().select(lengths_of, ALIGNED)


@pytest.mark.parametrize("make", [some_batch, aligned], ids=["batch", "micro-batch"])
def test_the_real_class_has_the_fields(params_class, make):
    batch = make()
    params = to_packed_seq_params(batch)
    assert type(params) is params_class
    given = packed_seq_params_kwargs(batch)
    for name in {field.name for field in dataclasses.fields(params_class)} - {"seq_idx"}:
        assert getattr(params, name) is given.get(name), name
    assert torch.equal(params.seq_idx, given["seq_idx"])
    assert params.qkv_format == "thd"
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(params, name).dtype == torch.int32, name
    assert type(params.max_seqlen_q) is type(params.max_seqlen_kv) is int
    assert params.pad_between_seqs is (make is aligned)
    derived = params_class(
        **{name: given[name] for name in ("cu_seqlens_q_padded", "total_tokens")}
    )
    assert torch.equal(params.seq_idx, derived.seq_idx)


LATER = ("total_tokens", "seq_idx", "pad_between_seqs")


def test_an_older_class_gets_the_fields_that_it_has(params_class, monkeypatch):
    import megatron.core.packed_seq_params as module

    names = [field.name for field in dataclasses.fields(params_class) if field.name not in LATER]
    older = dataclasses.make_dataclass("Older", [(name, object, None) for name in names])
    monkeypatch.setattr(module, "PackedSeqParams", older)
    params, given = to_packed_seq_params(aligned()), packed_seq_params_kwargs(aligned())
    for name in names:
        assert (getattr(params, name) is None) is (name not in given), name


def test_the_class_does_not_read_the_device(params_class, monkeypatch):
    """It would if it were made with ``total_tokens``."""
    made = []
    monkeypatch.setattr(params_class, "__post_init__", lambda self: made.append(self.total_tokens))
    assert to_packed_seq_params(aligned()).total_tokens == 64
    assert made == [None]


@pytest.mark.parametrize(("lengths", "is_right"), [("both", False), ("padded", True)])
def test_labels_of_multi_token_prediction_need_padded_lengths(peer, lengths, is_right):
    """Its own function takes the true lengths for boundaries in memory."""
    path = peer("megatron-core").folder / "megatron/core/transformer/multi_token_prediction.py"
    (roll,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "_roll_tensor_packed_seq"
    )
    scope = {"torch": torch}
    exec(compile(ast.Module([roll], []), str(path), "exec"), scope)
    batch = aligned()
    params = SimpleNamespace(**packed_seq_params_kwargs(batch, lengths=lengths))
    rolled, _ = scope["_roll_tensor_packed_seq"](batch.input_ids[None], -1, -1, params)
    labels = batch.labels()
    is_label = labels != -100
    assert torch.equal(rolled[0, is_label], labels[is_label]) is is_right


def test_both_lengths_and_padded_ones_alone():
    micro_batch = aligned()
    both = packed_seq_params_kwargs(micro_batch)
    assert both["cu_seqlens_q"].diff().tolist() == list(micro_batch.num_kept)
    assert both["cu_seqlens_q_padded"].tolist() == [0, 24, 40, 64]
    assert both["max_seqlen_q"] == 24
    padded = packed_seq_params_kwargs(micro_batch, lengths="padded")
    assert padded["cu_seqlens_q"] is padded["cu_seqlens_kv_padded"] is both["cu_seqlens_q_padded"]
    assert padded["pad_between_seqs"] is False
    with pytest.raises(ValueError, match="lengths must be 'both' or 'padded', got 'true'"):
        packed_seq_params_kwargs(micro_batch, lengths="true")


class OneRank:
    """What Megatron asks of a group of context-parallel ranks."""

    def size(self):
        return 1

    def rank(self):
        return 0


def test_megatrons_rotary_embedding_turns_tokens_by_their_positions(peer):
    """Its own code finds each token's position by the boundaries that it is given."""
    rope = rope_module(peer)
    for batch in (some_batch(), aligned()):
        params = packed_seq_params_kwargs(batch)
        torch.manual_seed(0)
        heads = torch.randn(batch.num_tokens, 2, 8)
        angles = torch.outer(torch.arange(batch.max_seqlen), torch.rand(8))[:, None, None]
        turned = rope._apply_rotary_pos_emb_thd(
            heads, params["cu_seqlens_q_padded"], angles, cp_group=OneRank()
        )
        alone = rope._apply_rotary_pos_emb_bshd(heads[:, None], angles[batch.position_ids])[:, 0]
        for ours, theirs in zip(
            sequences_of(batch, turned), sequences_of(batch, alone), strict=True
        ):
            torch.testing.assert_close(ours, theirs)
        assert [end - begin for begin, end in pairwise(params["cu_seqlens_q"].tolist())] == list(
            getattr(batch, "num_kept", batch.seqlens)
        )


def rope_module(peer):
    package = peer("megatron-core")
    for name in ("core", "core.models", "core.models.common", "core.models.common.embeddings"):
        package.without_init(f"megatron.{name}")
    return package.load("megatron.core.models.common.embeddings.rope_utils")
