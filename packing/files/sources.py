"""Batches as the arrays of their trajectories, and back, without an object for each turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.runs import Run
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import write_batch
from trajpack.packing.buffer.chains import place_ragged
from trajpack.packing.buffer.staging import DeviceRegion
from trajpack.packing.buffer.stored import Columns, Ints, Labels
from trajpack.packing.buffer.tables import check_layout, tables_of
from trajpack.packing.buffer.trajectory_arrays import (
    F64,
    FLOATS,
    I32,
    INTEGERS,
    U8,
    TrajectoryArrays,
    as_array,
)
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.layout import Layout
from trajpack.packing.ragged import Ragged, compact_fields
from trajpack.packing.token_fields import TokenField
from trajpack.packing.tree.trie import expanded
from trajpack.packing.turn_fields import TURN_FIELDS

Bytes = npt.NDArray[np.uint8]


def sources_of(batch: PackedBatch) -> TrajectoryArrays:
    """Return the trajectories that a batch was packed of, from its run table and its fields.

    Turns are of one chain if its tokens began at the same word of the stream that was packed.
    """
    host = {name: tensor.detach().cpu().numpy() for name, tensor in batch.tensors().items()}
    runs = batch.tables.runs.detach().cpu().numpy().astype(np.int64)
    first, end = host["turn_spans"].astype(np.int64).T
    turn, sizes = runs[:-1, Run.TURN], end - first
    stream_begin = np.zeros_like(sizes)
    stream_begin[turn] = runs[:-1, Run.SOURCE] - runs[:-1, Run.POSITION]
    _, appeared, number = np.unique(stream_begin, return_index=True, return_inverse=True)
    chain = appeared.argsort().argsort()[number]
    by_chain, begin_new = chain.argsort(kind="stable"), host["turn_begin"].astype(np.int64)
    new = _places(begin_new[by_chain], end[by_chain])
    generated: Any = host["turn_ids"] >= 0
    if (first[1:] < end[:-1]).any():
        generated = _places(first, end)
    several = np.flatnonzero((np.bincount(turn, minlength=len(sizes)) > 1)[turn])
    several = several[turn[several].argsort(kind="stable")]
    stops, of = runs[several + 1, Run.START], turn[several]
    starts = np.minimum(runs[several, Run.START] + runs[several, Run.GENERATED], stops)
    columns = {
        "chain": chain,
        "begin": first - host["cu_seqlens"][host["turn_sequence"]],
        "size": sizes,
        "num_spans": np.bincount(of, minlength=len(sizes)),
        **{field.attribute: host[field.name] for field in TURN_FIELDS},
    }
    fields, values = compact_fields(batch)
    rows = tuple(
        _rows_of(declared, fields[declared.name], values.get(declared.name), (new, generated))
        for declared in batch.token_fields
    )
    return TrajectoryArrays(
        labels=Labels(*(list(getattr(batch, name)) for name in Labels._fields)),
        num_turns=np.diff(host["cu_turns"]).astype(np.int64),
        chain_sizes=np.bincount(chain, end - begin_new).astype(I32),
        tokens=host["input_ids"][new].astype(I32),
        turns=np.stack([columns[name] for name in INTEGERS], 1).astype(I32),
        numbers=np.stack([columns[name] for name in FLOATS], 1).astype(F64),
        spans=np.stack(
            [runs[several, Run.VERSION], starts - first[of], stops - first[of]], 1
        ).astype(I32),
        logprobs=host["rollout_logprobs"][generated],
        token_fields=batch.token_fields,
        rows=rows,
    )


def _places(begins: Ints, ends: Ints) -> slice | Ints:
    """Return what indexes some stretches one behind the other."""
    if len(begins) and (begins[1:] == ends[:-1]).all():
        return slice(int(begins[0]), int(ends[-1]))
    return expanded(begins, ends - begins)


def _rows_of(
    declared: TokenField,
    rows: torch.Tensor,
    values: torch.Tensor | None,
    places: tuple[Any, Any],
) -> Bytes:
    """Return `TrajectoryArrays.rows` of a field; ``places`` are new and generated tokens."""
    chosen = as_array(rows)[1][places[declared.generated_only]]
    if values is None:
        return np.ascontiguousarray(chosen).reshape(-1).view(U8)
    begins, counts = chosen.T
    flat = as_array(values)[1][expanded(begins.astype(np.int64), counts.astype(np.int64))]
    return np.concatenate([np.ascontiguousarray(flat).reshape(-1).view(U8), counts.copy().view(U8)])


def packed(sources: TrajectoryArrays, layout: Layout) -> PackedBatch:
    """Pack trajectories on the host; their chains are as they say, prompts are not compared.

    Raises:
        ValueError: If the layout is unknown, or the stream would pass 2³¹ words.
    """
    check_layout(layout)
    sizes = sources.column("size").astype(np.int64)
    chain_sizes = sources.chain_sizes.astype(np.int64)
    in_chains, in_turns = (counts.cumsum() - counts for counts in (chain_sizes, sizes))
    blocks = list[tuple[int, list[Any]]]()
    end, values, begins = len(sources.tokens) + len(sources.logprobs), list[Ints](), list[Ints]()
    for declared, raw in zip(sources.token_fields, sources.rows, strict=True):
        place = -(-end // 4) * 4  # words: a multiple of 16 bytes
        skipped = in_turns if declared.generated_only else in_chains
        begins.append(4 * place + skipped * declared.row_bytes)
        if declared.ragged:
            split = raw.size - 4 * len(sources.logprobs)
            cu = np.append(0, raw[split:].view(I32).cumsum(dtype=np.int64))
            flat = [Ragged(cu, raw[:split])]
            end = place_ragged(declared, flat, place, sizes.tolist(), blocks, values)
        else:
            blocks.append((4 * place, [raw]))
            end = place + -(-raw.size // 4)
    if end > INT32_MAX:
        raise ValueError(f"a batch holds at most {INT32_MAX} words, this one needs {end}")
    words = np.zeros(end, I32)
    words[: len(sources.tokens)] = sources.tokens
    words[len(sources.tokens) :][: len(sources.logprobs)] = sources.logprobs.view(I32)
    for begin, pieces in blocks:
        for piece in pieces:
            words.view(U8)[begin : begin + piece.size] = piece.reshape(-1)
    counts = sources.column("num_spans")
    columns = Columns(
        num_turns=sources.num_turns,
        chain_sizes=chain_sizes,
        sources=in_chains,
        chains=sources.column("chain").astype(np.int64),
        begins=sources.column("begin").astype(np.int64),
        sizes=sizes,
        logprobs=len(sources.tokens) + in_turns,
        numbers=tuple(
            sources.column(field.attribute).astype(field.numpy_dtype) for field in TURN_FIELDS
        ),
        spans=np.concatenate([np.arange(len(sizes)).repeat(counts)[:, None], sources.spans], 1),
        rows=tuple(begins),
        values=tuple(values),
    )
    tables = tables_of(columns, sources.labels, sources.token_fields, layout)
    on_host = {name: torch.from_numpy(table) for name, table in tables.arrays.items()}
    region = DeviceRegion(torch.from_numpy(words), on_host)
    batch = write_batch(region, tables, sources.token_fields, "torch")
    batch |= {"layout": layout, "num_generated": len(sources.logprobs)}
    return PackedBatch(**batch, **sources.labels.as_tuples())
