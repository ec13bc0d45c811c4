"""`TreeBatch`: trajectories as trees of tokens, with every shared prefix once.

The tree of the chains on the host (`trie`), the batch (`nodes`, `tree_batch`), its micro-batches
(`chain_plan`, `micro_batches`), what it shares (`statistics`), and where prefixes broke (`breaks`).
`trajpack.packing.buffer.trees` makes it.
"""
