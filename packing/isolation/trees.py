"""`check_tree_attention`: whether a model computes a tree as it computes its turns alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from trajpack.packing.isolation.isolation import TF32_SPACING, restoring, vocabulary_of
from trajpack.packing.tree.pack_tree import pack_tree
from trajpack.packing.tree.tree_batch import TreeBatch
from trajpack.packing.tree_attention.huggingface import check_dropouts
from trajpack.packing.types import Trajectory, Turn

SHARED = ((0, 0), (0, 12), (1, 30), (0, 12), (3, 13))
"""For each turn of the trial tree, the turn that it branches off, and behind how many tokens."""
LENGTH = 40
"""Tokens of a turn of the trial tree."""


def check_tree_attention(model: Any) -> None:
    """Raise unless a model computes a tree as it computes the tree's turns alone.

    A trial tree of 5 turns of 40 random tokens, which branch off each other, goes through the model
    in one row, then each turn alone, all by `trajpack.TreeBatch.model_inputs`. Logits may differ by
    half of the digits of the model's dtype, since kernels for other shapes add in another order.
    Layers that ignore the tree, such as recurrent ones, make other logits.

    `trajpack.packing.adapters.huggingface.LMHead` calls it once. Without an `LMHead`, call it
    before a model's first tree, behind ``model.set_attn_implementation("trajpack_tree")``.

    Args:
        model: A Hugging Face causal language model.

    Raises:
        TypeError: If the model is no torch module, or has no known vocabulary.
        ValueError: If a module is dropout in training; if the model refuses the tree, with its own
            error as the cause; or if logits differ.

    Example:
        >>> from trajpack.agent import build_tiny_model
        >>> from trajpack.packing.tree_attention.huggingface import register_tree_attention
        >>> register_tree_attention()
        >>> model, _ = build_tiny_model(seed=0)
        >>> model.set_attn_implementation("trajpack_tree")
        >>> check_tree_attention(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
    name, ids, longest = vocabulary_of(model)
    check_dropouts(model)
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    trial = _trial(ids, min(LENGTH, longest))
    batch = pack_tree(trial, device=device)
    with restoring(model):
        model.eval()
        logits = _logits(model, batch, name)[batch.entry_node]
        for number, (trajectory, got) in enumerate(
            zip(trial, logits.split(batch.entries.tables.generated_lens), strict=True)
        ):
            alone = _logits(model, pack_tree([trajectory], device=device), name)[1:]
            distance = float((got - alone).abs().amax(-1).max() / alone.std())
            if not distance <= _allowed(model, device):
                raise ValueError(
                    f"{name} computes a tree otherwise than its turns alone: logits of turn "
                    f"{number} differ by {distance:.1e} of their deviation, expected at most "
                    f"{_allowed(model, device):.1e}. Its layers may ignore the tree: register and "
                    "choose the attention 'trajpack_tree', or train it with layout 'merged'"
                )


def _trial(ids: torch.Tensor, length: int) -> list[Trajectory]:
    """Return trajectories of one turn each; their prompts are one token, the same."""
    generator = torch.Generator().manual_seed(0)
    turns: list[torch.Tensor] = []
    first = ids[:1]
    for other, shared in SHARED:
        new = ids[torch.randint(len(ids), (length,), generator=generator)]
        held = turns[other][:shared] if turns else first
        turns.append(torch.cat([held, new])[:length])
    return [
        Trajectory(str(number), [Turn(turn[:1], turn[1:], torch.zeros(length - 1))])
        for number, turn in enumerate(turns)
    ]


def _logits(model: nn.Module, batch: TreeBatch, name: str) -> torch.Tensor:
    try:
        logits: torch.Tensor = model(**batch.model_inputs()).logits[0]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{name} cannot take a tree: {error}") from error
    return logits.double()


def _allowed(model: nn.Module, device: torch.device) -> float:
    """Return the square root of the spacing of numbers in the model's coarsest dtype."""
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    spacings = [torch.finfo(dtype).eps for dtype in dtypes | {torch.float32}]
    return math.sqrt(max(*spacings, TF32_SPACING if device.type == "cuda" else 0.0))
