"""`TreeBatch`: trajectories as trees of tokens on one device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch

from trajpack.kernels.fields.build import FIELD_DTYPES
from trajpack.kernels.runs import Run
from trajpack.kernels.scan.observations import PASSING
from trajpack.packing.batch.batch import UNALIGNED, PackedBatch, SequenceOf
from trajpack.packing.conversion import shown
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.tree.chain_plan import ChainPlan, Fewest, plan_chain_ranks, plan_chains
from trajpack.packing.tree.entries import Entries
from trajpack.packing.tree.micro_batches import TreeMicroBatch, cut_chains, merge_entries
from trajpack.packing.tree.nodes import Boundary, TreeNodes
from trajpack.packing.tree.plan import PARENT, TreePlan

if TYPE_CHECKING:
    from trajpack.kernels.corrections.importance_weights import Correction
    from trajpack.kernels.corrections.loss_weights import Aggregation
    from trajpack.kernels.dispatch import Impl
    from trajpack.kernels.rearrange.select_tokens import Number
    from trajpack.packing.credit.advantages import Own
    from trajpack.packing.credit.estimators import Estimator
    from trajpack.packing.tree.statistics import TreeStatistics
    from trajpack.packing.types import Trajectory

NODE_FIELDS = {
    "input_ids": "input_ids",
    "position_ids": "position_ids",
    "tree_end": "sequence_ids",
    "loss_mask": "loss_mask",
}
"""Tensors of nodes, and the field of `build` that holds each."""
Share: TypeAlias = Literal["once", "sum", "mean"]
"""Weight of an entry, see `TreeBatch.entry_weights`."""


def check_options(share: str, boundary: str) -> None:
    """Raise unless both options are known and go together."""
    for name, value, known in (("share", share, Share), ("boundary", boundary, Boundary)):
        if value not in get_args(known):
            names = ", ".join(repr(one) for one in get_args(known))
            raise ValueError(f"{name} must be one of {names}, got {shown(value)}")
    if boundary == "duplicate" and share != "once":
        raise ValueError(f"boundary='duplicate' needs share='once', got share={share!r}")


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
    """

    turn_prompt_node: torch.Tensor
    entries: Entries
    share: Share

    @property
    def num_turns(self) -> int:
        """Turns of all trajectories."""
        return self.entries.num_turns

    @cached_property
    def entry_weights(self) -> torch.Tensor:
        """float32 ``[entries]``: how often each entry counts in `loss_weights`.

        - ``"once"``: 1. A token counts once for each time that it was sampled, so the gradient is
          that of layout ``"merged"``, and that of separate turns.
        - ``"sum"``: a node counts once for each chain through it, of any trajectory, as if each
          chain were a row that trains every token on its path that a turn generated. Entries on one
          node share this number equally.
        - ``"mean"``: that number over the chains of the tree, as if rows of a tree were averaged.

        A chain is a sequence of layout ``"merged"``. With ``"sum"`` and ``"mean"`` the weights of a
        trajectory depend on those that it is packed with.

        Cost: computed at first access, without synchronisation: ``"once"`` is one fill, the others
            a copy of 8 bytes a chain and a dozen small operations.
        """
        if self.share == "once" or not self.num_entries:
            return torch.ones_like(self.rollout_logprobs)
        bounds = torch.from_numpy(self.chains.trie.first[1:]).to(self.device, non_blocking=True)

        def through(node: torch.Tensor) -> torch.Tensor:
            """Return the chains through nodes: those that end in their subtrees."""
            end = self.tree_end[node].long()
            return torch.searchsorted(bounds, torch.stack([node, end]), right=True).diff(dim=0)[0]

        node = self.entry_node
        times = torch.zeros(self.num_nodes, dtype=torch.int64, device=self.device)
        times.index_add_(0, node, torch.ones_like(node))
        weights = through(node).float() / times[node]
        if self.share == "mean":
            tree = torch.searchsorted(self.cu_seqlens.long(), node, right=True) - 1
            weights = weights / through(self.cu_seqlens[tree].long())
        return weights

    def with_advantages(  # noqa: PLR0913 - as PackedBatch.with_advantages
        self,
        estimator: Estimator | Own,
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

        ``values``, ``ref_logprobs`` and ``logprobs`` are ``[entries]``; a value is that of a causal
        critic at `entry_parent`. A function of your own gets `entries` as its batch. All else is as
        there, cost included.

        Raises:
            TypeError: As there.
            ValueError: As there; also for a convention in which tokens that were not generated are
                steps (``observation="ignore"``, ``"multiply"``, ``"reset"``).
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

        Arguments, errors and cost are as there; a ``"row"`` is a chain. With ``share="once"`` the
        weights, float32 ``[entries]``, are the bits of layout ``"merged"``.
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

        `PackedBatch.importance_weights` of the entries, with its arguments, errors and cost; the
        log-probabilities and weights are ``[entries]``, the weights the bits of layout
        ``"merged"``.
        """
        return self.entries.importance_weights(logprobs, correction, per=per, impl=impl)

    def statistics(self) -> TreeStatistics:
        """Return what the tree shares, between whom, and where and why prefixes broke.

        Cost: a sort of the chains; if a prefix broke, a copy of the token ids to the host
            (synchronises), and for each break a pass over the turns before it and three sorts of
            the tokens behind it. With ``boundary="duplicate"`` also as `merged` and a plan.

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

        A chain is in one micro-batch, with all of its entries. Micro-batches are cut from the
        depth-first order of chains; a cut repeats the prefix that the chains beside it share. The
        plan has the fewest micro-batches and, of the plans with as many, the fewest nodes; or the
        reverse.

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
        return plan_chains(self.chains, capacity, fewest, self.entries.ids)

    def plan_ranks(
        self, num_ranks: int, capacity: int, fewest: Fewest = "micro_batches"
    ) -> tuple[ChainPlan, ...]:
        """Plan the micro-batches of every data-parallel rank, as many on each.

        The plan of `plan_micro_batches` says how many each rank has. The capacity is then lowered
        as far as that number allows, so that the largest micro-batch is small and no rank is left
        without work. The i-th micro-batches of the ranks are of similar size, the largest first;
        missing ones are dummies. Every rank computes the same plans and takes its own.

        Raises:
            TypeError: As `plan_micro_batches`.
            ValueError: As `plan_micro_batches`.

        Cost: as `plan_micro_batches`, about ``log2(capacity)`` times.
        """
        return plan_chain_ranks(
            self.chains, num_ranks, capacity, fewest=fewest, ids=self.entries.ids
        )

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
            TypeError: As `PackedBatch.merge`.
            ValueError: As `PackedBatch.merge`.
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
        """Write the trajectories, their advantages, returns and options to a file.

        `PackedBatch.load` reads it too, as ``batch.merged()``. It holds shared prefixes once for
        each chain.

        Raises:
            OSError: As `PackedBatch.save`.
            ValueError: As `PackedBatch.save`.

        Cost: as `merged` and `PackedBatch.save`.
        """
        from trajpack.packing.tree.merged import save_tree

        save_tree(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TreeBatch:
        """Read a file of `save` to the host, with its `share` and `boundary`.

        A file of a `PackedBatch` of layout ``"merged"`` becomes a tree of the default options.

        Raises:
            OSError: If the file cannot be read.
            ValueError: As `PackedBatch.load`; also if the layout is not ``"merged"``.

        Cost: as `PackedBatch.load`, and the plan of the tree again.
        """
        from trajpack.packing.tree.merged import load_tree

        return load_tree(path)

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


def tree_batch_of(
    plan: TreePlan,
    runs: torch.Tensor,
    written: Callable[[str], torch.Tensor],
    *,
    cu_seqlens: torch.Tensor,
    prompt_nodes: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    of_entries: tuple[Mapping[str, Any], Mapping[str, Callable[[], Any]]],
    options: tuple[Share, Boundary],
) -> TreeBatch:
    """Make a batch from what `build` wrote.

    Args:
        plan: The plan.
        runs: Its run table on the device of the batch.
        written: Function that returns a field of `FIELD_DTYPES` over nodes, padding and entries.
        cu_seqlens: `TreeBatch.cu_seqlens`.
        prompt_nodes: `TreeBatch.turn_prompt_node`.
        fields: `TreeBatch.fields`.
        of_entries: Fields of the entries by name, but those that are written or known here, and
            functions that make others at first access.
        options: `TreeBatch.share` and `TreeBatch.boundary`.

    Cost: three small operations for the parents.
    """
    num_nodes, first = plan.num_nodes, plan.first_entry
    # `data`: nodes and entries share memory, but a write to one is none to the other
    nodes = {name: written(source)[:num_nodes].data for name, source in NODE_FIELDS.items()}
    parents = written("turn_ids")[:num_nodes].data  # memory of a field that nodes do not have
    if parents.device.type == "cpu":  # a tenth of the time of torch's operators
        host, table = parents.numpy(), plan.runs[: plan.num_node_rows]
        host[:] = np.arange(-1, num_nodes - 1, dtype=np.int32)
        host[table[:, Run.START]] = table[:, PARENT]
    else:
        torch.arange(-1, num_nodes - 1, out=parents)
        rows = runs[: plan.num_node_rows]
        parents[rows[:, Run.START].long()] = rows[:, PARENT]
    chains, (ready, later) = plan.chains, of_entries
    bounds = ready["cu_generated"]
    entries = {
        **{name: written(name)[first:].data for name in FIELD_DTYPES},
        "turn_begin": bounds[:-1].clone(),
        "cu_seqlens": bounds.clone(),
        "seqlens": tuple((chains.end - chains.begin).tolist()),
        "layout": "turns",
        **ready,
    }
    return TreeBatch(
        **nodes,
        tree_parent=parents,
        cu_seqlens=cu_seqlens,
        turn_prompt_node=prompt_nodes,
        fields=fields,
        entries=Entries.with_lazy_columns(entries, later),
        num_trained=plan.num_trained,
        seqlens=tuple((plan.cu_seqlens[1:] - plan.cu_seqlens[:-1]).tolist()),
        share=options[0],
        boundary=options[1],
        chains=chains,
    )
