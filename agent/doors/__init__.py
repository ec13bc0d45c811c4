"""Our agents inside the rollout loops of trainers: one file for each trainer.

A trainer asks for episodes with its own engine, tokenizer and data rows. A door runs each with
`run_episode` and returns what the trainer's loop expects. An episode whose history was rewritten
has several sequences; every door hands its reward over so that the trainer counts it once. Prompts
are encoded once, and sampled ids are never decoded and encoded again.
"""
