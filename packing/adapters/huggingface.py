"""Hugging Face's padding-free batches, and whether a model keeps their sequences apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from trajpack.packing.adapters.isolation import Trial
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows.packed import Packed, check_unpadded, holds_token

_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
IGNORED = -100
"""The label that no loss is taken at."""


def to_padding_free(
    batch: Packed,
    *,
    labels: Literal["generated", "all"] = "generated",
    separator_id: int = IGNORED,
    return_position_ids: bool = True,
    return_flash_attn_kwargs: bool = False,
    return_seq_idx: bool = False,
    position_ids_start: int = 0,
) -> dict[str, Any]:
    """Return what transformers' ``DataCollatorWithFlattening`` returns, with its options.

    ================================ ===== ========= ===============================================
    key                              dtype shape     content
    ================================ ===== ========= ===============================================
    input_ids                        int64 [1, T]    tokens, sequence after sequence
    labels                           int64 [1, T]    the token itself; ``separator_id`` where a
                                                     sequence begins, -100 where no loss is
    position_ids                     int64 [1, T]    from ``position_ids_start`` in every sequence
    seq_idx                          int32 [1, T]    number of the token's sequence
    cu_seq_lens_q, cu_seq_lens_k     int32 [n + 1]   where sequences lie
    max_length_q, max_length_k       int             tokens of the longest
    ================================ ===== ========= ===============================================

    Labels stand at the token itself: the model shifts them. Give the model ``use_cache=False``
    besides: with a cache, and as with an ``attention_mask``, sequences see each other, silently.
    Convolutions and recurrent layers keep them apart by `seq_idx` and boundaries, not by positions:
    pass these options too for a hybrid model, and call `check_isolation` once for any model.

    Not carried: log-probabilities, versions, returns, advantages; turns.

    Args:
        batch: A batch or a micro-batch; its padding has the label -100.
        labels: ``"generated"`` has a label at generated tokens alone, ``"all"`` at all tokens.
        separator_id: Label where a sequence begins.
        return_position_ids: Whether to return `position_ids`.
        return_flash_attn_kwargs: Whether to return boundaries and lengths.
        return_seq_idx: Whether to return `seq_idx`.
        position_ids_start: Position of the first token of a sequence.

    Raises:
        ValueError: If ``labels`` is neither; if it is ``"all"`` and the batch that of a
            `StaticBatch`, whose padding would have labels.

    Cost: labels take some launches over the tokens, positions one where they do not start at 0;
    the rest are views. No synchronisation.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> batch = pack([Trajectory(name, [Turn([1, 2], [3], [-0.5])]) for name in "ab"])
        >>> to_padding_free(batch, return_seq_idx=True)["labels"]
        tensor([[-100, -100,    3, -100, -100,    3]])
    """
    flattened = {
        "input_ids": batch.input_ids[None],
        "labels": _labels(batch, labels, separator_id)[None],
    }
    if return_position_ids:
        positions = batch.position_ids
        flattened["position_ids"] = (
            positions + position_ids_start if position_ids_start else positions
        )[None]
    if return_seq_idx:
        flattened["seq_idx"] = batch.sequence_ids[None]
    if return_flash_attn_kwargs:
        inputs = batch.model_inputs()
        flattened |= {name: inputs[name] for name in _BOUNDARIES}
    return flattened


def _labels(batch: Packed, labels: str, separator_id: int) -> torch.Tensor:
    if labels not in ("generated", "all"):
        raise ValueError(f"to_padding_free: labels must be 'generated' or 'all', got {labels!r}")
    holds = holds_token(batch)
    if labels == "all":
        check_unpadded(batch)
    places = torch.where(
        batch.loss_mask if labels == "generated" else holds, batch.input_ids, IGNORED
    )
    # padding may be at position 0 throughout, and is to have no label at all
    return torch.where((batch.position_ids == 0) & holds, separator_id, places)


def check_isolation(
    model: Any, *, inputs: Callable[[PackedBatch], Mapping[str, Any]] = PackedBatch.model_inputs
) -> None:
    """Raise unless a model keeps the sequences of a packed batch apart.

    A trial batch of six sequences, 337 random tokens of the model's vocabulary, goes through the
    model, and again with all tokens of one sequence changed, for each sequence. Logits of the
    other sequences must not move: neither those of later sequences, into which a state may leak,
    nor those of earlier ones. This is done in evaluation mode and in training mode, where models
    may take other kernels. Then each sequence of more than two tokens goes through the model alone,
    with ``input_ids`` and no position, and must get the logits that it has in the batch.

    Logits of a model that keeps sequences apart mostly do not move by a bit: all shapes are the
    same. Where they do, modules are compared one by one, on inputs that are the same to the bit.
    The output of a module may move by 64 roundings of float32, or 2 of the coarsest dtype of the
    model; kernels of a mixture of experts do so, which add in another order. More is a leak. Logits
    of a sequence alone may differ by half of the digits, in the median over its tokens, since
    kernels for other shapes add in another order: the comparison finds gross errors, such as
    positions that are ignored.

    A mixture of experts with a capacity drops tokens by what all sequences send to an expert
    together. That is a leak as well, and its layer is named, if the trial batch overflows it.

    Not found: what needs sequences longer than 180 tokens, such as attention in chunks of 8,192
    tokens, or positions that are scaled by the longest sequence of the row; a fault where a
    sequence begins with a chunk of 128 or more tokens; layers whose weights give them no effect
    yet; and what a model does only while gradients are recorded. A model that draws from a
    generator of its own is taken for one that leaks. Which families of models keep sequences
    apart, and with which kernels, is in ``docs/formats/huggingface.md``.

    Args:
        model: A Hugging Face causal language model, also wrapped by PEFT, by ``torch.compile`` (it
            runs without compilation here), or for several ranks (each of them calls this).
        inputs: Makes the keyword arguments of a forward pass from the trial batch, ``input_ids``
            of shape ``[1, tokens]`` among them. With those of padded micro-batches it is
            ``lambda batch: batch.select(range(len(batch)), alignment).model_inputs()``.

    Raises:
        ValueError: If another sequence moves: the message has the class of the model, and name and
            class of the innermost module that moves first. If the model does not take the inputs:
            its own error is the cause. If a sequence has other logits alone than in the batch. If
            logits are NaN, or do not depend on the tokens.
        TypeError: If the model returns no logits, or does not say how many tokens it knows.

    Cost: 18 forward passes of up to 337 tokens, without gradients; where logits move, two more for
    each sequence that moves others, with the activations of all modules on the host. Synchronises
    after each. Modes, buffers and the generators of torch, numpy and Python are left as they were.

    Example:
        >>> from trajpack.agent import build_tiny_model
        >>> model, tokenizer = build_tiny_model(seed=0)
        >>> check_isolation(model)
    """
    Trial(model, inputs).run()
