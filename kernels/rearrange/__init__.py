"""Ops that move tokens between layouts.

`pad` and `unpad` convert between packed tokens and padded rows; `select_tokens` and `merge_tokens`
cut a batch into micro-batches and put per-token results back; `shift` aligns labels with logits;
`context_parallel` gives each rank of a context-parallel group its slices.
"""
