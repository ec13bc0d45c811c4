"""`PackedBatch`: packed trajectories as tensors on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch

from trajpack.packing.batch.breaks import prefix_breaks
from trajpack.packing.batch.columns import mapped, turn_ends, with_field
from trajpack.packing.batch.description import trained_in_words
from trajpack.packing.batch.show import show
from trajpack.packing.batch.tables import PackTables
from trajpack.packing.batch.unpack import unpack
from trajpack.packing.credit.loss_weights import (
    importance_weights,
    loss_denominator,
    loss_weights,
)
from trajpack.packing.layout import Layout
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.micro_batches.cutting import (
    Lengths,
    cut,
    lengths_of,
    merged,
    place_plan,
    place_selected,
    summed,
)
from trajpack.packing.micro_batches.generated import Generated, generated_of, with_loss_mask
from trajpack.packing.micro_batches.labels import drop, labels, shift
from trajpack.packing.micro_batches.logprobs import logprobs
from trajpack.packing.micro_batches.micro_batch import record_storages
from trajpack.packing.micro_batches.model_inputs import model_inputs
from trajpack.packing.representation import missing_attribute, public_names
from trajpack.packing.text import counted
from trajpack.packing.token_fields import TokenField

if TYPE_CHECKING:
    from trajpack.kernels.dispatch import Impl
    from trajpack.kernels.rearrange.select_tokens import Number
    from trajpack.packing.credit.advantages import Own, Unit
    from trajpack.packing.credit.estimators import Estimator
    from trajpack.packing.micro_batches.micro_batch import MicroBatch
    from trajpack.packing.plan.types import Plan

UNALIGNED = Alignment()


@dataclass(frozen=True, eq=False, repr=False)
class PackedBatch:
    """Trajectories as flat, unpadded tensors on one device.

    Made by `trajpack.pack` or `TrajectoryBuffer.pack`. Tensors over tokens are of shape
    ``[tokens]``, sequence after sequence; tensors over turns of shape ``[turns]``, trajectory
    after trajectory, oldest turn first. Host tuples have one entry for each trajectory.

    Attributes:
        input_ids: int64 ``[tokens]``: token ids.
        position_ids: int64 ``[tokens]``: positions, from 0 in every sequence.
        sequence_ids: int32 ``[tokens]``: index of the token's sequence.
        turn_ids: int32 ``[tokens]``: turn that generated the token, an index of the turn tensors,
            or -1.
        prompt_mask: bool ``[tokens]``: True on prompt and observation tokens.
        loss_mask: bool ``[tokens]``: True on generated tokens, each exactly once in the batch, but
            those that `with_loss_mask` dropped.
        rollout_logprobs: float32 ``[tokens]``: log-probability at the token's own index; 0 where
            not generated.
        policy_versions: int32 ``[tokens]``: version of the weights that sampled the token, or -1.
        returns: float32 ``[tokens]``: return of the token's turn; 0 where not generated.
        cu_seqlens: int32 ``[sequences + 1]``: sequence boundaries; starts at 0, ends at ``tokens``.
        turn_rewards: float64 ``[turns]``: rewards as given.
        turn_returns: float32 ``[turns]``: rewards discounted backward over the trajectory's turns.
        turn_truncated: bool ``[turns]``: True where no end-of-sequence token was sampled.
        turn_version_start: int32 ``[turns]``: policy version of the first sampled token.
        turn_version_end: int32 ``[turns]``: policy version of the last sampled token.
        turn_stop_reasons: int8 ``[turns]``: `Turn.stop_reason`: 0 ``None``, 1 ``"stop"``, 2
            ``"length"``, 3 ``"tool"``, 4 ``"abort"``, 5 ``"error"``.
        turn_sequence: int32 ``[turns]``: sequence that holds the turn's completion.
        turn_spans: int32 ``[turns, 2]``: the completion's first token in the batch, and one past
            its last.
        turn_begin: int32 ``[turns]``: index of the first token that is new with the turn: the end
            of the previous completion of its chain, or the start of its sequence. The tokens from
            here to the end of the completion are the same in every layout.
        cu_generated: int32 ``[turns + 1]``: generated tokens of all turns before each; ends at
            their number.
        cu_turns: int32 ``[trajectories + 1]``: boundaries of the trajectories' turns.
        group_ids: int32 ``[trajectories]``: groups, numbered from 0 as they first appear in the
            batch; a trajectory without a group is one of its own.
        truncated: bool ``[trajectories]``: True where a limit ended the episode, see
            `Trajectory.truncated`.
        fields: ``[tokens, *shape]`` each: the extra fields, by name.
        token_fields: Declarations of the extra fields.
        layout: ``"merged"`` or ``"turns"``.
        seqlens: Tokens of each sequence.
        num_generated: Number of generated tokens, those that are not trained included.
        num_groups: Number of distinct groups in `group_ids`.
        ids: Names of the trajectories.
        groups: Groups of the trajectories.
        task_ids: Kinds of task of the trajectories.
        birth_times_ms: Start times of the episodes, milliseconds since the epoch.
        turn_discounts: Discounts of the trajectories from one turn to the next.
        truncated_as_given: `Trajectory.truncated` of each; ``None`` where its last turn says it.
        tables: What packing knows beside the fields.
        advantages: float32 ``[tokens]``: advantages, 0 where not generated; ``None`` at first.
        metrics: float64 ``[metrics]``: metrics of `with_advantages`, named by `metric_names`.
        metric_names: Names of the metrics.
        ragged_values: ``[any, *shape]`` each: what the rows of ragged fields in `fields` refer to,
            by name. The order is any, and other numbers may be among them: see `ragged`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sequence_ids: torch.Tensor
    turn_ids: torch.Tensor
    prompt_mask: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    policy_versions: torch.Tensor
    returns: torch.Tensor

    cu_seqlens: torch.Tensor
    turn_rewards: torch.Tensor
    turn_returns: torch.Tensor
    turn_truncated: torch.Tensor
    turn_version_start: torch.Tensor
    turn_version_end: torch.Tensor
    turn_stop_reasons: torch.Tensor
    turn_sequence: torch.Tensor
    turn_spans: torch.Tensor
    turn_begin: torch.Tensor
    cu_generated: torch.Tensor
    cu_turns: torch.Tensor
    group_ids: torch.Tensor
    truncated: torch.Tensor

    fields: Mapping[str, torch.Tensor]
    token_fields: tuple[TokenField, ...]

    layout: Layout
    seqlens: tuple[int, ...]
    num_generated: int
    num_groups: int
    ids: tuple[str, ...]
    groups: tuple[str | None, ...]
    task_ids: tuple[int | None, ...]
    birth_times_ms: tuple[int | None, ...]
    turn_discounts: tuple[float, ...]
    truncated_as_given: tuple[bool | None, ...]
    tables: PackTables

    advantages: torch.Tensor | None = None
    metrics: torch.Tensor | None = None
    metric_names: tuple[str, ...] = ()
    ragged_values: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    model_inputs = model_inputs
    labels = labels
    shift = shift
    drop = drop
    logprobs = logprobs
    with_loss_mask = with_loss_mask
    loss_weights = loss_weights
    loss_denominator = loss_denominator
    importance_weights = importance_weights
    turn_ends = turn_ends
    with_field = with_field
    prefix_breaks = prefix_breaks
    unpack = unpack
    show = show

    @property
    def generated(self) -> Generated:
        """Generated tokens in the order of `logprobs`, and what a loss takes of them."""
        return generated_of(self)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence; 0 in an empty batch. Read from the host."""
        return max(self.seqlens) if self.seqlens else 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.input_ids.shape[0]

    @property
    def num_turns(self) -> int:
        """Turns of all trajectories."""
        return self.turn_rewards.shape[0]

    @property
    def num_prefix_breaks(self) -> int | None:
        """Turns, but a trajectory's first, that began a new chain: a sequence of its own.

        Their prompts do not begin with the turns before them: `prefix_breaks` says where and why.
        ``None`` in layout ``"turns"``, where every turn is a sequence. Read from the host.
        """
        return len(self) - len(self.ids) if self.layout == "merged" else None

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.input_ids.device

    __dir__ = public_names
    if not TYPE_CHECKING:  # else it would have every attribute
        __getattr__ = missing_attribute

    def __len__(self) -> int:
        """Sequences in the batch."""
        return len(self.seqlens)

    def __repr__(self) -> str:
        num_breaks = self.num_prefix_breaks or 0
        breaks = f", {counted(num_breaks, 'prefix break')}" if num_breaks else ""
        versions = "" if self.device.type != "cpu" or not self.num_turns else self._versions()
        return (
            f"PackedBatch({self.layout!r}: {len(self.ids)} trajectories, {self.num_turns} turns "
            f"in {len(self)} sequences{breaks}; {self.num_tokens:,} tokens, {self.num_generated:,} "
            f"generated{trained_in_words(self.loss_mask, self.num_generated)}; "
            f"longest {self.max_seqlen:,}{versions}; {self.device})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return fields that share no memory: pickles and deep copies hold the tensors alone."""
        return self._values() | mapped(self, torch.Tensor.clone)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the batch by field name, without the extra fields in `fields`."""
        values = self._values()
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def host_values(self) -> dict[str, Any]:
        """Return the fields that are no tensors by name, but those of extra fields."""
        values = self._values()
        return {
            name: value
            for name, value in values.items()
            if not isinstance(value, (torch.Tensor, type(None)))  # None: a missing tensor
            and name not in ("fields", "token_fields", "ragged_values", "tables")
        }

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch on ``device``; the same object if it is there already.

        Lengths that are known on the host stay known.
        """
        if self.cu_seqlens.to(device) is self.cu_seqlens:
            return self
        moved = mapped(self, lambda one: one.to(device, non_blocking=non_blocking))
        return dataclasses.replace(self, **moved)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the batch from reuse while work of another stream reads it.

        PyTorch's caching allocator reuses memory on the stream of its allocation as soon as no
        tensor holds it. This method records ``stream`` for all memory of the batch: the one
        allocation of the per-token fields, the one of all tables and the token stream, extra
        fields, returns, advantages and metrics. ``record_stream`` on a tensor
        covers its allocation alone. Call this method on the batch that the other stream reads,
        after `with_advantages`: a batch with advantages is another batch, with memory of its own.

        Make the other stream wait for the packing before: ``stream.wait_stream(packing)``.
        ``docs/devices.md`` has an example.

        Args:
            stream: The `torch.cuda.Stream` that reads the batch.
        """
        more = [*self.fields.values(), *self.ragged_values.values(), self.tables]
        record_storages([*self.tensors().values(), *more], stream)

    def with_advantages(  # noqa: PLR0913 - estimators need different tensors
        self,
        estimator: Estimator | Own | str,
        values: torch.Tensor | None = None,
        ref_logprobs: torch.Tensor | None = None,
        *,
        logprobs: torch.Tensor | None = None,
        bootstrap: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
        state_ids: torch.Tensor | None = None,
        all_reduce: Callable[[torch.Tensor], object] | None = None,
        impl: Impl = "auto",
    ) -> PackedBatch:
        """Return the batch with ``advantages``, ``returns`` and ``metrics`` of an estimator.

        ``docs/credit.md`` has an example of each estimator. A generated token has the same values
        in every layout, bit for bit (up to rounding if advantages are whitened); all other tokens
        have 0. Call `with_loss_mask` after this, not before: estimators read the
        generated tokens from the turns. The new batch shares all other tensors.

        Args:
            estimator: Estimator with its conventions, such as ``GAE(lam=0.95)`` or ``GRPO()``; or
                its name, such as ``"grpo"``, for its usual parameters. Or a
                function ``(scores, group_ids, batch) -> advantages`` of your own: ``scores`` are
                float64 ``[trajectories]``, the sums of the rewards, or the argument of that name;
                ``group_ids`` and ``batch`` are this batch's. It gives floats for each trajectory,
                turn, generated token or token of the batch; where it gives as many as there are
                generated tokens by chance, `spread` says which are meant. Or these advantages
                themselves, a tensor. Values are not read: NaN stays NaN.
            values: ``[tokens]`` floats, value of the state before each token: the output of a
                causal critic one token earlier.
            ref_logprobs: ``[tokens]`` floats of the reference policy, for the penalty ``kl``.
            logprobs: ``[tokens]`` floats, at each token's own index, of the trained policy before
                its update. Default in ``kl``: `rollout_logprobs`.
            bootstrap: ``[trajectories]`` floats, value of the state behind the last token; used for
                trajectories that were cut off (`truncated`), if ``truncated="bootstrap"``.
            scores: ``[trajectories]`` floats that replace the summed rewards, for estimators that
                compare trajectories.
            state_ids: ``[turns]`` int32 or int64, state of each turn, for `GiGPO`: for instance
                ``zlib.crc32(observation.encode())``. A negative number: no state.
            all_reduce: Function that sums a float64 ``[3]`` tensor over the data-parallel ranks in
                place, such as ``torch.distributed.all_reduce``; called if the estimator whitens.
                Without it each rank whitens its own batch. The recipe ``"gpg"`` raises, because its
                factor counts one batch.
            impl: See `trajpack.kernels`.

        Raises:
            TypeError: If an input is of a wrong type.
            ValueError: If an input has a wrong shape or device, is missing, or is not used by the
                estimator; ``values`` and ``logprobs`` are accepted by all.

        Warns:
            UserWarning: If the estimator compares trajectories and every group has one member.

        Reference:
            Each estimator names its own.
        """
        from trajpack.packing.credit.advantages import (
            Inputs,
            with_advantages,  # it imports this class
        )

        inputs = Inputs(values, logprobs, ref_logprobs, bootstrap, scores, state_ids)
        return with_advantages(self, estimator, inputs, all_reduce=all_reduce, impl=impl)

    def spread(self, x: torch.Tensor, of: Unit) -> torch.Tensor:
        """Return values of trajectories, turns or generated tokens at the batch's tokens.

        Args:
            x: ``[trajectories, ...]``, ``[turns, ...]`` or ``[num_generated, ...]``, of any dtype.
            of: ``"trajectory"``, ``"turn"`` or ``"token"``: a generated token, in the order of
                `logprobs`.

        Returns:
            ``[tokens, ...]``, 0 where not generated. Differentiable with respect to ``x``.

        Raises:
            TypeError: If ``x`` is no tensor.
            ValueError: If ``of`` is unknown, or ``x`` has another length or device.

        Example:
            >>> import torch, trajpack
            >>> turns = [trajpack.Turn([1], [2, 3], [-0.5] * 2), trajpack.Turn([4], [5], [-0.5])]
            >>> batch = trajpack.pack([trajpack.Trajectory("a", turns)])
            >>> batch.spread(torch.tensor([0.25, 0.75]), of="turn")
            tensor([0.0000, 0.2500, 0.2500, 0.0000, 0.7500])
        """
        from trajpack.packing.credit.advantages import spread_over_tokens  # it imports this class

        return spread_over_tokens(self, x, of)

    @property
    def value_counts(self) -> dict[str, tuple[int, int]]:
        """Values of each ragged field, and generated tokens without any."""
        return summed(self.tables.value_lens)

    @cached_property
    def host_lengths(self) -> Lengths:
        """Sequences' lengths and starts as int64 arrays on the host."""
        return lengths_of(self.seqlens)

    def select(
        self,
        sequences: Iterable[int],
        alignment: Alignment = UNALIGNED,
        *,
        tensors: Mapping[str, torch.Tensor] | None = None,
        impl: Impl = "auto",
    ) -> MicroBatch:
        """Return some sequences, in the given order, as a micro-batch.

        Args:
            sequences: Indices of the sequences; an empty list makes a dummy of padding.
            alignment: Rules for padding.
            tensors: ``[tokens, ...]`` each, of any dtype of at most 8 bytes: further inputs of the
                loss, such as ``{"loss_weights": batch.loss_weights("token_mean")}``. They become
                `MicroBatch.fields`, 0 on padding, without gradients; a loss reads
                ``generated["loss_weights"]``.
            impl: See `trajpack.kernels`.

        Raises:
            TypeError: If ``sequences`` are no integers, or one of ``tensors`` is none.
            ValueError: If there is no such sequence, a tensor has a wrong shape, device or name,
                or the alignment has no room.
            RuntimeError: While a CUDA graph is captured.

        Example:
            >>> import trajpack
            >>> turn = trajpack.Turn([1, 2], [3], [-0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory(name, [turn]) for name in "abc"])
            >>> batch.select([2, 0], trajpack.Alignment(sequence_multiple=4)).input_ids
            tensor([1, 2, 3, 0, 1, 2, 3, 0])
        """
        placed = place_selected(self.host_lengths, sequences, alignment)
        return next(cut(self, [placed], alignment, tensors, impl))

    def micro_batches(
        self,
        plan: Plan,
        alignment: Alignment = UNALIGNED,
        *,
        tensors: Mapping[str, torch.Tensor] | None = None,
        impl: Impl = "auto",
    ) -> Iterator[MicroBatch]:
        """Return an iterator that makes the micro-batches of a plan one by one.

        Args:
            plan: Plan of the batch, such as ``trajpack.plan_micro_batches(batch.seqlens,
                capacity)``. A truncated sequence keeps its first tokens; a micro-batch without
                sequences is a dummy.
            alignment: As for `select`.
            tensors: As for `select`.
            impl: See `trajpack.kernels`.

        Raises:
            TypeError: As `select`.
            ValueError: As `select`; also if the plan is for other sequences, or a padded
                micro-batch exceeds the plan's capacity. All are checked before the first is made.
            RuntimeError: As `select`.
        """
        placed = place_plan(self.host_lengths, plan, alignment)
        return cut(self, placed, alignment, tensors, impl)

    def split(
        self,
        plan: Plan,
        alignment: Alignment = UNALIGNED,
        *,
        tensors: Mapping[str, torch.Tensor] | None = None,
        impl: Impl = "auto",
    ) -> list[MicroBatch]:
        """Return all micro-batches of a plan: `micro_batches` as a list."""
        return list(self.micro_batches(plan, alignment, tensors=tensors, impl=impl))

    def merge(
        self,
        plan: Plan,
        outputs: Sequence[torch.Tensor],
        alignment: Alignment = UNALIGNED,
        *,
        fill: Number = 0,
        impl: Impl = "auto",
    ) -> torch.Tensor:
        """Return outputs of the micro-batches in the order of the batch: the inverse of `split`.

        Args:
            plan: Plan of the split.
            outputs: One tensor for each micro-batch, dummies included: ``[tokens of the
                micro-batch, ...]``, of one dtype, with a row for each token, padding included:
                values, or log-probabilities at the token's own index. Outputs for the next token
                must be shifted first.
            alignment: Alignment of the split.
            fill: Value of tokens in no micro-batch: dropped sequences and truncated tokens.
            impl: See `trajpack.kernels`.

        Returns:
            ``[tokens, ...]``: padding is left out. Differentiable with respect to the outputs.

        Raises:
            TypeError: If an output is no tensor.
            ValueError: If there are not as many as micro-batches, one has another number of rows,
                dtype or shape of a row, or the plan does not fit the batch.
            RuntimeError: While a CUDA graph is captured.

        Example:
            >>> import torch, trajpack
            >>> turn = trajpack.Turn([1, 2], [3], [-0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory(name, [turn]) for name in "abc"])
            >>> plan = trajpack.plan_micro_batches(batch.seqlens, capacity=6)
            >>> outputs = [micro_batch.input_ids for micro_batch in batch.split(plan)]
            >>> torch.equal(batch.merge(plan, outputs), batch.input_ids)
            True
        """
        placed = place_plan(self.host_lengths, plan, alignment)
        return merged(self.host_lengths, placed, outputs, self.device, fill=fill, impl=impl)

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _versions(self) -> str:
        low, high = int(self.turn_version_start.min()), int(self.turn_version_end.max())
        return f"; policy version {low}" if low == high else f"; policy versions {low} to {high}"
