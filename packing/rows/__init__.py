"""Rows: one row per sample, for trainers that do not take packed tensors.

Masked rows are read into turns, and turns are written as lists or padded arrays; the formats in
`trajpack.packing.adapters` share this code.
"""
