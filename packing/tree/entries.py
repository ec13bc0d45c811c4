"""`Entries` and `MicroEntries`: generated tokens of trees, as tables that losses read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.micro_batches.micro_batch import MicroBatch


def _refused(name: str, remedy: str) -> Callable[..., NoReturn]:
    def method(self: object, *given: object, **options: object) -> NoReturn:
        raise TypeError(f"{name}: entries have no prompts and are no sequences; {remedy}")

    method.__doc__ = f"Raise a `TypeError`: {remedy}."
    return method


class Entries(PackedBatch):
    """Generated tokens of a `TreeBatch`, each once, as a packed batch without prompts.

    Tensors over tokens have an entry for each generated token, turn after turn, in the order of
    `cu_generated`. `position_ids` are the nodes of the entries, `sequence_ids` and `turn_sequence`
    their chains; `cu_seqlens` are the boundaries of the turns, as `cu_generated` is. Estimators,
    loss weights and corrections read the entries as they read any batch. What needs sequences, such
    as a trainer's format, refuses them.
    """

    @property
    def generated_lens(self) -> tuple[int, ...]:
        """Entries of each turn; all of them are generated."""
        return self.seqlens

    labels: Any = _refused("labels", "call TreeBatch.labels")
    logprobs: Any = _refused("logprobs", "call TreeBatch.logprobs")
    model_inputs: Any = _refused("model_inputs", "call TreeBatch.model_inputs")
    unpack: Any = _refused("unpack", "call TreeBatch.unpack")
    save: Any = _refused("save", "call TreeBatch.save")
    select: Any = _refused("select", "call TreeBatch.micro_batches")
    split: Any = _refused("split", "call TreeBatch.micro_batches")
    micro_batches: Any = _refused("micro_batches", "call TreeBatch.micro_batches")


class MicroEntries(MicroBatch):
    """Entries of the turns of a `TreeMicroBatch`, as `Entries` are those of a `TreeBatch`.

    `turn_ids` are turns of the batch, `position_ids` nodes of the micro-batch, `sequences` its
    turns; `fields` hold the caller's tensors too. They have no padding.
    """

    labels: Any = _refused("labels", "call TreeMicroBatch.labels")
    logprobs: Any = _refused("logprobs", "call TreeMicroBatch.logprobs")
    model_inputs: Any = _refused("model_inputs", "call TreeMicroBatch.model_inputs")
    shard: Any = _refused("shard", "a context-parallel rank computes nodes")
