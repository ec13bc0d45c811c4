"""Trainer ranks on a Ray cluster, fed by rollout workers, with checkpoints."""
