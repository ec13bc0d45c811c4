"""Every per-token field of a packed batch, written from a word stream and a table of runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.fields.build_host import build_on_host, check_runs
from trajpack.kernels.runs import MAX_TOKENS, RUN_WIDTH, TILE, Run
from trajpack.kernels.validation import check_device, check_tensor

OP = "build"


class TokenFields(NamedTuple):
    """What `build` writes for each token; all of shape ``[tokens]``."""

    input_ids: torch.Tensor
    """int64 token ids."""
    position_ids: torch.Tensor
    """int64 positions, from 0 in every sequence."""
    sequence_ids: torch.Tensor
    """int32 index of the token's sequence."""
    turn_ids: torch.Tensor
    """int32 index of the turn that generated the token, or -1."""
    prompt_mask: torch.Tensor
    """bool, True on tokens that were not generated."""
    loss_mask: torch.Tensor
    """bool, True on generated tokens."""
    rollout_logprobs: torch.Tensor
    """float32 log-probability at the token's own index; 0 where not generated."""
    policy_versions: torch.Tensor
    """int32 version that sampled the token, or -1."""
    returns: torch.Tensor
    """float32 return of the token's turn; 0 where not generated."""


FIELD_DTYPES = {
    "input_ids": torch.int64,
    "position_ids": torch.int64,
    "sequence_ids": torch.int32,
    "turn_ids": torch.int32,
    "prompt_mask": torch.bool,
    "loss_mask": torch.bool,
    "rollout_logprobs": torch.float32,
    "policy_versions": torch.int32,
    "returns": torch.float32,
}
"""The one table of per-token fields and their dtypes, in the order of `TokenFields`."""

NUMPY_DTYPES = {
    dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    for dtype in FIELD_DTYPES.values()
}


def build(
    words: torch.Tensor,
    runs: torch.Tensor,
    turn_returns: torch.Tensor,
    num_tokens: int,
    impl: Impl = "auto",
) -> TokenFields:
    """Expand a table of runs into every per-token field of a packed batch.

    Args:
        words: int32 stream of token ids and, bit for bit, of float32 log-probabilities.
        runs: ``[runs + 1, 8]`` int32, see `Run`, in order of START; a run may be empty. The
            last row only says where the last run ends: START is ``num_tokens``.
        turn_returns: ``[turns]`` float32.
        num_tokens: Tokens of the batch.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others.

    Returns:
        `TokenFields`, each of shape ``[num_tokens]``.

    Raises:
        TypeError: If a dtype is none of the above.
        ValueError: If shapes or devices disagree, or, on the host, where the table can be
            read, if it does not end at ``num_tokens``.

    Cost: one launch, no copy, no host synchronisation; 38 bytes written a token.

    Example:
        >>> words = torch.tensor([7, 8, 9], dtype=torch.int32)
        >>> runs = torch.tensor([[0, 0, 3, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]])
        >>> build(words, runs.int(), torch.zeros(0), 3).position_ids
        tensor([0, 1, 2])
    """
    _check_inputs(words, runs, turn_returns, num_tokens)
    chosen = resolve_impl(OP, impl, words)
    fields = torch.ops.trajpack.build(
        words.contiguous(), runs.contiguous(), turn_returns.contiguous(), num_tokens, chosen
    )
    return TokenFields(*fields)


def _check_inputs(
    words: torch.Tensor, runs: torch.Tensor, turn_returns: torch.Tensor, num_tokens: int
) -> None:
    check_tensor(OP, "words", words, ndim=1, dtypes=(torch.int32,))
    check_tensor(OP, "runs", runs, ndim=2, dtypes=(torch.int32,))
    check_tensor(OP, "turn_returns", turn_returns, ndim=1, dtypes=(torch.float32,))
    check_device(OP, "runs", runs, words.device)
    check_device(OP, "turn_returns", turn_returns, words.device)
    if runs.shape[0] == 0 or runs.shape[1] != RUN_WIDTH:
        raise ValueError(
            f"{OP}: runs must have shape [runs + 1, {RUN_WIDTH}], got {list(runs.shape)}"
        )
    if not 0 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"{OP}: num_tokens must be in [0, {MAX_TOKENS}], got {num_tokens}")


def empty_fields(num_tokens: int, device: torch.device) -> TokenFields:
    """Return uninitialised fields over memory in whole tiles, for `build_into`."""
    size = -(-num_tokens // TILE) * TILE
    if device.type == "cpu":  # numpy takes large arrays in huge pages
        arrays = [np.empty(size, NUMPY_DTYPES[dtype]) for dtype in FIELD_DTYPES.values()]
        return TokenFields(*(torch.from_numpy(array)[:num_tokens] for array in arrays))
    return TokenFields(
        *(
            torch.empty(size, dtype=dtype, device=device)[:num_tokens]
            for dtype in FIELD_DTYPES.values()
        )
    )


def build_into(
    fields: TokenFields,
    words: torch.Tensor,
    runs: torch.Tensor,
    turn_returns: torch.Tensor,
    impl: Impl = "auto",
) -> None:
    """Write the fields into memory that `empty_fields` made: `build` without an allocation.

    Raises:
        TypeError, ValueError: As `build`; also if the memory is not in whole tiles.

    Cost: one launch, no copy, no host synchronisation, capturable in a CUDA graph.
    """
    num_tokens = fields.input_ids.shape[0]
    _check_inputs(words, runs, turn_returns, num_tokens)
    if num_tokens == 0:
        return
    for name, field in fields._asdict().items():
        check_tensor(OP, name, field, ndim=1, dtypes=(FIELD_DTYPES[name],))
        check_device(OP, name, field, words.device)
        room = field.untyped_storage().nbytes() // field.itemsize - field.storage_offset()
        if (
            field.shape[0] != num_tokens
            or field.stride() != (1,)
            or room < -(-num_tokens // TILE) * TILE
        ):
            raise ValueError(
                f"{OP}: {name} must be {num_tokens} tokens in whole tiles of {TILE}, as "
                f"empty_fields makes it, got shape {list(field.shape)} with room for {room}"
            )
    chosen = resolve_impl(OP, impl, words)
    inputs = words.contiguous(), runs.contiguous(), turn_returns.contiguous()
    if chosen == "triton":
        from trajpack.kernels.fields.build_triton import write_fields

        check_runs(OP, runs, num_tokens)
        write_fields(*inputs, num_tokens, fields)
    elif words.device.type == "cpu":
        build_on_host(*inputs, num_tokens, fields)
    else:
        for out, field in zip(fields, build_reference(*inputs, num_tokens), strict=True):
            out.copy_(field)


def build_reference(
    words: torch.Tensor, runs: torch.Tensor, turn_returns: torch.Tensor, num_tokens: int
) -> TokenFields:
    """Say in plain torch what `build` means: each token looks its run up, then each field.

    No value is read by the host, so it runs on any device.
    """
    start = runs[:, Run.START]
    run = torch.repeat_interleave(start.diff(), output_size=num_tokens).long()
    offset = torch.arange(num_tokens, device=words.device) - start[run]
    source, context = runs[run, Run.SOURCE], runs[run, Run.GENERATED]
    generated = offset >= context
    token = torch.where(source >= 0, source + offset, 0)
    logprob = torch.where(generated, runs[run, Run.LOGPROB] + offset - context, 0)
    turn = torch.where(generated, runs[run, Run.TURN], -1)
    stream = words if words.shape[0] else words.new_zeros(1)  # all may be padding
    returns = torch.zeros(num_tokens, dtype=torch.float32, device=words.device)
    if turn_returns.shape[0]:
        returns = torch.where(generated, turn_returns[turn.clamp(min=0)], 0.0)
    return TokenFields(
        input_ids=torch.where(source >= 0, stream[token], 0).long(),
        position_ids=runs[run, Run.POSITION] + offset,
        sequence_ids=runs[run, Run.SEQUENCE],
        turn_ids=turn,
        prompt_mask=~generated,
        loss_mask=generated,
        rollout_logprobs=torch.where(generated, stream.view(torch.float32)[logprob], 0.0),
        policy_versions=torch.where(generated, runs[run, Run.VERSION], -1),
        returns=returns,
    )


def _run(
    words: torch.Tensor, runs: torch.Tensor, turn_returns: torch.Tensor, num_tokens: int, impl: str
) -> list[torch.Tensor]:
    if impl == "torch" and words.device.type == "cpu":
        return build_on_host(words, runs, turn_returns, num_tokens)
    if impl == "torch":
        return list(build_reference(words, runs, turn_returns, num_tokens))
    from trajpack.kernels.fields.build_triton import build_forward

    check_runs(OP, runs, num_tokens)
    return build_forward(words, runs, turn_returns, num_tokens)


def _fake(
    words: torch.Tensor, runs: torch.Tensor, turn_returns: torch.Tensor, num_tokens: int, impl: str
) -> list[torch.Tensor]:
    return [words.new_empty(num_tokens, dtype=dtype) for dtype in FIELD_DTYPES.values()]


LIBRARY.define(
    "build(Tensor words, Tensor runs, Tensor turn_returns, SymInt num_tokens, str impl) -> Tensor[]"
)
LIBRARY.impl("build", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::build", _fake, lib=LIBRARY)
