"""`pack_tree`: the content of a buffer as trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.fields.build import expand_runs, field_of
from trajpack.kernels.fields.gather_fields import gather_fields
from trajpack.kernels.runs import RUN_WIDTH, Run
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import TrajectoryBuffer, write_batch
from trajpack.packing.buffer.staging import DeviceRegion
from trajpack.packing.buffer.tables import Tables
from trajpack.packing.conversion import shown
from trajpack.packing.micro_batches.cutting import summed
from trajpack.packing.token_fields import TokenField
from trajpack.packing.tree.entries import BatchEntries
from trajpack.packing.tree.nodes import Boundary
from trajpack.packing.tree.tree_batch import Share, TreeBatch
from trajpack.packing.tree.trie import Chains, Ints, Rows, Trie, expanded, trie_of
from trajpack.packing.types import Trajectory, several_trajectories

NODE_FIELDS = {
    "input_ids": "input_ids",
    "position_ids": "position_ids",
    "tree_end": "sequence_ids",
}
"""Tensors of nodes, and the field of `build` that is each: a run of nodes is a segment, and its
sequence is the end of its subtree."""


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
    buffer._take(several_trajectories(trajectories))
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
    buffer._await_last()
    tables, chains = arrange_tree(buffer, duplicate=boundary == "duplicate")
    of_nodes, of_entries = _divided(buffer.fields)
    with buffer._staging.on_device():
        region = buffer._staging.send(buffer.num_bytes // 4, tables.arrays)
        columns = write_batch(region, tables, of_entries, chosen)
        nodes = _write_nodes(region, chains.trie.num_nodes, of_nodes, columns, chosen)
    columns |= buffer._stored.labels.as_tuples(len(buffer))
    columns |= {
        "node": columns["position_ids"],
        "token_fields": buffer.fields,
        "value_counts": summed(columns["tables"].value_lens),
    }
    of_table = {field.name for field in dataclasses.fields(BatchEntries)}
    return TreeBatch(
        **nodes,
        cu_seqlens=region.tables["trees"],
        turn_prompt_node=region.tables["prompt_node"],
        entries=BatchEntries(**{name: columns[name] for name in of_table & columns.keys()}),
        seqlens=tuple(np.diff(chains.trie.roots).tolist()),
        share=share,
        boundary=boundary,
        chains=chains,
    )


def arrange_tree(buffer: TrajectoryBuffer, *, duplicate: bool = False) -> tuple[Tables, Chains]:
    """Return the tables of a tree, and its chains on the host.

    The tables are those of a batch of the entries alone, whose positions are nodes and whose
    sequences are chains. Beside them are the runs of the nodes, which are segments, with the
    parents of their first nodes and their sources of fields; the boundaries of the trees, and the
    node of the last token of each turn's prompt. With ``duplicate`` each node is followed by one
    token.
    """
    merged, columns = buffer._tables_of("merged"), buffer._stored.columns()
    spans, (of_nodes, of_entries) = merged.spans, _divided(buffer.fields)
    rows = dict(zip(buffer.fields, zip(columns.rows, merged.rows, strict=True), strict=True))
    words = buffer._staging.region.stream
    compared = [Rows(words.view(np.uint8), rows[field][0], field.row_bytes) for field in of_nodes]
    trie = trie_of(words, columns.sources, columns.chain_sizes, compared, duplicate=duplicate)
    span, depth, node, length = trie.pieces(trie.places[spans.chain], spans.begin, spans.end)
    chain, skipped = spans.chain[span], depth - spans.begin[span]
    segments, of_segments, depths = _segment_runs(trie, columns.sources)
    runs = _run_table(
        length,
        {
            Run.SOURCE: columns.sources[chain] + depth,
            Run.LOGPROB: spans.logprob[span] + skipped,
            Run.POSITION: node,
            Run.SEQUENCE: chain,
            Run.TURN: spans.turn[span],
            Run.VERSION: spans.version[span],
        },
    )
    chains = Chains(
        trie,
        trie.places[columns.chains],
        columns.begins,
        columns.begins + columns.sizes,
        merged.arrays["turn_trajectory"].astype(np.int64),
    )
    bounds = merged.arrays["cu_generated"]
    arrays = merged.arrays | {
        "runs": runs,
        "segments": segments,
        "parents": trie.parents().astype(np.int32),
        "cu_new": bounds,
        "turn_spans": np.stack([bounds[:-1], bounds[1:]], 1),
        "trees": trie.roots.astype(np.int32),
        "prompt_node": trie.node_at(chains.place, chains.begin - 1).astype(np.int32),
        "field_sources": _sources(
            [rows[field][1][span] + skipped * field.row_bytes for field in of_entries], len(runs)
        ),
        "node_sources": _sources(
            [rows[field][0][of_segments] + depths * field.row_bytes for field in of_nodes],
            len(segments),
        ),
    }
    tables = merged._replace(
        arrays=arrays,
        num_tokens=int(columns.sizes.sum()),
        generated_lens=columns.sizes,
        value_lens=_sources(columns.values, len(columns.sizes)),
        longest=merged.longest._replace(new=merged.longest.generated),
    )
    return tables, chains


def _segment_runs(trie: Trie, sources: Ints) -> tuple[npt.NDArray[np.int32], Ints, Ints]:
    """Return the run table of the nodes, and the chain and the depth of each run.

    A run is a segment. Its sequence is the end of its subtree. `loss_mask` comes from the entries.
    """
    starts, places, depths, ends = trie.segments
    chain, length = trie.order[places], np.diff(starts)
    columns = {
        Run.SOURCE: sources[chain] + depths,
        Run.GENERATED: length,
        Run.POSITION: depths,
        Run.SEQUENCE: ends,
    }
    return _run_table(length, columns), chain, depths


def _divided(fields: Sequence[TokenField]) -> tuple[list[TokenField], list[TokenField]]:
    """Return the fields of nodes, and those of entries."""
    return [one for one in fields if not one.generated_only], [
        one for one in fields if one.generated_only
    ]


def _sources(columns: Sequence[Ints], num_rows: int) -> Ints:
    """Return columns as a table of so many rows."""
    table = np.zeros((num_rows, len(columns)), np.int64)
    for number, column in enumerate(columns):
        table[: len(column), number] = column
    return table


def _run_table(lengths: Ints, columns: dict[Run, Ints]) -> npt.NDArray[np.int32]:
    """Return the run table of rows of these lengths."""
    runs = np.zeros((len(lengths) + 1, RUN_WIDTH), np.int32)
    runs[1:, Run.START] = np.cumsum(lengths)
    for column, numbers in columns.items():
        runs[:-1, column] = numbers
    return runs


def _write_nodes(
    region: DeviceRegion,
    num_nodes: int,
    fields: Sequence[TokenField],
    entries: Mapping[str, torch.Tensor],
    impl: Impl,
) -> dict[str, Any]:
    """Launch the kernels that write the tensors of nodes; ``entries`` are columns of entries."""
    words, runs = region.stream, region.tables["segments"]
    block = expand_runs(words, runs, entries["turn_returns"], num_nodes, impl)
    nodes: dict[str, Any] = {
        name: field_of(block, num_nodes, of) for name, of in NODE_FIELDS.items()
    }
    parent = torch.arange(-1, num_nodes - 1, dtype=torch.int32, device=words.device)
    parent[runs[:-1, Run.START].long()] = region.tables["parents"]
    mask = torch.zeros_like(parent, dtype=torch.bool)
    mask.index_fill_(0, entries["position_ids"], True)
    rows, sources = list[torch.Tensor](), region.tables["node_sources"]
    if fields:
        layouts = [field.layout for field in fields]
        rows = gather_fields(words, runs, sources, layouts, num_nodes, impl)
    nodes["fields"] = {field.name: of for field, of in zip(fields, rows, strict=True)}
    return nodes | {"tree_parent": parent, "loss_mask": mask}
