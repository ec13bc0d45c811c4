"""`TreeBatch`: trajectories as one tree of tokens, with every shared prefix once.

The tree of the chains (`trie`), its run table for the kernel that writes fields (`plan`), the batch
(`tree_batch`, `assemble`), its way to and from a packed batch of layout ``"merged"`` (`merged`),
which is also its way to trajectories and files, and its attention (`attention`, `flex`) in models
of transformers (`huggingface`).
"""
