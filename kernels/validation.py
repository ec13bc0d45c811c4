"""Argument checks that all ops share; each message names op, argument, expectation and value."""

from __future__ import annotations

import os
from math import inf
from numbers import Real

import numpy as np
import torch

READS_DEVICE = os.environ.get("TRAJPACK_CHECK", "0") not in ("", "0")
"""Whether tables on a device are checked too: set ``TRAJPACK_CHECK=1`` before ``trajpack`` is
imported. Each call then waits for the device."""
HOSTS = ("cpu",)
"""Device types whose tensors are read without synchronisation."""


def values_to_check(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return ``tensor`` on the host, or ``None`` where its values must not be read.

    A traced tensor and one on the meta device have no values; one on a device is read with
    ``TRAJPACK_CHECK=1`` alone, and never while a CUDA graph is captured.
    """
    is_traced = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_traced or torch.compiler.is_compiling():
        return None
    if tensor.device.type in HOSTS:
        return tensor
    if not READS_DEVICE or tensor.device.type == "meta":
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return tensor.cpu()


def check_boundaries(
    op: str,
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    max_seqlen: int | None = None,
    *,
    name: str = "cu_seqlens",
    end: str = "num_tokens",
) -> None:
    """Raise if the values of ``cu_seqlens`` can be read and do not bound ``num_tokens``.

    ``name`` is that of the argument, ``end`` that of the number at which it must end.
    """
    readable = values_to_check(cu_seqlens)
    if readable is None:
        return
    ends = readable.numpy().astype(np.int64)
    lengths = np.diff(ends)
    if ends[0] != 0 or ends[-1] != num_tokens or (lengths < 0).any():
        raise ValueError(
            f"{op}: {name} must go from 0 to {end} {num_tokens} and never back, it goes "
            f"from {ends[0]} to {ends[-1]}, in steps of {lengths.min(initial=num_tokens)} or more"
        )
    if max_seqlen is not None and lengths.max(initial=0) > max_seqlen:
        raise ValueError(
            f"{op}: no sequence may be longer than max_seqlen {max_seqlen}, sequence "
            f"{lengths.argmax()} has {lengths.max()} tokens"
        )


def check_segments_within(op: str, name: str, segments: torch.Tensor, num_entries: int) -> None:
    """Raise if the values of boundaries or spans can be read and leave ``num_entries`` entries."""
    readable = values_to_check(segments)
    if readable is None:
        return
    begin, end = readable.unbind(1) if readable.ndim == 2 else (readable[:-1], readable[1:])
    wrong = (begin < 0) | (end < begin) | (end > num_entries)
    if wrong.any():
        first = int(wrong.int().argmax())
        raise ValueError(
            f"{op}: {name} must lie within {num_entries} entries and not end before they begin, "
            f"segment {first} goes from {int(begin[first])} to {int(end[first])}"
        )


def check_indices(op: str, name: str, indices: torch.Tensor, size: int, least: int = 0) -> None:
    """Raise if the values of ``indices`` can be read and are not in ``[least, size)``."""
    readable = values_to_check(indices)
    if readable is None or not readable.numel():
        return
    low, high = (int(bound) for bound in readable.aminmax())
    if low < least or high >= size:
        raise ValueError(f"{op}: {name} must be in [{least}, {size}), they go from {low} to {high}")


def check_tensor(  # noqa: PLR0913 - all but three are keywords
    op: str,
    name: str,
    tensor: torch.Tensor,
    *,
    dtypes: tuple[torch.dtype, ...] | None = None,
    ndim: int = 1,
    or_more: bool = False,
    device: torch.device | None = None,
    entries: int | None = None,
    per: str = "token",
    constant: bool = False,
) -> None:
    """Raise unless the argument ``name`` is a tensor that the op accepts.

    ``None`` accepts any dtype, any device, or any size of the first dimension, of which ``per`` is
    the noun for the owner of one entry. ``or_more`` accepts more dimensions too. ``constant``
    refuses a tensor through which a gradient would be recorded.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if dtypes is not None and tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} must be {expected}, got {got}")
    if tensor.ndim < ndim or (tensor.ndim > ndim and not or_more):
        shape, least = list(tensor.shape), "at least " * or_more
        raise ValueError(f"{op}: {name} must have {least}{ndim} dimension(s), got shape {shape}")
    if device is not None:
        check_device(op, name, tensor, device)
    if entries is not None and tensor.shape[0] != entries:
        raise ValueError(
            f"{op}: {name} must have one entry for each of {entries} {per}(s), "
            f"got shape {list(tensor.shape)}"
        )
    if constant and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: no gradient flows to {name}; pass {name}.detach()")


def check_cu_seqlens(
    op: str, cu_seqlens: torch.Tensor, *, device: torch.device | None = None
) -> None:
    """Raise unless ``cu_seqlens`` can hold segment boundaries: int32, 1-D, not empty."""
    check_tensor(op, "cu_seqlens", cu_seqlens, dtypes=(torch.int32,), device=device)
    if cu_seqlens.shape[0] == 0:
        raise ValueError(f"{op}: cu_seqlens must have segments + 1 entries, got none")


def check_device(op: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise unless ``tensor`` lives on ``device``."""
    if tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device} but the other inputs are on {device}")


def check_choice(op: str, name: str, choice: str, choices: tuple[str, ...]) -> None:
    """Raise unless ``choice`` is one of ``choices``."""
    if choice not in choices:
        expected = ", ".join(map(repr, choices))
        raise ValueError(f"{op}: {name} must be one of {expected}, got {choice!r}")


def check_integer(
    op: str,
    name: str,
    number: int,
    *,
    least: int = 0,
    most: int | None = None,
    kind: str = "an int",
) -> None:
    """Raise unless ``number`` is an int (no bool) from ``least`` to ``most``."""
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be {kind}, got {number!r}")
    if most is not None and not least <= number <= most:
        raise ValueError(f"{op}: {name} must be in [{least}, {most}], got {number}")
    if number < least:
        expected = f"be at least {least}" if least else "not be negative"
        raise ValueError(f"{op}: {name} must {expected}, got {number}")


def check_max_seqlen(op: str, max_seqlen: int | None) -> None:
    """Raise unless ``max_seqlen`` is a length or ``None``."""
    if max_seqlen is not None:
        check_integer(op, "max_seqlen", max_seqlen, kind="an int or None")


def check_number(
    op: str,
    name: str,
    number: float,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    finite: bool = False,
) -> None:
    """Raise unless ``number`` is a number (no bool, no NaN) within its bounds.

    ``above`` is an exclusive lower bound, ``least`` and ``most`` are inclusive bounds; ``finite``
    refuses infinity.
    """
    if isinstance(number, bool) or not isinstance(number, (Real, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number, got {number!r}")
    bounds = ["finite"] if finite else []
    is_within = -inf < number < inf if finite else -inf <= number <= inf  # False for NaN
    if above is not None:
        bounds.append(f"above {above:g}")
        is_within = is_within and number > above
    if least is not None:
        bounds.append("not negative" if least == 0 else f"at least {least:g}")
        is_within = is_within and number >= least
    if most is not None:
        bounds.append(f"at most {most:g}")
        is_within = is_within and number <= most
    if not is_within:
        expected = " and ".join(bounds) or "a number that is not NaN"
        raise ValueError(f"{op}: {name} must be {expected}, got {number!r}")
