"""Conversion of callers' values to int32 ids, float32 log-probabilities and plain numbers."""

from __future__ import annotations

import math
import operator
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

INT32_MAX = 2**31 - 1
"""Greatest token id, version, and index into the word stream."""
FLOAT32_MAX = float(np.finfo(np.float32).max)
INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)
TINY = 64
"""Numbers of a list up to which `array` is faster than `struct`, and types than values."""
Typecode: TypeAlias = Literal["i", "f"]
ARRAYS = (np.ndarray, torch.Tensor, array, memoryview)


def as_ids(name: str, values: Any) -> npt.NDArray[np.int32]:
    """Convert token ids to a 1-D int32 array; copies only if dtype or container require it.

    Raises:
        TypeError: If they are not integers.
        ValueError: If they are negative, beyond int32, or not one-dimensional.
    """
    ids = narrow_ids(name, values)
    if ids.size and int(ids.min()) < 0:
        raise ValueError(f"{name} must be 0 or more, got {ids.min()} at index {ids.argmin()}")
    return ids


def narrow_ids(name: str, values: Any) -> npt.NDArray[np.int32]:
    """Convert as `as_ids`, without the check for negative int32, which is cheaper in bulk."""
    if type(values) is np.ndarray and values.dtype is INT32 and values.ndim == 1:
        return values
    if type(values) is list:
        return _numbers_of(name, values, "i")
    ids = _as_array(name, values, "i")
    if ids.dtype is INT32 or ids.size == 0:
        return ids.astype(np.int32, copy=False)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {ids.dtype}")
    if not np.can_cast(ids.dtype, np.int32) and int(np.bitwise_or.reduce(ids)) >> 31:
        if (low := int(ids.min())) < 0:
            raise ValueError(f"{name} must be 0 or more, got {low} at index {ids.argmin()}")
        raise ValueError(f"{name} must fit int32, got {ids.max()} at index {ids.argmax()}")
    return ids.astype(np.int32, copy=False)


def as_logprobs(name: str, values: Any) -> npt.NDArray[np.float32]:
    """Convert log-probabilities to a 1-D float32 array.

    Raises:
        TypeError: If they are not numbers.
        ValueError: If one is not finite as float32, or they are not one-dimensional.
    """
    narrow = narrow_logprobs(name, values)
    finite = np.isfinite(narrow)
    if not finite.all():
        where = int(finite.argmin())
        got = (values if isinstance(values, list | tuple) else narrow)[where]
        raise ValueError(f"{name} must be finite float32, got {got} at index {where}")
    return narrow


def narrow_logprobs(name: str, values: Any) -> npt.NDArray[np.float32]:
    """Convert as `as_logprobs`, without the check for finite values, which is cheaper in bulk."""
    if type(values) is np.ndarray and values.dtype is FLOAT32 and values.ndim == 1:
        return values
    if type(values) is list:
        return _numbers_of(name, values, "f")
    logprobs = _as_array(name, values, "f")
    if logprobs.size and logprobs.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be floats, got {logprobs.dtype}")
    with np.errstate(over="ignore"):
        return logprobs.astype(np.float32, copy=False)


def as_number(name: str, value: Any) -> float:
    """Convert a reward or a discount to a float that is finite as float32 too; True is 1."""
    if type(value) is float and -FLOAT32_MAX <= value <= FLOAT32_MAX:
        return value
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception as error:
        raise TypeError(f"{name} must be a number, got {shown(value)}") from error
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"{name} must be finite float32, got {number}")
    return number


def as_integer(name: str, value: Any) -> int:
    """Convert a version, an id or a count to a Python int that fits int64."""
    if is_bool(value) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    try:
        number = operator.index(value)
    except Exception as error:
        raise TypeError(f"{name} must be an integer, got {shown(value)}") from error
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} must fit int64, got {shown(number)}")
    return number


def is_bool(value: Any) -> bool:
    """Tell whether a value is a bool of Python, numpy or torch, which is no number of a turn."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def shown(value: Any) -> str:
    """Return at most 100 characters of the ``repr`` of a value, for an error message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def several(expected: str, values: Any) -> tuple[Any, ...]:
    """Return the entries of an iterable; the `TypeError` for others begins with ``expected``."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{expected}, got {type(values).__name__}")
    return tuple(values)


def merge_spans(
    spans: Sequence[Any] | None, version_start: int, version_end: int
) -> tuple[list[tuple[int, int, int]] | None, int, int]:
    """Return version spans in their canonical form, and start and end.

    Empty spans are removed, adjacent spans of one version are merged, and a single span becomes
    ``None`` with its version as start and end. A start and end of 0 are taken from the spans.
    """
    merged: list[tuple[int, int, int]] = []
    for version, start, end in spans or ():
        if start == end:
            continue
        if merged and merged[-1][0] == version and merged[-1][2] == start:
            merged[-1] = (version, merged[-1][1], end)
        else:
            merged.append((version, start, end))
    if merged and version_start == version_end == 0:
        version_start, version_end = merged[0][0], merged[-1][0]
    single = len(merged) <= 1 and (not merged or version_start == version_end == merged[0][0])
    return (None if single else merged), version_start, version_end


def as_version_runs(
    name: str, spans: Sequence[Any] | None, version_start: Any, version_end: Any, num_tokens: int
) -> tuple[list[tuple[int, int, int]], int, int]:
    """Check a turn's versions and return ``(version, start, end)`` runs over its completion.

    Without spans all tokens have the start version.

    Raises:
        TypeError: If a version or a bound is not an integer.
        ValueError: If versions run backwards, are negative or beyond int32, or if the spans
            do not cover the completion or contradict start and end.
    """
    first = as_integer(f"{name}version_start", version_start)
    last = as_integer(f"{name}version_end", version_end)
    if spans is not None:
        spans = _as_spans(name, spans, num_tokens)
    merged, first, last = merge_spans(spans, first, last)
    if not 0 <= first <= INT32_MAX or not 0 <= last <= INT32_MAX:
        raise ValueError(f"{name}versions must be in [0, {INT32_MAX}], got {first} to {last}")
    if last < first:
        raise ValueError(
            f"{name}versions must not run backwards, got version_start {first} "
            f"and version_end {last}"
        )
    if merged is None:
        return [(first, 0, num_tokens)], first, last
    versions = [version for version, _, _ in merged]
    if versions != sorted(versions):
        raise ValueError(f"{name}version_spans must not run backwards, got versions {versions}")
    if (versions[0], versions[-1]) != (first, last):
        raise ValueError(
            f"{name}version_spans say versions {versions[0]} to {versions[-1]}, but "
            f"version_start is {first} and version_end is {last}"
        )
    return merged, first, last


def check_memory(tensor: torch.Tensor) -> None:
    """Raise a `ValueError` if a tensor's storage was freed or is smaller than its shape needs.

    Torch and numpy would read memory of others.
    """
    size = tensor.numel()
    if not size or tensor.layout is not torch.strided:
        return
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        size = 1 + sum((length - 1) * step for length, step in steps)
    end = tensor.storage_offset() + size
    if tensor.untyped_storage().nbytes() < end * tensor.itemsize:
        raise ValueError("the tensor's memory was freed")


def host_tensor(values: Any) -> torch.Tensor:
    """Return an array of any kind as a tensor on the host; Python numbers have 64 bits."""
    if isinstance(values, torch.Tensor):
        check_memory(values)
        return values.detach().cpu()
    array = np.asarray(values)
    plain = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
    # torch accepts no negative strides, and warns of read-only memory
    return torch.from_numpy(plain if plain.flags.writeable else plain.copy())


def _as_spans(name: str, spans: Any, num_tokens: int) -> list[tuple[int, int, int]]:
    """Return spans of integers; raise unless they cover the completion, one after the other."""
    field, reached, checked = f"{name}version_spans", 0, []
    for span in several(f"{field} must be a sequence", spans):
        try:
            version, start, end = span
        except (TypeError, ValueError) as error:
            triples = f"{field} must be (version, start, end) triples, got {shown(span)}"
            raise TypeError(triples) from error
        version, start, end = (as_integer(field, number) for number in (version, start, end))
        if start != reached or end < start:
            raise ValueError(
                f"{field} must follow each other from 0, got [{start}, {end}) where a span from "
                f"{reached} was expected"
            )
        checked.append((version, start, end))
        reached = end
    if reached != num_tokens:
        raise ValueError(f"{field} must cover {num_tokens} completion tokens, they cover {reached}")
    return checked


def _as_array(name: str, values: Any, typecode: Typecode) -> npt.NDArray[Any]:
    """Return numbers of any container as a one-dimensional numpy array."""
    if isinstance(values, ARRAYS):
        if isinstance(values, np.ma.MaskedArray):
            raise TypeError(f"{name} must not be a masked array: its mask would be lost")
        try:
            read = host_array(values)
        except Exception as error:  # sparse, meta, freed, a dtype that numpy lacks
            raise TypeError(f"{name} cannot be read as an array: {shown(error)}") from error
        if read.ndim != 1:
            raise ValueError(f"{name} must have one dimension, got shape {list(read.shape)}")
        return read
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be an array or a sequence, got {type(values).__name__}")
    if len(values) > INT32_MAX:
        raise ValueError(f"{name} must have at most {INT32_MAX} entries, got {len(values)}")
    return _numbers_of(name, list(values), typecode)


def _numbers_of(name: str, values: list[Any], typecode: Typecode) -> npt.NDArray[Any]:
    """Return the numbers of a list; `array` and `struct` reject those that numpy would round."""
    try:
        if len(values) <= TINY:
            numbers, suspects = np.array(array(typecode, values)), values
        else:
            packed = bytearray(struct.pack(f"{len(values)}{typecode}", *values))
            numbers = np.frombuffer(packed, typecode)
            suspects = [values[place] for place in np.flatnonzero((numbers == 0) | (numbers == 1))]
    except NUMBER_ERRORS:
        _check_each(name, values, typecode)
        raise
    if not set(map(type, suspects)) <= {int, float}:  # bools, perhaps
        _check_each(name, values, typecode)
    return numbers


NUMBER_ERRORS = (struct.error, TypeError, ValueError, OverflowError, RuntimeError)
"""What `array`, `struct` and numbers raise for a wrong number in a list."""


def _check_each(name: str, values: Sequence[Any], typecode: Typecode) -> None:
    """Raise the error of the first entry that does not fit a 4-byte number."""
    kinds, bound, method = {
        "i": ("integers", f"in [0, {INT32_MAX}]", "__index__"),
        "f": ("floats", "finite float32", "__float__"),
    }[typecode]
    for index, value in enumerate(values):
        got = f"got {shown(value)} at index {index}"
        if is_bool(value) or not hasattr(value, method):
            raise TypeError(f"{name} must be {kinds}, {got}")
        try:
            struct.pack(typecode, value)
        except NUMBER_ERRORS as error:
            raise ValueError(f"{name} must be {bound}, {got}") from error


def host_array(values: Any, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Return an array of any kind as a numpy array; tensors of a device are copied to the host."""
    if isinstance(values, torch.Tensor):
        check_memory(values)
        values = values.detach().cpu()
        if values.dtype == torch.bfloat16:
            values = values.float()
        values = values.resolve_neg().numpy()
    return np.asarray(values, dtype)


def sent(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device, by an asynchronous copy."""
    tensor = torch.from_numpy(numbers)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
