"""`TreeBatch`: trajectories as trees of tokens on one device."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import torch

from trajpack.kernels.fields.units import UNITS
from trajpack.kernels.runs import RUN_WIDTH, Run
from trajpack.kernels.scan.observations import PASSING
from trajpack.packing.batch.batch import UNALIGNED, PackedBatch, SequenceOf
from trajpack.packing.buffer.tables import cumulative
from trajpack.packing.conversion import sent
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.micro_batches.cutting import merged
from trajpack.packing.token_fields import TokenField
from trajpack.packing.tree.chain_plan import (
    ChainPlan,
    check_plan,
    plan_chain_ranks,
    plan_chains,
)
from trajpack.packing.tree.micro_batches import TreeMicroBatch, cut_chains, place_turns
from trajpack.packing.tree.nodes import Entries, TreeNodes
from trajpack.packing.tree.statistics import TreeStatistics, statistics_of
from trajpack.packing.tree.trie import Ints, expanded

if TYPE_CHECKING:
    from trajpack.kernels.corrections.importance_weights import Correction
    from trajpack.kernels.corrections.loss_weights import Aggregation
    from trajpack.kernels.dispatch import Impl
    from trajpack.kernels.rearrange.select_tokens import Number
    from trajpack.packing.credit.advantages import Own
    from trajpack.packing.credit.estimators import Estimator
    from trajpack.packing.types import Trajectory

CONTEXT = {
    "turn_ids": -1,
    "policy_versions": -1,
    "rollout_logprobs": 0.0,
    "returns": 0.0,
    "loss_mask": False,
    "advantages": 0.0,
}
"""Values of tokens that were not generated."""
Share: TypeAlias = Literal["once", "sum"]
"""Weight of an entry, see `TreeBatch.entry_weights`."""


@dataclass(frozen=True, eq=False, repr=False)
class TreeBatch(TreeNodes):
    """Trajectories as a forest in which each distinct prefix is stored once.

    Made by `trajpack.pack_tree`. Turns share a node if they agree
    up to there, in tokens and in every extra field that has rows for all tokens. An entry is a
    generated token of a turn; several may lie on one node, each with log-probability, version,
    return and advantage of its own. Trees and branches are in the order of their token ids, entries
    in the order of the turns. The tensors over nodes are those of `TreeNodes`, a base class.

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
            TypeError, ValueError: As there; a `ValueError` also for a convention in which tokens
                that were not generated are steps (``observation="ignore"``, ``"multiply"``,
                ``"reset"``).
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
        metrics: bool = True,
        impl: Impl = "auto",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return importance weights of the policy of ``logprobs`` over the sampling policy.

        `PackedBatch.importance_weights` of the entries, with its arguments, errors and cost;
        ``[entries]`` each, the bits of layout ``"merged"``.
        """
        options: dict[str, Any] = {"per": per, "metrics": metrics, "impl": impl}
        return self.entries.importance_weights(logprobs, correction, **options)

    def statistics(self) -> TreeStatistics:
        """Return what the tree shares, between whom, and where and why prefixes broke.

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
        return statistics_of(self)

    def plan_micro_batches(self, capacity: int) -> ChainPlan:
        """Plan as few micro-batches of at most ``capacity`` nodes as can be, with as few nodes.

        A chain is in one micro-batch, with all of its entries. Micro-batches are cut from the
        depth-first order of chains; a cut repeats the prefix that the chains beside it share.

        Args:
            capacity: Maximum nodes of a micro-batch, before padding.

        Returns:
            The plan; of a batch without chains one dummy.

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
            alignment: Rules for padding of the nodes: ``total_multiple``, ``total``,
                ``max_sequences`` (of trees) and ``token_id``. Its depths are 0 whatever
                ``positions`` is.
            tensors: ``[entries, ...]`` each, of any dtype of at most 8 bytes: further inputs of the
                loss, such as weights. They become ``entries.fields``, without gradients.
            impl: See `trajpack.kernels`.

        Raises:
            TypeError: If the plan is no `ChainPlan`, or one of ``tensors`` is no tensor.
            ValueError: If the plan is for another batch, the alignment has no room or pads each
                sequence, or a tensor has a wrong shape, device or name. All are checked before the
                first is made.
            RuntimeError: While a CUDA graph is captured.
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
            TypeError, ValueError, RuntimeError: As `PackedBatch.merge`.

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
        placed = [place_turns(self.chains, turns) for turns in self.chains.turns_at(plan.bounds)]
        return merged(self.entries, placed, outputs, fill, impl)

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
        tree = self.to("cpu")
        entries, (trie, place, begin, end, _) = tree.entries, tree.chains
        chain, lengths = trie.order[place], trie.lengths[trie.places]
        starts, pieces = (
            np.cumsum(lengths) - lengths,
            trie.pieces(trie.places, 0 * lengths, lengths),
        )
        begin, end = starts[chain] + begin, starts[chain] + end
        path = torch.from_numpy(expanded(pieces.node, pieces.length))
        at = torch.from_numpy(expanded(begin, end - begin))
        given = {field.name: getattr(entries, field.name) for field in dataclasses.fields(entries)}
        for name, value in CONTEXT.items():
            if (values := given[name]) is not None:
                given[name] = values.new_full((len(path),), value).index_copy_(0, at, values)
        order = np.argsort(chain, kind="stable")
        opens, ended = np.diff(chain[order], prepend=-1) != 0, np.roll(end[order], 1)
        begins = np.empty_like(end)  # where the turn before in its chain ended, or the chain starts
        begins[order] = np.where(opens, starts[chain[order]], ended)
        tables = {
            "sequence_ids": np.repeat(np.arange(len(lengths)), lengths),
            "turn_spans": np.stack([begin, end], 1),
            "turn_begin": begins,
            "cu_seqlens": np.append(starts, len(path)),
        }
        given |= {name: torch.from_numpy(table.astype(np.int32)) for name, table in tables.items()}
        given["fields"] = {
            field.name: _spread(field, entries.fields[field.name], at, len(path))
            if field.generated_only
            else tree.fields[field.name][path]
            for field in entries.token_fields
        }
        given |= {
            "input_ids": tree.input_ids[path],
            "position_ids": tree.position_ids[path],
            "prompt_mask": given["turn_ids"] < 0,
            "layout": "merged",
            "seqlens": tuple(lengths.tolist()),
        }
        sizes = (end - begin).astype(np.int64)
        runs = np.zeros((len(sizes) + 1, RUN_WIDTH), np.int32)  # without sources
        order = np.argsort(begin, kind="stable")
        runs[1:, Run.START], runs[:-1, Run.TURN] = end[order], order
        runs[:-1, Run.GENERATED] = begin[order] - runs[:-1, Run.START]
        cu_new = cumulative(end - begins)
        of_turns = entries.tables.value_lens.items()
        given["tables"] = entries.tables._replace(
            runs=torch.from_numpy(runs),
            cu_new=torch.from_numpy(cu_new),
            generated_lens=tuple(np.bincount(chain, sizes, len(lengths)).astype(int).tolist()),
            value_lens={name: _summed(lens, chain, len(lengths)) for name, lens in of_turns},
            longest=entries.tables.longest._replace(
                new=int(np.diff(cu_new[entries.cu_turns.numpy()]).max(initial=0))
            ),
            loss_mask=given["loss_mask"] if entries._is_whole else ~given["prompt_mask"],
        )
        return PackedBatch(**given)

    def unpack(self) -> list[Trajectory]:
        """Return the packed trajectories, equal in every value, in their order."""
        return self.merged().unpack()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeBatch:
        """Return the batch on ``device``; the same object if it is there already."""
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


def _summed(lengths: Ints, owners: Ints, count: int) -> Ints:
    """Return the sums of rows that have the same owner."""
    sums = np.zeros((count, lengths.shape[1]), np.int64)
    np.add.at(sums, owners, lengths)
    return sums


def _spread(
    field: TokenField, rows: torch.Tensor, place: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Return rows of all tokens, with the field's fill where none was generated."""
    layout = field.layout
    unit = UNITS[layout.dtype.itemsize]  # torch fills few dtypes
    fill = int.from_bytes(layout.fill, sys.byteorder, signed=True)
    bits = torch.full((num_tokens, *layout.shape), fill, dtype=unit)
    return bits.index_copy_(0, place, rows.view(unit)).view(layout.dtype)
