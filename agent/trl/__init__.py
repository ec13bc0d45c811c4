"""TRL's `rollout_func`: episodes of agents as rows of TRL's trainer."""
