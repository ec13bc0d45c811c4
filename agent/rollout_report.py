"""What a rollout leaves: a report for people, and a batch and a tokenizer on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trajpack.agent.causal_model import save_tokenizer
from trajpack.agent.rollout import RolloutOutcome
from trajpack.agent.runner import Progress
from trajpack.packing.batch import PackedBatch
from trajpack.packing.inspection import counted, describe

_MAX_REASONS = 5


def report(
    outcome: RolloutOutcome, progress: Progress, batch: PackedBatch, num_merged: int
) -> list[tuple[str, str]]:
    """Return what a rollout came to as pairs of a name and its value in words.

    ``fill`` is the share of a padded rectangle, as many rows as sequences and as wide as the
    longest, that the batch's tokens would take. The packed batch itself has no padding.

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
    share = progress.num_rewarded_turns / progress.num_turns if progress.num_turns else 0.0
    rows = [
        ("episodes", f"{progress.num_finished:,} finished, {progress.num_failed:,} of them failed"),
        (
            "right answers",
            f"{progress.num_rewarded_turns:,} of {progress.num_turns:,} ({share:.1%})",
        ),
        ("speed", f"{progress.tokens_per_s:,.0f} generated tokens/s, {progress.elapsed_s:.1f} s"),
        (
            "tokens as turns, merged",
            f"{num_as_turns:,} against {num_merged:,}: {num_as_turns / num_merged:.2f} times fewer",
        ),
    ]
    rectangle = len(batch) * batch.max_seqlen
    rows.append(
        ("fill", f"100% packed; padded to the longest it were {batch.num_tokens / rectangle:.0%}")
    )
    rows += describe(batch)
    reasons = outcome.failures.most_common()
    rows += [(f"failed {number:,}", reason) for reason, number in reasons[:_MAX_REASONS]]
    if len(reasons) > _MAX_REASONS:
        rows.append(("failed", counted(len(reasons) - _MAX_REASONS, "more reason")))
    return rows


def tokenizer_folder(batch_file: Path) -> Path:
    """Return where the tokenizer that belongs to a batch is kept.

    Example:
        >>> tokenizer_folder(Path("demo/batch.safetensors")).as_posix()
        'demo/batch.tokenizer'
    """
    return batch_file.with_suffix(".tokenizer")


def check_writable(folder: Path) -> None:
    """Make ``folder`` if need be, and raise unless files can be made in it.

    Raises:
        OSError: If they cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"trajpack")


def save_rollout(batch: PackedBatch, tokenizer: Any, batch_file: Path) -> None:
    """Write a batch, and beside it the tokenizer that decodes it.

    Raises:
        OSError: If either cannot be written; what was there stays as it was.
    """
    folder = tokenizer_folder(batch_file)
    prefix = f".{folder.name}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=batch_file.parent) as unfinished:
        written, replaced = Path(unfinished, "written"), Path(unfinished, "replaced")
        save_tokenizer(tokenizer, written)
        batch.save(batch_file)
        if folder.exists():
            folder.rename(replaced)
        written.rename(folder)
