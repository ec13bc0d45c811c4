"""`Entries`: the generated tokens of trees as a table, and what they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from trajpack.packing.batch.tables import PackTables
from trajpack.packing.micro_batches.cutting import Lengths, lengths_of
from trajpack.packing.token_fields import TokenField

if TYPE_CHECKING:
    from trajpack.packing.credit.advantages import Unit


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Entries:
    """Generated tokens of turns, each once, turn after turn; several may lie on one node.

    Attributes:
        input_ids: int64 ``[entries]``: token ids.
        node: int64 ``[entries]``: node of each entry.
        turn_ids: int32 ``[entries]``: turn of the batch that generated the token.
        loss_mask: bool ``[entries]``: True on entries that are trained: all at first.
        rollout_logprobs: float32 ``[entries]``: log-probability of the sampling policy.
        policy_versions: int32 ``[entries]``: version of the weights that sampled the token.
        returns: float32 ``[entries]``: return of the entry's turn, or that of an estimator.
        advantages: float32 ``[entries]``; ``None`` at first.
        fields: ``[entries, *shape]`` each: extra fields with rows for generated tokens, by name;
            of a micro-batch also the caller's tensors.
        ragged_values: What the rows of ragged fields refer to, see `PackedBatch.ragged_values`.
        value_counts: Values of each ragged field, and entries without any.
    """

    input_ids: torch.Tensor
    node: torch.Tensor
    turn_ids: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    policy_versions: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor | None = None
    fields: Mapping[str, torch.Tensor]
    ragged_values: Mapping[str, torch.Tensor]
    value_counts: Mapping[str, tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        """Number of entries."""
        return self.input_ids.shape[0]

    @property
    def num_generated(self) -> int:
        """Number of entries, all of which were generated."""
        return self.num_tokens

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.input_ids.device

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by the names of their fields, without those in `fields`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BatchEntries(Entries):
    """Entries of a `TreeBatch`, and the turns and trajectories that they belong to.

    Fields of turns, trajectories and metrics are those of a `PackedBatch`. Of its tokens there are
    the entries alone: `turn_spans` and `cu_generated` are boundaries of entries. `turn_sequence`
    are chains: the sequences of layout ``"merged"``.
    """

    turn_rewards: torch.Tensor
    turn_returns: torch.Tensor
    turn_truncated: torch.Tensor
    turn_version_start: torch.Tensor
    turn_version_end: torch.Tensor
    turn_stop_reasons: torch.Tensor
    turn_sequence: torch.Tensor
    turn_spans: torch.Tensor
    cu_generated: torch.Tensor
    cu_turns: torch.Tensor
    group_ids: torch.Tensor
    truncated: torch.Tensor
    token_fields: tuple[TokenField, ...]
    num_groups: int
    ids: tuple[str, ...]
    groups: tuple[str | None, ...]
    task_ids: tuple[int | None, ...]
    birth_times_ms: tuple[int | None, ...]
    turn_discounts: tuple[float, ...]
    truncated_as_given: tuple[bool | None, ...]
    tables: PackTables
    metrics: torch.Tensor | None = None
    metric_names: tuple[str, ...] = ()

    @property
    def num_turns(self) -> int:
        """Turns of all trajectories."""
        return self.turn_rewards.shape[0]

    @property
    def turn_begin(self) -> torch.Tensor:
        """int32 ``[turns]``: first entry of each turn."""
        return self.turn_spans[:, 0]

    @cached_property
    def host_lengths(self) -> Lengths:
        """Entries of the turns, and the first of each, as int64 arrays on the host."""
        return lengths_of(self.tables.generated_lens)

    def spread(self, x: torch.Tensor, of: Unit) -> torch.Tensor:
        """Return values of trajectories, turns or entries at the entries.

        As `PackedBatch.spread`, for estimators of your own.
        """
        from trajpack.packing.credit.advantages import spread_over_tokens

        return spread_over_tokens(self, x, of)
