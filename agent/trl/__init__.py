"""TRL's `rollout_func`: episodes of agents as rows that TRL's trainer takes."""
