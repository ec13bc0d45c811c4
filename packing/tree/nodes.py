"""Nodes and entries: what a `TreeBatch` and its micro-batches have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from trajpack.packing.micro_batches.generated import Distinct, Generated
from trajpack.packing.micro_batches.logprobs import logprobs
from trajpack.packing.micro_batches.micro_batch import record_storages
from trajpack.packing.representation import missing_attribute, public_names
from trajpack.packing.tree.entries import Entries
from trajpack.packing.tree.trie import Chains
from trajpack.packing.tree_attention.attention import visible
from trajpack.packing.tree_attention.huggingface import tree_table

Boundary: TypeAlias = Literal["shared", "duplicate"]
"""Storage of the last token that sequences share: once, or once for each next token."""


@dataclass(frozen=True, eq=False, repr=False)
class TreeNodes:
    """Trees of tokens, flat, and the generated tokens that lie on them.

    A node is a token behind all tokens before it. Nodes are numbered depth first, so a subtree is
    an interval. Tensors over nodes have shape ``[nodes]``, tensors over entries ``[entries]``.

    Attributes:
        input_ids: int64 ``[nodes]``: token ids.
        position_ids: int64 ``[nodes]``: depths, 0 at a root: the position of the token in its
            sequence.
        tree_end: int32 ``[nodes]``: first node behind the node's subtree. A query at node q attends
            to the key at node k where ``k <= q < tree_end[k]``.
        tree_parent: int32 ``[nodes]``: node of the token before, whose output predicts this one; -1
            at a root.
        loss_mask: bool ``[nodes]``: True where at least one entry lies.
        cu_seqlens: int32 ``[trees + 1]``: boundaries of the trees.
        fields: ``[nodes, *shape]`` each: extra fields with rows for all tokens, by name. The others
            are in ``entries.fields``.
        entries: Generated tokens of all turns, turn after turn; several may lie on one node.
        chains: Chains and turns on the host. A chain is a sequence of layout ``"merged"``.
        seqlens: Nodes of each tree.
        boundary: Whether nodes at which sequences part are duplicated, see `trajpack.pack_tree`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    tree_end: torch.Tensor
    tree_parent: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    fields: Mapping[str, torch.Tensor]
    entries: Entries
    chains: Chains
    seqlens: tuple[int, ...]
    boundary: Boundary

    @property
    def num_nodes(self) -> int:
        """Number of nodes: tokens that a model computes."""
        return self.input_ids.shape[0]

    @property
    def num_entries(self) -> int:
        """Number of generated tokens of all turns."""
        return self.entries.num_tokens

    @property
    def num_tokens(self) -> int:
        """Number of nodes, as of any batch that a model computes."""
        return self.num_nodes

    @property
    def num_generated(self) -> int:
        """Number of entries, as of any batch."""
        return self.num_entries

    @property
    def layout(self) -> str:
        """``"tree"``."""
        return "tree"

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.input_ids.device

    @property
    def entry_node(self) -> torch.Tensor:
        """int64 ``[entries]``: node of each entry."""
        return self.entries.node

    @cached_property
    def entry_parent(self) -> torch.Tensor:
        """int64 ``[entries]``: node whose output predicts each entry; never -1."""
        return self.tree_parent[self.entry_node].long()

    logprobs = logprobs

    @cached_property
    def num_trained(self) -> int:
        """Nodes on which at least one entry lies: those that `loss_mask` selects."""
        return self.chains.num_trained

    @property
    def generated(self) -> Generated:
        """Entries in the order of `logprobs`, and what a loss takes of them."""
        node, parent = self.entry_node, self.entry_parent
        return Generated(self.entries, node, parent, fields=self.fields, distinct=self._distinct)

    def _distinct(self) -> Distinct:
        """Return the nodes on which entries lie, each once."""
        nodes = torch.nonzero_static(self.loss_mask, size=self.num_trained)[:, 0]
        owners = self.loss_mask.cumsum(0)[self.entry_node] - 1
        return Distinct(self.tree_parent[nodes].long(), self.input_ids[nodes], owners)

    def labels(self, ignore: int = -100) -> torch.Tensor:
        """Return the token that each node predicts, where an entry of it is trained.

        The label that a loss over rows takes, such as a fused cross-entropy, int64 ``[nodes]``;
        ``ignore`` where there is none. What belongs to its entries is at `entry_parent`.

        Raises:
            ValueError: If ``boundary`` is not ``"duplicate"``: a node may have several labels.

        Example:
            >>> import trajpack
            >>> turns = [trajpack.Turn([1], [2], [-0.5]), trajpack.Turn([1], [3], [-0.5])]
            >>> batch = trajpack.pack_tree([trajpack.Trajectory("a", turns)], boundary="duplicate")
            >>> batch.input_ids, batch.labels()
            (tensor([1, 2, 1, 3]), tensor([   2, -100,    3, -100]))
        """
        if self.boundary != "duplicate":
            raise ValueError("labels: needs pack_tree(..., boundary='duplicate'), got 'shared'")
        labels = torch.full_like(self.input_ids, ignore)
        trained = torch.zeros_like(self.loss_mask, dtype=torch.int32)  # entries of each node
        trained.index_add_(0, self.entry_node, self.entries.loss_mask.int())
        is_label = trained[self.entry_node] > 0
        # equal where several have one parent
        labels[self.entry_parent] = torch.where(is_label, self.entries.input_ids, ignore)
        return labels

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
        """float32 ``[entries]``: set by `PackedBatch.with_advantages`, ``None`` at first."""
        return self.entries.advantages

    def attention_mask(
        self, dtype: torch.dtype = torch.bool, window: int | None = None
    ) -> torch.Tensor:
        """Return the mask of all pairs of nodes, for small trees and for tests.

        Args:
            dtype: ``torch.bool`` for attention ``"sdpa"``: True where a query sees a key. A float
                dtype for ``"eager"``, which adds it to the scores: 0, or its least number.
            window: Depths that a query attends to, its own included; all if ``None``.

        Returns:
            ``[1, 1, nodes, nodes]`` of ``dtype``.

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
        `trajpack.packing.adapters.huggingface.register_tree_attention`; another kind fails on these
        arguments. For ``"sdpa"`` replace ``attention_mask`` by ``batch.attention_mask()``, for
        ``"eager"`` by ``batch.attention_mask(dtype)`` of the model's dtype.

        Returns:
            ``input_ids`` and ``position_ids``, int64 ``[1, nodes]``; ``attention_mask``, int32
            ``[2, 2, 1, nodes]``: `tree_end` and depths; ``use_cache=False``.

        Raises:
            ValueError: If there is no node.
        """
        if not self.num_nodes:
            raise ValueError(
                "model_inputs: a model needs at least one node, got none; an Alignment pads "
                "micro-batches without nodes"
            )
        return {
            "input_ids": self.input_ids[None],
            "position_ids": self.position_ids[None],
            "attention_mask": tree_table(self.tree_end, self.position_ids),
            "use_cache": False,
        }

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the batch from reuse while work of another stream reads it.

        See `PackedBatch.record_stream`.
        """
        for part in (self, self.entries):
            several = [*part.fields.values(), *self.entries.ragged_values.values()]
            record_storages([*vars(part).values(), *several], stream)

    __dir__ = public_names
    if not TYPE_CHECKING:  # else it would have every attribute
        __getattr__ = missing_attribute

    def __len__(self) -> int:
        """Trees in the batch."""
        return len(self.seqlens)
