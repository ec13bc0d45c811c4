"""`TreeBatch`: trajectories as trees of tokens on one device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, cast, get_args

import torch

from trajpack.kernels.scan.observations import PASSING
from trajpack.packing.batch.batch import UNALIGNED, PackedBatch, SequenceOf
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.tree.chain_plan import ChainPlan, Fewest, plan_chain_ranks, plan_chains
from trajpack.packing.tree.micro_batches import TreeMicroBatch, cut_chains, merge_entries
from trajpack.packing.tree.nodes import Boundary, TreeNodes
from trajpack.packing.tree.plan import Chains

if TYPE_CHECKING:
    from trajpack.kernels.corrections.importance_weights import Correction
    from trajpack.kernels.corrections.loss_weights import Aggregation
    from trajpack.kernels.dispatch import Impl
    from trajpack.kernels.rearrange.segments import Number
    from trajpack.packing.credit.estimators import Estimator
    from trajpack.packing.tree.statistics import TreeStatistics
    from trajpack.packing.types import Trajectory

Share: TypeAlias = Literal["once", "sum", "mean"]
"""Weight of an entry, see `TreeBatch.entry_weights`."""


def check_options(share: str, boundary: str) -> None:
    """Raise unless both options are known and go together."""
    for name, value, known in (("share", share, Share), ("boundary", boundary, Boundary)):
        if value not in get_args(known):
            names = ", ".join(repr(one) for one in get_args(known))
            raise ValueError(f"{name} must be one of {names}, got {value!r}")
    if boundary == "duplicate" and share != "once":
        raise ValueError(f"boundary='duplicate' needs share='once', got share={share!r}")


class Entries(PackedBatch):
    """Generated tokens of a `TreeBatch`, each once, as a packed batch without prompts.

    Tensors over tokens have an entry for each generated token, turn after turn, in the order of
    `cu_generated`. `position_ids` are the nodes of the entries, `sequence_ids` and `turn_sequence`
    the chains that layout ``"merged"`` would have as sequences; `cu_seqlens` are the boundaries of
    the turns, as `cu_generated` is. Estimators, loss weights and corrections read the entries as
    they read any batch.
    """

    @property
    def generated_lens(self) -> tuple[int, ...]:
        """Entries of each turn; all of them are generated."""
        return self.seqlens

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
class TreeBatch(TreeNodes):
    """Trajectories as a forest in which each distinct prefix is stored once.

    Made by `trajpack.pack_tree` or `TrajectoryBuffer.pack_tree`. A node is a token behind all
    tokens before it: turns share a node if they agree up to there, in tokens and in every extra
    field that has rows for all tokens. Nodes are numbered depth first, so a subtree is an interval.
    An entry is a generated token of a turn. Several entries may lie on one node, each with
    log-probability, version, return and advantage of its own.

    Tensors over nodes have shape ``[nodes]``, tensors over entries ``[entries]``. The order of the
    trees and branches is that of their token ids; the entries are in the order of the turns. The
    tensors over nodes are those of `TreeNodes`, a base class.

    Attributes:
        turn_prompt_node: int32 ``[turns]``: node of the last token of each turn's prompt.
        entries: Entries, turns and trajectories: all other tensors of a `PackedBatch`.
        share: Weight of an entry, see `entry_weights`.
        chains: Chains on the host: the sequences that layout ``"merged"`` has.
    """

    turn_prompt_node: torch.Tensor
    entries: Entries
    share: Share
    chains: Chains

    @property
    def num_turns(self) -> int:
        """Turns of all trajectories."""
        return self.entries.num_turns

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

    def statistics(self) -> TreeStatistics:
        """Return what the tree shares, between whom, and where and why prefixes broke.

        Cost: copies five small tables of turns to the host, and the token ids if a prefix broke
            (synchronises); a sort of the sequences, and for each break a pass over the turns before
            it and a sort of the tokens behind it. With ``boundary="duplicate"`` and a broken prefix
            also as `merged` and the plan of a tree.

        Example:
            >>> import trajpack
            >>> turns = [
            ...     trajpack.Turn([1, 2], [8, 3, 4], [-0.5] * 3),
            ...     trajpack.Turn([1, 2, 3, 4, 5], [6], [-0.5]),
            ... ]
            >>> statistics = trajpack.pack_tree([trajpack.Trajectory("a", turns)]).statistics()
            >>> statistics.num_tokens_merged, statistics.num_nodes
            (11, 9)
            >>> statistics.breaks[0]  # doctest: +NORMALIZE_WHITESPACE
            PrefixBreak(trajectory=0, turn=1, history=0, position=2, expected=8, came=3,
                        reason='stripped', removed=1, added=0)
        """
        from trajpack.packing.tree.statistics import statistics_of

        return statistics_of(self)

    def plan_micro_batches(self, capacity: int, fewest: Fewest = "micro_batches") -> ChainPlan:
        """Plan micro-batches of at most ``capacity`` nodes.

        A chain, a sequence of layout ``"merged"``, is in one micro-batch, with all of its entries.
        Micro-batches are cut from the depth-first order of chains; a cut repeats the prefix that
        the chains beside it share. The plan has the fewest micro-batches and, of the plans with as
        many, the fewest nodes; or the reverse.

        Args:
            capacity: Maximum nodes of a micro-batch, before padding.
            fewest: What comes first: ``"micro_batches"`` or ``"nodes"``.

        Returns:
            The plan; of a batch without chains one dummy.

        Raises:
            TypeError: If the capacity is no integer.
            ValueError: If a chain is longer than the capacity, or an argument is unknown.

        Cost: on the host, in time linear in the chains, about a microsecond each. No
        synchronisation.

        Example:
            >>> import trajpack
            >>> turns = [trajpack.Turn([1, 2, 3], [n], [-0.5]) for n in range(5)]
            >>> batch = trajpack.pack_tree([trajpack.Trajectory("a", turns)])
            >>> batch.num_nodes, batch.plan_micro_batches(capacity=6)
            (8, ChainPlan(2 micro-batches of up to 6 nodes, 5 of 5 chains, 11 nodes))
        """
        return plan_chains(self.chains, capacity, fewest)

    def plan_ranks(
        self, num_ranks: int, capacity: int, fewest: Fewest = "micro_batches"
    ) -> tuple[ChainPlan, ...]:
        """Plan the micro-batches of every data-parallel rank, as many on each.

        The plan of `plan_micro_batches` says how many each rank has. The capacity is then lowered
        as far as that number allows, so that the largest micro-batch is small and no rank is left
        without work. The i-th micro-batches of the ranks are of similar size, the largest first;
        missing ones are dummies. Every rank computes the same plans and takes its own.

        Args:
            num_ranks: Number of ranks.
            capacity: As for `plan_micro_batches`.
            fewest: As for `plan_micro_batches`.

        Raises:
            TypeError: As `plan_micro_batches`.
            ValueError: As `plan_micro_batches`.

        Cost: as `plan_micro_batches`, about ``log2(capacity)`` times.
        """
        return plan_chain_ranks(self.chains, num_ranks, capacity, fewest)

    def micro_batches(
        self,
        plan: ChainPlan,
        alignment: Alignment = UNALIGNED,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        impl: Impl = "auto",
    ) -> Iterator[TreeMicroBatch]:
        """Return an iterator that makes the micro-batches of a plan one by one.

        Every entry of the plan's chains is in one micro-batch. Losses whose weights are computed
        over the whole batch add up to the loss of the batch, and so do their gradients.

        Args:
            plan: Plan of the batch, such as ``batch.plan_micro_batches(capacity)``.
            alignment: Rules for padding of the nodes: ``total_multiple``, ``total``,
                ``max_sequences`` (of trees) and ``token_id``. Its depths are 0 whatever
                ``positions`` is.
            tensors: ``[entries, ...]`` each, of any dtype of at most 8 bytes: further inputs of the
                loss, such as ``{"weights": batch.loss_weights("token_mean")}``. They become
                ``entries.fields`` of the micro-batches, without gradients.
            impl: See `trajpack.kernels`.

        Raises:
            TypeError: If the plan is no `ChainPlan`, or one of ``tensors`` is no tensor.
            ValueError: If the plan is for another batch, the alignment has no room or pads each
                sequence, or a tensor has a wrong shape, device or name. All are checked before the
                first is made.
            RuntimeError: While a CUDA graph is captured.

        Cost: one copy for all micro-batches together, from pinned memory. For each, one launch for
        its nodes, one for its entries, and eight or nine small operations. No synchronisation.
        """
        return cut_chains(self, plan, alignment, tensors, impl)

    def merge(
        self,
        plan: ChainPlan,
        outputs: Sequence[torch.Tensor],
        *,
        fill: Number = 0,
        impl: Impl = "auto",
    ) -> torch.Tensor:
        """Return outputs of the micro-batches in the order of the entries.

        Args:
            plan: Plan of the micro-batches.
            outputs: One tensor for each micro-batch, dummies included: ``[entries of the
                micro-batch, ...]``, of one dtype.
            fill: Value of entries that the plan, of one rank, does not have.
            impl: See `trajpack.kernels`.

        Returns:
            ``[entries, ...]``. Differentiable with respect to the outputs.

        Raises:
            TypeError: If the plan is no `ChainPlan`, or an output is no tensor.
            ValueError: If the plan is for another batch, there are not as many outputs as
                micro-batches, or one has another number of rows, dtype or shape of a row.
            RuntimeError: While a CUDA graph is captured.

        Cost: as `PackedBatch.merge`.

        Example:
            >>> import torch, trajpack
            >>> turns = [trajpack.Turn([1, 2, 3], [n], [-0.5 * n]) for n in range(5)]
            >>> batch = trajpack.pack_tree([trajpack.Trajectory("a", turns)])
            >>> plan = batch.plan_micro_batches(capacity=6)
            >>> outputs = [one.rollout_logprobs for one in batch.micro_batches(plan)]
            >>> torch.equal(batch.merge(plan, outputs), batch.rollout_logprobs)
            True
        """
        return merge_entries(self, plan, outputs, fill, impl)

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
        holds shared prefixes once for each sequence of layout ``"merged"``, and neither `share` nor
        `boundary`.

        Raises:
            OSError: As `PackedBatch.save`.
            ValueError: As `PackedBatch.save`.

        Cost: as `merged` and `PackedBatch.save`.
        """
        self.merged().save(path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], share: Share = "once", boundary: Boundary = "shared"
    ) -> TreeBatch:
        """Read a file of `save`, or of a `PackedBatch` of layout ``"merged"``, to the host.

        Args:
            path: The file.
            share: As of `trajpack.pack_tree`.
            boundary: As of `trajpack.pack_tree`.

        Raises:
            OSError: If the file cannot be read.
            ValueError: As `PackedBatch.load`; also if the layout is not ``"merged"``.

        Cost: as `PackedBatch.load`, and the plan of the tree again.
        """
        from trajpack.packing.tree.merged import tree_of

        check_options(share, boundary)
        return tree_of(PackedBatch.load(path), (share, boundary))

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

    def __repr__(self) -> str:
        return (
            f"TreeBatch({len(self.entries.ids)} trajectories, {self.num_turns} turns in "
            f"{len(self)} trees; {self.num_nodes:,} nodes, {self.num_entries:,} entries; "
            f"share {self.share!r}, boundary {self.boundary!r}; {self.device})"
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
