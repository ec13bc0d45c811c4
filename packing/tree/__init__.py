"""`TreeBatch`: trajectories as one tree of tokens, with every shared prefix once.

The tree of the chains (`trie`), its run table for the kernel that writes fields (`plan`), the batch
(`nodes`, `tree_batch`, `assemble`), its way to and from a packed batch of layout ``"merged"``
(`merged`), which is also its way to trajectories and files, its micro-batches (`chain_plan`,
`micro_batches`), its attention (`attention`, `flex`) in models of transformers (`huggingface`), and
what it shares (`statistics`, `paths`, `segments`) and where prefixes broke (`breaks`), also in
words (`inspection`).
"""
