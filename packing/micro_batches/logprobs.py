"""Generated tokens: the places whose output predicts them, their values and log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.logprobs.token_logprobs import (
    FLOATS,
    TokenSets,
    temperatures,
    token_logprobs,
)
from trajpack.kernels.rearrange.repeat_rows import repeat_rows
from trajpack.kernels.validation import check_indices, check_tensor
from trajpack.packing.ragged import Ragged, gathered

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.micro_batches.micro_batch import MicroBatch
    from trajpack.packing.tree.entries import Entries

Head: TypeAlias = torch.Tensor | torch.nn.Linear
"""LM head: its weight ``[V, H]``, or a linear layer."""
Predictions: TypeAlias = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Number of places, rows and targets as of `LogprobMethods.logprob_rows`, and the row of each
generated token; None where each has its own."""


class LogprobMethods:
    """Methods of `PackedBatch` and `MicroBatch`; of `TreeBatch` and `TreeMicroBatch` in part."""

    @property
    def _generated(self) -> PackedBatch | MicroBatch | Entries:
        """The batch whose fields have a row for each generated token."""
        return cast("PackedBatch | MicroBatch", self)

    def _predictions(self, most: int | None, *, each: bool) -> Predictions:
        """Return what predicts the generated tokens; with ``each`` a row for each of them."""
        del each  # as it is anyway
        return self._generated.num_tokens, *self.logprob_rows(most), None

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

        Example:
            >>> import trajpack
            >>> turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory(name, [turn]) for name in "ab"])
            >>> batch.logprob_rows()
            (tensor([1, 2, 5, 6]), tensor([3, 4, 3, 4]))
        """
        batch = self._generated
        size = batch.num_generated + left_over("logprob_rows", most, batch.num_generated)
        # the first token of a batch was not generated: its place is that of what is left over
        place = torch.nonzero_static(batch.loss_mask, size=size, fill_value=0)[:, 0]
        ids = batch.input_ids if batch.num_tokens else batch.input_ids.new_zeros(1)
        return place - 1, torch.where(place > 0, ids[place], 0)

    def ragged(self, name: str, most: int | None = None) -> Ragged:
        """Return the values of a ragged field for each row of `logprob_rows`, in that order.

        Args:
            name: Name of a `TokenField` with ``ragged=True``.
            most: As of `logprob_rows`. Rows that are left over have no values. On a device the last
                of them has those of generated tokens that are no rows: `value_counts` are known,
                and no others.

        Returns:
            ``cu`` int32 ``[num_generated + 1]`` and ``values`` ``[all, *shape]``.

        Raises:
            ValueError: If there is no such field; see also `logprob_rows`.
        """
        spans = self._spans(name)
        spans = spans if spans.shape[0] else spans.new_zeros(1, 2)
        return self._gathered(name, spans[self.logprob_rows(most)[0] + 1])

    def values_of_tokens(self, name: str) -> Ragged:
        """Return the values of a ragged field for each token of `fields`, in their order."""
        return self._gathered(name, self._spans(name))

    def compact_fields(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the extra fields of generated tokens and `ragged_values` in their order."""
        fields, values = dict(self._generated.fields), {}
        for name in self._generated.ragged_values:
            cu, values[name] = self.values_of_tokens(name)
            counts = fields[name][:, 1]
            fields[name] = torch.stack([torch.where(counts > 0, cu[:-1], 0), counts], 1)
        return fields, values

    def _spans(self, name: str) -> torch.Tensor:
        batch = self._generated
        if name not in batch.ragged_values:
            known = sorted(batch.ragged_values)
            raise ValueError(f"ragged: name must be that of a ragged field, {known}, got {name!r}")
        return batch.fields[name]

    def _gathered(self, name: str, spans: torch.Tensor) -> Ragged:
        batch = self._generated
        on_host = spans.device.type == "cpu"  # where the exact number costs nothing
        total = int(spans[:, 1].sum()) if on_host else batch.value_counts[name][0]
        return gathered(spans, batch.ragged_values[name], total)

    def logprobs(  # noqa: PLR0913 - as trajpack.kernels.token_logprobs
        self,
        hidden: torch.Tensor,
        lm_head: Head | None = None,
        *,
        tokens: str | TokenSets | None = None,
        entropy: bool = False,
        most: int | None = None,
        temperature: float | torch.Tensor = 1.0,
        softcap: float | None = None,
        support: str | TokenSets | None = None,
        group: Any = None,
        keep_logits: int | None = None,
        impl: Impl = "auto",
    ) -> Any:
        """Return the log-probabilities of the generated tokens from hidden states or logits.

        Only the places that predict them, of a batch tokens and of a tree nodes, go through the LM
        head, and their logits are never in memory at once: `trajpack.kernels.token_logprobs`.
        Entries on one node share what is computed, and their gradients are added in the order of
        the entries; with tensors of ``tokens``, ``support`` or temperatures each has its own row.

        Args:
            hidden: ``[places, H]`` or ``[1, places, H]``: the output of the model's decoder for
                `model_inputs`, such as ``model.model(**batch.model_inputs())[0]``. Without
                ``lm_head`` the logits, ``[places, V]`` or ``[1, places, V]``.
            lm_head: ``[V, H]``, or a ``torch.nn.Linear`` such as ``model.lm_head``.
            tokens: Other tokens in place of each generated one, such as a teacher's, see
                `trajpack.kernels.topk_kl`: the name of a ragged field, or
                ``[num_generated + 1]`` boundaries and tokens.
            entropy: Whether to return entropies too.
            most: Length of the result, for shapes that must not change, as of `logprob_rows`.
            temperature: One number, or float32 ``[num_generated]``.
            softcap: As of `trajpack.kernels.token_logprobs`.
            support: As there; or the name of a ragged field.
            group: As there.
            keep_logits: As there.
            impl: As there.

        Returns:
            ``[num_generated]``, of trees ``[entries]``, in the order of `logprob_rows` or of the
            entries; with ``tokens`` ``[P]`` of them, and ``[num_generated]`` of all others
            together. With ``entropy`` also ``[num_generated]``. float32, float64 of float64. Rows
            that are left over have 0, without a gradient.

        Raises:
            TypeError, ValueError: As `trajpack.kernels.token_logprobs`; also if ``hidden`` has not
                one row for each place, if ``lm_head`` computes more than its weight and bias say,
                or if logits meet what needs hidden states.

        Example:
            >>> import torch, trajpack
            >>> turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory("a", [turn])])
            >>> batch.logprobs(torch.zeros(4, 8), torch.nn.Linear(8, 5, bias=False))
            tensor([-1.6094, -1.6094], grad_fn=<WhereBackward0>)
        """
        sets = [one for one in (tokens, support) if one is not None]
        each = bool(sets) or isinstance(temperature, torch.Tensor)
        num_places, rows, targets, owners = self._predictions(most, each=each)
        if isinstance(hidden, torch.Tensor) and hidden.ndim == 3 and hidden.shape[0] == 1:
            hidden = hidden[0]
        name = "logits" if lm_head is None else "hidden"
        check_tensor("logprobs", name, hidden, dtypes=FLOATS, ndim=2, entries=num_places)
        is_row, rows = rows >= 0, rows.clamp(min=0)
        if isinstance(temperature, torch.Tensor) and temperature.shape == rows.shape:
            temperature = temperature.where(is_row, 1.0)  # that of rows left over may be 0
        if lm_head is None:
            if softcap is not None or sets or group is not None:
                wrong = "tokens, softcap, support and group need hidden states and lm_head"
                raise TypeError(f"logprobs: {wrong}, got logits")
            found = _of_logits(hidden, rows, targets, temperature, entropy=entropy)
        else:
            (weight, bias), every = head_of(lm_head), False
            if isinstance(support, str):
                every = not self._generated.value_counts.get(support, (0, 0))[1]
                support = self.ragged(support, most)
            if isinstance(tokens, str):
                tokens = self.ragged(tokens, most)
            found = token_logprobs(
                hidden, weight, rows, targets if tokens is None else tokens,
                bias=bias, temperature=temperature, softcap=softcap, entropy=entropy,
                support=support, every_row_supported=every, group=group,
                keep_logits=keep_logits, impl=impl,
            )  # fmt: skip
        several = found if isinstance(found, tuple) else (found,)
        of_pairs, of_rows = several[: tokens is not None], several[tokens is not None :]
        of_rows = tuple(torch.where(is_row, one, 0.0) for one in of_rows)
        if owners is not None:
            of_rows = tuple(repeat_rows(one, owners) for one in of_rows)
        return (*of_pairs, *of_rows) if entropy or of_pairs else of_rows[0]


def head_of(lm_head: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of an LM head.

    Raises:
        TypeError: If it is neither a tensor nor a ``torch.nn.Linear``, or has hooks, unless its
            weight is a ``DTensor``: what else it computes would be left out without an error.
    """
    if isinstance(lm_head, torch.Tensor):
        return lm_head, None
    is_linear = getattr(type(lm_head), "forward", None) is torch.nn.Linear.forward
    hooks = is_linear and (lm_head._forward_hooks or lm_head._forward_pre_hooks)
    if not is_linear or (hooks and not hasattr(lm_head.weight, "device_mesh")):
        raise TypeError(
            "lm_head must be a weight [V, H] or a torch.nn.Linear without hooks, got "
            f"{type(lm_head).__name__}{' with hooks' if hooks else ''}: only weight and bias are "
            "read; pass model.lm_head of a model, and merge an adapter such as LoRA before, or "
            "leave the head out of it"
        )
    return lm_head.weight, lm_head.bias


def left_over(op: str, most: int | None, least: int) -> int:
    """Return how many more than ``least`` are asked for."""
    if most is not None and most < least:
        raise ValueError(f"{op}: most must be at least {least}, got {most}")
    return 0 if most is None else most - least


def _of_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor,
    *,
    entropy: bool,
) -> tuple[torch.Tensor, ...]:
    check_indices("logprobs", "tokens", targets, logits.shape[1])
    of_rows = temperatures("logprobs", temperature, rows)
    chosen = repeat_rows(logits, rows)
    chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
    every = (chosen if of_rows is None else chosen / of_rows[:, None]).log_softmax(-1)
    logprobs = every.gather(1, targets[:, None])[:, 0]
    if not entropy:
        return (logprobs,)
    # a token of probability 0 adds 0, not 0 times infinity
    return logprobs, -(every.exp() * every.masked_fill(every == -torch.inf, 0.0)).sum(-1)
