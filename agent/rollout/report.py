"""The results of a rollout as rows of a table."""

from __future__ import annotations

from trajpack.agent.rollout.outcome import RolloutOutcome
from trajpack.agent.runner.runner import Progress
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.inspection import counted, describe

_MAX_REASONS = 5


def report(
    outcome: RolloutOutcome, progress: Progress, batch: PackedBatch, num_merged: int
) -> list[tuple[str, str]]:
    """Return what a rollout came to as pairs of a name and its value in words.

    The fill is the share that the batch's tokens would take of a padded rectangle, as many
    rows as sequences and as wide as the longest. The packed batch itself has no padding.

    Args:
        outcome: What came of the episodes.
        progress: The runner's last word.
        batch: What the trajectories were packed to.
        num_merged: Tokens of the trajectories, each counted once.
    """
    num_as_turns = sum(
        len(turn.prompt_ids) + len(turn.completion_ids)
        for trajectory in outcome.trajectories
        for turn in trajectory.turns
    )
    turns = [turn for result in outcome.results for turn in result.turns]
    num_right = sum(turn.reward > 0 for turn in turns)
    num_finished, num_failed = len(outcome.results), sum(outcome.failures.values())
    num_earlier = num_finished - progress.num_finished
    earlier = f", {num_earlier:,} earlier" if num_earlier > 0 else ""
    rows = [
        ("episodes", f"{num_finished:,} finished, {num_failed:,} of them failed{earlier}"),
        (
            "right answers",
            f"{num_right:,} of {len(turns):,} ({num_right / max(len(turns), 1):.1%})",
        ),
        ("speed", f"{progress.tokens_per_s:,.0f} generated tokens/s, {progress.elapsed_s:.1f} s"),
        (
            "tokens as turns, merged",
            f"{num_as_turns:,} against {num_merged:,}, a ratio of {num_as_turns / num_merged:.2f}",
        ),
    ]
    capacity = len(batch) * batch.max_seqlen
    share = f"{batch.num_tokens:,} of {capacity:,} tokens ({batch.num_tokens / capacity:.0%})"
    rows.append(("fill, if padded", share))
    rows += describe(batch)
    reasons = outcome.failures.most_common()
    rows += [(f"failed {number:,}", reason) for reason, number in reasons[:_MAX_REASONS]]
    if len(reasons) > _MAX_REASONS:
        rows.append(("failed", counted(len(reasons) - _MAX_REASONS, "more reason")))
    return rows
