"""Per-token weights and penalties that correct a loss or a reward.

Importance weights between the sampling and the trained policy, penalties for divergence and length,
weights of the loss average, and masks by policy age.
"""
