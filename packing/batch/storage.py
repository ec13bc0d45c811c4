"""Packed batches as ``.safetensors`` files.

The safetensors library writes the files. Its readers map the file, which others may change, or hold
all bytes twice, so the reader here copies each tensor from the file once.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.consistency import (
    DTYPES,
    FIELD_PREFIX,
    HOST,
    LATER_DTYPES,
    PIECE,
    VALUES_PREFIX,
    Check,
    Described,
    InconsistentBatch,
    called,
    check_spans,
    checked_batch,
)
from trajpack.packing.conversion import check_memory, several, shown
from trajpack.packing.durable_files import replacing
from trajpack.packing.token_fields import TokenField

FORMAT = "trajpack.PackedBatch"
SCHEMA_VERSION = 2
CODES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""Names of dtypes in the format."""
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a safetensors header, bytes."""
MAX_DIMENSIONS = 64
MAX_REASON = 1000
"""Maximum number of characters of an error's reason."""
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Stored(NamedTuple):
    """A tensor in a file."""

    described: Described
    begin: int
    """Position of its first byte in the file."""
    num_bytes: int


def save(
    batch: PackedBatch, path: str | os.PathLike[str], options: Mapping[str, str] | None = None
) -> None:
    """Write ``batch`` to ``path`` atomically; see `PackedBatch.save`.

    The texts in ``options`` become metadata of the file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save as serialise

    place = Path(os.path.realpath(path))
    if place.exists() and (kind := _other_kind(place.stat().st_mode)):
        raise FileExistsError(errno.EEXIST, f"it is {kind}, not a file", str(place))
    try:
        host = _host_of(batch)
        tensors = {name: _on_host(name, tensor) for name, tensor in _tensors_of(batch)}
        described = {name: Described(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        checked_batch(described, host, partial(_examined, tensors))
    except InconsistentBatch as error:
        remedy = f"; {error.remedy}" if error.remedy else ""
        raise ValueError(f"the batch cannot be saved: {error}{remedy}") from error
    metadata = {
        "format": FORMAT,
        "schema_version": str(SCHEMA_VERSION),
        "host": json.dumps(host, allow_nan=False),
        **(options or {}),
    }
    try:
        content = serialise(_unshared(tensors), metadata)
    except SafetensorError as error:  # its header holds 100 MB
        raise ValueError(f"ids and groups take too much room: {error}") from error
    unfinished = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    with replacing(place, unfinished), unfinished.open("xb") as file:
        file.write(content)


def load(path: str | os.PathLike[str]) -> PackedBatch:
    """Read a batch from ``path``; see `PackedBatch.load`."""
    return load_with_options(path)[0]


def load_with_options(path: str | os.PathLike[str]) -> tuple[PackedBatch, Mapping[str, str]]:
    """Read a batch and the metadata of its file, of which ``options`` of `save` are a part."""
    name = os.fspath(path)
    try:
        if kind := _other_kind(os.stat(name).st_mode):  # opening a pipe or a device may block
            raise ValueError(f"it is {kind}, not a file")
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            if kind := _other_kind(found.st_mode):  # replaced meanwhile
                raise ValueError(f"it is {kind}, not a file")
            return _read_batch(file, found.st_size)
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it takes more memory than there is"
        if len(reason) > MAX_REASON:  # it may quote text of the file
            reason = f"{reason[:MAX_REASON]} ..."
        raise ValueError(f"{os.fsdecode(name)} is not a readable packed batch: {reason}") from error


def _other_kind(mode: int) -> str | None:
    """Return the kind of a file that is not regular, or ``None``."""
    kind = stat.S_IFMT(mode)
    return None if kind == stat.S_IFREG else KINDS.get(kind, "of an unknown kind")


def _host_of(batch: PackedBatch) -> dict[str, Any]:
    """Return the host values of a batch for JSON."""
    host = {name: getattr(batch, name) for name in HOST}
    host = {
        name: _plain(name, v) if isinstance(v, (list, tuple)) else v for name, v in host.items()
    }
    declared = host["token_fields"]
    for field in declared if isinstance(declared, list) else [None]:
        if not isinstance(field, TokenField):
            got = shown(field if isinstance(declared, list) else declared)
            raise InconsistentBatch(f"token_fields must be several TokenField, got {got}")
    return host | {"token_fields": [field.as_json() for field in declared]}


def _plain(name: str, entries: Any) -> list[Any]:
    try:
        return list(several(f"{name} must be a list", entries))
    except (TypeError, ValueError) as error:
        raise InconsistentBatch(str(error)) from error


def _tensors_of(batch: PackedBatch) -> Iterator[tuple[str, Any]]:
    """Return the tensors of a batch with their names in a file."""
    for name in DTYPES:
        tensor = getattr(batch, name)
        if tensor is not None or name not in LATER_DTYPES:
            yield name, tensor
    if not isinstance(batch.fields, Mapping):
        raise InconsistentBatch(f"fields must be a mapping, got {type(batch.fields).__name__}")
    fields, values = _compact_fields(batch)
    for name in _plain("fields", fields):
        yield f"{FIELD_PREFIX}{name}", fields[name]
    for name in values:
        yield f"{VALUES_PREFIX}{name}", values[name]


def _compact_fields(batch: PackedBatch) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return extra fields, and the values of ragged fields in the order of the tokens."""
    for name in batch.ragged_values:
        rows, values = batch.fields.get(name), batch.ragged_values[name]
        if not isinstance(rows, torch.Tensor) or not isinstance(values, torch.Tensor):
            raise InconsistentBatch(f"field {name!r} must have tensors of rows and of values")
        check_spans(name, _on_host(FIELD_PREFIX + name, rows).numpy(), len(values))
    return batch.compact_fields() if batch.ragged_values else (batch.fields, {})


def _on_host(name: str, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        got = type(tensor).__name__
        raise InconsistentBatch(f"{called(name)} must be a tensor, got {got}")
    has_values = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not has_values or tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
        kind = kind if has_values else type(tensor).__name__
        told = f"must be a dense tensor with values, got a {kind} one"
        raise InconsistentBatch(f"{called(name)} {told}")
    try:
        check_memory(tensor)
    except ValueError as error:
        raise InconsistentBatch(f"{called(name)} cannot be read: {error}") from error
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _examined(tensors: Mapping[str, torch.Tensor], name: str, check: Check | None) -> torch.Tensor:
    """Check a tensor and return it."""
    tensor = tensors[name]
    if check:
        for begin in range(0, len(tensor), PIECE):
            check(tensor.numpy(), slice(begin, min(begin + PIECE, len(tensor))))
    return tensor


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that share memory, which safetensors rejects."""
    taken: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if memory in taken else tensor
        taken.add(memory)
    return unshared


def _read_batch(file: FileIO, size: int) -> tuple[PackedBatch, Mapping[str, str]]:
    """Read batch and metadata of a file of ``size`` bytes; raise a `ValueError` if it has none."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise ValueError(f"it needs {size:,} bytes of memory, this machine has {memory:,}")
    header, begin = _read_header(file, size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"its metadata must be texts by name, got {shown(metadata)}")
    if metadata.get("format") != FORMAT:
        raise ValueError(f"its format is {shown(metadata.get('format'))}, expected {FORMAT!r}")
    version = metadata.get("schema_version")
    if version != str(SCHEMA_VERSION):
        got = version if version and version.isdecimal() else shown(version)
        raise ValueError(
            f"it has schema version {got}, this release reads version {SCHEMA_VERSION}"
        )
    if "host" not in metadata:
        raise ValueError("its metadata must have a host")
    stored = _stored(header, begin, size)
    described = {name: one.described for name, one in stored.items()}
    read = partial(_read_tensor, file, stored)
    return checked_batch(described, _parsed(metadata["host"]), read), metadata


def _read_tensor(
    file: FileIO, stored: Mapping[str, Stored], name: str, check: Check | None
) -> torch.Tensor:
    """Read a tensor into fresh memory and check it in pieces."""
    (dtype, shape), place, num_bytes = stored[name]
    try:
        raw = np.empty(num_bytes, np.uint8)
    except MemoryError:
        raise ValueError(f"{called(name)} needs {num_bytes:,} bytes of memory") from None
    if not num_bytes:  # torch cannot view no bytes as another dtype
        return torch.empty(shape, dtype=dtype, device="cpu")
    tensor = torch.from_numpy(raw).view(dtype).reshape(shape)
    row_bytes = num_bytes // len(tensor)
    step = PIECE if check else len(tensor)
    for begin in range(0, len(tensor), step):
        rows = slice(begin, min(begin + step, len(tensor)))
        first, end = row_bytes * rows.start, row_bytes * rows.stop
        _fill(file, place + first, raw[first:end], name=called(name))
        if check:
            check(tensor.numpy(), rows)
    return tensor


def _read_header(file: FileIO, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a file and the position of its first tensor."""
    first = np.zeros(8, np.uint8)
    if size < len(first):
        raise ValueError(f"it has {size} bytes, too few for a header")
    _fill(file, 0, first, name="its header")
    length = int.from_bytes(first.tobytes(), "little")
    if length > min(MAX_HEADER_BYTES, size - len(first)):
        raise ValueError(f"its header would take {length:,} bytes of its {size:,}")
    raw = np.empty(length, np.uint8)
    _fill(file, len(first), raw, name="its header")
    text = raw.tobytes()
    header = _parsed(text.decode()) if text.startswith(b"{") else None
    if header is None:
        raise ValueError("its header is no JSON object")
    return header, len(first) + length


def _parsed(text: str) -> Any:
    """Read JSON; duplicate keys, NaN and infinity are errors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"its header has a key twice, of {shown([key for key, _ in pairs])}")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"its header has {constant}, which is no JSON")

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def _stored(header: Mapping[str, Any], begin: int, size: int) -> dict[str, Stored]:
    """Return the position of each tensor; together they must fill the file from ``begin``."""
    stored = {name: _stored_tensor(name, entry, begin) for name, entry in header.items()}
    end = begin
    for name, one in sorted(stored.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if one.begin != end:
            raise ValueError(f"{shown(name)} begins at byte {one.begin}, expected {end}")
        end += one.num_bytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, the file has {size}")
    return stored


def _stored_tensor(name: str, entry: Any, begin: int) -> Stored:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown(name)} must have dtype, shape and data_offsets in the header")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = CODES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise ValueError(f"{shown(name)} must be of a known dtype, got {shown(code)}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if (
            not isinstance(numbers, list)
            or len(numbers) > MAX_DIMENSIONS
            or any(type(number) is not int or not 0 <= number < 2**63 for number in numbers)
        ):
            raise ValueError(f"{what} of {shown(name)} must be sizes, got {shown(numbers)}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
        raise ValueError(
            f"{shown(name)} must have data_offsets of {num_bytes} bytes, got {shown(offsets)}"
        )
    return Stored(Described(dtype, tuple(shape)), begin + offsets[0], num_bytes)


def _fill(file: FileIO, begin: int, out: npt.NDArray[np.uint8], *, name: str) -> None:
    """Fill ``out`` with the bytes of the file from position ``begin``."""
    file.seek(begin)
    filled, room = 0, out.data
    while filled < len(out):
        count = file.readinto(room[filled:])  # a call reads 2 GB at most
        if not count:
            raise ValueError(f"{name} was cut off at byte {begin + filled} while it was read")
        filled += count
