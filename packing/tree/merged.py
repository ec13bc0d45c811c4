"""A tree as a packed batch of layout ``"merged"``, and back, on the host; its files."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import numpy as np
import torch

from trajpack.kernels.fields.build import FIELD_DTYPES, build
from trajpack.kernels.fields.units import UNITS
from trajpack.kernels.runs import Run
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.storage import load_with_options, save
from trajpack.packing.token_fields import TokenField
from trajpack.packing.tree.nodes import Boundary
from trajpack.packing.tree.plan import Spans, plan_tree
from trajpack.packing.tree.tree_batch import Share, TreeBatch, check_options, tree_batch_of
from trajpack.packing.tree.trie import Ints, Rows, expanded, trie_of

CONTEXT = {
    "turn_ids": -1,
    "policy_versions": -1,
    "rollout_logprobs": 0.0,
    "returns": 0.0,
    "loss_mask": False,
    "advantages": 0.0,
}
"""Values of tokens that were not generated."""


def save_tree(tree: TreeBatch, path: str | os.PathLike[str]) -> None:
    """Implement `TreeBatch.save`."""
    save(merged_of(tree), path, {"share": tree.share, "boundary": tree.boundary})


def load_tree(path: str | os.PathLike[str]) -> TreeBatch:
    """Implement `TreeBatch.load`."""
    batch, metadata = load_with_options(path)
    options: Any = metadata.get("share", "once"), metadata.get("boundary", "shared")
    try:
        check_options(*options)
        return tree_of(batch, options)
    except ValueError as error:
        raise ValueError(f"{os.fsdecode(path)} is not a readable tree: {error}") from error


def merged_of(tree: TreeBatch) -> PackedBatch:
    """Implement `TreeBatch.merged`."""
    tree = tree.to("cpu")
    entries, (trie, place, begin, end, _) = tree.entries, tree.chains
    chain, places = trie.order[place], trie.places
    lengths = trie.lengths[places]
    pieces = trie.pieces(places, np.zeros_like(lengths), lengths)
    path = torch.from_numpy(expanded(pieces.node, pieces.length))
    starts = np.cumsum(lengths) - lengths
    begin, end = starts[chain] + begin, starts[chain] + end
    at = torch.from_numpy(expanded(begin, end - begin))
    tokens: dict[str, Any] = {
        "input_ids": tree.input_ids[path],
        "position_ids": tree.position_ids[path],
        "sequence_ids": torch.from_numpy(
            np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        ),
    }
    for name, value in CONTEXT.items():
        values = getattr(entries, name)
        if values is not None:
            tokens[name] = values.new_full((len(path),), value).index_copy_(0, at, values)
    tokens["prompt_mask"] = ~tokens["loss_mask"]
    tables = {
        "turn_spans": np.stack([begin, end], 1),
        "turn_begin": _new_with_turns(chain, starts, end),
        "cu_seqlens": np.append(starts, len(path)),
    }
    given = {field.name: getattr(entries, field.name) for field in dataclasses.fields(entries)}
    given |= {name: torch.from_numpy(table.astype(np.int32)) for name, table in tables.items()}
    given["fields"] = {
        field.name: _spread(field, entries.fields[field.name], at, len(path))
        if field.generated_only
        else tree.fields[field.name][path]
        for field in entries.token_fields
    }
    given |= {**tokens, "layout": "merged", "seqlens": tuple(lengths.tolist())}
    return PackedBatch(**given)


def tree_of(batch: PackedBatch, options: tuple[Share, Boundary] = ("once", "shared")) -> TreeBatch:
    """Return the tree of a batch of layout ``"merged"``, on the host.

    Raises:
        ValueError: If the batch has another layout.
    """
    if batch.layout != "merged":
        raise ValueError(f"a tree is made of layout 'merged', the batch has {batch.layout!r}")
    batch = batch.to("cpu")
    words, bounds = batch.input_ids.int(), batch.cu_generated
    starts = batch.cu_seqlens.numpy().astype(np.int64)
    chain = batch.turn_sequence.numpy().astype(np.int64)
    begin, end = batch.turn_spans.numpy().astype(np.int64).T
    turn, first = np.arange(len(chain)), starts[chain]
    rows = [
        Rows(_memory(batch.fields[one.name]), starts[:-1] * one.row_bytes, one.row_bytes)
        for one in batch.token_fields
        if not one.generated_only
    ]
    duplicate = options[1] == "duplicate"
    trie = trie_of(words.numpy(), starts[:-1], np.diff(starts), rows, duplicate=duplicate)
    spans = Spans(turn, chain, begin - first, end - first, np.zeros_like(turn), begin)
    owners = np.repeat(np.arange(len(batch.ids)), batch.cu_turns.diff().numpy())
    plan = plan_tree(trie, starts[:-1], spans, owners)
    runs = torch.from_numpy(plan.runs.astype(np.int32))
    written = build(words, runs, torch.zeros(len(turn)), plan.num_tokens, impl="torch")
    at = torch.from_numpy(expanded(begin, end - begin))
    table = plan.runs[: plan.num_node_rows + 1]
    nodes = torch.from_numpy(expanded(table[:-1, Run.SOURCE], np.diff(table[:, Run.START])))
    held = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    per_token = {*FIELD_DTYPES, "advantages"} - {"position_ids"}
    held |= {name: held[name][at] for name in per_token if held[name] is not None}
    held["fields"] = {
        one.name: batch.fields[one.name][at] for one in batch.token_fields if one.generated_only
    }
    held["turn_spans"] = torch.stack([bounds[:-1], bounds[1:]], 1)
    for name in ("position_ids", "turn_begin", "cu_seqlens", "seqlens", "layout"):
        del held[name]
    return tree_batch_of(
        plan,
        runs,
        lambda name: getattr(written, name),
        cu_seqlens=torch.from_numpy(plan.cu_seqlens.astype(np.int32)),
        prompt_nodes=torch.from_numpy(plan.prompt_nodes.astype(np.int32)),
        fields={
            one.name: batch.fields[one.name][nodes]
            for one in batch.token_fields
            if not one.generated_only
        },
        of_entries=(held, {}),
        options=options,
    )


def _new_with_turns(chain: Ints, starts: Ints, ends: Ints) -> Ints:
    """Return the end of the turn before each turn in its chain, or the start of the chain."""
    order = np.argsort(chain, kind="stable")
    of = chain[order]
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
