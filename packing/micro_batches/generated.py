"""`Generated`: the generated tokens of a batch, a micro-batch or a tree, a row for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from trajpack.kernels.validation import check_tensor
from trajpack.packing.ragged import ragged_rows

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.micro_batches.micro_batch import MicroBatch
    from trajpack.packing.tree.entries import BatchEntries

B = TypeVar("B", "PackedBatch", "BatchEntries")


def unknown(name: str, known: list[str]) -> KeyError:
    """Return the error for a field that is not there."""
    return KeyError(
        f"no {name!r} among extra fields and tensors that were sent: {known}; send it by "
        f"micro_batches(plan, tensors={{{name!r}: ...}})"
    )


class Fields(dict[str, torch.Tensor]):
    """Extra fields and tensors by name; the error for an unknown name lists the known ones."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise unknown(name, sorted(self))


class Distinct(NamedTuple):
    """Predicted places of a tree, each once."""

    predicted_by: torch.Tensor
    """int64 ``[places]``: node whose output predicts each."""
    input_ids: torch.Tensor
    """int64 ``[places]``: tokens."""
    owners: torch.Tensor
    """int64 ``[rows]``: place of each row of `Generated`."""


class Generated:
    """Generated tokens in the order of the log-probabilities, of all that a model computes.

    `PackedBatch.generated` and `MicroBatch.generated` have a row for each generated token, those of
    trees a row for each entry. A loss over these tensors and the log-probabilities of
    `PackedBatch.logprobs` serves all of them.

    A token is trained unless `PackedBatch.with_loss_mask` dropped it or its micro-batch was cut off
    before it. A token that is not trained keeps its row: its log-probability is 0 without a
    gradient, its turn and version are -1, and all else but `input_ids` is 0. So it has no weight in
    a sum, and rows that were computed before tokens were dropped still fit.

    Each access of `PackedBatch.generated` makes a new one: keep it in a variable.

    Attributes:
        place: int64 ``[rows]``: index of the token in the batch, or its node in a tree.
        predicted_by: int64 ``[rows]``: place whose output predicts the token: the one before, of a
            tree the parent. Both are 0 of a token that is not in the micro-batch.
        loss_mask: bool ``[rows]``: whether the token is trained.

    Example:
        >>> import trajpack
        >>> turn = trajpack.Turn([1, 2], [3, 4, 5], [-0.5, -9.0, -0.25], reward=1.0)
        >>> batch = trajpack.pack([trajpack.Trajectory("a", [turn])]).with_advantages("grpo")
        >>> weights = {"weights": batch.loss_weights("token_mean")}
        >>> batch = batch.with_loss_mask(batch.rollout_logprobs > -5)
        >>> generated = batch.select([0], tensors=weights).generated
        >>> generated.input_ids, generated.rollout_logprobs
        (tensor([3, 4, 5]), tensor([-0.5000,  0.0000, -0.2500]))
        >>> generated["weights"]
        tensor([0.3333, 0.0000, 0.3333])
    """

    def __init__(
        self,
        columns: Any,
        place: torch.Tensor,
        predicted_by: torch.Tensor,
        *,
        index: torch.Tensor | None = None,
        fields: Mapping[str, torch.Tensor] | None = None,
        distinct: Callable[[], Distinct] | None = None,
    ) -> None:
        """Rows ``index`` of ``columns``, all if None, and ``fields`` over places."""
        self._columns, self._index, self._fields = columns, index, fields or {}
        self.place, self.predicted_by, self.distinct = place, predicted_by, distinct
        self.loss_mask = self._rows(columns.loss_mask)

    def __len__(self) -> int:
        """Number of rows: `PackedBatch.num_generated`."""
        return self.place.shape[0]

    def __repr__(self) -> str:
        return f"Generated({len(self):,} tokens; {self.names()}; {self.place.device})"

    @property
    def input_ids(self) -> torch.Tensor:
        """int64 ``[rows]``: tokens, trained or not; 0 if it is not in the micro-batch."""
        ids = self._rows(self._columns.input_ids)
        return ids if self._index is None else torch.where(self._index > 0, ids, 0)

    @property
    def advantages(self) -> torch.Tensor:
        """float32 ``[rows]``: advantages; a `ValueError` if the batch has none."""
        if self._columns.advantages is None:
            raise ValueError("advantages: the batch has none, call with_advantages first")
        return self.of(self._columns.advantages)

    @property
    def returns(self) -> torch.Tensor:
        """float32 ``[rows]``: returns."""
        return self.of(self._columns.returns)

    @property
    def rollout_logprobs(self) -> torch.Tensor:
        """float32 ``[rows]``: log-probabilities of the policy that sampled."""
        return self.of(self._columns.rollout_logprobs)

    @property
    def policy_versions(self) -> torch.Tensor:
        """int32 ``[rows]``: versions of the weights that sampled the tokens."""
        return torch.where(self.loss_mask, self._rows(self._columns.policy_versions), -1)

    @property
    def turn_ids(self) -> torch.Tensor:
        """int32 ``[rows]``: turns of the tokens, indices of the turn tensors of the batch."""
        return torch.where(self.loss_mask, self._rows(self._columns.turn_ids), -1)

    def names(self) -> list[str]:
        """Return the names that ``generated[name]`` takes."""
        return sorted({*self._columns.fields, *self._fields})

    def __getitem__(self, name: str) -> Any:
        """Return a tensor that was sent with the micro-batch, or an extra field.

        Returns:
            ``[rows, ...]``. Of a ragged field a `Ragged` with the values of all rows, those that
            are not trained included. On a device the last row of a micro-batch that was cut off
            has the values of tokens that are not in it, because numbers of values are not read.

        Raises:
            KeyError: If there is no such name.
        """
        columns = self._columns
        if name in columns.ragged_values:
            return ragged_rows(columns, name, self._index)
        if name in columns.fields:
            return self.of(columns.fields[name])
        if name in self._fields:
            return self._trained(self._fields[name][self.place])
        raise unknown(name, self.names())

    def all_have_values(self, name: str) -> bool:
        """Return whether the host knows that each generated token has values of a ragged field."""
        return not self._columns.value_counts.get(name, (0, 1))[1]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of a tensor over the tokens of the batch, or over the entries of a tree.

        For what is not sent, such as ``generated.of(batch.loss_weights("token_mean"))``.

        Args:
            x: ``[tokens, ...]``, of a tree ``[entries, ...]``.

        Returns:
            ``[rows, ...]``, 0 where the token is not trained; differentiable.

        Raises:
            TypeError: If ``x`` is no tensor.
            ValueError: If it has another length or device.
        """
        length = self._columns.input_ids.shape[0]
        check_tensor("of", "x", x, or_more=True, device=self.place.device, entries=length)
        return self._trained(self._rows(x))

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._index is None else x[self._index]

    def _trained(self, rows: torch.Tensor) -> torch.Tensor:
        mask = self.loss_mask.reshape(-1, *[1] * (rows.ndim - 1))
        return torch.where(mask, rows, rows.new_zeros(()))


def generated_of(batch: PackedBatch | MicroBatch) -> Generated:
    """Return the generated tokens of a batch or a micro-batch, without reading a device."""
    # the first token was not generated: it is the place of rows without a token
    is_generated, size = batch.turn_ids >= 0, batch.num_generated
    place = torch.nonzero_static(is_generated, size=size, fill_value=0)[:, 0]
    return Generated(batch, place, (place - 1).clamp_(min=0), index=place)


def with_loss_mask(  # noqa: D417 - a method of batches
    batch: B, keep: torch.Tensor
) -> B:
    """Return the batch with a `loss_mask` that is False where ``keep`` is: drop these tokens.

    Tokens that are dropped are not trained: `Generated` says what they have. They stay in the
    sequences, and in `num_generated`. Call it after `with_advantages`.

    Args:
        keep: bool ``[tokens]``, such as of tokens that are not too old.

    Raises:
        TypeError: If ``keep`` is not bool.
        ValueError: If it has another shape or device.

    Example:
        >>> import trajpack
        >>> turn = trajpack.Turn([1], [2, 3], [-0.5, -9.0])
        >>> batch = trajpack.pack([trajpack.Trajectory("a", [turn])])
        >>> batch = batch.with_loss_mask(batch.rollout_logprobs > -5)
        >>> batch.loss_weights("token_mean"), batch.generated.loss_mask
        (tensor([0., 1., 0.]), tensor([ True, False]))
    """
    check_tensor(
        "with_loss_mask", "keep", keep, dtypes=(torch.bool,), device=batch.device,
        entries=batch.num_tokens,
    )  # fmt: skip
    return dataclasses.replace(batch, loss_mask=batch.loss_mask & keep)
