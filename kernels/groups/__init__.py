"""Group statistics: advantages of trajectories that share one task.

`group_advantages` has one set of switches for centre, scale and baseline; `group_recipes` are its
published settings (GRPO, RLOO, ...); `step_groups` compares turns taken in the same state (GiGPO).
"""
