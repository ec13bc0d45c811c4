"""Sequences as rows, for trainers that do not take packed tensors; shared by the adapters.

`layout` writes rows of a packed batch; `reading` makes trajectories of a trainer's rows.
"""
