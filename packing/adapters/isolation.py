"""A trial of a model: whether it keeps the sequences of a packed batch apart."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.types import Trajectory, Turn

Row: TypeAlias = Mapping[str, Any]
"""Keyword arguments of one forward pass."""

LENGTHS = (64, 1, 180, 2, 40, 50)
"""Tokens of the sequences of the trial batch. Two are shorter than a convolution. Sequences begin
where chunks of 64, 128 and 256 tokens do, and elsewhere. The last one begins in a chunk of 256 that
the one before it reaches into."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
TF32_SPACING = 2.0**-10
"""Distance of neighbours around 1, of the numbers that TF32 and float16 can hold."""


class Trial:
    """A model, and the rows that it is tried with.

    Args:
        model: As for `trajpack.packing.adapters.huggingface.check_isolation`.
        inputs: As there.

    Raises:
        TypeError: If the model does not say how many tokens it knows, or ``inputs`` returns no row.
        ValueError: If it knows fewer than two, or ``inputs`` returns a row of another shape.
    """

    def __init__(self, model: Any, inputs: Callable[[PackedBatch], Row]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch module, got {type(model).__name__}")
        self._model = model
        known = Vocabulary.of(model)
        self._name = known.owner
        self._device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        if self._device.type == "meta":
            raise ValueError(f"{self._name} must have weights, it is on the meta device")
        batch, other_ids = known.draw(self._device)
        self._row = _checked(inputs(batch))
        self._changed: list[Row] = []  # the row with one sequence changed in each
        self._places: list[torch.Tensor] = []  # where that sequence lies, bool [tokens]
        for sequence in range(len(batch)):
            ids = torch.where(batch.sequence_ids == sequence, other_ids, batch.input_ids)
            changed = _checked(inputs(dataclasses.replace(batch, input_ids=ids)))
            if changed["input_ids"].shape != self._row["input_ids"].shape:
                raise ValueError("inputs must return rows of one shape for batches of one shape")
            self._changed.append(changed)
            self._places.append((changed["input_ids"] != self._row["input_ids"])[0])
        self._holds = torch.stack(self._places).any(0)  # False at padding
        if not self._holds.any():
            raise ValueError("inputs must return a row with tokens of the batch")
        self._distances: list[torch.Tensor] = []  # by which logits of changed tokens move

    def run(self) -> None:
        """Raise unless the model keeps the sequences apart, in evaluation and in training mode.

        Raises:
            TypeError, ValueError: As `trajpack.packing.adapters.huggingface.check_isolation`.
        """
        with _restoring(self._model):
            self._check_alone(self._check_movement(training=False))
            self._check_movement(training=True)

    def _check_movement(self, *, training: bool) -> torch.Tensor:
        """Raise if tokens of one sequence move logits of another. Return those of the batch."""
        self._set_mode(training)
        before = self._logits(self._row)
        if before[self._holds].isnan().any():
            raise ValueError(f"{self._name} returns logits that are NaN")
        for sequence, (changed, here) in enumerate(zip(self._changed, self._places, strict=True)):
            after = self._logits(changed)
            self._distances.append(_distances(before[here], after[here]))
            others = self._holds & ~here
            moved = others & (before != after).any(1)
            if not moved.any():
                continue
            observer = Observer(self._model, others, self._rounding(before.dtype))
            leak = observer.find(self._logits, self._row, changed)
            if leak is not None:
                other = next(i for i, place in enumerate(self._places) if (place & moved).any())
                raise ValueError(
                    f"{self._name} lets sequences of a packed batch see each other: tokens of "
                    f"sequence {sequence} move logits of sequence {other}, first in {leak}, in "
                    f"{'training' if training else 'evaluation'} mode. Give it one sequence at a "
                    "time, or load it with kernels and attention that keep sequences apart"
                )
        if not torch.cat(self._distances).any():
            raise ValueError(
                f"{self._name} returns logits that do not depend on its tokens, so that they tell "
                "nothing about packed sequences"
            )
        return before

    def _check_alone(self, packed: torch.Tensor) -> None:
        """Raise if a sequence has other logits alone than in the batch."""
        usual = torch.cat(self._distances).median()
        # kernels of Triton multiply in TF32, whatever torch is told
        least = TF32_SPACING if self._device.type == "cuda" else 0.0
        allowed = math.sqrt(max(self._spacing(packed.dtype), least))
        plain = {name: self._row[name] for name in ("use_cache",) if name in self._row}
        for sequence, here in enumerate(self._places):
            if here.sum() <= 2:  # too few for a median
                continue
            alone = self._logits(
                {"input_ids": self._row["input_ids"][:, here], **plain}, "a sequence alone"
            )
            distance = float(_distances(packed[here], alone).median() / usual)
            if not distance <= allowed:
                raise ValueError(
                    f"{self._name} gives sequence {sequence} of a packed batch other logits than "
                    f"the same sequence alone: they differ by {distance:.1e} of what other tokens "
                    f"make, expected at most {allowed:.1e}. No sequence moves another, so its "
                    "positions may not begin anew in each"
                )

    def _set_mode(self, training: bool) -> None:
        """Set the mode of all modules but dropout, whose draws may depend on the routing."""
        self._model.train(training)
        for module in self._model.modules():
            if isinstance(module, DROPOUTS):
                module.eval()

    def _logits(self, row: Row, taken: str = "packed sequences") -> torch.Tensor:
        """Return the logits of a row, ``[tokens, ids]``; each pass draws the same numbers."""
        kind = "cuda" if self._device.type == "cpu" else self._device.type
        places = {weight.device for weight in self._model.parameters()}
        devices = [place.index for place in places if place.type == kind]
        with torch.random.fork_rng(devices, device_type=kind), _same_draws():
            try:
                output = self._model(**row)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                why = str(error) or type(error).__name__
                raise ValueError(f"{self._name} cannot take {taken}: {why}") from error
        if isinstance(output, Mapping):
            output = output.get("logits")
        logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor):
            raise TypeError(f"{self._name} must return logits, got {type(output).__name__}")
        if logits.shape[:-1] != row["input_ids"].shape:
            raise ValueError(
                f"{self._name} must return logits of shape {[*row['input_ids'].shape, 'ids']}, got "
                f"{list(logits.shape)}"
            )
        return logits[0]

    def _rounding(self, dtype: torch.dtype) -> float:
        """Return by how much the output of a module moves where a kernel adds in another order."""
        return max(2 * self._spacing(dtype), 64 * torch.finfo(torch.float32).eps)

    def _spacing(self, dtype: torch.dtype) -> float:
        """Return the distance of neighbours around 1, of the coarsest numbers in the model."""
        kind = self._device.type
        dtypes = {dtype, *(w.dtype for w in self._model.parameters() if w.is_floating_point())}
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        dtypes.add(torch.float32)  # in which models of float64 do a part of their work
        spacing = max(torch.finfo(dtype).eps for dtype in dtypes)
        is_tf32 = kind == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return max(spacing, TF32_SPACING) if is_tf32 else spacing


class Vocabulary(NamedTuple):
    """What a trial batch for a model may hold."""

    owner: str
    """Class of the model, without what wraps it."""
    num_ids: int
    """Token ids are below it."""
    special: frozenset[int]
    """Token ids that may mean an image, padding or an end."""
    longest: int
    """Tokens of a sequence at most."""

    @classmethod
    def of(cls, model: nn.Module) -> Vocabulary:
        """Ask the configuration, or else the embeddings.

        Raises:
            TypeError: If the model has neither.
        """
        for wrapped in model.modules():
            module: Any = getattr(wrapped, "_orig_mod", wrapped)  # of torch.compile
            config: Any = getattr(module, "config", None)
            owner = _owner(module, config)
            if hasattr(config, "get_text_config"):
                text = config.get_text_config()
                values = [*vars(config).items(), *vars(text).items()]
                special = [v for name, v in values if name.endswith(("_token_id", "_token_index"))]
                flat = [i for v in special for i in (v if isinstance(v, list) else [v])]
                longest = getattr(text, "max_position_embeddings", None)
                return cls(
                    owner,
                    text.vocab_size,
                    special=frozenset(i for i in flat if isinstance(i, int)),
                    longest=longest if isinstance(longest, int) and longest > 0 else max(LENGTHS),
                )
            embeddings = getattr(module, "get_input_embeddings", lambda: None)()
            if embeddings is not None:
                num_ids = len(embeddings.weight)
                return cls(owner, num_ids, special=frozenset(), longest=max(LENGTHS))
        raise TypeError(
            f"{type(model).__name__} must have a config or get_input_embeddings(), which say how "
            "many tokens it knows"
        )

    def draw(self, device: torch.device) -> tuple[PackedBatch, torch.Tensor]:
        """Return the trial batch, and another id for each of its tokens, int64 ``[tokens]``.

        Raises:
            ValueError: If there are fewer than two ids to choose from.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.tensor([i for i in range(self.num_ids) if i not in self.special])
        if len(ids) < 2:
            ids = torch.arange(self.num_ids)
        if len(ids) < 2:
            raise ValueError(f"{self.owner} must know two tokens or more, got {len(ids)}")
        lengths = [min(length, self.longest) for length in LENGTHS]
        chosen = torch.randint(len(ids), (sum(lengths),), generator=generator)
        step = torch.randint(1, len(ids), chosen.shape, generator=generator)
        sequences = enumerate(ids[chosen].split(lengths))
        trajectories = [Trajectory(str(i), [Turn(sequence, [], [])]) for i, sequence in sequences]
        return pack(trajectories, device=device), ids[(chosen + step) % len(ids)].to(device)


def _owner(module: nn.Module, config: Any) -> str:
    """Return the class of the model that a configuration belongs to.

    A wrapper such as that of PEFT shows the configuration of the model in it as its own.
    """
    if not _is_pretrained(module):
        for inner in module.modules():
            if _is_pretrained(inner) and getattr(inner, "config", None) is config:
                return type(inner).__name__
    return type(module).__name__


def _is_pretrained(module: nn.Module) -> bool:
    """Tell whether a module is a model of transformers, which is not imported for that."""
    return any(of.__name__ == "PreTrainedModel" for of in type(module).__mro__)


class Observer:
    """Compares the modules of a model in two passes, at the tokens that are the same in both.

    A module is compared where its inputs are the same to the bit. If its output is not, what the
    first pass had there is written over it. So rounding reaches no module behind it, and that one
    is compared on inputs that are the same to the bit, too.

    Args:
        model: The model.
        same: Where tokens are the same, bool ``[tokens]``.
        tolerance: By how much the output of a module may move at a token, as a share of its norm.
    """

    def __init__(self, model: nn.Module, same: torch.Tensor, tolerance: float) -> None:
        self._model, self._tolerance = model, tolerance
        self._num_tokens, self._same = len(same), same.nonzero()[:, 0]
        self._first: dict[tuple[str, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._leak: str | None = None

    def find(self, run: Callable[[Row], torch.Tensor], before: Row, after: Row) -> str | None:
        """Return name and class of the first module that moves by more than the tolerance.

        That is the first one to end, the innermost. If none does, and logits move nevertheless, it
        is the model; if they do not, ``None``.

        Args:
            run: Returns the logits of a row, ``[tokens, ids]``.
            before: A row.
            after: Another one, the same where ``same`` says so.
        """
        first = self._observe(run, before, self._record)
        second = self._observe(run, after, self._compare)
        if self._leak is None and self._moves(first[self._same], second[self._same]):
            return type(self._model).__name__
        return self._leak

    def _observe(
        self, run: Callable[[Row], torch.Tensor], row: Row, end: Callable[..., None]
    ) -> torch.Tensor:
        calls: Counter[str] = Counter()
        begun: list[tuple[tuple[str, int], list[torch.Tensor]]] = []
        handles = []
        for name, module in self._model.named_modules():
            if module is self._model:
                continue  # its output is that of `run`

            def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                views = self._over_tokens((args, kwargs))
                sums = [_numbers(view[self._same]).double().sum(1) for view in views]
                begun.append(((name, calls[name]), [x.nan_to_num().cpu() for x in sums]))
                calls[name] += 1

            def leave(module: nn.Module, _: Any, output: Any) -> None:
                key, given = begun.pop()
                end(module, key, given, output)

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        try:
            return run(row)
        finally:
            for handle in handles:
                handle.remove()

    def _record(
        self, _: nn.Module, key: tuple[str, int], given: list[torch.Tensor], output: Any
    ) -> None:
        kept = [view[self._same].cpu() for view in self._over_tokens(output)]
        self._first[key] = given, kept

    def _compare(
        self, module: nn.Module, key: tuple[str, int], given: list[torch.Tensor], output: Any
    ) -> None:
        given_before, kept = self._first.get(key, ([], []))
        views = list(self._over_tokens(output))
        if [x.shape for x in given] != [x.shape for x in given_before] or len(views) != len(kept):
            return
        if not all(map(torch.equal, given, given_before)):
            return
        for view, rows in zip(views, kept, strict=True):
            before = rows.to(view.device)
            if view[self._same].shape != before.shape or torch.equal(view[self._same], before):
                continue
            if self._leak is None and self._moves(before, view[self._same]):
                self._leak = f"{key[0]} ({type(module).__name__})"
            view[self._same] = before

    def _moves(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Tell whether a row moves by more than the tolerance; integers may, as routes do."""
        if not before.is_floating_point():
            return False
        norms = _numbers(before).float().nan_to_num(0.0, 0.0, 0.0).norm(dim=1)
        allowed = self._tolerance * torch.maximum(norms, norms.median())
        return not (_distances(_numbers(before), _numbers(after)) <= allowed).all()

    def _over_tokens(self, value: Any) -> Iterator[torch.Tensor]:
        """Give the tensors that have a dimension of tokens, that one first, as views."""
        if isinstance(value, torch.Tensor):
            if self._num_tokens in value.shape:
                yield value.movedim(value.shape.index(self._num_tokens), 0)
            return
        if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
            value = vars(value)
        if isinstance(value, (list, tuple, Mapping)):
            for part in value.values() if isinstance(value, Mapping) else value:
                yield from self._over_tokens(part)


def _numbers(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of real numbers, ``[rows, numbers]``."""
    return (torch.view_as_real(rows) if rows.is_complex() else rows).reshape(len(rows), -1)


def _distances(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return how far apart rows are, float32 ``[rows]``; 0 between infinities of one sign."""
    moved = torch.where(before == after, 0.0, after.float() - before.float())
    return moved.square().sum(1).sqrt()


def _checked(row: Row) -> Row:
    ids = row.get("input_ids") if isinstance(row, Mapping) else None
    if not isinstance(ids, torch.Tensor):
        raise TypeError("inputs must return keyword arguments with a tensor input_ids")
    if ids.ndim != 2 or len(ids) != 1:
        raise ValueError(
            f"inputs must return input_ids of shape [1, tokens], got {list(ids.shape)}"
        )
    return row


@contextmanager
def _same_draws() -> Iterator[None]:
    """Leave the generators of Python and of numpy as they were, as torch's are."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """Run without gradients and compilation; leave modes and buffers as they were."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for owner, name, buffer, before in buffers:
            owner._buffers[name] = buffer
            if buffer is not None and before is not None and not torch.equal(buffer, before):
                with torch.no_grad():
                    buffer.copy_(before)
