"""The demonstration of training: `trajpack train` teaches a tiny model sums by GRPO."""
