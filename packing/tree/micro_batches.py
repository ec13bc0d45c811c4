"""`TreeMicroBatch`, and cutting a `TreeBatch` into micro-batches by a plan.

All is laid out on the host; the tables of a plan go to the device in one copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.rearrange.segments import Number
from trajpack.kernels.rearrange.select_tokens import TokenSources
from trajpack.packing.batch.batch import UNALIGNED
from trajpack.packing.micro_batches.alignment import Alignment, Ints, Placement
from trajpack.packing.micro_batches.cutting import (
    CU_SEQLENS,
    PaddedMicroBatch,
    SegmentTable,
    TokenSelection,
    merged,
    send_tables,
)
from trajpack.packing.micro_batches.micro_batch import MicroBatch
from trajpack.packing.tree.chain_plan import ChainPlan, check_plan
from trajpack.packing.tree.nodes import Boundary, TreeNodes
from trajpack.packing.tree.plan import union_of
from trajpack.packing.tree.trie import Branches

if TYPE_CHECKING:
    from trajpack.packing.tree.tree_batch import TreeBatch

PLACE = "entry_node"
"""Name under which the nodes and depths of entries are selected with them."""


@dataclass(frozen=True, eq=False, repr=False)
class TreeMicroBatch(TreeNodes):
    """Some chains of a `TreeBatch` as trees, and the entries of their turns.

    Made by `TreeBatch.micro_batches`. Its nodes are those that `trajpack.pack_tree` makes of these
    chains alone, numbered from 0; padding follows them. A padding node is a tree of its own at
    depth 0, on which no entry lies. The padding is the last of `seqlens`. The
    tensors over nodes are those of `TreeNodes`, a base class.

    Attributes:
        entries: Entries of its turns: ``turn_ids`` are turns of the batch, ``position_ids`` nodes
            of this micro-batch, ``sequences`` its turns, and ``fields`` hold the caller's tensors
            too. They have no padding.
        chains: Its chains, depth first: sequences of layout ``"merged"``.
        num_padding: Padding nodes.
    """

    entries: MicroBatch
    chains: tuple[int, ...]
    num_padding: int

    @property
    def is_dummy(self) -> bool:
        """Whether there is padding only, so that ranks do the same number of passes."""
        return not self.chains

    def __repr__(self) -> str:
        return (
            f"TreeMicroBatch({len(self.chains)} chains, {len(self.entries.sequences)} turns in "
            f"{len(self)} trees; {self.num_nodes:,} nodes, {self.num_padding:,} of padding, "
            f"{self.num_entries:,} entries; {self.device})"
        )


class _Layout(NamedTuple):
    """A micro-batch, laid out on the host."""

    table: SegmentTable
    """Its nodes as stretches of the nodes of the batch."""
    placement: Placement
    """Its trees, and the padding."""
    num_nodes: int
    """Nodes without padding."""
    shift: int
    """Number in the batch minus number in the micro-batch, of nodes of its branches."""
    stop: int
    """First node of the batch behind its branches."""
    turns: PaddedMicroBatch
    chains: Ints
    num_trained: int


def cut_chains(
    batch: TreeBatch,
    plan: ChainPlan,
    alignment: Alignment,
    tensors: Mapping[str, torch.Tensor] | None,
    impl: Impl,
) -> Iterator[TreeMicroBatch]:
    """Implement `TreeBatch.micro_batches`."""
    if tensors and PLACE in tensors:
        raise ValueError(f"tensors: a micro-batch has a field {PLACE!r} already")
    layouts = _layouts(batch, plan, alignment)
    places = torch.stack([batch.entry_node, batch.position_ids[batch.entry_node]], 1)
    of_entries = TokenSelection(batch.entries, UNALIGNED, {**(tensors or {}), PLACE: places})
    tables = send_tables(
        [*(one.table for one in layouts), *of_entries.tables(one.turns for one in layouts)],
        batch.device,
    )
    fills: dict[str, Number] = {"input_ids": alignment.token_id, "tree_parent": -1, "above": -1}
    fills |= {field.name: field.fill for field in batch.entries.token_fields}
    named = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "tree_end": batch.tree_end,
        "tree_parent": batch.tree_parent,
        "above": batch.position_ids.int() - 1,
        **batch.fields,
    }
    of_nodes = TokenSources([*named.values()], [fills.get(name, 0) for name in named])

    def select(one: _Layout, table: torch.Tensor, entries: torch.Tensor) -> TreeMicroBatch:
        rows = of_nodes.select(table, one.placement.num_tokens, impl=impl).rows
        num_boundaries = alignment.num_boundaries or len(one.placement.seqlens) + 1
        return _assemble(
            one,
            batch.boundary,
            dict(zip(named, rows, strict=True)),
            table[CU_SEQLENS, :num_boundaries],
            of_entries.select(one.turns, entries, impl),
        )

    return map(select, layouts, tables[: len(layouts)], tables[len(layouts) :])


def merge_entries(
    batch: TreeBatch,
    plan: ChainPlan,
    outputs: Sequence[torch.Tensor],
    fill: Number,
    impl: Impl,
) -> torch.Tensor:
    """Implement `TreeBatch.merge`."""
    check_plan(plan, batch.chains)
    lengths = batch.entries.host_lengths.seqlens
    placed = [_place_turns(turns, lengths) for turns in _members(batch.chains.turn_branch, plan)]
    return merged(batch.entries, placed, outputs, fill, impl)


def _assemble(
    one: _Layout,
    boundary: Boundary,
    rows: dict[str, torch.Tensor],
    cu_seqlens: torch.Tensor,
    entries: MicroBatch,
) -> TreeMicroBatch:
    """Number the selected nodes from 0, and say on which of them entries lie.

    A node of the micro-batch's branches has its number in the batch minus ``shift``. A node before
    them is on the path to the first, so its number is its depth. That is the larger of the two for
    these nodes, and the smaller for the others.

    Cost: eight small operations, nine with padding.
    """
    total = one.placement.num_tokens
    tree_end = rows.pop("tree_end").clamp_(max=one.stop).sub_(one.shift)
    if one.num_nodes < total:
        torch.arange(one.num_nodes + 1, total + 1, out=tree_end[one.num_nodes :])
    parent = rows.pop("tree_parent").sub_(one.shift)
    place = entries.fields[PLACE]
    node = torch.maximum(place[:, 0] - one.shift, place[:, 1])
    loss_mask = torch.zeros(total, dtype=torch.bool, device=node.device).index_fill_(0, node, True)
    others = {name: rows for name, rows in entries.fields.items() if name != PLACE}
    return TreeMicroBatch(
        input_ids=rows.pop("input_ids"),
        position_ids=rows.pop("position_ids"),
        tree_end=tree_end,
        tree_parent=torch.maximum(parent, rows.pop("above")),
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        fields=rows,
        entries=dataclasses.replace(entries, position_ids=node, fields=others),
        seqlens=tuple(one.placement.seqlens.tolist()),
        chains=tuple(one.chains.tolist()),
        num_trained=one.num_trained,
        boundary=boundary,
        num_padding=total - one.num_nodes,
    )


def _layouts(batch: TreeBatch, plan: ChainPlan, alignment: Alignment) -> list[_Layout]:
    """Lay out the micro-batches of a plan.

    Raises:
        TypeError: If the plan is no `ChainPlan`.
        ValueError: If it is for another batch, or the alignment has no room or is not for trees.
    """
    chains, lengths = batch.chains, batch.entries.host_lengths.seqlens
    check_plan(plan, chains)
    if alignment.sequence_multiple != 1 or alignment.tail != "sequence":
        raise ValueError(
            "alignment: trees have their padding behind the last one, with sequence_multiple=1 and "
            f"tail='sequence', got {alignment.sequence_multiple} and {alignment.tail!r}"
        )
    turns, stretches = (
        _members(branch, plan) for branch in (chains.turn_branch, chains.turn_branch[chains.turn])
    )
    paths, roots = _paths(chains.trie, plan), np.flatnonzero(chains.trie.shared == 0)
    first, layouts = np.append(chains.trie.first, chains.trie.num_nodes), list[_Layout]()
    for number, (begin, end) in enumerate(plan.bounds.tolist()):
        size, source, depth = int(plan.loads[number]), *paths[number]
        shift = int(first[end]) - size
        within = roots[slice(*np.searchsorted(roots, [begin + 1, end]))]
        trees = np.diff(first[within] - shift, prepend=0, append=size) if size else source[:0]
        try:
            placement = alignment.place(trees)
        except ValueError as error:
            raise ValueError(f"micro-batch {number}: {error}") from error
        begins, ends = (of[stretches[number]] for of in (chains.begin, chains.end))
        begins, ends = union_of(begins, ends)
        layouts.append(
            _Layout(
                _table(source, depth, placement, size=size, alignment=alignment),
                placement,
                size,
                shift,
                int(first[end]),
                _place_turns(turns[number], lengths),
                plan[number],
                int((ends - begins).sum()),
            )
        )
    return layouts


def _paths(trie: Branches, plan: ChainPlan) -> list[tuple[Ints, Ints]]:
    """Return the stretches of each micro-batch: first nodes in the batch, and first depths.

    They are those of the path to its first branch, which other branches hold, and one of all of its
    own branches.
    """
    begin, end = plan.bounds.T
    chosen = np.flatnonzero(begin < end)
    branch = begin[chosen]
    piece, depth, holder = trie.on_path(
        trie.order[branch], np.zeros_like(branch), trie.shared[branch]
    )
    of = np.append(chosen[piece], chosen)
    source = np.append(trie.node(holder, depth), trie.first[branch])
    depth = np.append(depth, trie.shared[branch])
    order = np.argsort(of, kind="stable")
    cuts = np.searchsorted(of[order], np.arange(1, len(plan)))
    return list(zip(np.split(source[order], cuts), np.split(depth[order], cuts), strict=True))


def _table(
    source: Ints, start: Ints, placement: Placement, *, size: int, alignment: Alignment
) -> SegmentTable:
    """Return the table that selects ``size`` nodes in stretches, and then padding."""
    ends = np.append(start[1:], size)[: start.size]
    kept = ends - start
    if size < placement.num_tokens:
        ends = np.append(ends, placement.num_tokens)
    boundaries = np.cumsum(placement.seqlens)
    min_columns = max(len(boundaries) + 1, alignment.num_boundaries or 0)
    return SegmentTable(ends, source, kept, boundaries, min_columns)


def _members(branch: Ints, plan: ChainPlan) -> list[Ints]:
    """Return the items of each micro-batch, ascending, by the branch of each item."""
    order = np.argsort(branch, kind="stable")
    bounds = np.searchsorted(branch[order], plan.bounds)
    return [np.sort(order[begin:end]) for begin, end in bounds.tolist()]


def _place_turns(turns: Ints, lengths: Ints) -> PaddedMicroBatch:
    """Lay out the entries of turns, without padding."""
    kept = lengths[turns]
    return PaddedMicroBatch(turns, kept, Placement(kept, kept, int(kept.sum())))
