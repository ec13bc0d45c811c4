"""The trajectory buffer: stores each token once, packs all of them in one copy."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch

from trajpack.kernels.dispatch import Impl, resolve_impl
from trajpack.kernels.fields.build import FIELD_DTYPES, expand_runs, field_of
from trajpack.kernels.fields.gather_fields import gather_fields
from trajpack.kernels.scan.credit_scan import credit_scan
from trajpack.kernels.scan.scan_inputs import Scan
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.tables import GroupOrder, PackTables
from trajpack.packing.buffer.chains import Signs
from trajpack.packing.buffer.staging import DeviceRegion, Staging
from trajpack.packing.buffer.stored import Columns, Count, Stored
from trajpack.packing.buffer.tables import (
    BESIDE,
    GROUP_ORDER,
    Tables,
    by_field,
    check_layout,
    tables_of,
)
from trajpack.packing.buffer.take import NOTHING, take
from trajpack.packing.conversion import as_integer
from trajpack.packing.layout import Layout
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.types import Trajectory, several_trajectories

ROUNDING = 0.01
"""Log-probabilities up to this are 0 with the rounding errors of an engine."""

LONG = 1 << 19
"""Tokens of prompts and completions from which `TrajectoryBuffer.aadd` takes a thread."""


class Packed(NamedTuple):
    """Tables of the last pack, and what they are tables of."""

    layout: Layout
    num_trajectories: int
    columns: Columns
    tables: Tables


def pack(
    trajectories: Iterable[Trajectory],
    layout: Layout = "merged",
    device: torch.device | str | None = None,
    impl: Impl = "auto",
    fields: Iterable[TokenField] = (),
) -> PackedBatch:
    """Pack trajectories into one batch; `PackedBatch.unpack` is the exact inverse.

    Args:
        trajectories: Trajectories in the order of the batch.
        layout: ``"merged"``: a sequence is a whole conversation, and all its completions are
            trained. ``"turns"``: a sequence is one turn, its prompt and its completion.
        device: Device of the batch; torch's default device if ``None``.
        impl: See `trajpack.kernels`; ``"auto"`` is Triton on CUDA and torch elsewhere.
        fields: Extra per-token fields that every turn brings, see `TokenField`.

    Raises:
        TypeError, ValueError: As `TrajectoryBuffer.extend`.

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
    buffer._take(several_trajectories(trajectories))
    return buffer.pack(layout=layout, impl=impl)


def _warn(signs: Signs, stacklevel: int) -> None:
    """Warn of positive log-probabilities, and of prompts that repeat their history otherwise."""
    found = {
        "completion_logprobs has positive numbers, which are no logarithms of probabilities: give "
        "the natural logarithm, neither negated nor as a probability": signs.largest_logprob
        > ROUNDING,
        "a prompt replaces a few tokens of the completion before it, so that a new sequence begins "
        "and the history is stored again: if it was built from decoded text, build it from the "
        "sampled token ids; the report of the batch shows the places": signs.has_retokenized,
        f"{signs.contradicted} has other rows for tokens of the turns before, so that a new "
        "sequence begins and the history is stored again: give these tokens the same rows in both "
        "turns": bool(signs.contradicted),
    }
    for message, is_so in found.items():
        if is_so:  # at the line that calls add, extend or pack
            warnings.warn(f"TrajectoryBuffer.extend: {message}", stacklevel=stacklevel)


class TrajectoryBuffer:
    """Collects trajectories on the host and packs them for a device.

    Each token is stored once, however many turns repeat it. The buffer grows as needed,
    keeps its memory through `clear`, and belongs to one thread at a time.

    Args:
        device: Device of the batches; torch's default device if ``None``. For a CUDA device the
            buffer's memory is pinned.
        capacity: Maximum number of stored tokens, allocated at once. Unlimited if ``None``.
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
        num_words = 2 * (capacity or 0)  # an id and a log-probability for each token
        self._staging = Staging(self.device, num_words)
        self._stored = Stored.empty(self.fields)
        self._packed: Packed | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._last: Future[Signs] | None = None

    def __len__(self) -> int:
        """Number of stored trajectories."""
        return self._stored.counts[Count.TRAJECTORIES]

    def __reduce__(self) -> str:
        raise TypeError(
            "a buffer cannot be pickled or copied, its memory is shared between its parts; "
            "send trajectories or packed batches"
        )

    def __repr__(self) -> str:
        limit = "" if self.capacity is None else f" of {self.capacity:,}"
        return (
            f"TrajectoryBuffer({len(self)} trajectories, {self.num_turns} turns, "
            f"{self.num_tokens:,}{limit} tokens, for {self.device})"
        )

    @property
    def num_tokens(self) -> int:
        """Number of stored tokens, each counted once."""
        return self._stored.counts[Count.TOKENS]

    @property
    def num_turns(self) -> int:
        """Number of turns of the stored trajectories."""
        return self._stored.counts[Count.TURNS]

    @property
    def num_bytes(self) -> int:
        """Bytes of the stream: 4 a token, 4 more a generated token, and the extra fields."""
        return 4 * self._stored.counts[Count.WORDS]

    def add(self, trajectory: Trajectory) -> None:
        """Check a trajectory and store the new tokens of its turns: `extend` by one."""
        if self._last is not None:
            self._await_last()
        signs = take(self._stored, self._staging, (trajectory,), self.fields, self.capacity)
        if signs is not NOTHING:
            _warn(signs, 3)

    async def aadd(self, trajectory: Trajectory) -> None:
        """Do what `add` does, from an event loop of asyncio.

        A long trajectory is stored by a thread, which copies arrays without the GIL; a short one is
        stored at once. Trajectories are stored in the order of the calls. Other calls of the buffer
        wait until the thread has stored what it was given; a cancelled call is stored too.
        """
        try:
            turns = trajectory.turns
            num_given = sum(
                len(ids) for one in turns for ids in (one.prompt_ids, one.completion_ids)
            )
        except (AttributeError, TypeError):  # which `add` names
            num_given = 0
        if num_given < LONG and (self._last is None or self._last.done()):
            self._take((trajectory,))
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "trajpack-buffer")
        call = self._stored, self._staging, (trajectory,), self.fields, self.capacity
        self._last = self._worker.submit(take, *call)
        _warn(await asyncio.shield(asyncio.wrap_future(self._last)), 3)

    def extend(self, trajectories: Iterable[Trajectory]) -> None:
        """Check trajectories and store the new tokens of their turns.

        A turn extends the longest chain of its trajectory that is a prefix of its prompt (the
        latest, on a tie). Without such a chain it begins a new one.

        Raises:
            TypeError: If a value is of the wrong kind.
            ValueError: If a value is out of range, lengths disagree, or the trajectories do
                not fit the capacity. Every error names the trajectory, the turn, the expected and
                the given value; no part of the call is stored.

        Warns:
            UserWarning: If a log-probability of the call is above 0.01; if one of its first 4
                prompts that break a prefix replaces a few tokens of the completion before it by a
                few others, as re-tokenized text does; if one of these 4 repeats the tokens before
                it with other rows of an extra field.

        No other thread may write the arrays meanwhile.
        """
        self._await_last()
        self._take(several_trajectories(trajectories))

    def clear(self) -> None:
        """Remove all trajectories and keep the memory. Packed batches stay valid."""
        self._await_last()
        self._stored, self._packed = Stored.empty(self.fields), None
        self._staging.clear()

    def pack(self, layout: Layout = "merged", impl: Impl = "auto") -> PackedBatch:
        """Return all trajectories as one batch; the buffer keeps them.

        Args:
            layout: ``"merged"`` or ``"turns"``, see `trajpack.pack`.
            impl: ``"auto"`` is Triton for a CUDA device and torch elsewhere; a named
                implementation that cannot run raises.

        Raises:
            ValueError: If ``layout`` or ``impl`` is unknown, or the batch would exceed 2³¹ tokens.
            RuntimeError: If ``impl`` cannot run for this device.
        """
        check_layout(layout)
        chosen = resolve_impl("pack", impl, self.device)
        self._await_last()
        with self._staging.on_device():
            tables, counts = self._tables_of(layout), self._stored.counts
            region = self._staging.send(counts[Count.WORDS], tables.arrays)
            columns = write_batch(region, tables, self.fields, chosen)
            columns |= self._stored.labels.as_tuples(counts[Count.TRAJECTORIES])
            columns |= {"layout": layout, "num_generated": counts[Count.GENERATED]}
        return PackedBatch(**columns)

    def _take(self, trajectories: tuple[Trajectory, ...]) -> None:
        if not trajectories:
            return
        signs = take(self._stored, self._staging, trajectories, self.fields, self.capacity)
        if signs is not NOTHING:
            _warn(signs, 4)

    def _await_last(self) -> None:
        """Wait until the thread of `aadd` has stored what it was given."""
        if self._last is not None:
            wait([self._last])
            self._last = None

    def _tables_of(self, layout: Layout) -> Tables:
        """Return the tables of the content, which stay until it changes."""
        stored, packed = self._stored, self._packed
        if packed is None or packed[:2] != (layout, len(self)):
            columns = stored.columns()
            tables = tables_of(columns, stored.labels, self.fields, layout)
            self._packed = packed = Packed(layout, len(self), columns, tables)
        return packed.tables


def returns_of_turns(region: DeviceRegion, most_turns: int, impl: Impl) -> torch.Tensor:
    """Discount the turns' rewards backward over their trajectories."""
    tables = region.tables
    scan = Scan(
        tables["cu_turns"],
        tables["turn_rewards"],
        kind="returns",
        gammas=tables["turn_discounts"],
        max_seqlen=most_turns,
    )
    return credit_scan(scan, "discounted_returns", impl)[0]


def write_batch(
    region: DeviceRegion, tables: Tables, fields: Sequence[TokenField], impl: Impl
) -> dict[str, Any]:
    """Launch the kernels that write a batch from its tables and its stream.

    Returns all columns of the batch but its layout, its number of generated tokens and its labels.
    """
    returns = returns_of_turns(region, tables.most_turns, impl)
    words, runs, tokens = region.stream, region.tables["runs"], tables.num_tokens
    if words.device.type == "cpu":  # the op would check the runs
        block = expand_runs(words, runs, returns, tokens, impl)
    else:
        block = torch.ops.trajpack.build(words, runs, returns, tokens, impl)
    extra = {}
    if fields:
        layouts = [field.layout for field in fields]
        gathered = gather_fields(words, runs, region.tables["field_sources"], layouts, tokens, impl)
        extra = {field.name: rows for field, rows in zip(fields, gathered, strict=True)}
    columns: dict[str, Any] = {name: field_of(block, tokens, name) for name in FIELD_DTYPES}
    of_region = region.tables
    return {
        **columns,
        **{name: table for name, table in of_region.items() if name not in BESIDE},
        "turn_returns": returns,
        "fields": extra,
        "token_fields": tuple(fields),
        "ragged_values": values_of(words, fields),
        "seqlens": tuple(tables.seqlens.tolist()),
        "num_groups": tables.num_groups,
        "tables": PackTables(
            runs,
            of_region["cu_new"],
            GroupOrder(**{name: of_region[table] for name, table in GROUP_ORDER.items()}),
            tuple(tables.generated_lens.tolist()),
            by_field(fields, tables.value_lens),
            tables.longest,
            columns["loss_mask"],
        ),
    }


def values_of(words: torch.Tensor, fields: Sequence[TokenField]) -> dict[str, torch.Tensor]:
    """Return the values of ragged fields: views of the stream, on the host of a copy."""
    ragged = [field for field in fields if field.ragged]
    if ragged and words.device.type == "cpu":  # later calls write to it
        words = words.clone()
    return {field.name: field.values_in(words) for field in ragged}
