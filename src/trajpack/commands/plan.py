"""The work of ``trajpack plan``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from trajpack.agent.models.causal_model import refused
from trajpack.commands.inspect import load_batch
from trajpack.packing.batch.show import print_table
from trajpack.packing.plan.plan import plan_micro_batches, plan_ranks
from trajpack.packing.plan.types import Plan


def plan_file(
    file: Path, capacity: int, ranks: int, options: dict[str, Any], *, as_json: bool
) -> None:
    """Plan the micro-batches of a saved batch and show the plan."""
    batch = load_batch(file)
    options = {name: value for name, value in options.items() if value is not None}
    if options["oversized"] == "truncate_at_turn":
        options = {**options, "turn_ends": batch.turn_ends()}
    plans: tuple[Plan, ...]
    with refused(""):
        if ranks == 1:
            plan = plan_micro_batches(batch.seqlens, capacity, **options)
            plans, figures = (plan,), plan.statistics()
        else:
            of_ranks = plan_ranks(batch.seqlens, ranks, capacity, **options)
            plans, figures = of_ranks.plans, of_ranks.statistics()
    if as_json:
        sequences = [[micro_batch.tolist() for micro_batch in plan] for plan in plans]
        print(json.dumps({"statistics": dataclasses.asdict(figures), "ranks": sequences}))  # noqa: T201
        return
    counts = (figures.num_dropped, figures.num_truncated, figures.num_oversized)
    kinds = ("dropped", "truncated", "over the capacity")
    notes = [f"{count:,} {kind}" for count, kind in zip(counts, kinds, strict=True) if count]
    rows = {
        "micro-batches": f"{figures.num_micro_batches:,} of up to {capacity:,} tokens; at least "
        f"{figures.lower_bound:,} are needed",
        "sequences": ", ".join([f"{figures.num_sequences:,}", *notes]),
        "tokens": f"{figures.num_tokens:,}",
        "fill": f"{figures.fill:.1%}",
        "padding": f"{figures.padding_tail:,} tokens at ends, {figures.padding_alignment:,} of "
        f"alignment, {figures.padding_dummy:,} in {figures.num_dummies:,} empty micro-batches",
        "largest micro-batch": f"{figures.cost_imbalance:.3f} times the mean in tokens",
    }
    if ranks > 1:
        each = [f"{int(plan.loads.sum()):,}" for plan in plans]
        rows["largest rank"] = f"{figures.rank_cost_imbalance:.3f} times the mean in tokens"
        rows[f"tokens of {ranks} ranks"] = ", ".join(each)
    print_table(file.name, rows.items())
