"""Log-probabilities of tokens from what a model returns for a batch: hidden states or logits."""

from __future__ import annotations

from typing import Any, cast

import torch

from trajpack.kernels.logprobs.token_logprobs import token_logprobs
from trajpack.kernels.rearrange.repeat_rows import repeat_rows
from trajpack.kernels.validation import check_tensor


def logprobs_of_rows(
    output: torch.Tensor,
    lm_head: torch.Tensor | torch.nn.Module | None,
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    num_places: int,
    entropy: bool,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Return log-probabilities ``[R]`` of ``targets``, and with ``entropy`` entropies.

    Args:
        output: ``[places, H]`` or ``[1, places, H]`` hidden states, with ``lm_head``; or logits
            ``[places, V]`` or ``[1, places, V]``, without.
        lm_head: ``[V, H]``, or a module with ``weight`` and perhaps ``bias``; None for logits.
        rows: ``[R]`` int64 places.
        targets: ``[R]`` int64 tokens.
        num_places: Rows that ``output`` must have.
        entropy: Whether to return entropies too.
        options: Of `trajpack.kernels.token_logprobs`; for logits ``temperature`` alone.

    Raises:
        TypeError, ValueError: As that; also if ``output`` has not ``num_places`` rows.
    """
    if isinstance(output, torch.Tensor) and output.ndim == 3 and output.shape[0] == 1:
        output = output[0]
    name = "logits" if lm_head is None else "hidden"
    check_tensor("logprobs", name, output, ndim=2, entries=num_places)
    if lm_head is None:
        return _of_logits(output, rows, targets, entropy=entropy, **options)
    if isinstance(lm_head, torch.nn.Module):
        options.setdefault("bias", getattr(lm_head, "bias", None))
        lm_head = cast("torch.Tensor", lm_head.weight)
    options["entropy"] = entropy
    found: Any = token_logprobs(output, lm_head, rows, targets, **options)
    return found if entropy else (found,)


def _of_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    entropy: bool,
    temperature: float | torch.Tensor = 1.0,
    **others: Any,
) -> tuple[torch.Tensor, ...]:
    if others:
        raise TypeError(f"logprobs: {', '.join(others)} need hidden states and lm_head, got logits")
    chosen = repeat_rows(logits, rows)
    chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
    if isinstance(temperature, torch.Tensor) and temperature.ndim:
        temperature = temperature[:, None]
    every = (chosen / temperature).log_softmax(-1)
    logprobs = every.gather(1, targets[:, None])[:, 0]
    if not entropy:
        return (logprobs,)
    # a token of probability 0 adds 0, not 0 times infinity
    return logprobs, -(every.exp() * every.masked_fill(every == -torch.inf, 0.0)).sum(-1)
