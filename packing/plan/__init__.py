"""Plans: the sequences of each micro-batch and of each rank.

A plan is integers on the host, computed from lengths alone: packing into bins, balancing work over
ranks, cost models, and statistics of the result. This folder imports nothing from the others.
"""
