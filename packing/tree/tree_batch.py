"""`TreeBatch`: trajectories as trees of tokens on one device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, cast, get_args

import torch

from trajpack.kernels.scan.observations import PASSING
from trajpack.packing.batch.batch import PackedBatch, SequenceOf
from trajpack.packing.micro_batches.micro_batch import record_storages
from trajpack.packing.tree.attention import visible
from trajpack.packing.tree.huggingface import tree_table

if TYPE_CHECKING:
    from trajpack.kernels.corrections.importance_weights import Correction
    from trajpack.kernels.corrections.loss_weights import Aggregation
    from trajpack.kernels.dispatch import Impl
    from trajpack.packing.credit.estimators import Estimator
    from trajpack.packing.types import Trajectory

Share: TypeAlias = Literal["once", "sum", "mean"]
"""Weight of an entry, see `TreeBatch.entry_weights`."""
SHARES: tuple[str, ...] = get_args(Share)


def check_share(share: str) -> None:
    """Raise unless ``share`` is known."""
    if share not in SHARES:
        known = ", ".join(repr(name) for name in SHARES)
        raise ValueError(f"share must be one of {known}, got {share!r}")


class Entries(PackedBatch):
    """Generated tokens of a `TreeBatch`, each once, as a packed batch without prompts.

    Tensors over tokens have an entry for each generated token, turn after turn, in the order of
    `cu_generated`. `position_ids` are the nodes of the entries, `sequence_ids` and `turn_sequence`
    the chains that layout ``"merged"`` would have as sequences; `cu_seqlens` are the boundaries of
    the turns, as `cu_generated` is. Estimators, loss weights and corrections read the entries as
    they read any batch.
    """

    def unpack(self) -> NoReturn:
        """Raise a `TypeError`: entries have no prompts."""
        raise TypeError("entries have no prompts: call TreeBatch.unpack")

    def save(self, path: str | os.PathLike[str]) -> NoReturn:
        """Raise a `TypeError`: entries have no prompts."""
        raise TypeError("entries have no prompts: call TreeBatch.save")

    def model_inputs(self) -> NoReturn:
        """Raise a `TypeError`: the model reads the nodes."""
        raise TypeError("entries are no input of a model, the nodes of a TreeBatch are")


@dataclass(frozen=True, eq=False, repr=False)
class TreeBatch:
    """Trajectories as a forest in which each distinct prefix is stored once.

    Made by `trajpack.pack_tree` or `TrajectoryBuffer.pack_tree`. A node is a token behind all
    tokens before it: turns share a node if they agree up to there, in tokens and in every extra
    field that has rows for all tokens. Nodes are numbered depth first, so a subtree is an interval.
    An entry is a generated token of a turn. Several entries may lie on one node, each with
    log-probability, version, return and advantage of its own.

    Tensors over nodes have shape ``[nodes]``, tensors over entries ``[entries]``. The order of the
    trees and branches is that of their token ids; the entries are in the order of the turns.
    """

    input_ids: torch.Tensor
    """int64 ``[nodes]``: token ids."""
    position_ids: torch.Tensor
    """int64 ``[nodes]``: depths, 0 at a root: the position of the token in its sequence."""
    tree_end: torch.Tensor
    """int32 ``[nodes]``: first node behind the node's subtree. A query at node q attends to the
    key at node k where ``k <= q < tree_end[k]``."""
    tree_parent: torch.Tensor
    """int32 ``[nodes]``: node of the token before, whose output predicts this one; -1 at a root."""
    loss_mask: torch.Tensor
    """bool ``[nodes]``: True where at least one entry lies."""
    cu_seqlens: torch.Tensor
    """int32 ``[trees + 1]``: boundaries of the trees."""
    turn_prompt_node: torch.Tensor
    """int32 ``[turns]``: node of the last token of each turn's prompt."""
    fields: Mapping[str, torch.Tensor]
    """``[nodes, *shape]`` each: extra fields with rows for all tokens, by name. The others are
    in ``entries.fields``."""
    entries: Entries
    """Entries, turns and trajectories: all other tensors of a `PackedBatch`."""
    seqlens: tuple[int, ...]
    """Nodes of each tree."""
    share: Share
    """Weight of an entry, see `entry_weights`."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes: tokens that a model computes."""
        return self.input_ids.shape[0]

    @property
    def num_entries(self) -> int:
        """Number of generated tokens of all turns."""
        return self.entries.num_tokens

    @property
    def num_turns(self) -> int:
        """Turns of all trajectories."""
        return self.entries.num_turns

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.input_ids.device

    @property
    def entry_node(self) -> torch.Tensor:
        """int64 ``[entries]``: node of each entry."""
        return self.entries.position_ids

    @cached_property
    def entry_parent(self) -> torch.Tensor:
        """int64 ``[entries]``: node whose output predicts each entry; never -1.

        Cost: one gather and one conversion at first access.
        """
        return self.tree_parent[self.entry_node].long()

    @property
    def rollout_logprobs(self) -> torch.Tensor:
        """float32 ``[entries]``: log-probability of the sampling policy."""
        return self.entries.rollout_logprobs

    @property
    def policy_versions(self) -> torch.Tensor:
        """int32 ``[entries]``: version of the weights that sampled the token."""
        return self.entries.policy_versions

    @property
    def returns(self) -> torch.Tensor:
        """float32 ``[entries]``: return of the entry's turn, or that of an estimator."""
        return self.entries.returns

    @property
    def advantages(self) -> torch.Tensor | None:
        """float32 ``[entries]``: set by `with_advantages`, ``None`` at first."""
        return self.entries.advantages

    @cached_property
    def entry_weights(self) -> torch.Tensor:
        """float32 ``[entries]``: how often each entry counts in `loss_weights`.

        A row is a sequence of layout ``"merged"``; a conversation that branches has several.

        - ``"once"``: 1. A token counts once for each time that it was sampled, so the gradient is
          that of layout ``"merged"``, and that of separate turns.
        - ``"sum"``: the number of rows of the entry's trajectory that go through its node, as if
          each row were trained in all tokens that its trajectory generated. Entries of one
          trajectory on one node divide the number.
        - ``"mean"``: the same, divided by the number of rows of the trajectory.

        Cost: computed at first access, without synchronisation; ``"once"`` is one fill, the others
            are about 20 small operations, two of them sorts of ``[entries]`` numbers.
        """
        if self.share == "once" or not self.num_entries:
            return torch.ones_like(self.rollout_logprobs)
        return _weights_of_rows(self)

    def with_advantages(  # noqa: PLR0913 - as PackedBatch.with_advantages
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
    ) -> TreeBatch:
        """Return the batch with ``advantages``, ``returns`` and ``metrics`` of an estimator.

        `PackedBatch.with_advantages` of the entries: an entry gets the bits that the token has in
        layout ``"merged"`` (up to rounding if advantages are whitened). `share` has no influence.

        Args:
            estimator: As there. Conventions in which tokens that were not generated are steps
                (``observation="ignore"``, ``"multiply"``, ``"reset"``) are refused.
            values: ``[entries]`` floats, value of the state before each entry: that of a causal
                critic at `entry_parent`.
            ref_logprobs: ``[entries]`` floats of the reference policy.
            logprobs: ``[entries]`` floats of the trained policy before its update.
            bootstrap: As there.
            scores: As there.
            state_ids: As there.
            all_reduce: As there.
            impl: See `trajpack.kernels`.

        Raises:
            TypeError: If an input is of a wrong type.
            ValueError: As there; also if the estimator needs tokens that were not generated.

        Cost: as there.
        """
        observation = getattr(estimator, "observation", PASSING[0])
        if observation not in PASSING:
            raise ValueError(
                f"with_advantages: a tree has no entries for observation={observation!r}, in which "
                "tokens that were not generated are steps; compute it with layout 'merged'"
            )
        entries = self.entries.with_advantages(
            estimator, values, ref_logprobs, logprobs=logprobs, bootstrap=bootstrap, scores=scores,
            state_ids=state_ids, all_reduce=all_reduce, impl=impl,
        )  # fmt: skip
        return dataclasses.replace(self, entries=cast("Entries", entries))

    def loss_weights(
        self,
        aggregation: Aggregation,
        *,
        per: SequenceOf = "trajectory",
        denominator: float | torch.Tensor | None = None,
        truncated: Literal["keep", "mask"] = "keep",
    ) -> torch.Tensor:
        """Return weights with which a plain sum over entries is the aggregated loss.

        `PackedBatch.loss_weights` of the entries, times `entry_weights`. Its denominators count
        each entry once, whatever `share` is; for another one pass ``denominator``, such as
        ``batch.entry_weights.sum()`` for ``"token_mean"``.

        Args:
            aggregation: As there.
            per: As there; a ``"row"`` is a sequence of layout ``"merged"``.
            denominator: As there.
            truncated: As there.

        Returns:
            float32 ``[entries]``; with ``share="once"`` the bits of layout ``"merged"``.

        Raises:
            ValueError: As there.

        Cost: as there; one multiplication more unless ``share`` is ``"once"``.
        """
        weights = self.entries.loss_weights(
            aggregation, per=per, denominator=denominator, truncated=truncated
        )
        return weights if self.share == "once" else weights * self.entry_weights

    def importance_weights(
        self,
        logprobs: torch.Tensor,
        correction: Correction,
        *,
        per: Literal["trajectory", "turn"] = "trajectory",
        impl: Impl = "auto",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return importance weights of the policy of ``logprobs`` over the sampling policy.

        `PackedBatch.importance_weights` of the entries.

        Args:
            logprobs: float32 ``[entries]`` of the trained policy before its update.
            correction: As there.
            per: As there.
            impl: See `trajpack.kernels`.

        Returns:
            Weights, float32 ``[entries]``, the bits of layout ``"merged"``; and metrics, as there.

        Raises:
            ValueError: As there.

        Cost: as there.
        """
        return self.entries.importance_weights(logprobs, correction, per=per, impl=impl)

    def attention_mask(
        self, dtype: torch.dtype = torch.bool, window: int | None = None
    ) -> torch.Tensor:
        """Return the mask of all pairs of nodes, for small trees and for tests.

        Args:
            dtype: ``torch.bool`` for attention that keeps scores where the mask is True
                (``"sdpa"``); a float dtype for attention that adds the mask to the scores
                (``"eager"``): 0, or the least number of the dtype.
            window: Depths that a query attends to, its own included; all if ``None``.

        Returns:
            ``[1, 1, nodes, nodes]`` of ``dtype``.

        Raises:
            TypeError: If ``dtype`` is neither bool nor a float dtype.
            ValueError: If ``window`` is below 1.

        Cost: a few operations over ``nodes²`` entries.

        Example:
            >>> import trajpack
            >>> turns = [trajpack.Turn([1], [2], [-0.5]), trajpack.Turn([1], [3], [-0.5])]
            >>> batch = trajpack.pack_tree([trajpack.Trajectory("a", turns)])
            >>> batch.attention_mask().int()[0, 0]
            tensor([[1, 0, 0],
                    [1, 1, 0],
                    [1, 0, 1]], dtype=torch.int32)
        """
        if dtype != torch.bool and not dtype.is_floating_point:
            raise TypeError(f"attention_mask: dtype must be bool or a float dtype, got {dtype}")
        if window is not None and window < 1:
            raise ValueError(f"attention_mask: window must be at least 1, got {window}")
        mask = visible(self.tree_end, self.position_ids, window)[None, None]
        if dtype == torch.bool:
            return mask
        least = torch.finfo(dtype).min
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, least)

    def model_inputs(self) -> dict[str, Any]:
        """Return keyword arguments for a Hugging Face causal model's ``forward``.

        The model needs the attention ``"trajpack_tree"``, see
        `trajpack.packing.adapters.huggingface.register_tree_attention`. Attention of another kind
        fails on these arguments. For ``"sdpa"`` replace ``attention_mask`` by
        ``batch.attention_mask()``, for ``"eager"`` by ``batch.attention_mask(dtype)`` of the
        model's dtype.

        Returns:
            ``input_ids`` and ``position_ids``, int64 ``[1, nodes]``; ``attention_mask``, int32
            ``[2, 2, 1, nodes]``: `tree_end` and depths; ``use_cache=False``.

        Cost: two small operations.
        """
        return {
            "input_ids": self.input_ids[None],
            "position_ids": self.position_ids[None],
            "attention_mask": tree_table(self.tree_end, self.position_ids),
            "use_cache": False,
        }

    def merged(self) -> PackedBatch:
        """Return the same trajectories as a batch of layout ``"merged"``, on the host.

        The batch that `trajpack.pack` makes of them, bit for bit, with the advantages, returns and
        metrics of this one.

        Cost: copies the batch to the host (synchronises), and a pass over the tokens of all chains.

        Example:
            >>> import trajpack
            >>> turns = [trajpack.Turn([1, 2], [3], [-0.5]), trajpack.Turn([1, 2], [4], [-1.0])]
            >>> batch = trajpack.pack_tree([trajpack.Trajectory("a", turns)])
            >>> batch.input_ids, batch.merged().input_ids
            (tensor([1, 2, 3, 4]), tensor([1, 2, 3, 1, 2, 4]))
        """
        from trajpack.packing.tree.merged import merged_of  # it imports this class

        return merged_of(self)

    def unpack(self) -> list[Trajectory]:
        """Return the packed trajectories, equal in every value, in their order.

        Cost: as `merged`.
        """
        return self.merged().unpack()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trajectories, their advantages and returns to a ``.safetensors`` file.

        The file is that of ``batch.merged().save(path)``, which `PackedBatch.load` reads too. It
        holds shared prefixes once for each sequence of layout ``"merged"``, and no `share`.

        Raises:
            OSError: As `PackedBatch.save`.
            ValueError: As `PackedBatch.save`.

        Cost: as `merged` and `PackedBatch.save`.
        """
        self.merged().save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], share: Share = "once") -> TreeBatch:
        """Read a file of `save`, or of a `PackedBatch` of layout ``"merged"``, to the host.

        Args:
            path: The file.
            share: As of `trajpack.pack_tree`.

        Raises:
            OSError: If the file cannot be read.
            ValueError: As `PackedBatch.load`; also if the layout is not ``"merged"``.

        Cost: as `PackedBatch.load`, and the plan of the tree again.
        """
        from trajpack.packing.tree.merged import tree_of

        check_share(share)
        return tree_of(PackedBatch.load(path), share)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeBatch:
        """Return the batch on ``device``; the same object if it is there already.

        Cost: one copy a tensor. Packing for the device is one copy in all.
        """
        entries = self.entries.to(device, non_blocking)
        if entries is self.entries:
            return self
        moved: dict[str, Any] = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name, tensor in self.node_tensors().items()
        }
        moved["fields"] = {
            name: rows.to(device, non_blocking=non_blocking) for name, rows in self.fields.items()
        }
        return dataclasses.replace(self, entries=entries, **moved)

    def node_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of nodes, trees and prompts by name, without the extra fields."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the batch from reuse while work of another stream reads it.

        See `PackedBatch.record_stream`.
        """
        record_storages([*self.node_tensors().values(), *self.fields.values()], stream)
        self.entries.record_stream(stream)

    def __len__(self) -> int:
        """Trees in the batch."""
        return len(self.seqlens)

    def __repr__(self) -> str:
        return (
            f"TreeBatch({len(self.entries.ids)} trajectories, {self.num_turns} turns in "
            f"{len(self)} trees; {self.num_nodes:,} nodes, {self.num_entries:,} entries; "
            f"share {self.share!r}; {self.device})"
        )


def _weights_of_rows(batch: TreeBatch) -> torch.Tensor:
    """Return `TreeBatch.entry_weights` for ``"sum"`` and ``"mean"``.

    A row goes through a node if its last node is in the node's subtree, an interval. Numbers of
    nodes are made distinct for each trajectory, so that one sort serves all.
    """
    entries, nodes = batch.entries, batch.num_nodes
    sizes = entries.cu_generated.diff()
    last = batch.entry_node[(entries.cu_generated[1:] - 1).clamp(min=0).long()]
    last = torch.where(sizes > 0, last, batch.turn_prompt_node.long())
    owners = entries.group_order.owners.long()
    row = entries.turn_sequence.long()
    ends = last.new_full((batch.num_turns,), -1).scatter_reduce(0, row, last, "amax")
    trajectory = owners.new_full((batch.num_turns,), -1).scatter_reduce(0, row, owners, "amax")
    step = nodes + 1  # an interval may end behind the last node
    rows = (trajectory * step + ends).sort().values  # without rows -1, before all others
    of_entry = owners[entries.turn_ids.long()]
    node = batch.entry_node
    begin, end = of_entry * step + node, of_entry * step + batch.tree_end[node]
    through = torch.searchsorted(rows, end) - torch.searchsorted(rows, begin)
    sampled = begin.sort().values
    own = torch.searchsorted(sampled, begin, right=True) - torch.searchsorted(sampled, begin)
    weights = through.float() / own
    if batch.share == "mean":
        of_rows = torch.searchsorted(rows, (of_entry + 1) * step) - torch.searchsorted(
            rows, of_entry * step
        )
        weights = weights / of_rows
    return weights
