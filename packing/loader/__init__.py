"""Packed micro-batches of a stream of trajectories, as a data set of torch.

A window of trajectories is packed and planned at a time, so that micro-batches are full. Ranks and
workers make the same plan, and each cuts its own micro-batches.
"""
