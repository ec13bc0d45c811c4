"""`TreeBatch`: trajectories as trees of tokens on one device."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from trajpack.kernels.scan.observations import PASSING
from trajpack.packing.batch.batch import UNALIGNED, PackedBatch
from trajpack.packing.batch.breaks import PrefixBreak
from trajpack.packing.batch.columns import mapped
from trajpack.packing.batch.description import trained_in_words
from trajpack.packing.batch.unpack import trajectories_of
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.conversion import sent
from trajpack.packing.credit.advantages import Inputs, Own, with_advantages
from trajpack.packing.credit.loss_weights import (
    SequenceOf,
    importance_weights,
    loss_denominator,
    loss_weights,
)
from trajpack.packing.micro_batches.alignment import Alignment, Placement
from trajpack.packing.micro_batches.cutting import PaddedMicroBatch, merged
from trajpack.packing.micro_batches.generated import with_loss_mask
from trajpack.packing.micro_batches.micro_batch import moved
from trajpack.packing.ragged import ragged_rows
from trajpack.packing.text import counted
from trajpack.packing.tree.chain_plan import (
    ChainPlan,
    check_plan,
    plan_chain_ranks,
    plan_chains,
)
from trajpack.packing.tree.entries import BatchEntries
from trajpack.packing.tree.micro_batches import TreeMicroBatch, cut_chains
from trajpack.packing.tree.nodes import TreeNodes
from trajpack.packing.tree.statistics import TreeStatistics, statistics_of
from trajpack.packing.tree.trie import expanded

if TYPE_CHECKING:
    from trajpack.kernels.corrections.importance_weights import Correction
    from trajpack.kernels.corrections.loss_weights import Aggregation
    from trajpack.kernels.dispatch import Impl
    from trajpack.kernels.rearrange.select_tokens import Number
    from trajpack.packing.credit.estimators import Estimator
    from trajpack.packing.types import Trajectory

Share: TypeAlias = Literal["once", "sum"]
"""Weight of an entry, see `TreeBatch.entry_weights`."""


@dataclass(frozen=True, eq=False, repr=False)
class TreeBatch(TreeNodes):
    """Trajectories as a forest in which each distinct prefix is stored once.

    Made by `trajpack.pack_tree`. Turns share a node if they agree up to there, in tokens and in
    every extra field that has rows for all tokens. An entry is a generated token of a turn; several
    may lie on one node, each with values of its own. Trees and branches are in the order of their
    token ids, entries in the order of the turns. The tensors over nodes are those of `TreeNodes`, a
    base class.

    Attributes:
        turn_prompt_node: int32 ``[turns]``: node of the last token of each turn's prompt.
        entries: Entries, and the turns and trajectories that they belong to.
        share: Weight of an entry, see `entry_weights`.
    """

    turn_prompt_node: torch.Tensor
    entries: BatchEntries
    share: Share

    @property
    def num_turns(self) -> int:
        """Turns of all trajectories."""
        return self.entries.num_turns

    @cached_property
    def entry_weights(self) -> torch.Tensor:
        """float32 ``[entries]``: how often each entry counts in `loss_weights`.

        - ``"once"``: 1, so the gradient is that of layout ``"merged"``, and that of separate turns.
        - ``"sum"``: the chains through the node, of any trajectory, over the entries on it, as if
          each chain were a row that trains every token on its path that a turn generated.

        A chain is a sequence of layout ``"merged"``. With ``"sum"`` the weights of a trajectory
        depend on those that it is packed with.
        """
        if self.share == "once" or not self.num_entries:
            return torch.ones_like(self.rollout_logprobs)
        bounds, node = sent(self.chains.trie.first[1:], self.device), self.entry_node
        subtrees = torch.stack([node, self.tree_end[node].long()])
        chains = torch.searchsorted(bounds, subtrees, right=True).diff(dim=0)[0]  # they end there
        times = torch.zeros(self.num_nodes, dtype=torch.int64, device=self.device)
        times.index_add_(0, node, torch.ones_like(node))
        return chains.float() / times[node]

    def with_advantages(  # noqa: PLR0913 - as PackedBatch.with_advantages
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
    ) -> TreeBatch:
        """Return the batch with ``advantages``, ``returns`` and ``metrics`` of an estimator.

        `PackedBatch.with_advantages` of the entries: an entry gets the bits that the token has in
        layout ``"merged"`` (up to rounding if advantages are whitened). `share` has no influence.

        ``values``, ``ref_logprobs`` and ``logprobs`` are ``[entries]``; a value is that of a causal
        critic at `entry_parent`. A function of your own gets `entries` as its batch. All else is as
        there, cost included.

        Raises:
            TypeError, ValueError: As there; a `ValueError` also for the ``observation`` conventions
                ``"ignore"``, ``"multiply"`` and ``"reset"``: tokens of a prompt are no entries.
        """
        observation = getattr(estimator, "observation", PASSING[0])
        if observation not in PASSING:
            raise ValueError(
                f"with_advantages: a tree has no entries for observation={observation!r}, in which "
                "tokens that were not generated are steps; compute it with layout 'merged'"
            )
        inputs = Inputs(values, logprobs, ref_logprobs, bootstrap, scores, state_ids)
        entries = with_advantages(self.entries, estimator, inputs, all_reduce=all_reduce, impl=impl)
        return dataclasses.replace(self, entries=entries)

    def with_loss_mask(self, keep: torch.Tensor) -> TreeBatch:
        """Return the batch without some entries in training, as `PackedBatch.with_loss_mask`.

        ``keep`` is bool ``[entries]``. `loss_mask` stays: a node of entries that are dropped is
        computed as before.
        """
        return dataclasses.replace(self, entries=with_loss_mask(self.entries, keep))

    def loss_weights(
        self,
        aggregation: Aggregation,
        *,
        per: SequenceOf = "trajectory",
        denominator: float | torch.Tensor | None = None,
        truncated: Literal["keep", "mask"] = "keep",
        impl: Impl = "auto",
    ) -> torch.Tensor:
        """Return weights with which a plain sum over entries is the aggregated loss.

        `PackedBatch.loss_weights` of the entries, times `entry_weights`. Its denominators count
        each entry once, whatever `share` is; for another one pass ``denominator``, such as
        ``batch.entry_weights.sum()`` for ``"token_mean"``.

        Arguments and errors are as there; a ``"row"`` is a chain. With ``share="once"`` the
        weights, float32 ``[entries]``, are the bits of layout ``"merged"``.
        """
        weights = loss_weights(
            self.entries,
            aggregation,
            per=per,
            truncated=truncated,
            denominator=denominator,
            impl=impl,
        )
        return weights if self.share == "once" else weights * self.entry_weights

    def loss_denominator(
        self,
        aggregation: Aggregation,
        *,
        per: SequenceOf = "trajectory",
        truncated: Literal["keep", "mask"] = "keep",
    ) -> torch.Tensor:
        """Return this batch's share of the denominator, as `PackedBatch.loss_denominator`."""
        return loss_denominator(self.entries, aggregation, per=per, truncated=truncated)

    def importance_weights(
        self,
        logprobs: torch.Tensor,
        correction: Correction,
        *,
        per: Literal["trajectory", "turn"] = "trajectory",
        metrics: bool = True,
        impl: Impl = "auto",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return importance weights of the policy of ``logprobs`` over the sampling policy.

        `PackedBatch.importance_weights` of the entries: the bits of layout ``"merged"``.
        """
        return importance_weights(
            self.entries, logprobs, correction, per=per, metrics=metrics, impl=impl
        )

    def statistics(self) -> TreeStatistics:
        """Return what the tree shares, and between whom.

        Example:
            >>> import trajpack
            >>> turns = [
            ...     trajpack.Turn([1, 2], [8, 3, 4], [-0.5] * 3),
            ...     trajpack.Turn([1, 2, 3, 4, 5], [6], [-0.5]),
            ... ]
            >>> statistics = trajpack.pack_tree([trajpack.Trajectory("a", turns)]).statistics()
            >>> statistics.num_tokens_merged, statistics.num_nodes
            (11, 9)
        """
        return statistics_of(self)

    def prefix_breaks(self) -> tuple[PrefixBreak, ...]:
        """Return where prefixes broke and why, as `PackedBatch.prefix_breaks`."""
        return self.merged().prefix_breaks()

    def show(self, sequences: int = 2, **options: Any) -> None:
        """Print the batch of `merged`, with the options of `PackedBatch.show`."""
        self.merged().show(sequences, **options)

    def plan_micro_batches(self, capacity: int) -> ChainPlan:
        """Plan as few micro-batches of at most ``capacity`` nodes as can be, with as few nodes.

        A chain is in one micro-batch, with all of its entries. Micro-batches are cut from the
        depth-first order of chains; a cut repeats the prefix that the chains beside it share.

        Nodes are counted before padding. The plan of a batch without chains is one dummy.

        Raises:
            TypeError: If the capacity is no integer.
            ValueError: If a chain is longer than the capacity.

        Example:
            >>> import trajpack
            >>> turns = [trajpack.Turn([1, 2, 3], [n], [-0.5]) for n in range(5)]
            >>> batch = trajpack.pack_tree([trajpack.Trajectory("a", turns)])
            >>> batch.num_nodes, batch.plan_micro_batches(capacity=6)
            (8, ChainPlan(2 micro-batches of up to 6 nodes, 5 of 5 chains, 11 nodes))
        """
        return plan_chains(self.chains, capacity, self.entries.ids)

    def plan_ranks(self, num_ranks: int, capacity: int) -> tuple[ChainPlan, ...]:
        """Plan the micro-batches of every data-parallel rank, as many on each.

        The plan of `plan_micro_batches` says how many each rank has. The capacity is then lowered
        as far as that number allows, so that the largest micro-batch is small and no rank is left
        without work. The i-th micro-batches of the ranks are of similar size, the largest first;
        missing ones are dummies. Every rank computes the same plans and takes its own.

        Raises:
            TypeError, ValueError: As `plan_micro_batches`.
        """
        return plan_chain_ranks(self.chains, num_ranks, capacity, ids=self.entries.ids)

    def micro_batches(
        self,
        plan: ChainPlan,
        alignment: Alignment = UNALIGNED,
        *,
        tensors: Mapping[str, torch.Tensor] | None = None,
        impl: Impl = "auto",
    ) -> Iterator[TreeMicroBatch]:
        """Return an iterator that makes the micro-batches of a plan one by one.

        Every entry of the plan's chains is in one micro-batch. Losses whose weights are computed
        over the whole batch add up to the loss of the batch, and so do their gradients.

        Args:
            plan: Plan of the batch, such as ``batch.plan_micro_batches(capacity)``.
            alignment: Padding of the nodes: ``total_multiple``, ``total``, ``max_sequences`` (of
                trees) and ``token_id``. Depths of padding are 0.
            tensors: As of `PackedBatch.micro_batches`, ``[entries, ...]`` each; read them by
                ``generated[name]``.
            impl: See `trajpack.kernels`.

        Raises:
            TypeError, ValueError, RuntimeError: As there; a `ValueError` also if the alignment pads
                each sequence.
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

        As `PackedBatch.merge`: ``outputs`` are ``[entries of the micro-batch, ...]`` each, the
        result is ``[entries, ...]``. ``fill`` is the value of entries that are not in the plan.

        Example:
            >>> import torch, trajpack
            >>> turns = [trajpack.Turn([1, 2, 3], [n], [-0.5 * n]) for n in range(5)]
            >>> batch = trajpack.pack_tree([trajpack.Trajectory("a", turns)])
            >>> plan = batch.plan_micro_batches(capacity=6)
            >>> outputs = [one.rollout_logprobs for one in batch.micro_batches(plan)]
            >>> torch.equal(batch.merge(plan, outputs), batch.rollout_logprobs)
            True
        """
        check_plan(plan, self.chains.trie)
        lengths, placed = self.entries.host_lengths, list[PaddedMicroBatch]()
        for turns in self.chains.turns_at(plan.bounds):
            kept = lengths.seqlens[turns]
            placed.append(PaddedMicroBatch(turns, kept, Placement(kept, kept, int(kept.sum()))))
        return merged(lengths, placed, outputs, self.device, fill=fill, impl=impl)

    def merged(self) -> PackedBatch:
        """Return the same trajectories as a batch of layout ``"merged"``, on the host.

        The batch that `trajpack.pack` makes of them, bit for bit, with the advantages, returns and
        metrics of this one.

        Example:
            >>> import trajpack
            >>> turns = [trajpack.Turn([1, 2], [3], [-0.5]), trajpack.Turn([1, 2], [4], [-1.0])]
            >>> batch = trajpack.pack_tree([trajpack.Trajectory("a", turns)])
            >>> batch.input_ids, batch.merged().input_ids
            (tensor([1, 2, 3, 4]), tensor([1, 2, 3, 1, 2, 4]))
        """
        entries, trajectories = self.entries, self.unpack()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they came when the tree was packed
            batch = pack(trajectories, "merged", "cpu", fields=entries.token_fields)
        bounds = batch.turn_spans.numpy().astype(np.int64)
        at = torch.from_numpy(expanded(bounds[:, 0], np.diff(bounds)[:, 0]))
        later: dict[str, Any] = {
            "turn_returns": entries.turn_returns.cpu(),
            "metrics": None if entries.metrics is None else entries.metrics.cpu(),
            "metric_names": entries.metric_names,
        }
        names = ["returns", "advantages", "loss_mask"]
        if entries.tables.is_whole(entries.loss_mask):
            names.remove("loss_mask")
        for name in names:
            if (values := getattr(entries, name)) is not None:
                rows = values.new_zeros(batch.num_tokens, device="cpu")
                later[name] = rows.index_copy_(0, at, values.cpu())
        return dataclasses.replace(batch, **later)

    def unpack(self) -> list[Trajectory]:
        """Return the packed trajectories, equal in every value, in their order."""
        trie, place, begin, end, _ = self.chains
        lengths = trie.lengths[trie.places]
        pieces = trie.pieces(trie.places, np.zeros_like(lengths), lengths)
        path = sent(expanded(pieces.node, pieces.length), self.device)
        first = (np.cumsum(lengths) - lengths)[trie.order[place]]
        new, by_chain = np.zeros_like(end), place.argsort(kind="stable")
        follows = np.diff(place[by_chain]) == 0
        new[by_chain[1:][follows]] = end[by_chain[:-1][follows]]
        places = torch.from_numpy(first[:, None] + np.stack([0 * new, new, begin, end], 1))
        fields: dict[str, Any] = {name: rows[path] for name, rows in self.fields.items()}
        fields |= self.entries.fields
        fields |= {name: ragged_rows(self.entries, name) for name in self.entries.ragged_values}
        return trajectories_of(self.entries, self.input_ids[path], places, fields)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeBatch:
        """Return the batch on ``device``; the same object if it is there already."""
        if self.cu_seqlens.to(device) is self.cu_seqlens:
            return self
        return self.moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def __getstate__(self) -> dict[str, Any]:
        """Return fields that share no memory: pickles and deep copies hold the tensors alone."""
        return vars(self.moved(torch.Tensor.clone)).copy()

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> TreeBatch:
        """Return the trees and their entries with all tensors moved."""
        entries = dataclasses.replace(self.entries, **mapped(self.entries, move))
        return dataclasses.replace(moved(self, move), entries=entries)

    def __repr__(self) -> str:
        num_breaks = len(self.chains.trie.order) - len(self.entries.ids)
        breaks = f", {counted(num_breaks, 'prefix break')}" if num_breaks else ""
        return (
            f"TreeBatch({len(self.entries.ids)} trajectories, {self.num_turns} turns in "
            f"{len(self)} trees{breaks}; {self.num_nodes:,} nodes, {self.num_entries:,} "
            f"entries{trained_in_words(self.entries.loss_mask, self.num_entries)}; "
            f"share {self.share!r}, boundary {self.boundary!r}; {self.device})"
        )
