"""Per-token weights and penalties that correct a loss.

Importance weights between the policy that sampled and the one that trains, KL penalties, weights of
the loss average, weights by policy age, and the penalty for overlong responses.
"""
