"""The demonstration trainer of `trajpack train`: GRPO on sums, with a tiny model."""
