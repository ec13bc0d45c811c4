import dataclasses
from itertools import pairwise

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
    for field in dataclasses.fields(params_class):
        assert getattr(params, field.name) is given.get(field.name), field.name
    assert params.qkv_format == "thd"
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(params, name).dtype == torch.int32, name
    assert type(params.max_seqlen_q) is type(params.max_seqlen_kv) is int


def check_total(params):
    assert params.total_tokens is None, "it would read the device for seq_idx"


LATER = """
qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q
max_seqlen_kv local_cp_size cp_group total_tokens seq_idx tokens_per_sample pad_between_seqs
cp_scatter_cache"""
LaterParams = dataclasses.make_dataclass(
    "LaterParams",
    [(name, object, None) for name in LATER.split()],
    namespace={"__post_init__": check_total},
)
"""The fields of the class in later versions, and what it does on its own."""


@pytest.mark.usefixtures("params_class")
def test_later_versions_get_derived_fields_afterwards(monkeypatch):
    import megatron.core.packed_seq_params as module

    monkeypatch.setattr(module, "PackedSeqParams", LaterParams)
    micro_batch = aligned()
    params = to_packed_seq_params(micro_batch)
    assert params.pad_between_seqs is True
    assert params.total_tokens == 64
    lengths = micro_batch.cu_seqlens_padded.diff()
    expected = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), lengths)
    assert torch.equal(params.seq_idx, expected[None])
    assert to_packed_seq_params(some_batch()).pad_between_seqs is False


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
