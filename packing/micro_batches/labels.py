"""Labels of packed batches and micro-batches, in the conventions that trainers have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch

from trajpack.kernels.rearrange.shift import Direction, End, drop_tokens, end_tokens, shift_tokens
from trajpack.packing.micro_batches.logprobs import logprobs_of_rows
from trajpack.packing.ragged import Ragged, gathered

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.micro_batches.micro_batch import MicroBatch

Convention: TypeAlias = Literal["next", "own", "drop_last"]


class LabelMethods:
    """Methods of `PackedBatch` and `MicroBatch`."""

    @property
    def _tokens(self) -> PackedBatch | MicroBatch:
        return cast("PackedBatch | MicroBatch", self)

    @property
    def _boundaries(self) -> torch.Tensor:
        """Boundaries of sequences in memory, padding included."""
        bounds: torch.Tensor = getattr(self, "cu_seqlens_padded", self._tokens.cu_seqlens)
        return bounds

    def labels(
        self, convention: Convention = "next", *, ignore: int = -100, generated_only: bool = True
    ) -> torch.Tensor:
        """Return the tokens to predict; no label crosses a boundary, and none is padding.

        Args:
            convention: Index of a token's label.

                - ``"next"``: where the model predicts the token, one place earlier. Masks,
                  advantages and rollout log-probabilities are moved to it by ``shift("left")``.
                  The convention of verl, AReaL, slime and Megatron.
                - ``"own"``: the token's own index, for models that shift by themselves, such as
                  those of Hugging Face. The first token of a sequence has none.
                - ``"drop_last"``: as ``"next"``, with all sequences one token shorter; its inputs
                  are ``drop(input_ids, "last")``. The convention of torchtitan and tinker.
            ignore: Value where there is no label.
            generated_only: Whether the tokens of `loss_mask` have labels, or all but padding.

        Returns:
            int64 ``[tokens]``; one token less for each sequence with ``"drop_last"``.

        Raises:
            ValueError: If there is no such convention.

        Cost: six small operations, a few more with ``"drop_last"``. No synchronisation.

        Example:
            >>> import trajpack
            >>> turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory(name, [turn]) for name in "ab"])
            >>> batch.labels()
            tensor([-100,    3,    4, -100, -100,    3,    4, -100])
            >>> batch.labels("own")
            tensor([-100, -100,    3,    4, -100, -100,    3,    4])
            >>> batch.labels("drop_last")
            tensor([-100,    3,    4, -100,    3,    4])
        """
        batch = self._tokens
        counted = batch.loss_mask if generated_only else batch.prompt_mask | batch.loss_mask
        own = torch.where(counted, batch.input_ids, ignore)
        if convention == "next":
            return self.shift(own, "left", ignore)
        if convention == "drop_last":
            return self.drop(own, "first")
        if convention != "own":
            raise ValueError(f"convention must be 'next', 'own' or 'drop_last', got {convention!r}")
        if not batch.num_tokens:
            return own
        return own.index_fill_(0, end_tokens(self._boundaries, batch.num_tokens, "first"), ignore)

    def shift(
        self, x: torch.Tensor, direction: Direction, fill: bool | int | float = 0
    ) -> torch.Tensor:
        """Move values ``[tokens, ...]`` by one place within their sequences.

        ``"left"`` brings the next token's value, ``"right"`` that of the token before;
        see `trajpack.kernels.shift_tokens`.

        Raises:
            TypeError, ValueError: As that; also if ``x`` is ``None``, as missing advantages are.

        Cost: four small operations. No synchronisation.
        """
        self._check_given("shift", x)
        return shift_tokens(x, self._boundaries, direction, fill)

    def drop(self, x: torch.Tensor, end: End) -> torch.Tensor:
        """Return values ``[tokens, ...]`` without that of each sequence's first or last token.

        See `trajpack.kernels.drop_tokens`; boundaries are then those of
        `trajpack.kernels.rearrange.shift.dropped_boundaries`.

        Raises:
            TypeError, ValueError: As that; also if ``x`` is ``None``, as missing advantages are.

        Cost: a dozen small operations. No synchronisation.
        """
        self._check_given("drop", x)
        lengths = getattr(self, "padded_seqlens", self._tokens.seqlens)
        return drop_tokens(x, self._boundaries, end, sum(length > 0 for length in lengths))

    def logprob_rows(self, most: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places whose output predicts each generated token, and those tokens.

        A token's place is the one before it in its sequence, so ``rows + 1`` are the places of the
        tokens themselves: ``batch.advantages[rows + 1]``. Tokens are in the order of the batch.

        Args:
            most: Length of the result, for shapes that must not change; `num_generated` if None.
                Rows that are left over are -1, with token 0, as those of a micro-batch are whose
                sequence was cut off.

        Returns:
            ``rows`` and ``targets``, int64 ``[num_generated]``: arguments of
            `trajpack.kernels.token_logprobs`.

        Raises:
            ValueError: If ``most`` is below `num_generated`.

        Cost: a sum over ``[tokens]`` and some small operations over the result. No synchronisation.

        Example:
            >>> import trajpack
            >>> turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory(name, [turn]) for name in "ab"])
            >>> batch.logprob_rows()
            (tensor([1, 2, 5, 6]), tensor([3, 4, 3, 4]))
        """
        batch = self._tokens
        num_rows = batch.num_generated if most is None else most
        if num_rows < batch.num_generated:
            raise ValueError(
                f"logprob_rows: most must be at least {batch.num_generated}, got {most}"
            )
        if not batch.num_tokens:
            empty = batch.input_ids.new_full((num_rows,), -1)
            return empty, empty.clamp(min=0)
        wanted = torch.arange(1, num_rows + 1, device=batch.input_ids.device)
        place = torch.searchsorted(batch.loss_mask.cumsum(0), wanted)
        is_place = place < batch.num_tokens
        targets = batch.input_ids[place.clamp(max=batch.num_tokens - 1)]
        return torch.where(is_place, place - 1, -1), targets.where(is_place, 0)

    def ragged(self, name: str, most: int | None = None) -> Ragged:
        """Return the values of a ragged field for each row of `logprob_rows`, in that order.

        Args:
            name: Name of a `TokenField` with ``ragged=True``.
            most: As of `logprob_rows`. Rows that are left over have no values. On a device the last
                of them has those of generated tokens that are no rows: `num_values` are known, and
                no others.

        Returns:
            ``cu`` int32 ``[num_generated + 1]`` and ``values`` ``[num_values, *shape]``.

        Raises:
            ValueError: If there is no such field; see also `logprob_rows`.

        Cost: that of `logprob_rows`, and a dozen small operations. No synchronisation where `pack`
            made the batch, `PackedBatch.with_advantages` included; of any other batch as
            `PackedBatch.value_lens`.
        """
        return self._ragged_at(name, self.logprob_rows(most)[0])

    def values_of_tokens(self, name: str) -> Ragged:
        """Return the values of a ragged field for each token of `fields`, in their order.

        Cost: a dozen small operations, and that of `PackedBatch.value_lens`.
        """
        return self._gathered(name, self._tokens.fields[name])

    def _gathered(self, name: str, spans: torch.Tensor) -> Ragged:
        batch = self._tokens
        on_host = spans.device.type == "cpu"  # where the exact number costs nothing
        total = int(spans[:, 1].sum()) if on_host else batch.num_values[name]
        return gathered(spans, batch.ragged_values[name], total)

    def _ragged_at(self, name: str, rows: torch.Tensor) -> Ragged:
        batch = self._tokens
        if name not in batch.ragged_values:
            known = sorted(batch.ragged_values)
            raise ValueError(f"ragged: name must be that of a ragged field, {known}, got {name!r}")
        spans = batch.fields[name]
        if not batch.num_tokens:
            spans = spans.new_zeros(1, 2)
        # the first token of a batch, which was not generated, has no values
        return self._gathered(name, spans[rows + 1])

    def logprobs(
        self,
        hidden: torch.Tensor,
        lm_head: torch.Tensor | torch.nn.Module | None = None,
        *,
        entropy: bool = False,
        most: int | None = None,
        **options: Any,
    ) -> Any:
        """Return the log-probabilities of the generated tokens from hidden states or logits.

        Only the rows of `logprob_rows` go through the LM head, and their logits are never in memory
        at once: `trajpack.kernels.token_logprobs`.

        Args:
            hidden: ``[tokens, H]`` or ``[1, tokens, H]``: the output of the model's decoder for
                `model_inputs`, such as ``model.model(**batch.model_inputs())[0]``. Without
                ``lm_head`` the logits, ``[tokens, V]`` or ``[1, tokens, V]``.
            lm_head: ``[V, H]``, or a module with ``weight`` and perhaps ``bias``, such as
                ``model.lm_head``.
            entropy: Whether to return entropies too.
            most: As of `logprob_rows`.
            options: ``temperature``, ``softcap``, ``support``, ``group`` and ``impl`` of
                `trajpack.kernels.token_logprobs`; with logits ``temperature`` alone. ``support``
                may be the name of a ragged field.

        Returns:
            ``[num_generated]``, with ``entropy`` a pair of such, in the order of `logprob_rows`:
            float32, float64 of float64. Rows that are left over have log-probability and entropy 0,
            without a gradient.

        Raises:
            TypeError, ValueError: As `trajpack.kernels.token_logprobs`; also if ``hidden`` has not
                one row for each token.

        Cost: as those two. With logits, a copy of the rows of `logprob_rows` and their softmax.

        Example:
            >>> import torch, trajpack
            >>> turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory("a", [turn])])
            >>> batch.logprobs(torch.zeros(4, 8), torch.nn.Linear(8, 5, bias=False))
            tensor([-1.6094, -1.6094], grad_fn=<WhereBackward0>)
        """
        rows, targets = self.logprob_rows(most)
        if isinstance(support := options.get("support"), str):
            options["support"] = self._ragged_at(support, rows)
        found = logprobs_of_rows(
            hidden, lm_head, rows.clamp(min=0), targets,
            num_places=self._tokens.num_tokens, entropy=entropy, **options,
        )  # fmt: skip
        kept = tuple(torch.where(rows >= 0, one, 0.0) for one in found)
        return kept if entropy else kept[0]

    def _check_given(self, op: str, x: torch.Tensor | None) -> None:
        if x is None and self._tokens.advantages is None:
            raise TypeError(
                f"{op}: x must be a tensor, got None; the batch has no advantages: "
                "call with_advantages first"
            )
