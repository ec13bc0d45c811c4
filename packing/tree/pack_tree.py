"""`pack_tree`: the content of a buffer as trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.fields.build import FIELD_DTYPES
from trajpack.kernels.fields.gather_fields import gather_fields
from trajpack.kernels.runs import MAX_TOKENS, RUN_WIDTH, Run, in_tiles
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import TrajectoryBuffer, values_of, write_batch
from trajpack.packing.buffer.staging import DeviceRegion
from trajpack.packing.buffer.tables import Tables, by_field
from trajpack.packing.conversion import INT32_MAX, shown
from trajpack.packing.token_fields import TokenField
from trajpack.packing.tree.nodes import Boundary, Entries
from trajpack.packing.tree.tree_batch import Share, TreeBatch
from trajpack.packing.tree.trie import Chains, Ints, Rows, Trie, expanded, trie_of, union_of
from trajpack.packing.types import Trajectory

TREE_END, PARENT, NODE = Run.SEQUENCE, Run.VERSION, Run.POSITION
"""Columns with another meaning in a tree. In rows of nodes: the end of the subtrees, and the
parent of the row's first node. In rows of entries: the node of the row's first entry."""
NODE_FIELDS = {
    "input_ids": "input_ids",
    "position_ids": "position_ids",
    "tree_end": "sequence_ids",
    "loss_mask": "loss_mask",
    "tree_parent": "turn_ids",
}
"""Tensors of nodes, and the field of `build` whose memory holds each."""


class TreePlan(NamedTuple):
    """Rows of a run table: nodes, padding up to a whole tile, then entries."""

    chains: Chains
    num_node_rows: int
    """Rows of nodes; one row of padding and the rows of entries follow."""
    num_rows: int
    num_trained: int
    """Nodes that are generated tokens."""
    first_entry: int
    """Index of the first entry, a multiple of a tile."""
    num_tokens: int
    """Nodes, padding and entries."""


def pack_tree(
    trajectories: Iterable[Trajectory] | TrajectoryBuffer,
    share: Share = "once",
    device: torch.device | str | None = None,
    impl: Impl = "auto",
    fields: Iterable[TokenField] = (),
    *,
    boundary: Boundary = "shared",
) -> TreeBatch:
    """Pack trajectories into trees, in which each distinct prefix is stored and computed once.

    Prefixes are shared across the turns, branches and trajectories of the call. `TreeBatch.unpack`
    is the exact inverse.

    Args:
        trajectories: Trajectories in the order of the entries, or a buffer with them, which keeps
            them; ``device`` and ``fields`` are then those of the buffer.
        share: Weight of an entry in the loss, ``"once"`` or ``"sum"``, see
            `TreeBatch.entry_weights`.
        device: As for `pack`.
        impl: As for `pack`.
        fields: As for `pack`. Tokens are shared only if their rows of fields that have rows for all
            tokens are equal, bit for bit.
        boundary: Node of the last token that sequences have in common. With ``"shared"`` they share
            it, and it predicts a token for each way on. With ``"duplicate"`` it is stored once for
            each way on, and once where a sequence ends: each node is followed by one token, its
            label (`TreeBatch.labels`). Needs ``share="once"``. Log-probabilities and gradients of
            entries are the same.

    Raises:
        TypeError: As `TrajectoryBuffer.extend`.
        ValueError: As `TrajectoryBuffer.extend`. If an option is unknown, ``boundary="duplicate"``
            meets another ``share`` than ``"once"``, a buffer comes with ``device`` or ``fields``,
            or nodes and generated tokens would exceed 2³¹ together.
        RuntimeError: As `pack`.

    Example:
        >>> from trajpack import Trajectory, Turn
        >>> again = [Turn([1, 2], [3, 4], [-0.1, -0.2]), Turn([1, 2], [3, 5], [-0.3, -0.4])]
        >>> batch = pack_tree([Trajectory("a", again)])
        >>> batch.input_ids, batch.tree_end, batch.entry_node
        (tensor([1, 2, 3, 4, 5]), tensor([5, 5, 5, 4, 5], dtype=torch.int32), tensor([2, 3, 2, 4]))
        >>> batch.rollout_logprobs
        tensor([-0.1000, -0.2000, -0.3000, -0.4000])
    """
    if isinstance(trajectories, TrajectoryBuffer):
        if device is not None or fields:
            raise ValueError("device and fields are those of the buffer; leave them out")
        return _tree_of_buffer(trajectories, share, boundary, impl)
    buffer = TrajectoryBuffer(device=device, fields=fields)
    buffer.extend(trajectories)
    return _tree_of_buffer(buffer, share, boundary, impl)


def tree_of(batch: PackedBatch, share: Share = "once", boundary: Boundary = "shared") -> TreeBatch:
    """Return the tree of a batch of layout ``"merged"`` on the host: undo `TreeBatch.merged`.

    Raises:
        ValueError: If the batch has another layout.
    """
    if batch.layout != "merged":
        raise ValueError(f"a tree is made of layout 'merged', the batch has {batch.layout!r}")
    batch = batch.to("cpu")
    tree = pack_tree(batch.unpack(), share, "cpu", fields=batch.token_fields, boundary=boundary)
    begin, end = batch.turn_spans.numpy().astype(np.int64).T
    at, kept = torch.from_numpy(expanded(begin, end - begin)), {}
    for name in ("returns", "advantages", "loss_mask", "turn_returns", "metrics", "metric_names"):
        value = getattr(batch, name)
        of_tokens = name in ("returns", "advantages", "loss_mask") and value is not None
        kept[name] = value[at] if of_tokens else value
    return dataclasses.replace(tree, entries=dataclasses.replace(tree.entries, **kept))


def _tree_of_buffer(
    buffer: TrajectoryBuffer, share: Share, boundary: Boundary, impl: Impl
) -> TreeBatch:
    for name, value, known in (("share", share, Share), ("boundary", boundary, Boundary)):
        if value not in get_args(known):
            names = ", ".join(repr(one) for one in get_args(known))
            raise ValueError(f"{name} must be one of {names}, got {shown(value)}")
    if boundary == "duplicate" and share != "once":
        raise ValueError(f"boundary='duplicate' needs share='once', got share={share!r}")
    chosen = resolve_impl("pack_tree", impl, buffer.device)
    tables, plan = arrange_tree(buffer, duplicate=boundary == "duplicate")
    with buffer._staging.on_device():
        region = buffer._staging.send(buffer._state.num_words, tables.arrays)
        columns = _write(region, plan, tables, chosen)
        of_nodes, of_entries = (
            _gather(region, plan, buffer.fields, chosen) if buffer.fields else ({}, {})
        )
    chains, num_nodes = plan.chains, plan.chains.trie.num_nodes
    # `data`: nodes and entries share memory, but a write to one is none to the other
    nodes = {name: columns[field][:num_nodes].data for name, field in NODE_FIELDS.items()}
    columns |= {name: columns[name][plan.first_entry :].data for name in FIELD_DTYPES}
    cu_seqlens, prompt_nodes = columns["cu_seqlens"], columns["turn_begin"]
    bounds, lengths = columns["cu_generated"], tuple((chains.end - chains.begin).tolist())
    columns |= {
        "turn_begin": bounds[:-1].clone(),
        "cu_seqlens": bounds.clone(),
        "seqlens": lengths,
        "layout": "turns",
        "num_generated": buffer._state.num_generated,
        "fields": of_entries,
        "token_fields": buffer.fields,
        "ragged_values": values_of(region.stream, buffer.fields),
        "tables": columns["tables"]._replace(
            runs=_runs_of(region, plan)[1],
            cu_new=bounds,
            generated_lens=lengths,
            value_lens=by_field(buffer.fields, tables.value_lens),
            longest=tables.longest._replace(new=tables.longest.generated),
            loss_mask=columns["loss_mask"],
        ),
    }
    return TreeBatch(
        **nodes,
        cu_seqlens=cu_seqlens,
        turn_prompt_node=prompt_nodes,
        fields=of_nodes,
        entries=Entries(**columns, **buffer._labels.as_tuples()),
        num_trained=plan.num_trained,
        seqlens=tuple(np.diff(chains.trie.roots).tolist()),
        share=share,
        boundary=boundary,
        chains=chains,
    )


def arrange_tree(buffer: TrajectoryBuffer, *, duplicate: bool = False) -> tuple[Tables, TreePlan]:
    """Return the tables of a tree, from those of layout ``"merged"``.

    ``turn_begin`` becomes the node of the last token of each turn's prompt, ``cu_seqlens`` the
    boundaries of the trees, and ``turn_spans`` the entries of each turn; ``turn_sequence`` stays.
    With ``duplicate`` each node is followed by one token.

    Raises:
        ValueError: If nodes and entries would pass 2³¹ together.
    """
    merged = buffer._tables_of("merged")
    columns, spans = buffer._state.columns, merged.spans
    turn, chain, begin, end, version, logprob, _ = spans
    trie, sources, first_rows = _trie_of(buffer, merged, duplicate=duplicate)
    place = trie.places[chain]
    index, depth, node, length = trie.pieces(place, begin, end)
    generated = union_of(node, node + length)
    first_entry = in_tiles(trie.num_nodes)
    num_tokens = first_entry + int(length.sum())
    if num_tokens > MAX_TOKENS:
        raise ValueError(
            f"a tree holds at most {MAX_TOKENS} nodes and generated tokens, this one needs "
            f"{num_tokens}"
        )
    of_nodes, node_chain = _node_rows(trie, sources, generated)
    skipped = depth - begin[index]
    of_entries = {
        Run.START: first_entry + np.cumsum(length) - length,
        Run.SOURCE: sources[chain[index]] + depth,
        Run.LOGPROB: logprob[index] + skipped,
        NODE: node,
        Run.SEQUENCE: chain[index],
        Run.TURN: turn[index],
        Run.VERSION: version[index],
    }
    padding = {Run.START: trie.num_nodes, Run.SOURCE: -1, Run.GENERATED: INT32_MAX}
    split, num_rows = len(node_chain), len(node_chain) + 1 + len(index)
    runs = np.zeros((num_rows + 1, RUN_WIDTH), np.int32)
    for column in Run:
        runs[:split, column] = of_nodes.get(column, 0)
        runs[split, column] = padding.get(column, 0)
        runs[split + 1 : num_rows, column] = of_entries.get(column, 0)
    runs[num_rows, Run.START] = num_tokens
    owner = merged.arrays["turn_trajectory"].astype(np.int64)
    is_first = np.diff(turn, prepend=-1) != 0
    is_last = np.append(is_first[1:], True)[: len(turn)]
    chains = Chains(trie, place[is_first], begin[is_first], end[is_last], owner)
    trees, bounds = trie.roots, merged.arrays["cu_generated"]
    arrays = merged.arrays | {
        "runs": runs,
        "cu_seqlens": trees.astype(np.int32),
        "turn_spans": np.stack([bounds[:-1], bounds[1:]], 1),
        "turn_begin": trie.node_at(chains.place, chains.begin - 1).astype(np.int32),
    }
    if buffer.fields:
        arrays["field_sources"] = np.zeros((num_rows + 1, len(buffer.fields)), np.int64)
    for number, field in enumerate(buffer.fields):
        out, of_spans = arrays["field_sources"][:num_rows, number], merged.rows[number]
        if field.generated_only:
            out[split + 1 :] = of_spans[index] + skipped * field.row_bytes
        else:
            out[:split] = first_rows[node_chain, number] + of_nodes[NODE] * field.row_bytes
    num_trained = int((generated[1] - generated[0]).sum())
    plan = TreePlan(chains, split, num_rows, num_trained, first_entry, num_tokens)
    of_turns = np.array(columns.values, np.int64).reshape(len(columns.values), len(columns.sizes)).T
    return merged._replace(arrays=arrays, num_tokens=num_tokens, value_lens=of_turns), plan


def _trie_of(
    buffer: TrajectoryBuffer, tables: Tables, *, duplicate: bool
) -> tuple[Trie, Ints, Ints]:
    """Return the trie of the chains, their first words, and the first bytes of their fields."""
    columns, words = buffer._state.columns, buffer._staging.region.stream
    sources, lengths = columns.sources, columns.chain_sizes
    first_rows = np.zeros((len(sources), len(buffer.fields)), np.int64)
    for number, of_spans in enumerate(tables.rows):
        first_rows[tables.spans.chain, number] = of_spans
    compared = [
        Rows(words.view(np.uint8), first_rows[:, number], field.row_bytes)
        for number, field in enumerate(buffer.fields)
        if not field.generated_only
    ]
    return trie_of(words, sources, lengths, compared, duplicate=duplicate), sources, first_rows


def _node_rows(
    trie: Trie, sources: Ints, generated: tuple[Ints, Ints]
) -> tuple[dict[Run, Ints], Ints]:
    """Return the columns of the rows of nodes, and the chain of each row.

    A row ends where a segment or generated nodes end; so the nodes of a row are consecutive tokens
    of a chain, first those that no turn generated.
    """
    segments, (begins, ends) = trie.segments, generated
    cuts = np.concatenate([2 * segments.starts[:-1], 2 * ends[ends < trie.num_nodes] + 1])
    cuts.sort(kind="stable")  # two sorted parts
    last = np.flatnonzero(np.diff(cuts >> 1, append=-1))  # of those at one node
    start, interval = cuts[last] >> 1, np.cumsum(cuts & 1)[last]  # the first that ends behind it
    at = last - interval
    place, depth = segments.places[at], segments.depths[at] + start - segments.starts[at]
    length = np.diff(start, append=trie.num_nodes)
    parent = np.where(depth > 0, start - 1, -1)
    attached = np.flatnonzero((depth == trie.shared[place]) & (depth > 0))  # first of their owners
    parent[attached] = trie.node_at(place[attached], depth[attached] - 1)
    chain = trie.order[place]
    source = sources[chain] + depth
    return {
        Run.START: start,
        Run.SOURCE: source,
        Run.GENERATED: np.clip(np.append(begins, trie.num_nodes)[interval] - start, 0, length),
        Run.LOGPROB: source,
        Run.POSITION: depth,
        TREE_END: segments.ends[at],
        PARENT: parent,
    }, chain


def _runs_of(region: DeviceRegion, plan: TreePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a run table of the nodes, and one of the entries."""
    runs, split = region.tables["runs"], plan.num_node_rows + 1
    of_entries = runs[split:].clone()
    of_entries[:, Run.START] -= plan.first_entry
    return runs[:split], of_entries


def _write(region: DeviceRegion, plan: TreePlan, tables: Tables, impl: Impl) -> dict[str, Any]:
    """Write nodes and entries; return their columns by name, nodes first."""
    num_nodes, rows = plan.chains.trie.num_nodes, region.tables["runs"][: plan.num_node_rows]
    columns = write_batch(region, tables, (), impl)
    parents = columns[NODE_FIELDS["tree_parent"]][:num_nodes]
    if parents.device.type == "cpu":  # a tenth of the time of torch's operators
        host, table = parents.numpy(), rows.numpy()
        host[:] = np.arange(-1, num_nodes - 1, dtype=np.int32)
        host[table[:, Run.START]] = table[:, PARENT]
    else:
        torch.arange(-1, num_nodes - 1, out=parents)
        parents[rows[:, Run.START].long()] = rows[:, PARENT]
    return columns


def _gather(
    region: DeviceRegion, plan: TreePlan, fields: Sequence[TokenField], impl: Impl
) -> list[dict[str, torch.Tensor]]:
    """Gather the extra fields: rows of the nodes, and rows of the entries."""
    found: list[dict[str, torch.Tensor]] = [{}, {}]
    of_parts = region.tables["field_sources"].tensor_split([plan.num_node_rows + 1])
    sizes = plan.chains.trie.num_nodes, plan.num_tokens - plan.first_entry
    for part, runs in enumerate(_runs_of(region, plan)):
        chosen = [number for number, one in enumerate(fields) if one.generated_only == bool(part)]
        if chosen:
            columns = torch.stack([of_parts[part][:, number] for number in chosen], 1)
            layouts = [fields[number].layout for number in chosen]
            rows = gather_fields(region.stream, runs, columns, layouts, sizes[part], impl)
            found[part] = {fields[n].name: one for n, one in zip(chosen, rows, strict=True)}
    return found
