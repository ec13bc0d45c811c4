"""The trajectory buffer: stores each token once, packs all of them in one copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.fields.host_memory import HostMemory
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.store import Store
from trajpack.packing.buffer.writing import turn_tables, write_batch
from trajpack.packing.conversion import as_integer, several
from trajpack.packing.layout import Layout, check_layout
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.types import Trajectory

if TYPE_CHECKING:
    from trajpack.packing.buffer.static_batch import StaticBatch


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


class TrajectoryBuffer:
    """Collects trajectories on the host and packs them for a device.

    Each token is stored once, however many turns repeat it. The buffer grows as needed,
    keeps its memory through `clear`, and belongs to one thread at a time.

    Args:
        device: Where batches shall live; torch's default device if ``None``. For a CUDA
            device the buffer's memory is pinned.
        capacity: Tokens it may hold; memory for them is made at once. Unlimited if ``None``.
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
        if capacity is not None and (capacity := as_integer("capacity", capacity)) < 1:
            raise ValueError(f"capacity must be at least 1 token, got {capacity}")
        self.device = torch.get_default_device() if device is None else torch.device(device)
        self.capacity = capacity
        self.fields = check_fields(fields)
        self._store = Store(self.device, capacity, self.fields)
        self._memory = HostMemory() if self.device.type == "cpu" else None

    def __len__(self) -> int:
        """Trajectories it holds."""
        return self._store.state.num_trajectories

    def __repr__(self) -> str:
        limit = "" if self.capacity is None else f" of {self.capacity:,}"
        return (
            f"TrajectoryBuffer({len(self)} trajectories, {self.num_turns} turns, "
            f"{self.num_tokens:,}{limit} tokens, for {self.device})"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens it stores, each counted once."""
        return self._store.state.num_tokens

    @property
    def num_turns(self) -> int:
        """Turns of all its trajectories."""
        return self._store.state.num_turns

    @property
    def num_bytes(self) -> int:
        """Bytes its stream takes: 4 a token, 4 more a generated token, and the extra fields."""
        return 4 * self._store.state.num_words

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

        Each number is read once, and what was read is checked and stored: an array that another
        thread writes meanwhile may be refused, but never leaves a value behind that was not
        checked.

        Cost: copies what is new and, where a trajectory has several turns, each prompt, and
            compares the prompt with the chain it extends (with several, where their ends agree),
            at memory speed, beside about 30 microseconds a call and 3 a turn. Arrays of int32
            and float32 are read where they are; others are converted first. Reads CUDA tensors
            back (one synchronisation each; see `pack_resident`). After `pack`, and without
            `clear`, waits for that pack's copy.
        """
        given = several("trajectories must be several of Trajectory", trajectories)
        if given:
            self._store.extend(given)

    def clear(self) -> None:
        """Forget every trajectory and keep the memory. Batches already packed stay valid."""
        self._store.clear()

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
            layout at a time. On the host, memory of batches that are gone is used again: let go
            of one before the next is packed. A CUDA graph that captures it replays this batch,
            as long as the buffer lives; `StaticBatch` replays others. Where another stream than
            the current one reads the batch, `PackedBatch.record_stream` keeps its memory.
        """
        check_layout(layout)
        chosen = resolve_impl("pack", impl, torch.empty(0, device=self.device))
        state = self._store.update_tables(layout)
        with self._store.staging.on_device():
            arena = self._store.staging.send(state.num_words)
            counts, memory = state.settled, self._memory
            written = write_batch(arena, arena.stream, counts, self.fields, chosen, memory)
        ready = written | {"layout": layout, "num_generated": state.num_generated}
        later = turn_tables(arena, state.settled)
        if self.device.type == "cpu":  # the buffer's memory is written again
            ready |= {name: table().clone() for name, table in later.items()}
            later = {}
        return PackedBatch.with_lazy_columns(ready, later | self._store.host_columns())

    def pack_into(self, static: StaticBatch, layout: Layout = "merged") -> PackedBatch:
        """Write all trajectories into the memory of ``static``: `StaticBatch.fill` and `run`.

        Raises:
            ValueError: If the batch does not fit, or ``static`` was made for other fields.

        Cost: as `pack`, and a copy on the host; nothing is allocated but the turns' returns.
        """
        static.fill(self, layout)
        return static.run()
