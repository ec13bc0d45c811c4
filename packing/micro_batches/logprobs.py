"""Log-probabilities of generated tokens from hidden states or logits."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.logprobs.token_logprobs import (
    FLOATS,
    TokenSets,
    temperatures,
    token_logprobs,
)
from trajpack.kernels.rearrange.repeat_rows import repeat_rows
from trajpack.kernels.validation import check_indices, check_tensor

Head: TypeAlias = torch.Tensor | torch.nn.Linear
"""LM head: its weight ``[V, H]``, or a linear layer."""


def logprobs(  # noqa: D417, PLR0913 - a method of batches, as trajpack.kernels.token_logprobs
    batch: Any,
    hidden: torch.Tensor,
    lm_head: Head | None = None,
    *,
    tokens: str | TokenSets | None = None,
    entropy: bool = False,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    support: str | TokenSets | None = None,
    group: Any = None,
    keep_logits: int | None = None,
    impl: Impl = "auto",
) -> Any:
    """Return the log-probabilities of the generated tokens from hidden states or logits.

    Only the places that predict them, of a batch tokens and of a tree nodes, go through the LM
    head, and their logits are never in memory at once: `trajpack.kernels.token_logprobs`.
    Entries on one node share what is computed, and their gradients are added in the order of
    the entries; with tensors of ``tokens``, ``support`` or temperatures each has its own row.

    Args:
        hidden: ``[places, H]`` or ``[1, places, H]``: the output of the model's decoder for
            `model_inputs`, such as ``model.model(**batch.model_inputs())[0]``. Without
            ``lm_head`` the logits, ``[places, V]`` or ``[1, places, V]``.
        lm_head: ``[V, H]``, or a ``torch.nn.Linear`` such as ``model.lm_head``.
        tokens: Other tokens in place of each generated one, such as a teacher's, see
            `trajpack.kernels.topk_kl`: the name of a ragged field, or
            ``[num_generated + 1]`` boundaries and tokens.
        entropy: Whether to return entropies too.
        temperature: One number, or float32 ``[num_generated]``.
        softcap: As of `trajpack.kernels.token_logprobs`.
        support: As there; or the name of a ragged field.
        group: As there.
        keep_logits: As there.
        impl: As there.

    Returns:
        ``[num_generated]``, of trees ``[entries]``, in the order of `PackedBatch.generated`; with
        ``tokens`` ``[P]`` of them, and ``[num_generated]`` of all others together. With ``entropy``
        also ``[num_generated]``. float32, float64 of float64. Tokens that are not trained have 0
        without a gradient, but of ``[P]``.

    Raises:
        TypeError, ValueError: As `trajpack.kernels.token_logprobs`; also if ``hidden`` has not
            one row for each place, if ``lm_head`` computes more than its weight and bias say,
            or if logits meet what needs hidden states.

    Example:
        >>> import torch, trajpack
        >>> turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5])
        >>> batch = trajpack.pack([trajpack.Trajectory("a", [turn])])
        >>> batch.logprobs(torch.zeros(4, 8), torch.nn.Linear(8, 5, bias=False))
        tensor([-1.6094, -1.6094], grad_fn=<WhereBackward0>)
    """
    generated, name = batch.generated, "logits" if lm_head is None else "hidden"
    if isinstance(hidden, torch.Tensor) and hidden.ndim == 3 and hidden.shape[0] == 1:
        hidden = hidden[0]
    places = batch.input_ids.shape[0]
    check_tensor("logprobs", name, hidden, dtypes=FLOATS, ndim=2, entries=places)
    rows, targets, owners = generated.predicted_by, generated.input_ids, None
    sets = [one for one in (tokens, support) if one is not None]
    is_trained = generated.loss_mask
    if isinstance(temperature, torch.Tensor):
        if temperature.shape == rows.shape:
            temperature = temperature.where(is_trained, 1.0)  # that of other tokens may be 0
    elif generated.distinct is not None and not sets:
        rows, targets, owners = generated.distinct()
    if lm_head is None:
        if softcap is not None or sets or group is not None:
            wrong = "tokens, softcap, support and group need hidden states and lm_head"
            raise TypeError(f"logprobs: {wrong}, got logits")
        results = _of_logits(hidden, rows, targets, temperature, entropy=entropy)
    else:
        weight, bias = head_of(lm_head)
        every = isinstance(support, str) and generated.all_have_values(support)
        others, allowed = (
            generated[sets] if isinstance(sets, str) else sets for sets in (tokens, support)
        )
        results = token_logprobs(
            hidden, weight, rows, targets if others is None else others,
            bias=bias, temperature=temperature, softcap=softcap, entropy=entropy,
            support=allowed, every_row_supported=every, group=group,
            keep_logits=keep_logits, impl=impl,
        )  # fmt: skip
    several = results if isinstance(results, tuple) else (results,)
    of_pairs, of_rows = several[: tokens is not None], several[tokens is not None :]
    if owners is not None:
        of_rows = tuple(repeat_rows(one, owners) for one in of_rows)
    of_rows = tuple(torch.where(is_trained, one, 0.0) for one in of_rows)
    return (*of_pairs, *of_rows) if entropy or of_pairs else of_rows[0]


def head_of(lm_head: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of an LM head.

    Raises:
        TypeError: If it is neither a tensor nor a ``torch.nn.Linear``, or has hooks, unless its
            weight is a ``DTensor``: what else it computes would be left out without an error.
    """
    if isinstance(lm_head, torch.Tensor):
        return lm_head, None
    is_linear = getattr(type(lm_head), "forward", None) is torch.nn.Linear.forward
    hooks = is_linear and (lm_head._forward_hooks or lm_head._forward_pre_hooks)
    if not is_linear or (hooks and not hasattr(lm_head.weight, "device_mesh")):
        raise TypeError(
            "lm_head must be a weight [V, H] or a torch.nn.Linear without hooks, got "
            f"{type(lm_head).__name__}{' with hooks' if hooks else ''}: only weight and bias are "
            "read; pass model.lm_head of a model, and merge an adapter such as LoRA before, or "
            "leave the head out of it"
        )
    return lm_head.weight, lm_head.bias


def _of_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor,
    *,
    entropy: bool,
) -> tuple[torch.Tensor, ...]:
    check_indices("logprobs", "tokens", targets, logits.shape[1])
    of_rows = temperatures("logprobs", temperature, rows)
    chosen = repeat_rows(logits, rows)
    chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
    every = (chosen if of_rows is None else chosen / of_rows[:, None]).log_softmax(-1)
    logprobs = every.gather(1, targets[:, None])[:, 0]
    if not entropy:
        return (logprobs,)
    # a token of probability 0 adds 0, not 0 times infinity
    return logprobs, -(every.exp() * every.masked_fill(every == -torch.inf, 0.0)).sum(-1)
