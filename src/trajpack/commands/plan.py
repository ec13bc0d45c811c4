"""The work of ``trajpack plan``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from trajpack.agent.models.causal_model import refused
from trajpack.commands.inspect import load_batch
from trajpack.commands.terminal import show
from trajpack.packing.plan.plan import Plan, plan_micro_batches
from trajpack.packing.plan.ranks import plan_ranks


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
            plans, found = (plan,), plan.statistics()
        else:
            of_ranks = plan_ranks(batch.seqlens, ranks, capacity, **options)
            (plans,), found = of_ranks.plans, of_ranks.statistics()
    if as_json:
        sequences = [[micro_batch.tolist() for micro_batch in plan] for plan in plans]
        print(json.dumps({"statistics": dataclasses.asdict(found), "ranks": sequences}))  # noqa: T201
        return
    counts = (found.num_dropped, found.num_truncated, found.num_oversized)
    kinds = ("dropped", "truncated", "over the capacity")
    notes = [f"{count:,} {kind}" for count, kind in zip(counts, kinds, strict=True) if count]
    rows = {
        "micro-batches": f"{found.num_micro_batches:,} of up to {capacity:,} tokens; at least "
        f"{found.lower_bound:,} are needed",
        "sequences": ", ".join([f"{found.num_sequences:,}", *notes]),
        "tokens": f"{found.num_tokens:,}",
        "fill": f"{found.fill:.1%}",
        "padding": f"{found.padding_tail:,} tokens at ends, {found.padding_alignment:,} of "
        f"alignment, {found.padding_dummy:,} in {found.num_dummies:,} empty micro-batches",
        "largest micro-batch": f"{found.token_imbalance:.3f} times the mean in tokens",
    }
    if ranks > 1:
        each = [f"{int(plan.loads.sum()):,}" for plan in plans]
        rows["largest rank"] = f"{found.rank_token_imbalance:.3f} times the mean in tokens"
        rows[f"tokens of {ranks} ranks"] = ", ".join(each)
    show(file.name, rows.items())
