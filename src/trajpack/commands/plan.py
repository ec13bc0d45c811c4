"""The work of ``trajpack plan``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line
from trajpack.commands.inspect import load_batch
from trajpack.commands.panels import summary
from trajpack.commands.terminal import make_console
from trajpack.packing.plan.plan import Plan, plan_micro_batches
from trajpack.packing.plan.ranks import plan_ranks
from trajpack.packing.plan.statistics import PlanStatistics


def plan_file(
    file: Path,
    capacity: int,
    ranks: int,
    *,
    options: dict[str, Any],
    as_json: bool,
) -> int:
    """Plan the micro-batches of a saved batch and show the plan; return the exit status."""
    batch = load_batch(file)
    if options["oversized"] == "truncate_at_turn":
        options = {**options, "turn_ends": batch.turn_ends()}
    plans: tuple[Plan, ...]
    try:
        if ranks == 1:
            plan = plan_micro_batches(batch.seqlens, capacity, **options)
            plans, statistics = (plan,), plan.statistics()
        else:
            of_ranks = plan_ranks(batch.seqlens, ranks, capacity, **options)
            (plans,), statistics = of_ranks.plans, of_ranks.statistics()
    except ValueError as error:
        raise SetupError(first_line(error)) from error
    if as_json:
        shown = {
            "statistics": dataclasses.asdict(statistics),
            "ranks": [[sequences.tolist() for sequences in plan] for plan in plans],
        }
        print(json.dumps(shown))  # noqa: T201
    else:
        console = make_console()
        console.print(summary(_rows(statistics, plans, capacity), file.name, console.width))
    return 0


def _rows(
    statistics: PlanStatistics, plans: tuple[Plan, ...], capacity: int
) -> list[tuple[str, str]]:
    """Return the rows of the table: what there is, then its padding, then how even it is."""
    num_left_out = (
        (statistics.num_dropped, "dropped"),
        (statistics.num_truncated, "truncated"),
        (statistics.num_oversized, "over the capacity"),
    )
    notes = [f"{count:,} {what}" for count, what in num_left_out if count]
    rows = [
        (
            "micro-batches",
            f"{statistics.num_micro_batches:,} of up to {capacity:,} tokens; at least "
            f"{statistics.lower_bound:,} are needed",
        ),
        ("sequences", ", ".join([f"{statistics.num_sequences:,}", *notes])),
        ("tokens", f"{statistics.num_tokens:,}"),
        ("fill", f"{statistics.fill:.1%}"),
        (
            "padding",
            f"{statistics.padding_tail:,} tokens at ends, {statistics.padding_alignment:,} of "
            f"alignment, {statistics.padding_dummy:,} in {statistics.num_dummies:,} empty "
            "micro-batches",
        ),
        (
            "largest micro-batch",
            f"{statistics.token_imbalance:.3f} times the mean in tokens",
        ),
    ]
    if len(plans) > 1:
        each = [f"{int(plan.loads.sum()):,}" for plan in plans]
        rows += [
            ("largest rank", f"{statistics.rank_token_imbalance:.3f} times the mean in tokens"),
            (f"tokens of {len(plans)} ranks", ", ".join(each)),
        ]
    return rows
