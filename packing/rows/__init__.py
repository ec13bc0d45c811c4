"""Sequences as rows, for trainers that do not take packed tensors; shared by the adapters.

`rows` and `packed` read a packed batch; `masked_tokens` and `reading` make trajectories
of rows; `sampling_mask` does both for one field.
"""
