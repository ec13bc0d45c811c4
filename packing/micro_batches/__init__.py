"""Cutting a packed batch into micro-batches by a plan.

`MicroBatch` and its model inputs, the alignment of lengths, shifted labels, and the index tables of
the kernels that move the tokens.
"""
