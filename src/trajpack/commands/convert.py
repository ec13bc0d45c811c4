"""The work of ``trajpack convert``."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line
from trajpack.commands.inspect import load_batch
from trajpack.commands.terminal import make_console, say, tell, writing
from trajpack.packing.adapters import areal, prime_rl, slime, torchtitan
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.credit.estimators import GroupEstimator
from trajpack.packing.durable_files import replacing
from trajpack.packing.files.storage import save

READERS: Mapping[str, Any] = {
    "slime": slime.from_samples,
    "prime-rl": prime_rl.from_training_samples,
    "areal": areal.from_padded_dict,
}
"""Function that makes trajectories, by format."""
WRITERS: Mapping[str, Any] = {
    "slime": slime.to_samples,
    "prime-rl": prime_rl.to_training_samples,
    "torchtitan": torchtitan.to_training_samples,
}
"""Function that makes a list of samples of a batch, by format."""
UNREAD: Mapping[str, Iterable[str]] = {
    "slime": ["rollout_routed_experts"],
    "prime-rl": ["advantages", *prime_rl.READ],
    "areal": sorted(areal.EARLY),
}
"""Keys of numbers per token that no batch of the command gets, by format."""
WRITTEN: Mapping[str, Iterable[str]] = {
    "slime": slime.SAMPLE_KEYS,
    "prime-rl": [*prime_rl.READ, "sampling_mask"],
    "torchtitan": [],
}
"""Extra fields of a batch that a format has, by format."""


def convert_file(
    file: Path,
    source: str,
    target: str,
    *,
    out: Path,
    advantages: str | None,
    missing_reward: float | None,
) -> int:
    """Read rollouts, pack them, and write them in another format; return the exit status."""
    if source == "trajpack":
        batch = load_batch(file)
    else:
        given = _read(file)
        if source == "slime" and isinstance(given, Mapping):  # its dump of a rollout
            given = given.get("samples")
        if not isinstance(given, (list, Mapping) if source == "areal" else list):
            raise SetupError(f"{file} holds no list of {source} samples")
        batch = _packed(file, source, given, missing_reward)
        samples = [given] if isinstance(given, Mapping) else given
        unread = [key for key in UNREAD[source] if any(one.get(key) is not None for one in samples)]
        remedy = f"; {_place(source)} reads extra fields" if source != "areal" else ""
        _tell_left_out(f"not read from {source}", unread, remedy)
    if target != "trajpack":
        unwritten = [name for name in batch.fields if name not in WRITTEN[target]]
        _tell_left_out(f"not in samples of {target}", unwritten)
    try:
        if advantages is not None:
            recipe: Any = advantages.replace("-", "_")
            batch = batch.with_advantages(GroupEstimator(recipe))
        written = batch if target == "trajpack" else WRITERS[target](batch)
    except ValueError as error:
        needed = "; name an estimator with --advantages" if "with_advantages" in str(error) else ""
        raise SetupError(f"{first_line(error)}{needed}") from error
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(out, target, written)
    console = make_console()
    tell(console, f"sequences  {len(batch):,} of {len(batch.ids):,} trajectories")
    tell(console, f"tokens     {batch.num_tokens:,}, {batch.num_generated:,} of them generated")
    tell(console, f"written    {out}")
    return 0


def _tell_left_out(where: str, names: list[str], remedy: str = "") -> None:
    """Say on standard error what the written file lacks."""
    if names:
        say(f"left out, {where}: {', '.join(names)}{remedy}")


def _place(source: str, fields: str = "...") -> str:
    """Return the call in Python that reads extra fields of a format."""
    reader = READERS[source]
    return f"{reader.__module__}.{reader.__name__}(samples, fields=[{fields}])"


def _read(file: Path) -> Any:
    """Return the content of a JSONL file, a list, or of a file of `torch.save`."""
    if file.is_char_device():
        raise SetupError(f"cannot read {file}: a device has no end")
    try:
        if file.suffix == ".pt":
            return torch.load(file, map_location="cpu", weights_only=True)
        rows = []
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        rows.append(json.loads(line))
                    except ValueError as error:
                        raise SetupError(f"{file}, line {number}: no JSON: {error}") from error
    except (EOFError, RuntimeError, UnicodeDecodeError, pickle.UnpicklingError) as error:
        raise SetupError(f"cannot read {file}: {first_line(error)}") from error
    else:
        return rows


def _packed(file: Path, source: str, given: Any, missing_reward: float | None) -> PackedBatch:
    try:
        return pack(READERS[source](given, missing_reward=missing_reward))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # of untyped JSON
        remedy = first_line(error).replace("pass missing_reward=0.0", "give --missing-reward 0")
        unread = r'"\1"'  # the field that the error names
        in_python = f"read them in Python by {_place(source, unread)}"
        remedy = re.sub(r"name (\w+) in fields", in_python, remedy)
        raise SetupError(f"{file}: {remedy}") from error


def _write(out: Path, target: str, written: Any) -> None:
    """Write a batch or samples, whole or not at all."""
    if isinstance(written, PackedBatch):
        save(written, out)
        return
    with replacing(out) as unfinished:
        if out.suffix == ".pt":
            torch.save({"samples": written} if target == "slime" else written, unfinished)
            return
        with unfinished.open("w", encoding="utf-8") as lines:
            for row in written:
                try:
                    lines.write(json.dumps(row) + "\n")
                except TypeError as error:
                    raise SetupError(
                        f"extra fields have no JSON form, write a .pt: {error}"
                    ) from error
