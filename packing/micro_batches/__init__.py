"""Cutting a packed batch into micro-batches by a plan.

`MicroBatch` and its model inputs, padding of lengths, shifted labels, and the tables of the kernels
that move the tokens.
"""
