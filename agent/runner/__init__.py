"""`RolloutRunner`: runs many episodes at once.

`runner` has the public class, `run` starts and retries episodes, and `episode` runs one of them
once. `policy` has limits and retries, `results` what a run gives, `observers` the hooks of metrics.
"""
