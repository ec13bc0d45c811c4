"""A micro-batch: the input of one forward and backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trajpack.kernels.rearrange.context_parallel import Partition, chunks_of, context_parallel_index
from trajpack.packing.micro_batches.generated import Generated, generated_of
from trajpack.packing.micro_batches.labels import drop, labels, shift
from trajpack.packing.micro_batches.logprobs import logprobs
from trajpack.packing.micro_batches.model_inputs import model_inputs
from trajpack.packing.representation import missing_attribute, public_names

M = TypeVar("M")
WITHOUT_STREAMS = ("cpu", "meta")
"""Device types without streams."""


def check_given(
    name: str, tensor: Any, taken: Collection[str], *, num_tokens: int, device: torch.device
) -> None:
    """Raise unless a caller's tensor has a row for each token and a name that is free."""
    if name in taken:
        raise ValueError(f"tensors: a micro-batch has a field {name!r} already")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensors: {name!r} must be a tensor, got {type(tensor).__name__}")
    if tensor.shape[:1] != (num_tokens,):
        raise ValueError(
            f"tensors: {name!r} must have shape [{num_tokens}, ...], got {list(tensor.shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"tensors: {name!r} is on {tensor.device} but the batch is on {device}")


def moved(batch: M, move: Callable[[torch.Tensor], torch.Tensor]) -> M:
    """Return a batch with all of its tensors moved, each once."""
    done: dict[int, torch.Tensor] = {}

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in done:
                done[id(value)] = move(value)
            return done[id(value)]
        if isinstance(value, Mapping):
            return type(value)((name, of(one)) for name, one in value.items())  # type: ignore[call-arg]
        return type(value)(*map(of, value)) if hasattr(value, "_fields") else value

    given: Any = batch
    result: M = dataclasses.replace(
        given, **{field.name: of(getattr(given, field.name)) for field in dataclasses.fields(given)}
    )
    return result


def record_storages(values: Iterable[Any], stream: torch.Stream) -> None:
    """Call ``record_stream`` once for each storage in some values, where their device has streams.

    Values are tensors and named tuples of them; tensors in others are not found. The caching
    allocator counts by storage: a view of the same memory needs no call.
    """
    tensors = (tensor for value in values for tensor in _tensors_in(value))
    by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    for tensor in by_storage.values():
        if tensor.device.type not in WITHOUT_STREAMS:
            tensor.record_stream(stream)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "_fields"):  # a named tuple; others have many host values, and no tensors
        for part in value:
            yield from _tensors_in(part)


@dataclass(frozen=True, eq=False, repr=False)
class MicroBatch:
    """Some sequences of a packed batch, flat, in the given order and with the given padding.

    Made by `PackedBatch.select`, `PackedBatch.split` and `PackedBatch.micro_batches`. Tensors over
    tokens are of shape ``[tokens]``, padding included, sequence after sequence. Padding has the
    token id of the `Alignment`, no turn, no version, 0 everywhere else, and is in neither mask.

    Attributes:
        input_ids: int64 ``[tokens]``: token ids.
        position_ids: int64 ``[tokens]``: positions, from 0 in every sequence.
        sequence_ids: int32 ``[tokens]``: index of the token's sequence in this micro-batch; padding
            has the index of the sequence that it pads.
        turn_ids: int32 ``[tokens]``: turn that generated the token, an index of the turn tensors of
            the batch it was selected from, or -1.
        prompt_mask: bool ``[tokens]``: True on prompt and observation tokens, not on padding.
        loss_mask: bool ``[tokens]``: True on generated tokens that the batch trains, see
            `PackedBatch.with_loss_mask`.
        rollout_logprobs: float32 ``[tokens]``: log-probability at the token's own index; 0 where
            not generated.
        policy_versions: int32 ``[tokens]``: version of the weights that sampled the token, or -1.
        returns: float32 ``[tokens]``: return of the token; 0 where not generated.
        advantages: float32 ``[tokens]``: advantages, 0 where not generated; ``None`` if the batch
            has none.
        fields: ``[tokens, *shape]`` each: the batch's extra fields, and the caller's tensors.
        cu_seqlens: int32 ``[sequences + 1]``: cumulative sums of `seqlens`, as Megatron and
            Transformer Engine use the name. Boundaries in memory only where no sequence is padded.
        cu_seqlens_padded: int32 ``[sequences + 1]``: boundaries in memory, cumulative sums of
            `padded_seqlens`; the same tensor as `cu_seqlens` where those are the same.
        seqlens: Tokens of each sequence; a padding sequence is the last.
        padded_seqlens: Tokens of each sequence in memory, its padding included.
        sequences: Indices of the sequences in the batch, without the padding sequence.
        num_kept: Tokens of each of `sequences` in this micro-batch: all, or the first ones where it
            was cut off. Padding follows them.
        max_seqlen: Tokens of the longest sequence in memory, or `Alignment.total` where shapes are
            fixed.
        num_generated: Generated tokens of `sequences`, those that were cut off or are not trained
            included; or `Alignment.max_generated`.
        ragged_values: What the rows of ragged fields in `fields` refer to, by name: the batch's own
            tensors.
        value_counts: Values of each ragged field in `sequences`, and generated tokens without any,
            those that were cut off included.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sequence_ids: torch.Tensor
    turn_ids: torch.Tensor
    prompt_mask: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    policy_versions: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor | None
    fields: Mapping[str, torch.Tensor]

    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor

    seqlens: tuple[int, ...]
    padded_seqlens: tuple[int, ...]
    sequences: tuple[int, ...]
    num_kept: tuple[int, ...]
    max_seqlen: int
    num_generated: int
    ragged_values: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    value_counts: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    model_inputs = model_inputs
    labels = labels
    shift = shift
    drop = drop
    logprobs = logprobs

    @property
    def generated(self) -> Generated:
        """Generated tokens in the order of `logprobs`, and what a loss takes of them."""
        return generated_of(self)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, padding included."""
        return self.input_ids.shape[0]

    @property
    def num_padding(self) -> int:
        """Number of padding tokens."""
        return self.num_tokens - sum(self.num_kept)

    @property
    def is_dummy(self) -> bool:
        """Whether there is padding only, so that ranks do the same number of passes."""
        return not self.sequences

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.input_ids.device

    __dir__ = public_names
    if not TYPE_CHECKING:  # else it would have every attribute
        __getattr__ = missing_attribute

    def __len__(self) -> int:
        """Number of sequences, the padding sequence included."""
        return len(self.seqlens)

    def __repr__(self) -> str:
        return (
            f"MicroBatch({len(self.sequences)} sequences; {self.num_tokens:,} tokens, "
            f"{self.num_padding:,} of padding; longest {self.max_seqlen:,}; {self.device})"
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by the name of its field; extra fields are in `fields`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def record_stream(self, stream: torch.Stream) -> None:
        """Let work of another stream read the micro-batch; as `PackedBatch.record_stream`.

        Its memory is not the batch's. The micro-batches of a plan share that of the boundaries.

        Args:
            stream: Stream that reads the micro-batch, a `torch.cuda.Stream`.
        """
        given = [*self.fields.values(), *self.ragged_values.values()]
        record_storages([*self.tensors().values(), *given], stream)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """Return the micro-batch on a device."""
        return moved(self, lambda one: one.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> MicroBatch:
        """Return the micro-batch in pinned memory, as a `torch.utils.data.DataLoader` asks for."""
        return moved(self, torch.Tensor.pin_memory)

    def context_parallel_index(
        self, cp_size: int, cp_rank: int, partition: Partition = "zigzag"
    ) -> torch.Tensor:
        """Return the token indices of a context-parallel rank, int32 ``[tokens / cp_size]``.

        See `trajpack.kernels.context_parallel_index`.

        Raises:
            ValueError: As there; on any device if the length of a sequence is not divisible.
        """
        chunks = chunks_of(cp_size, partition)
        wrong = [number for number, n in enumerate(self.padded_seqlens) if n % chunks]
        if wrong:
            raise ValueError(
                f"each sequence must take a multiple of {chunks} tokens, sequence {wrong[0]} takes "
                f"{self.padded_seqlens[wrong[0]]}; align with sequence_multiple={chunks}"
            )
        return context_parallel_index(
            self.cu_seqlens_padded, self.num_tokens, cp_size, cp_rank, partition
        )

    def shard(
        self,
        cp_size: int,
        cp_rank: int,
        partition: Partition = "zigzag",
        *,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return a rank's share of all tensors over tokens, extra fields among them, by name.

        Boundaries stay those of the whole micro-batch. A ragged field ``name`` has its rows, and
        under ``ragged_values.name`` the values that they refer to, those of all tokens. Values that
        depend on the next token are
        computed from the whole and passed, such as ``{"labels": micro_batch.labels()}``.

        Args:
            cp_size: Number of context-parallel ranks.
            cp_rank: Rank, from 0.
            partition: See `trajpack.kernels.rearrange.context_parallel.Partition`.
            tensors: More tensors ``[tokens, ...]`` by name.

        Raises:
            TypeError: If one of ``tensors`` is no tensor.
            ValueError: As `context_parallel_index`, or if one of ``tensors`` has a wrong shape,
                device or name.

        Example:
            >>> import trajpack
            >>> turn = trajpack.Turn([1, 2], [3], [-0.5])
            >>> batch = trajpack.pack([trajpack.Trajectory("a", [turn])])
            >>> micro_batch = batch.select([0], trajpack.Alignment(sequence_multiple=4))
            >>> labels = {"labels": micro_batch.labels()}
            >>> share = micro_batch.shard(cp_size=2, cp_rank=1, tensors=labels)
            >>> share["input_ids"], share["labels"]
            (tensor([2, 3]), tensor([   3, -100]))
        """
        index = self.context_parallel_index(cp_size, cp_rank, partition)
        whole = {
            name: tensor for name, tensor in self.tensors().items() if not name.startswith("cu_")
        }
        whole |= self.fields
        for name, tensor in (tensors or {}).items():
            check_given(name, tensor, whole, num_tokens=self.num_tokens, device=self.device)
        whole |= tensors or {}
        values = {f"ragged_values.{name}": one for name, one in self.ragged_values.items()}
        return {name: tensor.index_select(0, index) for name, tensor in whole.items()} | values
