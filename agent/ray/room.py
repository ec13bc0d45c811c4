"""Whether a cluster has room for what is asked of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trajpack.agent.ray.rollouts.options import WorkerOptions
    from trajpack.agent.ray.training.rank import RankOptions


def lacking_room(who: str, count: int, options: WorkerOptions | RankOptions) -> str:
    """Return why so many actors will never fit into the cluster as it is; empty if they may.

    Args:
        who: What they are, for the text.
        count: How many.
        options: Of each of them.

    Cost: a question to Ray's control service.
    """
    import ray

    there = ray.cluster_resources()
    wanted = _wanted(count, options)
    if all(amount <= there.get(kind, 0.0) for kind, amount in wanted.items()):
        return ""
    return describe_room(who, count, options)


def describe_room(who: str, count: int, options: WorkerOptions | RankOptions) -> str:
    """Return what so many actors ask for, and what the cluster has of it.

    Cost: two questions to Ray's control service.
    """
    import ray

    there, free = ray.cluster_resources(), ray.available_resources()
    parts = [
        f"{amount:g} {kind}s, of which the cluster has {there.get(kind, 0.0):g} "
        f"({free.get(kind, 0.0):g} free now)"
        for kind, amount in _wanted(count, options).items()
    ]
    return f"{count} {who} ask for {' and '.join(parts)}"


def _wanted(count: int, options: WorkerOptions | RankOptions) -> dict[str, float]:
    wanted = {"CPU": count * options.num_cpus, "GPU": count * options.num_gpus}
    return {kind: amount for kind, amount in wanted.items() if amount}
