"""`RolloutRunner`: runs many episodes at once.

`runner` is the public class, `run` schedules and retries episodes, `attempt` runs one of them,
and `bridge` connects its agent with the engine. `policy` holds limits and retries, `gates` pauses
and staleness, `observers` the hooks, `watchdog` and `outcome` the log lines of a run.
"""
