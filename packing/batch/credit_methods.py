"""What a packed batch does about credit: advantages, weights of losses, off-policy corrections."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch

if TYPE_CHECKING:
    from trajpack.kernels.corrections.importance_weights import Correction
    from trajpack.kernels.corrections.loss_weights import Aggregation
    from trajpack.kernels.dispatch import Impl
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.credit.estimators import Estimator


SequenceOf: TypeAlias = Literal["trajectory", "turn", "row"]
"""What one sequence of a sequence mean is, see `PackedBatch.loss_weights`."""


class CreditMethods:
    """Methods of `PackedBatch`."""

    @property
    def _batch(self) -> PackedBatch:
        return cast("PackedBatch", self)

    def with_advantages(  # noqa: PLR0913 - estimators need different tensors
        self,
        estimator: Estimator,
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

        The guide, ``docs/credit.md``, has an example of each. A generated token is given the same
        in every layout, bit for bit (where advantages are whitened, up to rounding); all other
        tokens have 0. Narrow `loss_mask`, as for staleness, after this and not before: credit goes
        to what turns generated. The batch that comes back shares all other tensors with this one.

        Args:
            estimator: Such as ``GAE(lam=0.95)`` or ``GRPO()``; it names every convention.
            values: ``[tokens]`` floats, of the state before each token: what a causal critic puts
                out one token earlier.
            ref_logprobs: ``[tokens]`` floats, of the reference that ``kl`` penalizes distance from.
            logprobs: ``[tokens]`` floats, at each token's own index, of the policy that is trained,
                before its update; `rollout_logprobs` stand in for it in ``kl``.
            bootstrap: ``[trajectories]`` floats, of the state behind the last token; read where the
                last turn was cut off, if ``truncated="bootstrap"``.
            scores: ``[trajectories]`` floats in the place of summed rewards, for estimators that
                compare trajectories.
            state_ids: ``[turns]`` int32 or int64, the state of each turn, for `GiGPO`: such
                as ``zlib.crc32(observation.encode())``. Negative: none.
            all_reduce: Sums a float64 ``[3]`` tensor over the data-parallel ranks, in place, where
                the estimator whitens; such as ``torch.distributed.all_reduce``. Without it each
                rank whitens by itself. It is not called where nothing is whitened; `GPG`, which
                counts the batch in another way, refuses it.
            impl: See `trajpack.kernels`.

        Raises:
            TypeError: If an input is of a wrong type.
            ValueError: If one has a wrong shape or device, is missing, or would go unnoticed;
                ``values`` and ``logprobs`` may be given to all.

        Warns:
            UserWarning: If the estimator compares trajectories, there are several of them, and
                every group has one member.

        Cost: three or four launches, metrics included, and six with ``scores``; up to seven where
        tokens between generated ones are steps, five or six more where cut-off trajectories are
        masked, three or four more with ``all_reduce``, 26 for `GiGPO`, which numbers its states by
        sorting, and one more where the batch was credited before. No copy, no synchronisation.

        Reference:
            Each estimator names its own.
        """
        from trajpack.packing.credit.advantages import (
            Inputs,
            with_advantages,  # which itself needs this class
        )

        inputs = Inputs(values, logprobs, ref_logprobs, bootstrap, scores, state_ids)
        return with_advantages(self._batch, estimator, inputs, all_reduce, impl)

    def loss_weights(
        self,
        aggregation: Aggregation,
        *,
        per: SequenceOf = "trajectory",
        denominator: float | torch.Tensor | None = None,
        truncated: Literal["keep", "mask"] = "keep",
    ) -> torch.Tensor:
        """Return weights with which a plain sum over tokens is the aggregated loss.

        A prompt is a group. What a sequence is, ``per`` says: with ``"trajectory"`` and ``"turn"``
        a token has the same weight in every layout, bit for bit.

        Args:
            aggregation: ``"token_mean"``, ``"sequence_mean_token_mean"``,
                ``"sequence_mean_token_sum"``, ``"prompt_mean"`` or ``"constant"``.
            per: What one sequence of a sequence mean is: a ``"trajectory"``, in however many rows
                it is packed; a ``"turn"``; or a ``"row"``, a sequence of this batch, which is a
                turn in layout ``"turns"`` and a chain of turns in ``"merged"``. Trainers that are
                given rows count rows (TRL, verl, SkyRL), with ``denominator=len(batch)`` those
                without a generated token too, as TRL and SkyRL do.
            denominator: In place of the number of tokens, sequences or groups, where a batch is
                spread over ranks: the sum of their `loss_denominator`. ``"constant"`` needs it.
            truncated: ``"mask"`` leaves trajectories out whose last turn was cut off: they have
                weight 0 and count nowhere.

        Returns:
            float32 ``[tokens]``, 0 where not generated.

        Raises:
            ValueError: If ``per`` is unknown, or given to an aggregation that means no sequences;
                or see `trajpack.kernels.loss_weights`.

        Cost: up to 45 small operations. No copy, no synchronisation.

        Reference:
            `trajpack.kernels.loss_weights`.

        Example:
            >>> import trajpack
            >>> turn = trajpack.Turn([1], [2, 3], [-1.0, -1.0])
            >>> batch = trajpack.pack([trajpack.Trajectory("a", [turn])])
            >>> batch.loss_weights("token_mean")
            tensor([0.0000, 0.5000, 0.5000])
        """
        from trajpack.kernels.corrections.loss_weights import loss_weights

        units = self._units(aggregation, per, truncated)
        return loss_weights(aggregation, **units, denominator=denominator)

    def loss_denominator(
        self,
        aggregation: Aggregation,
        *,
        per: SequenceOf = "trajectory",
        truncated: Literal["keep", "mask"] = "keep",
    ) -> torch.Tensor:
        """Return this batch's share of the denominator of `loss_weights`.

        Args:
            aggregation: As there, but for ``"constant"``, which has none.
            per: As there.
            truncated: As there.

        Returns:
            0-d int64 tensor: tokens, sequences or groups that have tokens. The sum over ranks is
            the ``denominator`` of each.

        Raises:
            ValueError: As there, or see `trajpack.kernels.loss_denominator`.

        Cost: up to 30 small operations. No copy, no synchronisation.

        Reference:
            `trajpack.kernels.loss_weights`.
        """
        from trajpack.kernels.corrections.loss_weights import loss_denominator

        return loss_denominator(aggregation, **self._units(aggregation, per, truncated))

    def importance_weights(
        self,
        logprobs: torch.Tensor,
        correction: Correction,
        *,
        per: Literal["trajectory", "turn"] = "trajectory",
        impl: Impl = "auto",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weigh tokens as if the policy of ``logprobs`` had sampled them.

        Args:
            logprobs: float32 ``[tokens]``, of the policy that is trained, before its update.
            correction: What becomes of a ratio to `rollout_logprobs`, such as
                ``Correction.tis(2.0)``.
            per: What the segments of ``correction`` are, if it has any.
            impl: See `trajpack.kernels`.

        Returns:
            Weights, float32 ``[tokens]``, 0 where not generated and the same in every layout; and
            metrics, float64 ``[12]``, named by ``IMPORTANCE_METRICS`` in the module
            ``trajpack.kernels.corrections.importance_weights``.

        Raises:
            ValueError: If ``per`` is unknown, or see `trajpack.kernels.importance_weights`.

        Cost: that of `trajpack.kernels.importance_weights`, and ten small launches where the
        segments are trajectories. No copy, no synchronisation.

        Reference:
            `trajpack.kernels.importance_weights`.
        """
        from trajpack.kernels.corrections.importance_weights import (
            check_weighed,
            importance_weights,
        )

        batch = self._batch
        if per not in ("trajectory", "turn"):
            raise ValueError(f"importance_weights: per must be 'trajectory' or 'turn', got {per!r}")
        check_weighed(logprobs, batch.rollout_logprobs, batch.loss_mask, correction)
        if per == "turn" or not correction.needs_segments:
            return importance_weights(
                logprobs, batch.rollout_logprobs, batch.loss_mask, correction,
                segments=batch.turn_spans, segment_ids=batch.turn_ids, impl=impl,
            )  # fmt: skip
        # what a trajectory generated may stand in several sequences: line it up
        num_positions = batch.num_tokens if batch.is_padded else batch.num_generated
        position = torch.arange(num_positions, device=batch.device)
        turn = torch.searchsorted(batch.cu_generated[1:].long(), position, right=True)
        exists = turn < batch.num_turns
        turn = turn.clamp(max=max(batch.num_turns - 1, 0))
        at = batch.turn_spans[turn, 0].long() + position - batch.cu_generated[turn]
        at = torch.where(exists, at, 0)
        bounds = batch.cu_generated[batch.cu_turns.long()]
        weights, metrics = importance_weights(
            logprobs[at], batch.rollout_logprobs[at], batch.loss_mask[at] & exists, correction,
            segments=bounds, impl=impl,
        )  # fmt: skip
        out = torch.zeros(batch.num_tokens + 1, device=batch.device)
        return out.index_copy_(0, torch.where(exists, at, batch.num_tokens), weights)[:-1], metrics

    def _units(self, aggregation: str, per: str, truncated: str) -> dict[str, Any]:
        """Return what counts, each token's sequence, and each trajectory's group."""
        batch = self._batch
        if per not in ("trajectory", "turn", "row"):
            raise ValueError(
                f"loss_weights: per must be 'trajectory', 'turn' or 'row', got {per!r}"
            )
        if per != "trajectory" and not aggregation.startswith("sequence_mean"):
            raise ValueError(f"loss_weights: aggregation={aggregation!r} takes no per={per!r}")
        if truncated not in ("keep", "mask"):
            raise ValueError(f"loss_weights: truncated must be 'keep' or 'mask', got {truncated!r}")
        units: dict[str, Any] = {"loss_mask": batch.loss_mask}
        if per == "turn":
            units |= {"sequence_ids": batch.turn_ids, "num_sequences": batch.num_turns}
        elif per == "row":
            num_rows = batch.cu_seqlens.shape[0] - 1
            units |= {"sequence_ids": batch.sequence_ids, "num_sequences": num_rows}
        by_trajectory = per == "trajectory" and aggregation not in ("token_mean", "constant")
        if truncated == "keep" and not by_trajectory:
            return units
        turn = torch.arange(batch.num_turns + 1, device=batch.device)  # and one of no trajectory
        trajectory = torch.searchsorted(batch.cu_turns[1:].long(), turn, right=True)
        of_tokens = trajectory[batch.turn_ids.long()]
        if truncated == "mask" and batch.num_turns:
            cut_off = batch.turn_truncated[(batch.cu_turns[1:].long() - 1).clamp(min=0)]
            units["loss_mask"] = batch.loss_mask & ~torch.cat([cut_off, cut_off[:1]])[of_tokens]
        if not by_trajectory:
            return units
        num_trajectories = batch.cu_turns.shape[0] - 1
        units |= {"sequence_ids": of_tokens, "num_sequences": num_trajectories}
        if aggregation == "prompt_mean":
            units |= {"group_ids": batch.group_ids, "num_groups": num_trajectories}
        return units
