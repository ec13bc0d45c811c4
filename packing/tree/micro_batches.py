"""`TreeMicroBatch`, and cutting a `TreeBatch` into micro-batches by a plan.

All is laid out on the host; the tables of a plan go to the device in one copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.rearrange.select_tokens import Number, TokenSources
from trajpack.packing.micro_batches.alignment import Alignment, Placement, check_alignment
from trajpack.packing.micro_batches.cutting import (
    CU_SEQLENS,
    SegmentTable,
    checked_tensors,
    send_tables,
    summed,
)
from trajpack.packing.micro_batches.generated import Fields
from trajpack.packing.micro_batches.micro_batch import moved
from trajpack.packing.tree.chain_plan import ChainPlan, check_plan
from trajpack.packing.tree.entries import Entries
from trajpack.packing.tree.nodes import TreeNodes
from trajpack.packing.tree.trie import Chains, Ints

if TYPE_CHECKING:
    from trajpack.packing.tree.tree_batch import TreeBatch


@dataclass(frozen=True, eq=False, repr=False)
class TreeMicroBatch(TreeNodes):
    """Some chains of a `TreeBatch` as trees, and the entries of their turns.

    Made by `TreeBatch.micro_batches`. Its nodes are those that `trajpack.pack_tree` makes of these
    chains alone, numbered from 0; ``chains.trie.order`` are their numbers in the batch. Padding
    follows: nodes at depth 0, without a parent and without entries, that see themselves alone. It
    is no tree, but the last of `seqlens`. All else is that of `TreeNodes`, a base class.

    Attributes:
        turns: Its turns, numbers of those of the batch, as ``entries.turn_ids`` are.
        num_padding: Padding nodes.
    """

    turns: tuple[int, ...]
    num_padding: int

    @property
    def is_dummy(self) -> bool:
        """Whether there is padding only, so that ranks do the same number of passes."""
        return self.num_padding == self.num_nodes

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeMicroBatch:
        """Return the micro-batch on a device."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TreeMicroBatch:
        """Return the micro-batch in pinned memory, as a `torch.utils.data.DataLoader` asks for."""
        return self._moved(torch.Tensor.pin_memory)

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> TreeMicroBatch:
        return dataclasses.replace(moved(self, move), entries=moved(self.entries, move))

    def __repr__(self) -> str:
        return (
            f"TreeMicroBatch({len(self.chains.trie.order)} chains, {len(self.turns)} turns "
            f"in {len(self)} trees; {self.num_nodes:,} nodes, {self.num_padding:,} of "
            f"padding, {self.num_entries:,} entries; {self.device})"
        )

    def __len__(self) -> int:
        """Trees, without the padding."""
        return len(self.seqlens) - (self.num_padding > 0)


class _Layout(NamedTuple):
    """A micro-batch, laid out on the host."""

    chains: Chains
    nodes: SegmentTable
    """Its nodes as stretches of the nodes of the batch."""
    entries: SegmentTable
    """Its entries as stretches of the entries of the batch."""
    placement: Placement
    """Its trees, and the padding."""
    shift: int
    """Number in the batch minus number in the micro-batch, of nodes that its places own."""
    turns: Ints
    """Its turns."""


def cut_chains(
    batch: TreeBatch,
    plan: ChainPlan,
    alignment: Alignment,
    tensors: Mapping[str, torch.Tensor] | None,
    impl: Impl,
) -> Iterator[TreeMicroBatch]:
    """Implement `TreeBatch.micro_batches`."""
    layouts, entries = _layouts(batch, plan, alignment), batch.entries
    names = [field.name for field in dataclasses.fields(Entries)]
    own = [name for name in names if isinstance(getattr(entries, name), torch.Tensor)]
    tokens = {name: getattr(entries, name) for name in own} | dict(entries.fields)
    sizes: Any = {"num_tokens": entries.num_tokens, "device": batch.device}
    tokens |= checked_tensors(tensors, {*names, *tokens, *batch.fields}, **sizes)
    depth = batch.position_ids[entries.node]
    of_entries = TokenSources([*tokens.values(), depth], [0] * (len(tokens) + 1))
    tables = send_tables(
        [*(layout.nodes for layout in layouts), *(layout.entries for layout in layouts)],
        batch.device,
    )
    fills: dict[str, Number] = {"input_ids": alignment.token_id, "tree_parent": -1, "above": -1}
    fills |= {field.name: field.fill for field in entries.token_fields}
    nodes = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "tree_end": batch.tree_end,
        "tree_parent": batch.tree_parent,
        "above": batch.position_ids.int() - 1,
        **batch.fields,
    }
    of_nodes = TokenSources([*nodes.values()], [fills.get(name, 0) for name in nodes])

    def select(layout: _Layout, table: torch.Tensor, turns: torch.Tensor) -> TreeMicroBatch:
        rows = of_nodes.select(table, layout.placement.num_tokens, impl=impl).rows
        *rows_of_entries, depth = of_entries.select(
            turns, int(layout.entries.kept.sum()), impl=impl
        ).rows
        fields = dict(zip(tokens, rows_of_entries, strict=True))
        value_lens = entries.tables.value_lens.items()
        of_turns = Entries(
            **{name: fields.pop(name) for name in own},
            fields=Fields(fields),
            ragged_values=entries.ragged_values,
            value_counts=summed({name: lens[layout.turns] for name, lens in value_lens}),
        )
        num_boundaries = alignment.num_boundaries or len(layout.placement.seqlens) + 1
        return _numbered(
            layout,
            dict(zip(nodes, rows, strict=True)),
            of_turns,
            depth,
            cu_seqlens=table[CU_SEQLENS, :num_boundaries],
            boundary=batch.boundary,
        )

    return map(select, layouts, tables[: len(layouts)], tables[len(layouts) :])


def _numbered(
    layout: _Layout,
    nodes: dict[str, torch.Tensor],
    entries: Entries,
    depth: torch.Tensor,
    **others: Any,
) -> TreeMicroBatch:
    """Number the selected nodes from 0, and say on which of them entries lie.

    A node that the micro-batch's places own has its number in the batch minus ``shift``. A node
    before them is on the path to the first, so its number is its depth. That is the larger of the
    two for these nodes, and the smaller for the others. ``depth`` is that of the entries.
    """
    total, num_nodes = layout.placement.num_tokens, layout.chains.trie.num_nodes
    tree_end = nodes.pop("tree_end").sub_(layout.shift).clamp_(max=num_nodes)
    if num_nodes < total:
        torch.arange(num_nodes + 1, total + 1, out=tree_end[num_nodes:])
    parent = nodes.pop("tree_parent").sub_(layout.shift)
    node = torch.maximum(entries.node - layout.shift, depth)
    return TreeMicroBatch(
        input_ids=nodes.pop("input_ids"),
        position_ids=nodes.pop("position_ids"),
        tree_end=tree_end,
        tree_parent=torch.maximum(parent, nodes.pop("above")),
        loss_mask=torch.zeros_like(parent, dtype=torch.bool).index_fill_(0, node, True),
        fields=Fields(nodes),
        entries=dataclasses.replace(entries, node=node),
        chains=layout.chains,
        seqlens=tuple(layout.placement.seqlens.tolist()),
        turns=tuple(layout.turns.tolist()),
        num_padding=total - num_nodes,
        **others,
    )


def _layouts(batch: TreeBatch, plan: ChainPlan, alignment: Alignment) -> list[_Layout]:
    """Lay out the micro-batches of a plan.

    Raises:
        TypeError: If the plan is no `ChainPlan`.
        ValueError: If it is for another batch, or the alignment has no room or is not for trees.
    """
    trie = batch.chains.trie
    check_plan(plan, trie)
    check_alignment(alignment)
    if alignment.sequence_multiple != 1 or alignment.tail != "sequence":
        raise ValueError(
            "alignment: trees have their padding behind the last one, with sequence_multiple=1 and "
            f"tail='sequence', got {alignment.sequence_multiple} and {alignment.tail!r}"
        )
    if alignment.max_generated is not None:
        raise ValueError(f"alignment: trees take no max_generated, got {alignment.max_generated}")
    layouts, turns_of = list[_Layout](), batch.chains.turns_at(plan.bounds)
    generated = batch.entries.host_lengths
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
        nodes = SegmentTable(ends, source, kept, boundaries, columns)
        kept = generated.seqlens[turns]
        entries = SegmentTable(np.cumsum(kept), generated.starts[turns], kept)
        shift = int(trie.first[end]) - size
        layouts.append(_Layout(chains, nodes, entries, placement, shift, turns))
    return layouts
