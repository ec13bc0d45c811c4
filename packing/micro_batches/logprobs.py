"""Log-probabilities of generated tokens from what a model returns: hidden states or logits."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, cast

import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.logprobs.token_logprobs import (
    FLOATS,
    Support,
    pair_logprobs,
    temperatures,
    token_logprobs,
)
from trajpack.kernels.rearrange.repeat_rows import repeat_rows
from trajpack.kernels.validation import check_indices, check_tensor
from trajpack.packing.ragged import Ragged

Head: TypeAlias = torch.Tensor | torch.nn.Linear
"""LM head: its weight ``[V, H]``, or a linear layer."""


class Predictions(NamedTuple):
    """What a model predicts at which place: at a token of a batch, at a node of a tree."""

    rows: torch.Tensor
    """int64 ``[R]``: places; -1 for rows that are left over."""
    targets: torch.Tensor
    """int64 ``[R]``: tokens."""
    owners: torch.Tensor | None
    """int64 ``[num_generated]``: row of each generated token; None if each has its own."""
    num_places: int


class LogprobMethods:
    """Methods of `PackedBatch`, `MicroBatch`, `TreeBatch` and `TreeMicroBatch`."""

    def _predictions(self, most: int | None, *, each: bool) -> Predictions:
        """Return what predicts the generated tokens; with ``each`` a row for each of them."""
        raise NotImplementedError

    def _support(self, name: str, most: int | None) -> tuple[Ragged, bool]:
        """Return the values of a ragged field for each generated token, and if each has some."""
        raise NotImplementedError

    def logprobs(  # noqa: PLR0913 - as trajpack.kernels.token_logprobs
        self,
        hidden: torch.Tensor,
        lm_head: Head | None = None,
        *,
        entropy: bool = False,
        most: int | None = None,
        temperature: float | torch.Tensor = 1.0,
        softcap: float | None = None,
        support: str | Support | None = None,
        group: Any = None,
        impl: Impl = "auto",
    ) -> Any:
        """Return the log-probabilities of the generated tokens from hidden states or logits.

        Only the places that predict them go through the LM head, and their logits are never in
        memory at once: `trajpack.kernels.token_logprobs`. Entries on one node of a tree share what
        is computed, and their gradients are added in the order of the entries; with a ``support``,
        or a temperature for each, an entry has a row of its own.

        Args:
            hidden: ``[places, H]`` or ``[1, places, H]``: the output of the model's decoder for
                `model_inputs`, such as ``model.model(**batch.model_inputs())[0]``. Without
                ``lm_head`` the logits, ``[places, V]`` or ``[1, places, V]``.
            lm_head: ``[V, H]``, or a ``torch.nn.Linear`` such as ``model.lm_head``.
            entropy: Whether to return entropies too.
            most: Length of the result, for shapes that must not change, as of `logprob_rows`.
            temperature: One number, or float32 ``[num_generated]``.
            softcap: As of `trajpack.kernels.token_logprobs`.
            support: As there, ``[num_generated + 1]`` boundaries; or the name of a ragged field.
            group: As there.
            impl: As there.

        Returns:
            ``[num_generated]``, of trees ``[entries]``, with ``entropy`` a pair of such, in the
            order of `logprob_rows` or of the entries: float32, float64 of float64. Numbers that are
            left over are 0, without a gradient.

        Raises:
            TypeError, ValueError: As `trajpack.kernels.token_logprobs`; also if ``hidden`` has not
                one row for each place, if ``lm_head`` computes more than its weight and bias say,
                or if logits meet what needs hidden states.

        Cost: as `logprob_rows` and `trajpack.kernels.token_logprobs`; of trees also a gather, and
            backward a sort of ``[entries]`` indices. With logits, a copy of the rows and their
            softmax.

        Example:
            >>> import torch, trajpack
            >>> turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory("a", [turn])])
            >>> batch.logprobs(torch.zeros(4, 8), torch.nn.Linear(8, 5, bias=False))
            tensor([-1.6094, -1.6094], grad_fn=<WhereBackward0>)
        """
        each = support is not None or isinstance(temperature, torch.Tensor)
        rows, targets, owners, num_places = self._predictions(most, each=each)
        output = _rows_of(hidden, lm_head, num_places)
        is_row, rows, temperature = rows >= 0, rows.clamp(min=0), _filled(temperature, rows)
        if lm_head is None:
            if softcap is not None or support is not None or group is not None:
                wrong = "softcap, support and group need hidden states and lm_head, got logits"
                raise TypeError(f"logprobs: {wrong}")
            found = _of_logits(output, rows, targets, temperature, entropy=entropy)
        else:
            weight, bias = head_of(lm_head)
            every, call = False, cast("Any", token_logprobs)  # entropy may be either
            if isinstance(support, str):
                support, every = self._support(support, most)
            several = call(
                output, weight, rows, targets, bias=bias, temperature=temperature,
                softcap=softcap, entropy=entropy, support=support, every_row_supported=every,
                group=group, impl=impl,
            )  # fmt: skip
            found = several if entropy else (several,)
        found = tuple(torch.where(is_row, one, 0.0) for one in found)
        if owners is not None:
            found = tuple(repeat_rows(one, owners) for one in found)
        return found if entropy else found[0]

    def pair_logprobs(
        self,
        hidden: torch.Tensor,
        lm_head: Head,
        support: str | Support,
        *,
        most: int | None = None,
        temperature: float | torch.Tensor = 1.0,
        softcap: float | None = None,
        group: Any = None,
        impl: Impl = "auto",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of several tokens for each generated one, and of all others.

        `trajpack.kernels.pair_logprobs` of the places that predict the generated tokens: what
        `trajpack.kernels.topk_kl` compares with a teacher.

        Args:
            hidden: As of `logprobs`.
            lm_head: As of `logprobs`.
            support: The name of a ragged field of tokens, such as a teacher's; or boundaries
                ``[num_generated + 1]`` and tokens.
            most: As of `logprobs`.
            temperature: As of `logprobs`.
            softcap: As of `logprobs`.
            group: As of `logprobs`.
            impl: As of `logprobs`.

        Returns:
            As `trajpack.kernels.pair_logprobs`: ``[P]`` and ``[num_generated]``.

        Raises:
            TypeError, ValueError: As `logprobs`.

        Cost: as `logprob_rows` and `trajpack.kernels.pair_logprobs`.
        """
        rows, _, _, num_places = self._predictions(most, each=True)
        output, (weight, bias) = _rows_of(hidden, lm_head, num_places), head_of(lm_head)
        logprobs, rest = pair_logprobs(
            output, weight, rows.clamp(min=0),
            self._support(support, most)[0] if isinstance(support, str) else support,
            bias=bias, temperature=_filled(temperature, rows), softcap=softcap, group=group,
            impl=impl,
        )  # fmt: skip
        return logprobs, torch.where(rows >= 0, rest, 0.0)


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


def _rows_of(output: Any, lm_head: Any, num_places: int) -> torch.Tensor:
    """Return a row for each place."""
    if isinstance(output, torch.Tensor) and output.ndim == 3 and output.shape[0] == 1:
        output = output[0]
    name = "logits" if lm_head is None else "hidden"
    check_tensor("logprobs", name, output, dtypes=FLOATS, ndim=2, entries=num_places, per="place")
    found: torch.Tensor = output
    return found


def _filled(temperature: float | torch.Tensor, rows: torch.Tensor) -> float | torch.Tensor:
    """Return temperatures with 1 for rows that are left over, whose own may be 0."""
    if isinstance(temperature, torch.Tensor) and temperature.shape == rows.shape:
        return temperature.where(rows >= 0, 1.0)
    return temperature


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
