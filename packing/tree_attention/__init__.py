"""Attention over trees: a node attends to its ancestors and itself.

`TreeAttention` (`attention`) computes it for tensors by one of three backends: calls along the
paths from the roots, which are planned on the host (`blocks`) and joined by their softmaxes
(`parts`), FlexAttention (`flex`), or one mask. `huggingface` registers it with transformers.
"""
