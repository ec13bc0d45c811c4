"""Reductions over the segments of a packed batch.

Sum, mean and maximum of each segment, mean and variance under a mask, and whitening. Sums have a
fixed order, so a result does not depend on the rest of the batch.
"""
