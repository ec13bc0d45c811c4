"""Packed batches as ``.safetensors`` files."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from trajpack.packing.batch import PackedBatch
from trajpack.packing.consistency import FIELD_PREFIX, checked_batch

FORMAT = "trajpack.PackedBatch"
SCHEMA_VERSION = 2


def save(batch: PackedBatch, path: str | os.PathLike[str]) -> None:
    """Write ``batch`` to ``path``, whole or not at all; see `PackedBatch.save`."""
    from safetensors import SafetensorError
    from safetensors.torch import save as serialise

    batch.check_unpadded()

    tensors = {name: tensor.cpu().contiguous() for name, tensor in batch.tensors().items()}
    tensors |= {
        f"{FIELD_PREFIX}{name}": field.cpu().contiguous() for name, field in batch.fields.items()
    }
    host = batch.host_values()
    host["token_fields"] = [field.as_json() for field in batch.token_fields]
    metadata = {
        "format": FORMAT,
        "schema_version": str(SCHEMA_VERSION),
        "host": json.dumps(host, allow_nan=False),
    }
    try:
        content = serialise(tensors, metadata)
    except SafetensorError as error:  # its header holds 100 MB
        raise ValueError(f"ids and groups take too much room: {error}") from error
    _write_whole(Path(os.path.realpath(path)), content)


def load(path: str | os.PathLike[str]) -> PackedBatch:
    """Read a batch from ``path``; see `PackedBatch.load`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)} is not a readable packed batch: {error}") from error
    _check_schema(path, metadata)
    try:
        return checked_batch(tensors, json.loads(metadata["host"]))
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is not a readable packed batch: {error}") from error


def _check_schema(path: str | os.PathLike[str], metadata: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{os.fspath(path)} is not a packed batch: its format is "
            f"{metadata.get('format')!r}, expected {FORMAT!r}"
        )
    if metadata.get("schema_version") != str(SCHEMA_VERSION):
        raise ValueError(
            f"{os.fspath(path)} has schema version {metadata.get('schema_version')}, "
            f"this release reads version {SCHEMA_VERSION}"
        )


def _write_whole(path: Path, content: bytes) -> None:
    """Write to a file beside ``path`` and move it there, so that no reader sees half of it."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
