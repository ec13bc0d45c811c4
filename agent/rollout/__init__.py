"""The work of `trajpack rollout`: settings, engine, log and report of one rollout."""
