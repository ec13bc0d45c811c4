"""A tree as a packed batch of layout ``"merged"``, and back, on the host."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import torch

from trajpack.kernels.fields.build import FIELD_DTYPES, build
from trajpack.kernels.fields.gather_fields import UNITS
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.token_fields import TokenField
from trajpack.packing.tree.assemble import assemble
from trajpack.packing.tree.nodes import Boundary
from trajpack.packing.tree.plan import Spans, plan_tree
from trajpack.packing.tree.segments import expanded
from trajpack.packing.tree.tree_batch import Share, TreeBatch
from trajpack.packing.tree.trie import Ints, Rows, branches_of

CONTEXT = {
    "turn_ids": -1,
    "policy_versions": -1,
    "rollout_logprobs": 0.0,
    "returns": 0.0,
    "loss_mask": False,
    "advantages": 0.0,
}
"""Values of tokens that were not generated."""


def merged_of(tree: TreeBatch) -> PackedBatch:
    """Implement `TreeBatch.merged`."""
    tree = tree.to("cpu")
    entries, depth = tree.entries, tree.position_ids.numpy()
    bounds, row = entries.cu_generated.numpy().astype(np.int64), entries.turn_sequence.numpy()
    sizes, prompt = np.diff(bounds), tree.turn_prompt_node.numpy().astype(np.int64)
    last = prompt.copy()  # of a turn without a completion
    last[sizes > 0] = tree.entry_node.numpy()[bounds[1:][sizes > 0] - 1]
    tips = np.full(row.max(initial=-1) + 1, -1, np.int64)
    np.maximum.at(tips, row, last)
    lengths = depth[tips] + 1
    starts = np.cumsum(lengths) - lengths
    path = torch.from_numpy(_paths(tree.tree_parent.numpy(), tips, starts + lengths))
    begin = starts[row] + depth[prompt] + 1
    place = torch.from_numpy(expanded(begin, sizes))
    num_tokens = len(path)
    tokens: dict[str, Any] = {
        "input_ids": tree.input_ids[path],
        "position_ids": tree.position_ids[path],
        "sequence_ids": torch.from_numpy(np.repeat(np.arange(len(tips), dtype=np.int32), lengths)),
    }
    for name, value in CONTEXT.items():
        values = getattr(entries, name)
        if values is not None:
            tokens[name] = values.new_full((num_tokens,), value).index_copy_(0, place, values)
    tokens["prompt_mask"] = ~tokens["loss_mask"]
    tables = {
        "turn_spans": np.stack([begin, begin + sizes], 1),
        "turn_begin": _new_with_turns(row, starts, begin + sizes),
        "cu_seqlens": np.append(starts, num_tokens),
    }
    given = {field.name: getattr(entries, field.name) for field in dataclasses.fields(entries)}
    given |= {name: torch.from_numpy(table.astype(np.int32)) for name, table in tables.items()}
    given["fields"] = {
        field.name: _spread(field, entries.fields[field.name], place, num_tokens)
        if field.generated_only
        else tree.fields[field.name][path]
        for field in entries.token_fields
    }
    given |= {**tokens, "layout": "merged", "seqlens": tuple(lengths.tolist())}
    return PackedBatch(**given)


def tree_of(batch: PackedBatch, options: tuple[Share, Boundary]) -> TreeBatch:
    """Return the tree of a batch of layout ``"merged"`` on the host.

    Raises:
        ValueError: If the batch has another layout.
    """
    if batch.layout != "merged":
        raise ValueError(f"a tree is made of layout 'merged', the batch has {batch.layout!r}")
    words = batch.input_ids.int()
    starts = batch.cu_seqlens.numpy().astype(np.int64)
    row = batch.turn_sequence.numpy().astype(np.int64)
    turn_spans = batch.turn_spans.numpy().astype(np.int64)
    begin, end = turn_spans.T
    rows = [
        Rows(_memory(batch.fields[one.name]), starts[:-1] * one.row_bytes, one.row_bytes)
        for one in batch.token_fields
        if not one.generated_only
    ]
    duplicate = options[1] == "duplicate"
    trie = branches_of(words.numpy(), starts[:-1], np.diff(starts), rows, duplicate=duplicate)
    first, turn = starts[row], np.arange(len(row))
    spans = Spans(turn, row, begin - first, end - first, np.zeros_like(turn), begin)
    plan = plan_tree(trie, starts[:-1], spans)
    runs = torch.from_numpy(plan.runs.astype(np.int32))
    written = build(words, runs, torch.zeros(len(turn)), plan.num_tokens, impl="torch")
    place = torch.from_numpy(expanded(begin, end - begin))
    table = plan.runs[: plan.num_node_rows + 1]
    nodes = torch.from_numpy(expanded(table[:-1, 1], np.diff(table[:, 0])))
    given = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    per_token = {*FIELD_DTYPES, "advantages"} - {"position_ids"}
    given |= {name: given[name][place] for name in per_token if given[name] is not None}
    given["position_ids"] = written.position_ids[plan.first_entry :].clone()
    spread = {one.name: one.generated_only for one in batch.token_fields}
    given["fields"] = {name: batch.fields[name][place] for name in spread if spread[name]}
    bounds = batch.cu_generated
    given |= {
        "turn_spans": torch.stack([bounds[:-1], bounds[1:]], 1),
        "turn_begin": bounds[:-1].clone(),
        "cu_seqlens": bounds.clone(),
        "seqlens": tuple((end - begin).tolist()),
        "layout": "turns",
    }
    tables = {
        "cu_seqlens": torch.from_numpy(plan.cu_seqlens.astype(np.int32)),
        "turn_prompt_node": torch.from_numpy(plan.prompt_nodes.astype(np.int32)),
    }
    return assemble(
        plan,
        runs,
        lambda name: getattr(written, name),
        tables=tables,
        fields={name: batch.fields[name][nodes] for name in spread if not spread[name]},
        of_entries=given,
        later={},
        options=options,
    )


def _paths(parents: Any, tips: Ints, ends: Ints) -> Ints:
    """Return the nodes from a root to each tip, one path behind another; they end at ``ends``."""
    nodes = np.empty(int(ends[-1]) if ends.size else 0, np.int64)
    heads = np.flatnonzero(parents != np.arange(-1, len(parents) - 1))
    heads = np.append(0, heads[heads > 0])
    for tip, behind in zip(tips.tolist(), ends.tolist(), strict=True):
        node, end = tip, behind
        while node >= 0:  # a stretch of nodes, each the parent of the next
            head = int(heads[np.searchsorted(heads, node, side="right") - 1])
            begin = end - (node - head + 1)
            nodes[begin:end] = np.arange(head, node + 1)
            node, end = int(parents[head]), begin
    return nodes


def _new_with_turns(row: Any, starts: Ints, ends: Ints) -> Ints:
    """Return the end of the turn before each turn in its row, or the start of the row."""
    order = np.argsort(row, kind="stable")
    of = row[order]
    before = np.append(0, ends[order][:-1])[: of.size]
    begin = np.empty_like(ends)
    begin[order] = np.where(np.diff(of, prepend=-1) != 0, starts[of], before)
    return begin


def _spread(
    field: TokenField, rows: torch.Tensor, place: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Return rows of all tokens, with the field's fill where none was generated."""
    layout = field.layout
    unit = UNITS[layout.dtype.itemsize]  # torch fills few dtypes
    fill = int.from_bytes(layout.fill, sys.byteorder, signed=True)
    bits = torch.full((num_tokens, *layout.shape), fill, dtype=unit)
    return bits.index_copy_(0, place, rows.view(unit)).view(layout.dtype)


def _memory(rows: torch.Tensor) -> Any:
    """Return the bytes of a field's rows."""
    if not rows.numel():
        return np.empty(0, np.uint8)
    return rows.contiguous().view(-1).view(torch.uint8).numpy()
