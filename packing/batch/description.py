"""What a packed batch holds, in words, and the kinds of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.text import counted

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch

Ints: TypeAlias = npt.NDArray[np.int64]
Kind: TypeAlias = Literal["prompt", "observation", "generated"]


class Span(NamedTuple):
    """Tokens of a sequence of one kind."""

    kind: Kind
    """``"prompt"``, ``"generated"``, or ``"observation"``: context after a generated token."""
    start: int
    """Index of its first token in the batch."""
    end: int
    """Index past its last token in the batch."""
    turn: int
    """Turn that generated the tokens, an index of the batch's turn tensors, or -1."""


def sequence_spans(batch: PackedBatch, sequence: int) -> list[Span]:
    """Return the spans of prompt, observations and completions of a sequence.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> turns = [Turn([1, 2], [3], [-0.1]), Turn([1, 2, 3, 4], [5, 6], [-0.2, -0.3])]
        >>> for span in sequence_spans(pack([Trajectory("a", turns)]), 0):
        ...     print(*span)
        prompt 0 2 -1
        generated 2 3 0
        observation 3 4 -1
        generated 4 6 1
    """
    start, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
    turn_ids = batch.turn_ids[start:end].cpu().numpy()
    bounds = [0, *(np.flatnonzero(np.diff(turn_ids)) + 1).tolist(), end - start]
    spans = []
    context: Kind = "prompt"
    for begin, stop in pairwise(bounds):
        turn = int(turn_ids[begin])
        kind: Kind = context if turn < 0 else "generated"
        if turn >= 0:
            context = "observation"
        spans.append(Span(kind, start + begin, start + stop, turn))
    return spans


def turn_words(batch: PackedBatch, span: Span) -> str:
    """Return reward, return, means and versions of the turn that generated a span."""
    turn, begin, end = span.turn, span.start, span.end
    numbers = {"reward": batch.turn_rewards[turn], "return": batch.turn_returns[turn]}
    if end > begin and batch.advantages is not None:
        numbers["mean advantage"] = batch.advantages[begin:end].double().mean()
    if end > begin:
        numbers["mean log-probability"] = batch.rollout_logprobs[begin:end].double().mean()
    parts = [f"{name} {float(value):.4g}" for name, value in numbers.items()]
    low, high = int(batch.turn_version_start[turn]), int(batch.turn_version_end[turn])
    parts.append(f"version {low}" if low == high else f"versions {low} to {high}")
    return ", ".join([*parts, "cut off"] if batch.turn_truncated[turn] else parts)


def describe(batch: PackedBatch) -> list[tuple[str, str]]:
    """Return the content of a batch as pairs of a name and a value in words.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> for name, value in describe(pack([Trajectory("a", [Turn([1, 2], [3], [-0.1])])])):
        ...     print(name, "=", value)
        trajectories = 1
        turns = 1, longest trajectory 1
        sequences = 1 in layout merged, longest 3 tokens
        tokens = 3, of them 1 generated (33.3%)
        returns = mean 0, min 0, max 0
        policy versions = 0
    """
    groups = {group for group in batch.groups if group is not None}
    in_groups = f" in {counted(len(groups), 'group')}" if groups else ""
    num_truncated = int(batch.turn_truncated.sum())
    truncated = f", {num_truncated:,} cut off by the length limit" if num_truncated else ""
    turns_each = int(batch.cu_turns.diff().max()) if batch.ids else 0
    share = batch.num_generated / batch.num_tokens if batch.num_tokens else 0.0
    rows = [
        ("trajectories", f"{len(batch.ids):,}{in_groups}"),
        ("turns", f"{batch.num_turns:,}, longest trajectory {turns_each:,}{truncated}"),
        (
            "sequences",
            f"{len(batch):,} in layout {batch.layout}, longest {batch.max_seqlen:,} tokens",
        ),
        (
            "tokens",
            f"{batch.num_tokens:,}, of them {batch.num_generated:,} generated ({share:.1%})"
            f"{trained_in_words(batch.loss_mask, batch.num_generated)}",
        ),
    ]
    if batch.num_turns:
        returns = batch.turn_returns.double().cpu()
        rows.append(
            (
                "returns",
                f"mean {returns.mean():.4g}, min {returns.min():.4g}, max {returns.max():.4g}",
            )
        )
        low, high = int(batch.turn_version_start.min()), int(batch.turn_version_end.max())
        rows.append(("policy versions", f"{low}" if low == high else f"{low} to {high}"))
    return rows


def trained_in_words(loss_mask: torch.Tensor, num_generated: int) -> str:
    """Return how many generated tokens are trained, if the mask is on the host and not all are.

    Example:
        >>> trained_in_words(torch.tensor([True, False, False]), 2)
        ', 1 trained'
    """
    trained = int(loss_mask.sum()) if loss_mask.device.type == "cpu" else num_generated
    return "" if trained == num_generated else f", {trained:,} trained"


def shared_prefixes(batch: PackedBatch) -> Ints:
    """Return how many first tokens of each sequence a tree takes from another one, int64.

    Of sequences with a common prefix, the first by token ids has all of its tokens.
    """
    lengths, starts = batch.host_lengths
    words = batch.input_ids.cpu().numpy().astype(">u4")  # bytes compare as their tokens do
    rows = np.split(words, starts[1:])
    order = sorted(range(len(lengths)), key=lambda one: rows[one].tobytes())
    shared = np.zeros_like(lengths)
    for before, one in pairwise(order):
        size = min(len(rows[before]), len(rows[one]))
        differ = rows[before][:size] != rows[one][:size]
        shared[one] = differ.argmax() if differ.any() else size
    return shared


def token_counts(batch: PackedBatch, shared: Ints) -> dict[str, int]:
    """Return the tokens of the batch, of the layouts, of a tree and of padded rows.

    ``shared`` is what `shared_prefixes` returns.
    """
    starts = batch.host_lengths.starts[batch.turn_sequence.cpu().numpy()]
    ends = batch.turn_spans[:, 1].cpu().numpy()
    return {
        "turns": int((ends - starts).sum()),
        "merged": int((ends - batch.turn_begin.cpu().numpy()).sum()),
        "tree": batch.num_tokens - int(shared.sum()),
        "padded": batch.max_seqlen * len(batch),
        "packed": batch.num_tokens,
    }


def saved_rows(tokens: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return what packing saved, of `token_counts`, as pairs of a name and a value in words."""
    rows = []
    for name, label in (("turns", "every turn with its whole prompt"), ("padded", "padded rows")):
        if tokens[name] > tokens["packed"]:
            saved = 1 - tokens["packed"] / tokens[name]
            rows.append((f"saved against {label}", f"{saved:.0%} of {tokens[name]:,} tokens"))
    if tokens["tree"] < tokens["packed"]:
        saved = 1 - tokens["tree"] / tokens["packed"]
        rows.append(("a tree would save another", f"{saved:.0%}: {tokens['tree']:,} nodes"))
    return rows
