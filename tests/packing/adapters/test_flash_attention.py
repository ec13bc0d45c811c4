from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.packing.adapters.cases import sequences_of, some_batch
from trajpack.packing.adapters.flash_attention import to_varlen
from trajpack.packing.micro_batches.alignment import Alignment

PARAMETERS = [
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p",
    "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
    "return_attn_probs", "block_table",
]  # fmt: skip
"""Of flash_attn_varlen_func, as published."""


def attend(query, key, value, given):
    """Attend as that function does, sequence after sequence."""
    places = given["cu_seqlens_q"]
    assert places.dtype == given["cu_seqlens_k"].dtype == torch.int32
    assert torch.equal(places, given["cu_seqlens_k"])
    assert type(given["max_seqlen_q"]) is type(given["max_seqlen_k"]) is int
    assert places[-1] == len(query)
    out = torch.full_like(query, float("nan"))
    for begin, end in pairwise(places.tolist()):
        assert end - begin <= min(given["max_seqlen_q"], given["max_seqlen_k"])
        of = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        if begin < end:
            attended = scaled_dot_product_attention(*of, is_causal=given["causal"])
            out[begin:end] = attended.transpose(0, 1)
    return out


def test_the_arguments_are_of_the_function_beside_query_key_and_value():
    assert set(to_varlen(some_batch())) <= set(PARAMETERS[3:])


def test_attention_is_within_sequences_with_any_padding():
    batch = some_batch()
    torch.manual_seed(0)
    inputs = dict(zip("qkv", torch.randn(3, batch.num_tokens, 2, 8), strict=True))
    expected = sequences_of(batch, attend(*inputs.values(), to_varlen(batch)))
    for index, tokens in enumerate(expected):
        of = (sequences_of(batch, x)[index].transpose(0, 1) for x in inputs.values())
        alone = scaled_dot_product_attention(*of, is_causal=True)
        torch.testing.assert_close(tokens.transpose(0, 1), alone)
    for tail in ("sequence", "extend", "separate"):
        alignment = Alignment(sequence_multiple=4, total=96, tail=tail, max_sequences=9)
        micro_batch = batch.select([3, 0, 5], alignment, tensors=inputs)
        padded = (micro_batch.fields[name] for name in inputs)
        attended = attend(*padded, to_varlen(micro_batch))
        assert attended.isfinite().all()
        for index, tokens in zip([3, 0, 5], sequences_of(micro_batch, attended), strict=True):
            torch.testing.assert_close(tokens, expected[index])
