"""A tree as a packed batch of layout ``"merged"``, on the host."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trajpack.kernels.fields.gather_fields import UNITS
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.token_fields import TokenField
from trajpack.packing.tree.trie import Ints, expanded

if TYPE_CHECKING:
    from trajpack.packing.tree.tree_batch import TreeBatch

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
