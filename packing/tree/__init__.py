"""`TreeBatch`: trajectories as trees of tokens, with every shared prefix once.

A tree is its nodes (`nodes`) and a table of generated tokens (`entries`). The tree of the chains on
the host (`trie`), how a buffer becomes one (`pack_tree`), the batch (`tree_batch`), its
micro-batches (`chain_plan`, `micro_batches`), and what it shares (`statistics`).
"""
