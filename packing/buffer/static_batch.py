"""`StaticBatch`: a batch of fixed size at fixed addresses, for CUDA graphs and reused memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, check_not_captured, resolve_impl
from trajpack.kernels.fields.build import build_into, empty_memory, fields_of
from trajpack.kernels.fields.gather_fields import empty_rows, gather_fields
from trajpack.kernels.runs import MAX_TOKENS, Run
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import (
    TrajectoryBuffer,
    lazy_columns,
    returns_of_turns,
)
from trajpack.packing.buffer.staging import Staging
from trajpack.packing.buffer.tables import TABLE_ROWS, Counts, check_layout, columns_for
from trajpack.packing.conversion import INT32_MAX, as_integer
from trajpack.packing.layout import Layout
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.turn_fields import TURN_FIELDS


class StaticBatch:
    """Reusable memory for batches of limited numbers of tokens and turns.

    The tensors always have the size of the capacity. Unused tokens are a padding sequence of token
    id 0 with ``loss_mask`` False; further sequences are empty. Unused turns belong to the padding
    sequence, with reward 0, version -1 and no tokens. Unused trajectories have no turns and group
    -1. The padding may be the longest sequence, so a captured model forward needs ``capacity`` as
    its longest sequence. `unpadded` returns the batch without padding.

    `fill` works on the host. `run` is one copy and the launches of a pack, at fixed addresses,
    sizes and grids. A CUDA graph that captured `run`, alone or with a model's forward, replays it
    with the content of the last `fill`. Call `run` once before the capture, to compile the
    kernels, and replay on one stream.

    `fill` and ``graph.replay()`` need no synchronisation: every replay records an event behind its
    copy (an external `torch.cuda.Event` that `run` puts into the graph), and `fill` waits for that
    event before it writes. Two static batches in turn avoid the wait. The next run or replay
    overwrites the tensors, so work of other streams must have read them before. Keep this object as
    long as the graph and the tensors; `PackedBatch.record_stream` is not needed.

    Args:
        capacity: Tokens of a batch in its layout.
        max_turns: Maximum number of turns, trajectories and sequences.
        max_runs: Maximum number of generated spans, one for each turn and policy version;
            ``max_turns`` if ``None``.
        device: Device of the batch; torch's default device if ``None``.
        fields: Extra per-token fields of the buffers.

    Raises:
        TypeError: If a size is no integer.
        ValueError: If a size is out of range, or two fields have one name.
        RuntimeError: While a CUDA graph is captured.

    Example:
        >>> from trajpack import Trajectory, TrajectoryBuffer, Turn
        >>> buffer = TrajectoryBuffer()
        >>> buffer.add(Trajectory("a", [Turn([1, 2], [3], [-0.5])]))
        >>> static = StaticBatch(capacity=5, max_turns=2)
        >>> buffer.pack_into(static).input_ids
        tensor([1, 2, 3, 0, 0])
        >>> static.batch.cu_seqlens
        tensor([0, 3, 5, 5], dtype=torch.int32)
    """

    def __init__(
        self,
        capacity: int,
        max_turns: int,
        max_runs: int | None = None,
        device: torch.device | str | None = None,
        fields: Iterable[TokenField] = (),
    ) -> None:
        self.capacity, self.max_turns, self.max_runs = _checked_sizes(capacity, max_turns, max_runs)
        self.device = torch.get_default_device() if device is None else torch.device(device)
        check_not_captured("StaticBatch", self.device, "make it before the capture")
        self.fields = check_fields(fields)
        if ragged := [field.name for field in self.fields if field.ragged]:
            raise ValueError(f"a StaticBatch holds no ragged fields, got {ragged}: pack instead")
        self._layouts = [field.layout for field in self.fields]
        capacity, max_turns, max_runs = self.capacity, self.max_turns, self.max_runs
        self._words = 2 * capacity + sum(
            -(-capacity * field.row_bytes // 4) + 4 * max_turns for field in self.fields
        )
        self._staging = Staging(self.device, columns_for(self.fields))
        self._staging.reserve(self._words, max(max_runs, max_turns) + 2, words_used=0)
        sent = self._staging.send(self._words)
        if self.device.type == "cpu":  # `send` returned the staging memory itself
            words = sent.words.clone()
            sent = sent._replace(words=words, stream=words[words.shape[0] - self._words :])
        self._arena = sent
        self._memory = empty_memory(capacity, self.device)
        self._tokens = fields_of(self._memory, capacity)
        self._rows = empty_rows(self._layouts, capacity, self.device)
        self._counts = Counts(
            trajectories=max_turns,
            turns=max_turns,
            most_turns=max_turns,
            spans=max_runs + 1,
            sequences=max_turns + 1,
            tokens=capacity,
            groups=max_turns,
        )
        self._lazy: dict[str, Any] = {}
        self._returns = torch.zeros(max_turns, device=self.device)
        self._ran: set[str] = set()
        """Implementations that `run` ran with."""

    @property
    def batch(self) -> PackedBatch:
        """The batch: tensors of the last `run` or replay, labels of the last `fill`.

        Raises:
            RuntimeError: If `run` was never called.
        """
        if not self._ran:
            raise RuntimeError("no batch was written yet: fill and run first")
        ready = {
            **self._tokens._asdict(),
            "turn_returns": self._returns,
            "fields": {f.name: row for f, row in zip(self.fields, self._rows, strict=True)},
            "token_fields": self.fields,
        }
        return PackedBatch.with_lazy_columns(ready, self._lazy)

    def fill(self, buffer: TrajectoryBuffer, layout: Layout = "merged") -> None:
        """Copy the content of a buffer to the host memory that `run` sends.

        Raises:
            ValueError: If the batch exceeds ``capacity``, ``max_turns`` or ``max_runs``, or the
                buffer has other fields; the memory then keeps its content.
            RuntimeError: While a CUDA graph is captured, because replays would not fill again.

        Cost: a copy at memory speed on the host. Waits for the copy of the last `run` or replay and
            for earlier work of its stream, not for the kernels behind the copy.
        """
        check_not_captured("StaticBatch.fill", self.device, "fill before the capture")
        check_layout(layout)
        if buffer.fields != self.fields:
            raise ValueError(
                f"fields must be those of the static batch, {[f.name for f in self.fields]}, "
                f"the buffer has {[f.name for f in buffer.fields]}"
            )
        state = buffer._arrange(layout)
        counts = state.counts
        self._check_room(counts)
        tables = self._staging.reserve(0, 0, words_used=0)  # waits
        source = buffer._staging.region
        self._staging.region.stream[: state.num_words] = source.stream[: state.num_words]
        for name, table in source.tables.items():
            tables[name][: counts.spans + 1] = table[: counts.spans + 1]
        self._pad_tables(counts)
        self._filled = counts
        seqlens = np.diff(tables["cu_seqlens"][: self.max_turns + 2])
        labels = lazy_columns(self._arena, buffer._labels, buffer._tables, counts=counts)
        padded = lazy_columns(self._arena, (), buffer._tables, counts=self._counts)
        self._lazy = labels | {name: padded[name] for name in (*TABLE_ROWS, "runs")}
        self._lazy["seqlens"] = lambda _: tuple(seqlens.tolist())
        self._lazy |= {"layout": lambda _: layout, "num_generated": lambda _: state.num_generated}

    def run(self, impl: Impl = "auto") -> PackedBatch:
        """Write the batch: one copy to the device and the launches of a pack.

        Raises:
            RuntimeError: If `fill` was not called, ``impl`` cannot run for this device, or the
                first call is captured in a CUDA graph.

        Cost: one copy of the whole capacity, the launches of a pack, a copy of the turns'
            returns, which alone are allocated anew. Capturable in a CUDA graph, once it ran
            outside of one with the same ``impl``: the first call compiles.
        """
        if not self._lazy:
            raise RuntimeError("nothing to write: fill first")
        chosen = resolve_impl("StaticBatch.run", impl, self.device)
        if chosen not in self._ran:
            first = f"the first StaticBatch.run with impl={chosen!r}"
            check_not_captured(first, self.device, "run once before the capture, to compile")
        with self._staging.on_device():
            self._staging.send_again(self._arena)
            arena, counts = self._arena, self._counts
            self._returns.copy_(returns_of_turns(arena, counts, chosen))
            runs = arena.table("runs", counts.spans + 1)
            build_into(
                self._memory,
                arena.stream,
                runs,
                turn_returns=self._returns,
                num_tokens=counts.tokens,
                impl=chosen,
            )
            if self.fields:
                sources, out = arena.table("field_sources", counts.spans + 1), self._rows
                tables = runs, sources, self._layouts
                gather_fields(arena.stream, *tables, counts.tokens, chosen, out=out)
        self._ran.add(chosen)
        return self.batch

    def unpadded(self) -> PackedBatch:
        """Return the batch without padding, for files and adapters.

        Raises:
            RuntimeError: As `batch`.

        Cost: views of the same memory.
        """
        batch, counts = self.batch, self._filled
        sizes = {name: getattr(counts, of) + more for name, (of, more) in TABLE_ROWS.items()}
        sizes["turn_returns"] = counts.turns
        cut: dict[str, Any] = {
            name: tensor[: sizes.get(name, counts.tokens)]
            for name, tensor in batch.tensors().items()
        }
        return dataclasses.replace(
            batch,
            **cut,
            fields={name: rows[: counts.tokens] for name, rows in batch.fields.items()},
            seqlens=batch.seqlens[: counts.sequences],
        )

    def _check_room(self, counts: Counts) -> None:
        for name, needed, room in (
            ("capacity", counts.tokens, self.capacity),
            ("max_turns", counts.turns, self.max_turns),
            ("max_runs", counts.spans, self.max_runs),
        ):
            if needed > room:
                raise ValueError(f"the batch needs {name} {needed}, the static batch has {room}")

    def _pad_tables(self, counts: Counts) -> None:
        """Fill the unused rows of every table with padding."""
        tables, spans, turns = self._staging.region.tables, counts.spans, counts.turns
        runs = tables["runs"]
        runs[spans] = 0
        runs[spans, [Run.START, Run.SOURCE, Run.GENERATED]] = counts.tokens, -1, INT32_MAX
        runs[spans, Run.SEQUENCE] = counts.sequences
        runs[spans + 1 :] = runs[spans]
        runs[spans + 1 :, Run.START] = self.capacity
        tables["cu_seqlens"][counts.sequences + 1 :] = self.capacity
        tables["cu_turns"][counts.trajectories + 1 :] = self.max_turns
        tables["turn_discounts"][counts.trajectories :] = 0
        for field in TURN_FIELDS:
            tables[field.name][turns:] = field.padding
        tables["turn_sequence"][turns:] = counts.sequences
        tables["turn_spans"][turns:] = counts.tokens
        tables["turn_begin"][turns:] = counts.tokens
        tables["cu_generated"][turns + 1 :] = counts.generated
        tables["cu_new"][turns + 1 :] = tables["cu_new"][turns]
        tables["group_ids"][counts.trajectories :] = -1
        tables["turn_trajectory"][turns:] = min(counts.trajectories, self.max_turns - 1)
        for name, used in (
            ("order_of_trajectories", counts.trajectories),
            ("order_of_turns", turns),
        ):
            tables[name][used:] = np.arange(used, len(tables[name]))
        for name in ("cu_group_trajectories", "cu_group_turns"):
            tables[name][counts.groups + 1 :] = self.max_turns  # padding is one more group
        if self.fields:
            tables["field_sources"][spans:] = 0


def _checked_sizes(capacity: int, max_turns: int, max_runs: int | None) -> tuple[int, int, int]:
    capacity, max_turns = as_integer("capacity", capacity), as_integer("max_turns", max_turns)
    max_runs = max_turns if max_runs is None else as_integer("max_runs", max_runs)
    if min(max_turns, max_runs) < 1:
        raise ValueError(
            f"max_turns and max_runs must be at least 1, got {max_turns} and {max_runs}"
        )
    if not 1 <= capacity <= MAX_TOKENS:
        raise ValueError(f"capacity must be in [1, {MAX_TOKENS}] tokens, got {capacity}")
    return capacity, max_turns, max_runs
