"""Packed batches and trees as ``.safetensors`` files."""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.stored import Labels
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays, as_array, as_tensor
from trajpack.packing.conversion import shown
from trajpack.packing.durable_files import remove_leftovers, replacing
from trajpack.packing.equality import same_bytes
from trajpack.packing.files.sources import packed, sources_of
from trajpack.packing.ragged import compact_fields
from trajpack.packing.text import one_line
from trajpack.packing.token_fields import TokenField
from trajpack.packing.tree.pack_tree import tree_of
from trajpack.packing.tree.tree_batch import TreeBatch

Arrays = dict[str, npt.NDArray[Any]]

FORMAT, SCHEMA_VERSION = "trajpack.PackedBatch", "5"
MAX_HEADER_BYTES = 1 << 24
SOURCES = ("num_turns", "chain_sizes", "tokens", "turns", "numbers", "spans", "logprobs")
"""Arrays of `TrajectoryArrays` in a file; the rows of extra fields are in it too."""
ADDED = ("advantages", "metrics")
"""Tensors that a pack does not have."""
LATER = (*ADDED, "returns", "turn_returns", "loss_mask")
"""Tensors in which a batch may differ from a pack of its trajectories. The file holds those that
do, and so for extra fields."""


def save(batch: PackedBatch | TreeBatch, path: str | os.PathLike[str]) -> None:
    """Write a batch or a tree to a ``.safetensors`` file, durably and whole.

    The file holds the trajectories, the layout (of a tree its options), and what was computed
    later: advantages, returns, metrics, a ``loss_mask`` of dropped tokens, fields of
    ``with_field``. A CRC covers all of it. A file that exists keeps its mode.

    Args:
        batch: Batch or tree on any device.
        path: File, usually ``.safetensors``.

    Raises:
        OSError: If the file cannot be written, or ``path`` is no file. A file at ``path`` then
            keeps its content.
        ValueError: If the batch differs in more from a pack of its trajectories. It names what.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        raise FileExistsError(errno.EEXIST, "it is not a file", str(place))
    content = _content(batch)
    remove_leftovers(place)
    unfinished = place.with_name(f".{place.name}.{uuid.uuid4().hex}.tmp")
    with replacing(place, unfinished), unfinished.open("xb") as file:
        if place.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
        file.write(content)


def load(path: str | os.PathLike[str]) -> PackedBatch:
    """Read a batch from a file of `save` to the host; a tree as `TreeBatch.merged`.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is no packed batch, has an unknown schema or is damaged. The error
            names the file.

    Example:
        >>> import tempfile, trajpack
        >>> batch = trajpack.pack([trajpack.Trajectory("a", [trajpack.Turn([1, 2], [3], [-0.5])])])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trajpack.save(batch, f"{folder}/batch.safetensors")
        ...     trajpack.load(f"{folder}/batch.safetensors")
        PackedBatch('merged': 1 trajectories, 1 turns in 1 sequences; 3 tokens, 1 generated; \
longest 3; policy version 0; cpu)
    """
    return _loaded(path)[0]


def load_tree(path: str | os.PathLike[str]) -> TreeBatch:
    """Read a tree from a file of `save` to the host, with its options.

    A file of a `PackedBatch` of layout ``"merged"`` becomes a tree of the default options.

    Raises:
        OSError: If the file cannot be read.
        ValueError: As `load`; also if the layout is not ``"merged"``.
    """
    batch, options = _loaded(path)
    try:
        return tree_of(batch, **options)
    except ValueError as error:
        raise ValueError(f"{os.fsdecode(path)} is not a readable tree: {error}") from error


def _content(batch: PackedBatch | TreeBatch) -> bytes:
    """Return the content of a file."""
    from safetensors.numpy import save as serialise

    options = {}
    if isinstance(batch, TreeBatch):
        options = {"share": batch.share, "boundary": batch.boundary}
        batch = batch.merged()
    try:
        sources, fields = sources_of(batch), batch.token_fields
        sources.check()
        later = _later(batch, packed(sources, batch.layout))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the batch cannot be saved: {error}") from error
    labels: tuple[Any, ...] = sources.labels
    host = {
        "layout": batch.layout,
        "labels": [None if of.count(None) == len(of) else of for of in labels],
        "token_fields": [field.as_json() for field in fields],
        "metric_names": batch.metric_names,
        "options": options,
    }
    arrays = {name: getattr(sources, name) for name in SOURCES}
    arrays |= later | {f"rows.{number}": rows for number, rows in enumerate(sources.rows)}
    arrays["host"] = np.frombuffer(json.dumps(host).encode(), np.uint8)
    metadata = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "crc32": _crc(arrays)}
    return serialise(arrays, metadata)


def _later(batch: PackedBatch, fresh: PackedBatch) -> Arrays:
    """Return the bytes of the tensors in which a batch differs from a pack of its trajectories.

    Raises:
        ValueError: If it differs in more than what is computed later.
    """
    for name, value in fresh.host_values().items():
        if name != "metric_names" and getattr(batch, name) != value:
            raise ValueError(f"{name} must be {shown(value)}, got {shown(getattr(batch, name))}")
    tensors, templates, later = _tensors(batch), _templates(fresh, batch.metric_names), Arrays()
    for name in templates.keys() - tensors.keys():
        value = getattr(batch, name, None)
        if value is not None or name not in ADDED:
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    for name in tensors.keys() - templates.keys():
        raise ValueError(f"{name} is not declared; add it with PackedBatch.with_field")
    for name, tensor in tensors.items():
        expected, got = templates[name], _bits(tensor)
        types = [f"{one.dtype} {list(one.shape)}" for one in (expected, tensor)]
        if types[0] != types[1]:
            raise ValueError(f"{name} must be {types[0]}, got {types[1]}")
        if name in ADDED or not same_bytes(got, _bits(expected)):
            if name not in LATER and not name.startswith("fields."):
                raise ValueError(f"{name} is not what packing the trajectories gives")
            later[name] = got
    return later


def _tensors(batch: PackedBatch) -> dict[str, torch.Tensor]:
    """Return all tensors of a batch by their names in a file."""
    fields, values = compact_fields(batch)
    return {
        **batch.tensors(),
        **{f"fields.{name}": rows for name, rows in fields.items()},
        **{f"ragged_values.{name}": rows for name, rows in values.items()},
    }


def _templates(fresh: PackedBatch, metric_names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return a tensor of the dtype and shape of each that a file may hold."""
    metrics = torch.empty(len(metric_names), dtype=torch.float64, device="cpu")
    return _tensors(fresh) | {"advantages": fresh.returns, "metrics": metrics}


def _bits(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return as_array(tensor)[1].reshape(-1).view(np.uint8)


def _loaded(path: str | os.PathLike[str]) -> tuple[PackedBatch, Mapping[str, Any]]:
    """Return the batch of a file, and the options of its tree."""
    name = os.fsdecode(path)
    try:
        return _batch_of(_read(name))
    except OSError:
        raise
    except Exception as error:  # damage may fail anywhere
        reason = one_line(error) or "it takes more memory than there is"
        raise ValueError(f"{name} is not a readable packed batch: {reason}") from error


def _read(path: str) -> Arrays:
    """Return the arrays of a file, whose CRC is right; read no more of a file of something else."""
    from safetensors.numpy import load as deserialise

    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe may block
        raise ValueError("it is not a file")
    with open(path, "rb") as file:
        size = file.read(8)
        header = file.read(min(int.from_bytes(size, "little"), MAX_HEADER_BYTES))
        try:
            metadata = dict(json.loads(header).get("__metadata__", {}))
        except (AttributeError, RecursionError, TypeError, ValueError):
            raise ValueError("it is no safetensors file") from None
        found = metadata.get("format"), metadata.get("schema_version")
        if found != (FORMAT, SCHEMA_VERSION):
            raise ValueError(f"its format is {found}, expected {(FORMAT, SCHEMA_VERSION)}")
        arrays: Arrays = deserialise(size + header + file.read())
    if _crc(arrays) != metadata.get("crc32"):
        raise ValueError("it is damaged: its CRC is not that of its content")
    return arrays


def _crc(arrays: Arrays) -> str:
    """Return the CRC-32 of names, dtypes, shapes and values."""
    crc = 0
    for name, array in sorted(arrays.items()):
        crc = zlib.crc32(f"{name} {array.dtype.str} {array.shape} ".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, crc)
    return f"{crc:08x}"


def _batch_of(arrays: Arrays) -> tuple[PackedBatch, Mapping[str, Any]]:
    host = json.loads(arrays["host"].tobytes())
    fields = tuple(TokenField.from_json(described) for described in host["token_fields"])
    parts: dict[str, Any] = {name: arrays[name] for name in SOURCES}
    without: list[Any] = [None] * len(arrays["num_turns"])
    sources = TrajectoryArrays(
        labels=Labels(*(without if of is None else of for of in host["labels"])),
        **parts,
        token_fields=fields,
        rows=tuple(arrays[f"rows.{number}"] for number in range(len(fields))),
    )
    sources.check()
    batch = packed(sources, host["layout"])
    metric_names = tuple(host["metric_names"])
    templates, later = _templates(batch, metric_names), dict[str, Any]()
    for name in arrays.keys() & templates.keys():
        dtype, like = as_array(templates[name])
        later[name] = as_tensor(dtype, arrays[name].copy().view(like.dtype).reshape(like.shape))
    rows = {name: later.pop(f"fields.{name}", packed) for name, packed in batch.fields.items()}
    loaded = replace(batch, fields=rows, metric_names=metric_names, **later)
    return loaded, host["options"]
