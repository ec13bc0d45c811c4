"""The trajectory buffer: stores each token once, packs all of them in one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.build import build
from trajpack.kernels.discounted_returns import discounted_returns
from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.gather_fields import gather_fields
from trajpack.packing.batch import PackedBatch
from trajpack.packing.chains import Intake, Labels, name_fault, take_in
from trajpack.packing.conversion import INT32_MAX, as_integer
from trajpack.packing.layout import Layout, check_layout
from trajpack.packing.staging import Arena, Staging
from trajpack.packing.tables import BatchTables, Block, Counts, columns_for
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.types import Trajectory

TURN_TABLES = (
    "turn_rewards",
    "turn_truncated",
    "turn_version_start",
    "turn_version_end",
    "turn_sequence",
    "turn_spans",
)
SETTLED = 64
"""Turns that may wait until their tables are worked out: as many as cost what a call does."""


def pack(
    trajectories: Iterable[Trajectory],
    layout: Layout = "merged",
    device: torch.device | str | None = None,
    impl: Impl = "auto",
    fields: Iterable[TokenField] = (),
) -> PackedBatch:
    """Pack trajectories into one batch; `PackedBatch.unpack` is the exact inverse.

    Args:
        trajectories: In the order they will have in the batch.
        layout: ``"merged"``: a sequence is a whole conversation, every completion in it
            trained. ``"turns"``: a sequence is one turn, its prompt and its completion.
        device: Where the batch shall live; torch's default device if ``None``.
        impl: See `trajpack.kernels`; ``"auto"`` is Triton on CUDA and torch elsewhere.
        fields: Extra per-token fields that every turn brings, see `TokenField`.

    Raises:
        TypeError, ValueError: As `TrajectoryBuffer.extend`.

    Cost: as `TrajectoryBuffer.extend` and `TrajectoryBuffer.pack`.

    Example:
        >>> from trajpack import Trajectory, Turn
        >>> first = Turn([1, 2], [3, 4], [-0.1, -0.2], reward=-1.0)
        >>> second = Turn([1, 2, 3, 4, 5], [6], [-0.3], reward=1.0)
        >>> batch = pack([Trajectory("a", [first, second], turn_discount=0.5)])
        >>> batch.input_ids
        tensor([1, 2, 3, 4, 5, 6])
        >>> batch.loss_mask.int()
        tensor([0, 0, 1, 1, 0, 1], dtype=torch.int32)
        >>> batch.returns
        tensor([ 0.0000,  0.0000, -0.5000, -0.5000,  0.0000,  1.0000])
        >>> pack([Trajectory("a", [first, second])], layout="turns").seqlens
        (4, 6)
    """
    buffer = TrajectoryBuffer(device=device, fields=fields)
    buffer.extend(trajectories)
    return buffer.pack(layout=layout, impl=impl)


class State(NamedTuple):
    """What a buffer holds; replaced as a whole, so that a call counts or does not."""

    num_words: int = 0
    num_tokens: int = 0
    num_turns: int = 0
    num_generated: int = 0
    num_trajectories: int = 0
    waiting: tuple[Block, ...] = ()
    """What came in and is not in the tables yet."""
    settled: Counts = Counts()
    """What is in the tables."""
    layout: Layout = "merged"
    """Layout of the tables."""


class TrajectoryBuffer:
    """Collects trajectories on the host and packs them for a device.

    Each token is stored once, however many turns repeat it. The buffer grows as needed,
    keeps its memory through `clear`, and belongs to one thread at a time.

    Args:
        device: Where batches shall live; torch's default device if ``None``. For a CUDA
            device the buffer's memory is pinned.
        capacity: Tokens it may hold; unlimited if ``None``.
        fields: Extra per-token fields that every turn brings, see `TokenField`.

    Example:
        >>> from trajpack import Trajectory, Turn
        >>> buffer = TrajectoryBuffer(capacity=100)
        >>> buffer.add(Trajectory("a", [Turn([1, 2], [3], [-0.5])]))
        >>> len(buffer), buffer.num_turns, buffer.num_tokens
        (1, 1, 3)
        >>> buffer.pack().loss_mask
        tensor([False, False,  True])
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        capacity: int | None = None,
        fields: Iterable[TokenField] = (),
    ) -> None:
        if capacity is not None and as_integer("capacity", capacity) < 1:
            raise ValueError(f"capacity must be at least 1 token, got {capacity}")
        self.device = torch.get_default_device() if device is None else torch.device(device)
        self.capacity = capacity
        self.fields = check_fields(fields)
        self._columns = columns_for(self.fields)
        self._staging = Staging(self.device, self._columns, capacity or 0)
        self._tables = BatchTables(self.fields)
        self._labels: list[Labels] = []
        self._state = State()

    def __len__(self) -> int:
        """Trajectories it holds."""
        return self._state.num_trajectories

    def __repr__(self) -> str:
        limit = "" if self.capacity is None else f" of {self.capacity:,}"
        return (
            f"TrajectoryBuffer({len(self)} trajectories, {self.num_turns} turns, "
            f"{self.num_tokens:,}{limit} tokens, for {self.device})"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens it stores, each counted once."""
        return self._state.num_tokens

    @property
    def num_turns(self) -> int:
        """Turns of all its trajectories."""
        return self._state.num_turns

    @property
    def num_bytes(self) -> int:
        """Bytes its stream takes: 4 a token, 4 more a generated token, and the extra fields."""
        return 4 * self._state.num_words

    def add(self, trajectory: Trajectory) -> None:
        """Check a trajectory and store what is new in each of its turns: `extend` by one."""
        self.extend((trajectory,))

    def extend(self, trajectories: Iterable[Trajectory]) -> None:
        """Check trajectories and store what is new in each of their turns.

        A turn extends the longest of its trajectory's chains whose tokens are all a prefix of
        its prompt (the latest, on a tie); where there is none, a new chain begins.

        Raises:
            TypeError: If a value is of the wrong kind.
            ValueError: If a value is out of range, lengths disagree, or the trajectories do
                not fit the capacity. Every error names trajectory, turn, what was expected
                and what came; nothing of the call stays behind.

        Cost: compares each prompt once with the chain it extends and copies what is new, both at
            memory speed, beside about 20 microseconds a call and 3 a turn. Arrays of int32 and
            float32 are read where they are; others are converted first. Reads CUDA tensors back
            (one synchronisation each; see `pack_resident`). After `pack`, and without `clear`,
            waits for that pack's copy.
        """
        given = trajectories if isinstance(trajectories, (list, tuple)) else list(trajectories)
        if not given:
            return
        intake = take_in(given, self.fields)
        state = self._state
        num_new = intake.num_tokens
        if self.capacity is not None and state.num_tokens + num_new > self.capacity:
            raise ValueError(
                f"{_named(given)} needs {num_new} tokens, but "
                f"{self.capacity - state.num_tokens} of the buffer's {self.capacity} are left; "
                "pack and clear it, or give it more capacity"
            )
        block, end = self._store(intake, given)
        waiting = (*state.waiting, block)
        new = state._replace(
            num_words=end,
            num_tokens=state.num_tokens + num_new,
            num_turns=state.num_turns + len(intake.turn_size),
            num_generated=state.num_generated + intake.num_generated,
            num_trajectories=state.num_trajectories + len(given),
            waiting=waiting,
        )
        if new.num_turns - state.settled.turns >= SETTLED:
            new = self._settled(new, new.layout)
        self._labels[state.num_trajectories :] = intake.labels
        self._state = new

    def clear(self) -> None:
        """Forget every trajectory and keep the memory. Batches already packed stay valid."""
        rows = self._state.settled.spans + 1
        self._labels = []  # not cleared: a batch looks its labels up when asked for them
        self._tables.forget_host()
        self._state = State(layout=self._state.layout)
        self._staging.clear(rows)

    def pack(self, layout: Layout = "merged", impl: Impl = "auto") -> PackedBatch:
        """Write all trajectories as one batch. The buffer keeps its content.

        Args:
            layout: ``"merged"`` or ``"turns"``, see `trajpack.pack`.
            impl: ``"auto"`` is Triton for a CUDA device and torch elsewhere; a named
                implementation that cannot run raises.

        Raises:
            ValueError: If ``layout`` or ``impl`` is unknown, or the batch would pass 2³¹ tokens.
            RuntimeError: If ``impl`` cannot run for this device.

        Cost: one host-to-device copy of what the buffer stores and its tables, two launches, a
            third one where there are extra fields, no synchronisation; 38 bytes a token are
            written on the device. The host's part does not grow with the batch, as long as the
            layout is that of the pack before (at first ``"merged"``): tables are kept for one
            layout at a time. Packing again before `clear` waits for the copy of the pack
            before. A CUDA graph may capture it, and then replays this batch.
        """
        check_layout(layout)
        chosen = resolve_impl("pack", impl, torch.empty(0, device=self.device))
        self._state = state = self._settled(self._state, layout)
        counts = state.settled
        with self._staging.on_device():
            arena = self._staging.send(state.num_words)
            tables = _tables_of(arena, counts)
            discounts = arena.table("turn_discounts", counts.trajectories)
            returns = discounted_returns(
                tables["turn_rewards"](), tables["cu_turns"](), discounts, chosen
            )
            runs = arena.table("runs", counts.spans + 1)
            built = build(arena.stream, runs, returns, counts.tokens, chosen)
            fields = self._gathered_fields(arena, runs, counts, chosen) if self.fields else {}
        ready = {
            **built._asdict(),
            "turn_returns": returns,
            "layout": layout,
            "num_generated": state.num_generated,
            "fields": fields,
            "token_fields": self.fields,
        }
        if self.device.type == "cpu":  # the buffer's memory is written again
            ready |= {name: table().clone() for name, table in tables.items()}
            tables = {}
        return PackedBatch.deferred(ready, tables | self._host_columns(counts))

    def _gathered_fields(
        self, arena: Arena, runs: torch.Tensor, counts: Counts, impl: Impl
    ) -> dict[str, torch.Tensor]:
        sources = arena.table("field_sources", counts.spans + 1)
        layouts = [field.layout for field in self.fields]
        gathered = gather_fields(arena.stream, runs, sources, layouts, counts.tokens, impl)
        return {field.name: rows for field, rows in zip(self.fields, gathered, strict=True)}

    def _host_columns(self, counts: Counts) -> dict[str, Callable[[], Any]]:
        """Return what makes the host tuples of a batch, when they are first asked for."""
        labels, count = self._labels, counts.trajectories
        seqlens = self._tables.seqlens[: counts.sequences]
        discounts = self._tables.discounts[:count]
        return {
            "seqlens": lambda: tuple(seqlens.tolist()),
            "turn_discounts": lambda: tuple(discounts.tolist()),
            "ids": lambda: tuple(label.id for label in labels[:count]),
            "groups": lambda: tuple(label.group for label in labels[:count]),
            "task_ids": lambda: tuple(label.task_id for label in labels[:count]),
            "birth_times_ms": lambda: tuple(label.birth_time_ms for label in labels[:count]),
        }

    def _store(self, intake: Intake, given: Sequence[Trajectory]) -> tuple[Block, int]:
        """Write a block behind the stream; return where it lies and where it ends."""
        used = self._state.num_words
        logprobs = used + intake.num_tokens
        end = logprobs + intake.num_generated
        rows = []
        for pieces in intake.rows:
            begin = -(-end // 4) * 4  # at a multiple of 16 bytes
            rows.append(4 * begin)
            end = begin + -(-sum(piece.nbytes for piece in pieces) // 4)
        if end > INT32_MAX:
            raise ValueError(f"a buffer holds at most {INT32_MAX} words, this one needs {end}")
        self._staging.reserve(end, 0, words_used=used)
        stream = self._staging.stream
        np.concatenate(intake.ids, out=stream[used:logprobs])
        floats = stream[logprobs : logprobs + intake.num_generated].view(np.float32)
        np.concatenate(intake.logprobs, out=floats)
        if stream[used:logprobs].min() < 0 or not _all_finite(floats):
            name_fault(given)
        for begin, pieces in zip(rows, intake.rows, strict=True):
            flat = [piece.reshape(-1) for piece in pieces]
            size = sum(piece.size for piece in flat)
            np.concatenate(flat, out=stream.view(np.uint8)[begin : begin + size])
        return Block(intake, used, logprobs, tuple(rows)), end

    def _settled(self, state: State, layout: Layout) -> State:
        """Bring the tables up to date, for ``layout``, and return the state that says so."""

        def room(rows: int) -> Mapping[str, npt.NDArray[Any]]:
            self._staging.reserve(0, rows, words_used=state.num_words)
            return self._staging.tables

        counts = state.settled
        same = layout == state.layout and counts.spans > 0
        if same and not state.waiting:
            return state
        for block in state.waiting:
            counts = self._tables.absorb(block, counts, room)
        before = state.settled if same else Counts()
        counts = self._tables.arrange(layout, counts, before, room)
        return state._replace(settled=counts, layout=layout, waiting=())


def _tables_of(arena: Arena, counts: Counts) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what makes the batch's tensors over turns and boundaries."""
    turns = dict.fromkeys(TURN_TABLES, counts.turns)
    bounds = {"cu_turns": counts.trajectories + 1, "cu_seqlens": counts.sequences + 1}
    return {name: partial(arena.table, name, rows) for name, rows in (turns | bounds).items()}


def _all_finite(values: npt.NDArray[np.float32]) -> bool:
    with np.errstate(all="ignore"):
        # a sum is cheaper than a look at each; it may pass float32 though all are finite
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def _named(trajectories: Sequence[Trajectory]) -> str:
    first = f"trajectory {trajectories[0].id!r}"
    return first if len(trajectories) == 1 else f"{first} with {len(trajectories) - 1} more"
