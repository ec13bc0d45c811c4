"""Group statistics: advantages of trajectories that share one task.

`group_advantages` has settings for baseline and scale. `group_recipes` are the published ones:
GRPO, RLOO, ..., and GiGPO's step advantages.
"""
