"""`RolloutRunner`: runs many episodes at once.

`runner` is the public class, `run` schedules episodes, `attempt` runs one of them. Retries and
limits are `policy`, staleness of weights is `staleness`, pauses are `gate`, groups of samples are
`groups` and `filters`, observers are in `watch` and `observers`.
"""
