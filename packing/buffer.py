"""The trajectory buffer: stores each token once, packs all of them in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.build import build
from trajpack.kernels.discounted_returns import discounted_returns
from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.packing.batch import PackedBatch
from trajpack.packing.chains import CheckedTurn, Labels, check_labels, find_chains
from trajpack.packing.conversion import as_integer
from trajpack.packing.layout import SPAN_COLUMNS, Arrangement, Layout, Spans, arrange
from trajpack.packing.staging import GrowingArray, Staging
from trajpack.packing.types import Trajectory

TURN_COLUMNS = ("version_start", "version_end", "truncated")


def pack(
    trajectories: Iterable[Trajectory],
    layout: Layout = "merged",
    device: torch.device | str | None = None,
    impl: Impl = "auto",
) -> PackedBatch:
    """Pack trajectories into one batch; `PackedBatch.unpack` is the exact inverse.

    Args:
        trajectories: In the order they will have in the batch.
        layout: ``"merged"``: a sequence is a whole conversation, every completion in it
            trained. ``"turns"``: a sequence is one turn, its prompt and its completion.
        device: Where the batch shall live; torch's default device if ``None``.
        impl: See `trajpack.kernels`; ``"auto"`` is Triton on CUDA and torch elsewhere.

    Raises:
        TypeError, ValueError: As `TrajectoryBuffer.add`.

    Cost: as `TrajectoryBuffer.add` for each and `TrajectoryBuffer.pack` once.

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
    buffer = TrajectoryBuffer(device=device)
    for trajectory in trajectories:
        buffer.add(trajectory)
    return buffer.pack(layout=layout, impl=impl)


class TrajectoryBuffer:
    """Collects trajectories on the host and packs them for a device.

    Each token is stored once, however many turns repeat it. The buffer grows as needed,
    keeps its memory through `clear`, and belongs to one thread at a time.

    Args:
        device: Where batches shall live; torch's default device if ``None``. For a CUDA
            device the buffer's memory is pinned.
        capacity: Tokens it may hold; unlimited if ``None``.

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
        self, device: torch.device | str | None = None, capacity: int | None = None
    ) -> None:
        if capacity is not None and as_integer("capacity", capacity) < 1:
            raise ValueError(f"capacity must be at least 1 token, got {capacity}")
        self.device = torch.get_default_device() if device is None else torch.device(device)
        self.capacity = capacity
        self._staging = Staging(self.device, capacity or 0)
        self._spans = GrowingArray(np.int64, width=len(SPAN_COLUMNS))
        self._chain_words = GrowingArray(np.int64)
        self._rewards = GrowingArray(np.float64)
        self._turns = GrowingArray(np.int32, width=len(TURN_COLUMNS))
        self._num_turns = GrowingArray(np.int32)
        self._discounts = GrowingArray(np.float64)
        self._growing = (
            self._spans,
            self._chain_words,
            self._rewards,
            self._turns,
            self._num_turns,
            self._discounts,
        )
        self._labels: list[Labels] = []
        self._num_tokens = 0
        self._num_generated = 0

    def __len__(self) -> int:
        """Trajectories it holds."""
        return len(self._labels)

    def __repr__(self) -> str:
        limit = "" if self.capacity is None else f" of {self.capacity:,}"
        return (
            f"TrajectoryBuffer({len(self)} trajectories, {self.num_turns} turns, "
            f"{self.num_tokens:,}{limit} tokens, for {self.device})"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens it stores, each counted once."""
        return self._num_tokens

    @property
    def num_turns(self) -> int:
        """Turns of all its trajectories."""
        return len(self._rewards)

    @property
    def num_bytes(self) -> int:
        """Bytes its content takes: 4 a token, 4 more a generated token, and the turn tables."""
        return 4 * self._staging.used + sum(table.rows.nbytes for table in self._growing)

    def add(self, trajectory: Trajectory) -> None:
        """Check a trajectory and store what is new in each of its turns.

        A turn extends the longest of the trajectory's chains whose tokens are all a prefix of
        its prompt (the latest, on a tie); where there is none, a new chain begins.

        Raises:
            TypeError: If a value is of the wrong kind.
            ValueError: If a value is out of range, lengths disagree, or the trajectory does
                not fit the capacity. Every error names trajectory, turn, what was expected
                and what came; nothing of the trajectory stays behind.

        Cost: converts and compares each prompt once at memory speed, stores each token once.
            Reads CUDA tensors back (one synchronisation each). After `pack`, and without
            `clear`, waits for that pack's copy.
        """
        labels, discount = check_labels(trajectory)
        turns, chain_of, tips = find_chains(trajectory)
        num_new = sum(tip.num_tokens for tip in tips)
        if self.capacity is not None and self._num_tokens + num_new > self.capacity:
            raise ValueError(
                f"trajectory {trajectory.id!r} needs {num_new} tokens, but "
                f"{self.capacity - self._num_tokens} of the buffer's {self.capacity} are left; "
                "pack and clear it, or give it more capacity"
            )
        pieces = [piece for tip in tips for piece in (tip.prompt, tip.completion)]
        with self._all_or_nothing():
            begin = self._staging.write(*pieces, *(turn.logprobs for turn in turns))
            chain_words = begin + np.cumsum([0, *(tip.num_tokens for tip in tips[:-1])])
            self._append_spans(turns, chain_of, begin + num_new)
            self._chain_words.append(chain_words)
            self._rewards.append([turn.reward for turn in turns])
            self._turns.append(
                [(turn.version_start, turn.version_end, turn.truncated) for turn in turns]
            )
            self._num_turns.append([len(turns)])
            self._discounts.append([discount])
            self._labels.append(labels)
            self._num_tokens += num_new
            self._num_generated += sum(turn.completion.size for turn in turns)

    def clear(self) -> None:
        """Forget every trajectory and keep the memory. Batches already packed stay valid."""
        self._staging.clear()
        for table in self._growing:
            table.truncate()
        self._labels.clear()
        self._num_tokens = 0
        self._num_generated = 0

    def pack(self, layout: Layout = "merged", impl: Impl = "auto") -> PackedBatch:
        """Write all trajectories as one batch. The buffer keeps its content.

        Args:
            layout: ``"merged"`` or ``"turns"``, see `trajpack.pack`.
            impl: ``"auto"`` is Triton for a CUDA device and torch elsewhere; a named
                implementation that cannot run raises.

        Raises:
            ValueError: If ``layout`` or ``impl`` is unknown, or the batch would pass 2³¹ tokens.
            RuntimeError: If ``impl`` cannot run for this device.

        Cost: one host-to-device copy of what the buffer stores plus small tables, two launches,
            no synchronisation; 38 bytes a token are written on the device. Packing again before
            `clear` waits for the copy of the pack before. A CUDA graph may capture it, and then
            replays this batch.
        """
        resolve_impl("pack", impl, torch.empty(0, device=self.device))
        spans = Spans(*self._spans.rows.T)
        arrangement = arrange(layout, spans, self._chain_words.rows, self.num_turns)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            words, tables = self._staging.send(self._tables(arrangement))
            runs, discounts = tables.pop("runs"), tables.pop("turn_discounts")
            rewards, cu_turns = tables["turn_rewards"], tables["cu_turns"]
            returns = discounted_returns(rewards, cu_turns, discounts, impl)
            fields = build(words, runs, returns, arrangement.num_tokens, impl)
        return PackedBatch(
            **fields._asdict(),
            **tables,
            turn_returns=returns,
            layout=layout,
            seqlens=tuple(np.diff(arrangement.cu_seqlens).tolist()),
            num_generated=self._num_generated,
            ids=tuple(labels.id for labels in self._labels),
            groups=tuple(labels.group for labels in self._labels),
            task_ids=tuple(labels.task_id for labels in self._labels),
            birth_times_ms=tuple(labels.birth_time_ms for labels in self._labels),
            turn_discounts=tuple(self._discounts.rows.tolist()),
        )

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undo what was appended where memory runs out half-way, or Ctrl-C comes."""
        used, num_labels = self._staging.used, len(self._labels)
        counts = self._num_tokens, self._num_generated
        lengths = [len(table) for table in self._growing]
        try:
            yield
        except BaseException:
            self._staging.truncate(used)
            for table, length in zip(self._growing, lengths, strict=True):
                table.truncate(length)
            del self._labels[num_labels:]
            self._num_tokens, self._num_generated = counts
            raise

    def _append_spans(
        self, turns: Sequence[CheckedTurn], chain_of: Sequence[int], logprob: int
    ) -> None:
        first_turn, first_chain = self.num_turns, len(self._chain_words)
        rows = []
        for index, (turn, chain) in enumerate(zip(turns, chain_of, strict=True)):
            begin = turn.prompt.size
            for version, start, end in turn.version_runs:
                rows.append(
                    (
                        first_turn + index,
                        first_chain + chain,
                        begin + start,
                        begin + end,
                        version,
                        logprob + start,
                    )
                )
            logprob += turn.completion.size
        self._spans.append(rows)

    def _tables(self, arrangement: Arrangement) -> dict[str, npt.NDArray[Any]]:
        """Return what goes to the device beside the words, by name."""
        version_start, version_end, truncated = self._turns.rows.T
        return {
            "runs": arrangement.runs,
            "turn_discounts": self._discounts.rows,
            "turn_rewards": self._rewards.rows,
            "cu_turns": np.cumsum(np.append(0, self._num_turns.rows), dtype=np.int32),
            "cu_seqlens": arrangement.cu_seqlens,
            "turn_sequence": arrangement.turn_sequence,
            "turn_spans": arrangement.turn_spans,
            "turn_version_start": version_start,
            "turn_version_end": version_end,
            "turn_truncated": truncated.astype(np.bool_),
        }
