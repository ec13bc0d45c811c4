"""`pack_tree`: the content of a buffer as trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.fields.build import HostMemory, write_on_host
from trajpack.kernels.fields.gather_fields import gather_fields
from trajpack.kernels.runs import RUN_WIDTH, Run
from trajpack.packing.buffer.buffer import (
    TrajectoryBuffer,
    lazy_columns,
    returns_of_turns,
    values_of,
    write_batch,
)
from trajpack.packing.buffer.staging import DeviceRegion
from trajpack.packing.buffer.tables import TABLE_ROWS, Counts, Longest
from trajpack.packing.token_fields import TokenField
from trajpack.packing.tree.nodes import Boundary
from trajpack.packing.tree.plan import TreePlan
from trajpack.packing.tree.tree_batch import (
    NODE_FIELDS,
    Share,
    TreeBatch,
    check_options,
    tree_batch_of,
)
from trajpack.packing.types import Trajectory


def pack_tree(
    trajectories: Iterable[Trajectory],
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
        trajectories: Trajectories in the order of the entries.
        share: Weight of an entry in the loss: ``"once"``, ``"sum"`` or ``"mean"``, see
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
        ValueError: As `TrajectoryBuffer.extend` and `TrajectoryBuffer.pack_tree`.

    Cost: as `TrajectoryBuffer.extend` and `TrajectoryBuffer.pack_tree`.

    Example:
        >>> from trajpack import Trajectory, Turn
        >>> again = [Turn([1, 2], [3, 4], [-0.1, -0.2]), Turn([1, 2], [3, 5], [-0.3, -0.4])]
        >>> batch = pack_tree([Trajectory("a", again)])
        >>> batch.input_ids, batch.tree_end, batch.entry_node
        (tensor([1, 2, 3, 4, 5]), tensor([5, 5, 5, 4, 5], dtype=torch.int32), tensor([2, 3, 2, 4]))
        >>> batch.rollout_logprobs
        tensor([-0.1000, -0.2000, -0.3000, -0.4000])
    """
    buffer = TrajectoryBuffer(device=device, fields=fields)
    buffer.extend(trajectories)
    return buffer.pack_tree(share=share, impl=impl, boundary=boundary)


def tree_of_buffer(
    buffer: TrajectoryBuffer, options: tuple[Share, Boundary], impl: Impl
) -> TreeBatch:
    """Implement `TrajectoryBuffer.pack_tree`."""
    check_options(*options)
    chosen = resolve_impl("pack_tree", impl, torch.empty(0, device=buffer.device))
    state = buffer._arrange("merged")
    buffer._state = state._replace(arranged=False)  # the tree's tables replace some
    reserve = partial(buffer._staging.reserve, 0, words_used=state.num_words)
    stream = buffer._staging.region.stream
    plan, counts = buffer._tables.arrange_tree(
        state.counts, stream, reserve, duplicate=options[1] == "duplicate"
    )
    with buffer._staging.on_device():
        region = buffer._staging.send(state.num_words)
        returns, written = write_tree(region, plan, counts, chosen, buffer._memory)
        nodes, entries = gather_tree(region, plan, buffer.fields, chosen)
    later = lazy_columns(region, buffer._labels, buffer._tables, counts=counts)
    later["value_lens"] = partial(buffer._tables.value_lens_of_turns, state.counts)
    given = {name: later.pop(name)() for name in TABLE_ROWS}
    if buffer.device.type == "cpu":  # later calls write to the memory of the tables
        given = {name: table.clone() for name, table in given.items()}
    cu_seqlens, prompt_nodes = given.pop("cu_seqlens"), given.pop("turn_begin")
    del later["seqlens"]
    given |= {
        "turn_returns": returns,
        "cu_new": given["cu_generated"],
        "longest": Longest(counts.longest.generated, counts.longest.generated),
        "num_generated": state.num_generated,
        "fields": entries,
        "ragged_values": values_of(region.stream, buffer.fields),
        "token_fields": buffer.fields,
    }
    return tree_batch_of(
        plan,
        region.table("runs", counts.spans + 1),
        written,
        cu_seqlens=cu_seqlens,
        prompt_nodes=prompt_nodes,
        fields=nodes,
        of_entries=(given, later),
        options=options,
    )


def write_tree(
    region: DeviceRegion, plan: TreePlan, counts: Counts, impl: Impl, memory: HostMemory | None
) -> tuple[torch.Tensor, Callable[[str], torch.Tensor]]:
    """Write nodes and entries; return the turns' returns, and a function that returns a field.

    On the host only the fields that nodes have are written for them.
    """
    if memory is None or impl != "torch":
        ready, later = write_batch(region, region.stream, counts, (), impl)
        return ready["turn_returns"], lambda name: later[name]()
    returns = returns_of_turns(region, counts, impl)
    fields = memory.fields(plan.num_tokens)._asdict()
    runs, first, split = plan.runs, plan.first_entry, plan.num_node_rows + 1
    nodes = {name: fields[name].numpy()[: plan.num_nodes] for name in NODE_FIELDS.values()}
    entries = {name: field.numpy()[first:] for name, field in fields.items()}
    behind = runs[split:] - np.eye(1, RUN_WIDTH, Run.START, dtype=np.int64) * first
    for out, table in ((nodes, runs[:split]), (entries, behind)):
        write_on_host(out, region.stream.numpy(), table, returns.numpy())
    return returns, lambda name: fields[name]


def gather_tree(
    region: DeviceRegion, plan: TreePlan, fields: Sequence[TokenField], impl: Impl
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gather the extra fields of a tree: rows of the nodes, and rows of the entries."""
    if not fields:
        return {}, {}
    num_rows, split = len(plan.runs), plan.num_node_rows + 1
    runs, sources = region.table("runs", num_rows), region.table("field_sources", num_rows)
    of_entries = runs[split:].clone()
    of_entries[:, Run.START] -= plan.first_entry

    def gathered(
        generated_only: bool, table: torch.Tensor, places: torch.Tensor, size: int
    ) -> dict[str, torch.Tensor]:
        numbers = [n for n, one in enumerate(fields) if one.generated_only == generated_only]
        if not numbers:
            return {}
        columns = torch.stack([places[:, number] for number in numbers], 1)
        layouts = [fields[number].layout for number in numbers]
        rows = gather_fields(region.stream, table, columns, layouts, size, impl)
        return {fields[number].name: one for number, one in zip(numbers, rows, strict=True)}

    num_entries = plan.num_tokens - plan.first_entry
    return (
        gathered(False, runs[:split], sources[:split], plan.num_nodes),
        gathered(True, of_entries, sources[split:], num_entries),
    )
