"""Packed batches as ``.safetensors`` files."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from trajpack.packing.batch import PackedBatch

FORMAT = "trajpack.PackedBatch"
SCHEMA_VERSION = 1


def save(batch: PackedBatch, path: str | os.PathLike[str]) -> None:
    """Write ``batch`` to ``path``, whole or not at all; see `PackedBatch.save`."""
    from safetensors.torch import save as serialise

    # host tensors of their own, so that no two share memory
    tensors = {name: tensor.cpu().contiguous() for name, tensor in batch.tensors().items()}
    host = {
        field.name: getattr(batch, field.name)
        for field in dataclasses.fields(batch)
        if field.name not in tensors
    }
    metadata = {
        "format": FORMAT,
        "schema_version": str(SCHEMA_VERSION),
        "host": json.dumps(host, allow_nan=False),
    }
    _write_whole(Path(path), serialise(tensors, metadata))


def load(path: str | os.PathLike[str]) -> PackedBatch:
    """Read a batch from ``path``; see `PackedBatch.load`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_schema(path, metadata)
            values: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        host = json.loads(metadata["host"])
        values.update((k, tuple(v) if isinstance(v, list) else v) for k, v in host.items())
        return PackedBatch(**values)
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
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
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
