"""A `TreeBatch` from what `build` wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trajpack.kernels.fields.build import FIELD_DTYPES
from trajpack.kernels.runs import Run
from trajpack.packing.tree.nodes import Boundary
from trajpack.packing.tree.plan import PARENT, TreePlan
from trajpack.packing.tree.tree_batch import Entries, Share, TreeBatch

NODE_FIELDS = {
    "input_ids": "input_ids",
    "position_ids": "position_ids",
    "tree_end": "sequence_ids",
    "loss_mask": "loss_mask",
}
"""Tensors of nodes, and the field of `build` that holds each."""


def assemble(
    plan: TreePlan,
    runs: torch.Tensor,
    written: Callable[[str], torch.Tensor],
    *,
    tables: Mapping[str, torch.Tensor],
    fields: Mapping[str, torch.Tensor],
    of_entries: Mapping[str, Any],
    later: Mapping[str, Callable[[], Any]],
    options: tuple[Share, Boundary],
) -> TreeBatch:
    """Make a batch.

    Args:
        plan: The plan.
        runs: Its run table on the device of the batch.
        written: Function that returns a field of `FIELD_DTYPES` over nodes, padding and entries.
        tables: ``cu_seqlens`` of the trees and ``turn_prompt_node``.
        fields: Extra fields of the nodes.
        of_entries: Fields of the entries by name, in place of those that ``written`` has.
        later: Functions that return further ones.
        options: `TreeBatch.share` and `TreeBatch.boundary`.

    Cost: three small operations for the parents.
    """
    num_nodes, first = plan.num_nodes, plan.first_entry
    # `data`: nodes and entries share memory, but a write to one is none to the other
    nodes = {name: written(source)[:num_nodes].data for name, source in NODE_FIELDS.items()}
    rows = runs[: plan.num_node_rows]
    parents = written("turn_ids")[:num_nodes].data  # memory of a field that nodes do not have
    torch.arange(-1, num_nodes - 1, out=parents)
    parents[rows[:, Run.START].long()] = rows[:, PARENT]
    entries = {name: written(name)[first:].data for name in FIELD_DTYPES}
    return TreeBatch(
        **nodes,
        tree_parent=parents,
        cu_seqlens=tables["cu_seqlens"],
        turn_prompt_node=tables["turn_prompt_node"],
        fields=fields,
        entries=Entries.with_lazy_columns({**entries, **of_entries}, later),
        num_trained=plan.num_trained,
        seqlens=tuple((plan.cu_seqlens[1:] - plan.cu_seqlens[:-1]).tolist()),
        share=options[0],
        boundary=options[1],
        chains=plan.chains,
    )
