"""The packed batch: what a trainer holds."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trajpack.kernels.fields.gather_fields import UNITS
from trajpack.packing.batch.credit_methods import CreditMethods
from trajpack.packing.batch.micro_batch_methods import MicroBatchMethods
from trajpack.packing.conversion import check_memory
from trajpack.packing.layout import Layout
from trajpack.packing.micro_batches.labels import LabelMethods
from trajpack.packing.micro_batches.micro_batch import model_inputs, record_storages
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.types import Trajectory


@dataclass(frozen=True, eq=False, repr=False)
class PackedBatch(CreditMethods, MicroBatchMethods, LabelMethods):
    """Trajectories as flat, unpadded tensors on one device.

    Made by `trajpack.pack` or `TrajectoryBuffer.pack`. Tensors over tokens are of shape
    ``[tokens]``, sequence after sequence; tensors over turns of shape ``[turns]``, trajectory
    after trajectory, oldest turn first. Host tuples have one entry for each trajectory.
    """

    input_ids: torch.Tensor
    """int64 ``[tokens]``: token ids."""
    position_ids: torch.Tensor
    """int64 ``[tokens]``: positions, from 0 in every sequence."""
    sequence_ids: torch.Tensor
    """int32 ``[tokens]``: index of the token's sequence."""
    turn_ids: torch.Tensor
    """int32 ``[tokens]``: turn that generated the token, an index of the turn tensors, or -1."""
    prompt_mask: torch.Tensor
    """bool ``[tokens]``: True on prompt and observation tokens."""
    loss_mask: torch.Tensor
    """bool ``[tokens]``: True on generated tokens, each exactly once in the batch."""
    rollout_logprobs: torch.Tensor
    """float32 ``[tokens]``: log-probability at the token's own index; 0 where not generated."""
    policy_versions: torch.Tensor
    """int32 ``[tokens]``: version of the weights that sampled the token, or -1."""
    returns: torch.Tensor
    """float32 ``[tokens]``: return of the token's turn; 0 where not generated."""

    cu_seqlens: torch.Tensor
    """int32 ``[sequences + 1]``: sequence boundaries; starts at 0, ends at ``tokens``."""
    turn_rewards: torch.Tensor
    """float64 ``[turns]``: rewards as given."""
    turn_returns: torch.Tensor
    """float32 ``[turns]``: rewards discounted backward over the trajectory's turns."""
    turn_truncated: torch.Tensor
    """bool ``[turns]``: True where no end-of-sequence token was sampled."""
    turn_version_start: torch.Tensor
    """int32 ``[turns]``: policy version of the first sampled token."""
    turn_version_end: torch.Tensor
    """int32 ``[turns]``: policy version of the last sampled token."""
    turn_sequence: torch.Tensor
    """int32 ``[turns]``: sequence that holds the turn's completion."""
    turn_spans: torch.Tensor
    """int32 ``[turns, 2]``: the completion's first token in the batch, and one past its last."""
    turn_begin: torch.Tensor
    """int32 ``[turns]``: first token in the batch that is new with the turn: its context since the
    completion before it in its chain, or since its sequence's start where there is none. The
    tokens from here to the completion's end are the same in every layout."""
    cu_generated: torch.Tensor
    """int32 ``[turns + 1]``: generated tokens of all turns before each; ends at their number."""
    cu_turns: torch.Tensor
    """int32 ``[trajectories + 1]``: boundaries of the trajectories' turns."""
    group_ids: torch.Tensor
    """int32 ``[trajectories]``: groups, numbered from 0 as they first appear in the batch; a
    trajectory without a group is one of its own."""

    fields: Mapping[str, torch.Tensor]
    """``[tokens, *shape]`` each: the extra fields, by name."""
    token_fields: tuple[TokenField, ...]
    """What the extra fields are, as declared at the buffer."""

    layout: Layout
    """``"merged"`` or ``"turns"``."""
    seqlens: tuple[int, ...]
    """Tokens of each sequence."""
    num_generated: int
    """Generated tokens: what `loss_mask` selects."""
    num_groups: int
    """Distinct groups: what `group_ids` numbers."""
    ids: tuple[str, ...]
    """Names of the trajectories."""
    groups: tuple[str | None, ...]
    """Groups of the trajectories."""
    task_ids: tuple[int | None, ...]
    """Kinds of task of the trajectories."""
    birth_times_ms: tuple[int | None, ...]
    """When their episodes began, in milliseconds since the epoch."""
    turn_discounts: tuple[float, ...]
    """Their discounts from one turn to the next."""

    advantages: torch.Tensor | None = None
    """float32 ``[tokens]``: advantages, 0 where not generated; ``None`` until they are assigned."""
    metrics: torch.Tensor | None = None
    """float64 ``[metrics]``: what was measured when they were, named by `metric_names`."""
    metric_names: tuple[str, ...] = ()
    """Names of the metrics."""

    @classmethod
    def deferred(
        cls, ready: Mapping[str, Any], later: Mapping[str, Callable[[], Any]]
    ) -> PackedBatch:
        """Make a batch of which some fields are made only when they are first asked for.

        For the host's sake: a pack shall cost it the same at any size.
        """
        batch = object.__new__(cls)
        batch.__dict__.update(ready, _later=dict(later))
        return batch

    if not TYPE_CHECKING:  # which knows all fields, and shall see a misspelled one

        def __getattr__(self, name: str) -> Any:
            make = self.__dict__.get("_later", {}).get(name)
            if make is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            with torch.inference_mode(False):  # whoever asks first, a trainer may ask later
                return self.__dict__.setdefault(name, make())

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence; 0 in an empty batch. Read from the host."""
        return max(self.seqlens) if self.seqlens else 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.input_ids.shape[0]

    @property
    def num_turns(self) -> int:
        """Turns of all trajectories."""
        return self.turn_rewards.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.input_ids.device

    def __len__(self) -> int:
        """Sequences in the batch."""
        return len(self.seqlens)

    def __repr__(self) -> str:
        versions = "" if self.device.type != "cpu" or not self.num_turns else self._versions()
        return (
            f"PackedBatch({self.layout!r}: {len(self.ids)} trajectories, {self.num_turns} turns "
            f"in {len(self)} sequences; {self.num_tokens:,} tokens, {self.num_generated:,} "
            f"generated; longest {self.max_seqlen:,}{versions}; {self.device})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Let go of shared memory: pickles and deep copies hold the tensors alone."""
        state = self._values() | {name: tensor.clone() for name, tensor in self.tensors().items()}
        return state | {"fields": {name: field.clone() for name, field in self.fields.items()}}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor it has by its field's name; extra fields are in `fields`."""
        values = self._values()
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def host_values(self) -> dict[str, Any]:
        """Return what is no tensor, by its field's name; extra fields are in `fields`."""
        values = self._values()
        return {
            name: value
            for name, value in values.items()
            if not isinstance(value, (torch.Tensor, type(None)))  # None: a tensor it lacks
            and name not in ("fields", "token_fields")
        }

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """Return the batch on ``device``; itself if it is there already.

        Cost: one copy a tensor. To get a batch to a device, pack it there: that is one copy.
        """
        moved: dict[str, Any] = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name, tensor in self.tensors().items()
        }
        moved["fields"] = {
            name: field.to(device, non_blocking=non_blocking) for name, field in self.fields.items()
        }
        if all(moved[name] is tensor for name, tensor in self.tensors().items()):
            return self
        return dataclasses.replace(self, **moved)

    def record_stream(self, stream: torch.Stream) -> None:
        """Let work of another stream than the one it was packed on read the batch.

        PyTorch hands memory out again as soon as no tensor holds it, for work that is behind on
        the stream it was allocated on. Work of another stream may still read it then. This tells
        the allocator of that stream for all memory of the batch: the fields over tokens, extra
        fields, returns, advantages, and the one allocation in which the copy from the host put
        all tables and the token stream. ``record_stream`` on a field covers that field alone.

        The other stream must have waited for the packing: ``stream.wait_stream(packing)``.
        ``docs/devices.md`` has an example.

        Args:
            stream: That the batch is read on, a `torch.cuda.Stream`.

        Cost: one call of ``torch.Tensor.record_stream`` a storage, about a dozen. No copy, no
            synchronisation. Does nothing on the host.
        """
        # tables that were not asked for yet lie in one allocation, with the boundaries
        made = [value for value in self.__dict__.values() if isinstance(value, torch.Tensor)]
        record_storages([self.cu_seqlens, *made, *self.fields.values()], stream)

    def model_inputs(self) -> dict[str, Any]:
        """Return keyword arguments for a Hugging Face causal model's ``forward``.

        One row that holds every sequence. Layers keep the sequences apart by different arguments:

        ================================= =========================================================
        layer                             argument
        ================================= =========================================================
        flash attention                   ``cu_seq_lens_q``, ``cu_seq_lens_k``, their maxima
        eager and sdpa attention          ``position_ids``, where there is neither cache nor mask:
                                          pass no ``attention_mask`` beside these, a mask of ones
                                          would let sequences see each other
        short convolution, Mamba2         ``seq_idx``
        gated delta rule (Qwen3.5)        ``cu_seq_lens_q``; its convolution ``seq_idx``
        ================================= =========================================================

        Some models ignore an argument that their layers need, without an error: Mamba2, Jamba,
        LFM3, GPT-OSS on eager attention, among others. Call
        `trajpack.packing.adapters.huggingface.check_isolation` once, before a model's first batch.

        Returns:
            ``input_ids`` and ``position_ids``, int64 ``[1, tokens]``; ``seq_idx``, int32
            ``[1, tokens]``: `sequence_ids`; ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32
            ``[sequences + 1]``; ``max_length_q`` and ``max_length_k``, integers;
            ``use_cache=False``.

        Cost: views; nothing is copied or synchronised.
        """
        return model_inputs(
            self.input_ids,
            self.position_ids,
            self.sequence_ids,
            places=self.cu_seqlens,
            max_seqlen=self.max_seqlen,
        )

    def unpack(self) -> list[Trajectory]:
        """Return the trajectories that were packed: equal in every value, in their order.

        Cost: copies the batch to the host (synchronises); the turns' arrays are views of that.
        """
        from trajpack.packing.batch.unpack import unpack  # which itself needs this class

        return unpack(self)

    def with_field(self, field: TokenField, rows: torch.Tensor) -> PackedBatch:
        """Return the batch with an extra field that was computed after packing.

        Such as log-probabilities of a teacher. The field is declared, so that `save` and `unpack`
        take it along. All other tensors are shared with this batch.

        Args:
            field: Its name is not that of a field the batch has.
            rows: ``[tokens, *field.shape]`` of ``field.dtype``, on the batch's device. Where
                ``field.generated_only``, tokens that were not generated get ``field.fill``.

        Raises:
            TypeError: If ``field`` is no `TokenField`, or ``rows`` no tensor or of another dtype.
            ValueError: If the name is taken, the shape or the device is another, or ``rows`` is
                sparse or its memory was freed.

        Cost: one launch where ``field.generated_only``, else nothing. No synchronisation.

        Example:
            >>> from trajpack import TokenField, Trajectory, Turn, pack
            >>> batch = pack([Trajectory("a", [Turn([1, 2], [3], [-0.5])])])
            >>> teacher = TokenField("teacher_logprobs", torch.float32)
            >>> batch = batch.with_field(teacher, torch.tensor([-1.0, -2.0, -3.0]))
            >>> batch.fields["teacher_logprobs"]
            tensor([ 0.,  0., -3.])
        """
        declared = check_fields([*self.token_fields, field])
        if not isinstance(rows, torch.Tensor) or rows.dtype != field.dtype:
            got = rows.dtype if isinstance(rows, torch.Tensor) else type(rows).__name__
            raise TypeError(f"field {field.name!r}: rows must be {field.dtype}, got {got}")
        expected = (self.num_tokens, *field.shape)
        if tuple(rows.shape) != expected or rows.device != self.device:
            raise ValueError(
                f"field {field.name!r}: rows must have shape {list(expected)} on {self.device}, "
                f"got {list(rows.shape)} on {rows.device}"
            )
        if rows.layout != torch.strided:
            raise ValueError(f"field {field.name!r}: rows must be dense, got {rows.layout}")
        try:
            check_memory(rows)
        except ValueError as error:
            raise ValueError(f"field {field.name!r}: rows cannot be read: {error}") from error
        rows = rows.detach().resolve_conj().resolve_neg()
        if field.generated_only:
            is_context = self.prompt_mask.reshape(-1, *[1] * len(field.shape))
            bits = rows.view(UNITS[field.dtype.itemsize])  # torch fills few dtypes
            fill = int.from_bytes(field.layout.fill, sys.byteorder, signed=True)
            rows = bits.masked_fill(is_context, fill).view(field.dtype)
        fields = {**self.fields, field.name: rows}
        return dataclasses.replace(self, fields=fields, token_fields=declared)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the batch to a ``.safetensors`` file, whole or not at all.

        What `load` would refuse is refused here: a tensor of another dtype or shape than this
        class says, a narrowed `loss_mask`, returns that are not those of the rewards, an extra
        field that is not declared (see `with_field`). Values of `advantages`, `metrics` and extra
        fields are free, and so are `returns` where there are `advantages`.

        Raises:
            OSError: If it cannot be written, or ``path`` is a folder, a pipe or a device; what was
                there stays as it was.
            ValueError: If the batch is padded, or its parts do not fit together. It names the
                field and what can be done.

        Cost: copies the batch to the host (synchronises), checks every value there, and takes
            twice its memory until it is written.
        """
        from trajpack.packing.batch.storage import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackedBatch:
        """Read a batch that `save` wrote, to the host.

        The tensors are copies: what happens to the file afterwards does not change them. They are
        checked as `save` checks them, so that a file which was damaged, or made by others, is
        either refused or a batch whose parts fit together.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is not a packed batch, one of an unknown schema, or one whose parts
                contradict each other. It names the file and the field.

        Cost: reads the file once and checks every value. Memory: that of the tensors, some MB to
            work in, and for names and lengths, 100 MB of a file at most, a few times their size.
        """
        from trajpack.packing.batch.storage import load

        return load(path)

    @property
    def is_padded(self) -> bool:
        """Whether it is of the size of a `StaticBatch`, with a sequence for the padding."""
        return self.cu_seqlens.shape[0] > self.num_turns + 1  # which are no fewer than sequences

    def check_unpadded(self) -> None:
        """Raise where there are turns of no trajectory, as in a `StaticBatch`.

        Raises:
            ValueError: That names the way out.
        """
        if self.is_padded:
            raise ValueError("the batch is padded: take StaticBatch.unpadded()")

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _versions(self) -> str:
        known = self.turn_version_start >= 0  # those of padding are not
        if not known.any():
            return ""
        low, high = int(self.turn_version_start[known].min()), int(self.turn_version_end.max())
        return f"; policy version {low}" if low == high else f"; policy versions {low} to {high}"
