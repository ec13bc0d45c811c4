"""Kernel launches of a pack: from staged tables to the tensors of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.kernels.dispatch import Impl
from trajpack.kernels.fields.build import build, build_into
from trajpack.kernels.fields.gather_fields import gather_fields
from trajpack.kernels.fields.host_memory import HostMemory
from trajpack.packing.buffer.staging import DeviceRegion
from trajpack.packing.buffer.tables import Counts
from trajpack.packing.token_fields import TokenField
from trajpack.packing.turn_fields import TURN_FIELDS

TURN_TABLES = (
    *(field.name for field in TURN_FIELDS),
    "turn_sequence",
    "turn_spans",
    "turn_begin",
)


def returns_of_turns(arena: DeviceRegion, counts: Counts, impl: Impl) -> torch.Tensor:
    """Discount the turns' rewards backward over their trajectories."""
    return discounted_returns(
        arena.table("turn_rewards", counts.turns),
        arena.table("cu_turns", counts.trajectories + 1),
        arena.table("turn_discounts", counts.trajectories),
        impl,
        max_seqlen=counts.most_turns,
    )


def write_batch(
    arena: DeviceRegion,
    words: torch.Tensor,
    counts: Counts,
    fields: Sequence[TokenField],
    impl: Impl,
    memory: HostMemory | None = None,
) -> dict[str, Any]:
    """Launch the kernels that write a batch from its tables and the stream ``words``.

    Returns its tensors over tokens, on the host in ``memory``, and the turns' returns.
    """
    returns = returns_of_turns(arena, counts, impl)
    runs = arena.table("runs", counts.spans + 1)
    if memory is not None and impl == "torch":
        built = memory.fields(counts.tokens)
        build_into(built, words, runs, returns, impl)
    else:
        built = build(words, runs, returns, counts.tokens, impl)
    extra = {}
    if fields:
        sources = arena.table("field_sources", counts.spans + 1)
        layouts = [field.layout for field in fields]
        gathered = gather_fields(words, runs, sources, layouts, counts.tokens, impl)
        extra = {field.name: rows for field, rows in zip(fields, gathered, strict=True)}
    return {
        **built._asdict(),
        "turn_returns": returns,
        "fields": extra,
        "token_fields": tuple(fields),
    }


def table_rows(counts: Counts) -> dict[str, int]:
    """Return the number of rows of the batch's tensors over turns, boundaries and groups."""
    return dict.fromkeys(TURN_TABLES, counts.turns) | {
        "cu_generated": counts.turns + 1,
        "cu_turns": counts.trajectories + 1,
        "cu_seqlens": counts.sequences + 1,
        "group_ids": counts.trajectories,
    }


def turn_tables(arena: DeviceRegion, counts: Counts) -> dict[str, Callable[[], torch.Tensor]]:
    """Return functions that make the batch's tensors over turns, boundaries and groups."""
    return {name: partial(arena.table, name, rows) for name, rows in table_rows(counts).items()}
