"""`TreeMicroBatch`, and cutting a `TreeBatch` into micro-batches by a plan.

All is laid out on the host; the tables of a plan go to the device in one copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.rearrange.select_tokens import Number, TokenSources
from trajpack.packing.batch.batch import UNALIGNED
from trajpack.packing.micro_batches.alignment import Alignment, Placement
from trajpack.packing.micro_batches.cutting import (
    CU_SEQLENS,
    PaddedMicroBatch,
    SegmentTable,
    TokenSelection,
    send_tables,
)
from trajpack.packing.micro_batches.micro_batch import MicroBatch, moved
from trajpack.packing.tree.chain_plan import ChainPlan, check_plan
from trajpack.packing.tree.nodes import Boundary, MicroEntries, TreeNodes
from trajpack.packing.tree.trie import Chains, Ints, union_of

if TYPE_CHECKING:
    from trajpack.packing.tree.tree_batch import TreeBatch

PLACE = "entry_node"
"""Name under which the nodes and depths of entries are selected with them."""


@dataclass(frozen=True, eq=False, repr=False)
class TreeMicroBatch(TreeNodes):
    """Some chains of a `TreeBatch` as trees, and the entries of their turns.

    Made by `TreeBatch.micro_batches`. Its nodes are those that `trajpack.pack_tree` makes of these
    chains alone, numbered from 0; ``chains.trie.order`` are their numbers in the batch. Padding
    follows: nodes at depth 0, without a parent and without entries, that see themselves alone. It
    is no tree, but the last of `seqlens`. All else is that of `TreeNodes`, a base class.

    Attributes:
        entries: Generated tokens of its turns, see `MicroEntries`.
        num_padding: Padding nodes.
    """

    entries: MicroEntries
    num_padding: int

    @property
    def is_dummy(self) -> bool:
        """Whether there is padding only, so that ranks do the same number of passes."""
        return self.num_padding == self.num_nodes

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeMicroBatch:
        """Return the micro-batch on a device."""
        return moved(self, lambda one: one.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TreeMicroBatch:
        """Return the micro-batch in pinned memory, as a `torch.utils.data.DataLoader` asks for."""
        return moved(self, torch.Tensor.pin_memory)

    def __repr__(self) -> str:
        return (
            f"TreeMicroBatch({len(self.chains.trie.order)} chains, {len(self.entries.sequences)} "
            f"turns in {len(self)} trees; {self.num_nodes:,} nodes, {self.num_padding:,} of "
            f"padding, {self.num_entries:,} entries; {self.device})"
        )

    def __len__(self) -> int:
        """Trees, without the padding."""
        return len(self.seqlens) - (self.num_padding > 0)


class _Layout(NamedTuple):
    """A micro-batch, laid out on the host."""

    chains: Chains
    table: SegmentTable
    """Its nodes as stretches of the nodes of the batch."""
    placement: Placement
    """Its trees, and the padding."""
    shift: int
    """Number in the batch minus number in the micro-batch, of nodes that its places own."""
    turns: PaddedMicroBatch


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


def _assemble(
    one: _Layout,
    boundary: Boundary,
    rows: dict[str, torch.Tensor],
    cu_seqlens: torch.Tensor,
    entries: MicroBatch,
) -> TreeMicroBatch:
    """Number the selected nodes from 0, and say on which of them entries lie.

    A node that the micro-batch's places own has its number in the batch minus ``shift``. A node
    before them is on the path to the first, so its number is its depth. That is the larger of the
    two for these nodes, and the smaller for the others.
    """
    total, num_nodes = one.placement.num_tokens, one.chains.trie.num_nodes
    tree_end = rows.pop("tree_end").sub_(one.shift).clamp_(max=num_nodes)
    if num_nodes < total:
        torch.arange(num_nodes + 1, total + 1, out=tree_end[num_nodes:])
    parent = rows.pop("tree_parent").sub_(one.shift)
    place = entries.fields[PLACE]
    node = torch.maximum(place[:, 0] - one.shift, place[:, 1])
    loss_mask = torch.zeros(total, dtype=torch.bool, device=node.device).index_fill_(0, node, True)
    given = {field.name: getattr(entries, field.name) for field in dataclasses.fields(entries)}
    given["fields"] = {name: of for name, of in entries.fields.items() if name != PLACE}
    generated = one.chains.generated()
    begins, ends = union_of(generated.node, generated.node + generated.length)
    return TreeMicroBatch(
        input_ids=rows.pop("input_ids"),
        position_ids=rows.pop("position_ids"),
        tree_end=tree_end,
        tree_parent=torch.maximum(parent, rows.pop("above")),
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        fields=rows,
        entries=MicroEntries(**given | {"position_ids": node}),
        chains=one.chains,
        seqlens=tuple(one.placement.seqlens.tolist()),
        num_trained=int((ends - begins).sum()),
        boundary=boundary,
        num_padding=total - num_nodes,
    )


def _layouts(batch: TreeBatch, plan: ChainPlan, alignment: Alignment) -> list[_Layout]:
    """Lay out the micro-batches of a plan.

    Raises:
        TypeError: If the plan is no `ChainPlan`.
        ValueError: If it is for another batch, or the alignment has no room or is not for trees.
    """
    trie = batch.chains.trie
    check_plan(plan, trie)
    if alignment.sequence_multiple != 1 or alignment.tail != "sequence":
        raise ValueError(
            "alignment: trees have their padding behind the last one, with sequence_multiple=1 and "
            f"tail='sequence', got {alignment.sequence_multiple} and {alignment.tail!r}"
        )
    layouts, turns_of = list[_Layout](), batch.chains.turns_at(plan.bounds)
    for number, ((begin, end), turns) in enumerate(
        zip(plan.bounds.tolist(), turns_of, strict=True)
    ):
        chains = batch.chains.part(begin, end, turns)
        size, first = chains.trie.num_nodes, np.arange(begin, end)[:1]
        try:
            placement = alignment.place(np.diff(chains.trie.roots))
        except ValueError as error:
            raise ValueError(f"micro-batch {number}: {error}") from error
        above = trie.pieces(first, np.zeros_like(first), trie.shared[first])  # it is repeated
        source = np.append(above.node, trie.first[first])
        start = np.append(above.depth, trie.shared[first])
        ends = np.append(start[1:], size)[: start.size]
        kept = ends - start
        if size < placement.num_tokens:
            ends = np.append(ends, placement.num_tokens)  # padding
        boundaries = np.cumsum(placement.seqlens)
        columns = max(len(boundaries) + 1, alignment.num_boundaries or 0)
        table = SegmentTable(ends, source, kept, boundaries, columns)
        placed = place_turns(batch.chains, turns)
        layouts.append(_Layout(chains, table, placement, int(trie.first[end]) - size, placed))
    return layouts


def place_turns(chains: Chains, turns: Ints) -> PaddedMicroBatch:
    """Lay out the entries of turns, without padding."""
    kept = (chains.end - chains.begin)[turns]
    return PaddedMicroBatch(turns, kept, Placement(kept, kept, int(kept.sum())))
