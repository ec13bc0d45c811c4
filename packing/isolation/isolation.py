"""`check_isolation`: whether a model keeps the sequences of a packed batch apart."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.tree_attention.huggingface import DROPOUTS
from trajpack.packing.types import Trajectory, Turn

Row: TypeAlias = Mapping[str, Any]
"""Keyword arguments of one forward pass."""

LENGTHS = (64, 1, 180, 2, 40, 50)
"""Lengths of the trial batch's sequences. Two are shorter than a convolution. Sequences begin at
multiples of 64, 128 and 256 tokens, and elsewhere. The last one begins within a chunk of 256 tokens
that holds the end of the one before it."""
TF32_SPACING = 2.0**-10
"""Distance between neighbouring numbers around 1 in TF32 and float16."""


def check_isolation(
    model: Any, *, inputs: Callable[[PackedBatch], Row] = PackedBatch.model_inputs
) -> None:
    """Raise unless a model keeps the sequences of a packed batch apart.

    A trial batch of six sequences, 337 random tokens of the model's vocabulary, goes through the
    model, and again with all tokens of one sequence changed, for each sequence. Logits of all other
    sequences must not move, in evaluation mode and in training mode, where models may use other
    kernels. Then each sequence of more than two tokens goes through the model alone, with
    ``input_ids`` and no position, and must get the logits that it has in the batch.

    Where logits move, modules are compared one by one, on bitwise equal inputs. The output of a
    module may move by 64 roundings of float32, or 2 of the model's coarsest dtype; more is a leak,
    as is a mixture of experts with a capacity that drops tokens. Logits of a sequence alone may
    differ by half of the digits, in the median over its tokens, since kernels for other shapes add
    in another order: this comparison finds gross errors, such as ignored positions.

    Not found: effects that need sequences longer than 180 tokens, such as attention in chunks of
    8,192 tokens or positions scaled by the row's longest sequence; a fault where a sequence begins
    with a chunk of 128 or more tokens; layers whose weights have no effect yet; and behaviour only
    while gradients are recorded. A model that draws from its own generator is reported as a leak.
    Families of models and kernels that keep sequences apart: ``docs/formats/huggingface.md``.

    Args:
        model: A Hugging Face causal language model, also wrapped by PEFT, by ``torch.compile`` (it
            runs without compilation here), or for several ranks (each of them calls this).
        inputs: Makes the keyword arguments of a forward pass from the trial batch, with
            ``input_ids`` of shape ``[1, tokens]``. For padded micro-batches it is
            ``lambda batch: batch.select(range(len(batch)), alignment).model_inputs()``.

    Raises:
        ValueError: If another sequence moves: the message has the class of the model, and name and
            class of the innermost module that moves first. If the model does not take the inputs,
            with its own error as the cause. If a sequence has other logits alone than in the
            batch. If logits are NaN, or do not depend on the tokens.
        TypeError: If the model returns no logits, or has no known vocabulary.

    Example:
        >>> from trajpack.agent import build_tiny_model
        >>> model, tokenizer = build_tiny_model(seed=0)
        >>> check_isolation(model)
    """
    trial = _Trial(model, inputs)
    with restoring(model):
        trial.check_alone(trial.check_movement(training=False))
        trial.check_movement(training=True)


class _Trial:
    """A model, the row of the trial batch, and that row with one sequence changed in each."""

    def __init__(self, model: Any, inputs: Callable[[PackedBatch], Row]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch module, got {type(model).__name__}")
        self.model = model
        self.name, ids, longest = vocabulary_of(model)
        self.weights = list(model.parameters())
        self.device = self.weights[0].device if self.weights else torch.device("cpu")
        if self.device.type == "meta":
            raise ValueError(f"{self.name} must have weights, it is on the meta device")
        if len(ids) < 2:
            raise ValueError(f"{self.name} must know two tokens or more, got {len(ids)}")
        generator = torch.Generator().manual_seed(0)
        lengths = [min(length, longest) for length in LENGTHS]
        chosen = torch.randint(len(ids), (sum(lengths),), generator=generator)
        step = torch.randint(1, len(ids), chosen.shape, generator=generator)
        turns = [Turn(sequence, [], []) for sequence in ids[chosen].split(lengths)]
        trajectories = [Trajectory(str(index), [turn]) for index, turn in enumerate(turns)]
        batch = pack(trajectories, device=self.device)
        others = ids[(chosen + step) % len(ids)].to(self.device)
        self.row = _checked(inputs(batch))
        self.changed: list[Row] = []
        self.places: list[torch.Tensor] = []
        """Bool ``[tokens]`` for each sequence: where its tokens are."""
        for sequence in range(len(batch)):
            changed_ids = torch.where(batch.sequence_ids == sequence, others, batch.input_ids)
            changed = _checked(inputs(dataclasses.replace(batch, input_ids=changed_ids)))
            if changed["input_ids"].shape != self.row["input_ids"].shape:
                raise ValueError("inputs must return rows of one shape for batches of one shape")
            self.changed.append(changed)
            self.places.append((changed["input_ids"] != self.row["input_ids"])[0])
        self.holds = torch.stack(self.places).any(0)  # False at padding
        if not self.holds.any():
            raise ValueError("inputs must return a row with tokens of the batch")
        self.distances: list[torch.Tensor] = []
        """Distances by which the logits of changed tokens moved."""

    def check_movement(self, *, training: bool) -> torch.Tensor:
        """Raise if tokens of a sequence move logits of another; return the batch's logits."""
        self.model.train(training)
        for module in self.model.modules():
            if isinstance(module, DROPOUTS):  # their draws may depend on the routing
                module.eval()
        before = self.logits(self.row)
        if before[self.holds].isnan().any():
            raise ValueError(f"{self.name} returns logits that are NaN")
        for sequence, (changed, here) in enumerate(zip(self.changed, self.places, strict=True)):
            after = self.logits(changed)
            self.distances.append(_distances(before[here], after[here]))
            others = self.holds & ~here
            moved = others & (before != after).any(1)
            if not moved.any():
                continue
            tolerance = max(2 * self.spacing(before), 64 * torch.finfo(torch.float32).eps)
            search = _LeakSearch(self.model, others, tolerance)
            leak = search.find(partial(self.logits, self.row), partial(self.logits, changed))
            if leak is not None:
                other = next(i for i, place in enumerate(self.places) if (place & moved).any())
                mode = "training" if training else "evaluation"
                raise ValueError(
                    f"{self.name} lets sequences of a packed batch see each other: tokens of "
                    f"sequence {sequence} move logits of sequence {other}, first in {leak}, in "
                    f"{mode} mode. {self.repair(changed, others)}"
                )
        if not torch.cat(self.distances).any():
            raise ValueError(
                f"{self.name} returns logits that do not depend on its tokens, so that they tell "
                "nothing about packed sequences"
            )
        return before

    def repair(self, changed: Row, others: torch.Tensor) -> str:
        """Return what keeps sequences apart: positions of mRoPE, if they do so here."""
        try:
            before, after = (
                self.logits({**row, "position_ids": row["position_ids"].expand(4, 1, -1)})
                for row in (self.row, changed)
            )
        except (KeyError, RuntimeError, TypeError, ValueError):  # not of such a class
            pass
        else:
            if torch.equal(before[others], after[others]):
                return "Give it four rows of positions: batch.model_inputs(mrope=True)"
        return (
            "Give it one sequence at a time, or load it with kernels and attention that keep "
            "sequences apart"
        )

    def check_alone(self, packed: torch.Tensor) -> None:
        """Raise if a sequence has other logits alone than in the batch."""
        usual = torch.cat(self.distances).median()
        # Triton kernels multiply in TF32, whatever torch's setting is
        least = TF32_SPACING if self.device.type == "cuda" else 0.0
        allowed = math.sqrt(max(self.spacing(packed), least))
        options = {name: self.row[name] for name in ("use_cache",) if name in self.row}
        for sequence, here in enumerate(self.places):
            if here.sum() <= 2:  # too few for a median
                continue
            row = {"input_ids": self.row["input_ids"][:, here], **options, **self._bounds(here)}
            distances = _distances(packed[here], self.logits(row, "a sequence alone"))
            distance = float(distances.median() / usual)
            if not distance <= allowed:
                raise ValueError(
                    f"{self.name} gives sequence {sequence} of a packed batch other logits than "
                    f"the same sequence alone: they differ by {distance:.1e} of what other tokens "
                    f"make, expected at most {allowed:.1e}. No sequence moves another, so its "
                    "positions may not begin anew in each"
                )

    def _bounds(self, here: torch.Tensor) -> Row:
        """Return the boundaries of a sequence alone, if the row has any."""
        length = int(here.sum())
        bounds = torch.tensor([0, length], dtype=torch.int32, device=self.device)
        alone = {"cu_seq_lens": bounds, "max_length": length}
        names = [(f"{name}_{side}", one) for name, one in alone.items() for side in "qk"]
        return {name: one for name, one in names if name in self.row}

    def logits(self, row: Row, taken: str = "packed sequences") -> torch.Tensor:
        """Return the logits of a row, ``[tokens, ids]``; each pass draws the same numbers."""
        kind = "cuda" if self.device.type == "cpu" else self.device.type
        devices = [d.index for d in {weight.device for weight in self.weights} if d.type == kind]
        of_python, of_numpy = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices, device_type=kind):
            try:
                output = self.model(**row)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                why = str(error) or type(error).__name__
                raise ValueError(f"{self.name} cannot take {taken}: {why}") from error
            finally:
                random.setstate(of_python)
                np.random.set_state(of_numpy)
        logits = output.get("logits") if isinstance(output, Mapping) else output
        logits = getattr(logits, "logits", logits)
        if not isinstance(logits, torch.Tensor):
            raise TypeError(f"{self.name} must return logits, got {type(output).__name__}")
        if logits.shape[:-1] != row["input_ids"].shape:
            raise ValueError(
                f"{self.name} must return logits of shape {[*row['input_ids'].shape, 'ids']}, got "
                f"{list(logits.shape)}"
            )
        return logits[0]

    def spacing(self, logits: torch.Tensor) -> float:
        """Return the distance of neighbouring numbers around 1 in the model's coarsest dtype."""
        kind = self.device.type
        dtypes = {weight.dtype for weight in self.weights if weight.is_floating_point()}
        dtypes |= {logits.dtype, torch.float32}  # models of float64 compute partly in float32
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        is_tf32 = kind == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
        spacings = [torch.finfo(dtype).eps for dtype in dtypes]
        return max(*spacings, TF32_SPACING if is_tf32 else 0.0)


class _LeakSearch:
    """Compares the modules of a model in two passes, at tokens that are the same in both.

    A module is compared where its inputs are bitwise equal. If its output is not, the output of the
    first pass replaces it, so that rounding does not reach later modules.
    """

    def __init__(self, model: nn.Module, same: torch.Tensor, tolerance: float) -> None:
        """Keep where tokens are the same, bool ``[tokens]``, and the relative tolerance."""
        self._model, self._tolerance = model, tolerance
        self._num_tokens, self._same = len(same), same.nonzero()[:, 0]
        self._first: dict[tuple[str, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._leak: str | None = None

    def find(
        self, before: Callable[[], torch.Tensor], after: Callable[[], torch.Tensor]
    ) -> str | None:
        """Return name and class of the first, innermost module that moves; None if none does.

        The model's class if only its logits move. Both arguments run the model.
        """
        first, second = self._observe(before), self._observe(after, compare=True)
        if self._leak is None and self._moves(first[self._same], second[self._same]):
            return type(self._model).__name__
        return self._leak

    def _observe(self, run: Callable[[], torch.Tensor], *, compare: bool = False) -> torch.Tensor:
        calls: Counter[str] = Counter()
        begun: list[tuple[tuple[str, int], list[torch.Tensor]]] = []
        handles = []
        for name, module in self._model.named_modules():
            if module is self._model:
                continue  # its output is that of `run`

            def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                views = self._over_tokens((args, kwargs))
                sums = [_real(view[self._same]).double().sum(1) for view in views]
                begun.append(((name, calls[name]), [x.nan_to_num().cpu() for x in sums]))
                calls[name] += 1

            def leave(module: nn.Module, _: Any, output: Any) -> None:
                key, given = begun.pop()
                views = list(self._over_tokens(output))
                if compare:
                    self._compare(f"{key[0]} ({type(module).__name__})", key, given, views)
                else:
                    self._first[key] = given, [view[self._same].cpu() for view in views]

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        try:
            return run()
        finally:
            for handle in handles:
                handle.remove()

    def _compare(
        self,
        label: str,
        key: tuple[str, int],
        given: list[torch.Tensor],
        views: list[torch.Tensor],
    ) -> None:
        given_before, kept = self._first.get(key, ([], []))
        if [x.shape for x in given] != [x.shape for x in given_before] or len(views) != len(kept):
            return
        if not all(map(torch.equal, given, given_before)):
            return
        for view, rows in zip(views, kept, strict=True):
            before, after = rows.to(view.device), view[self._same]
            if after.shape != before.shape or torch.equal(after, before):
                continue
            if self._leak is None and self._moves(before, after):
                self._leak = label
            view[self._same] = before

    def _moves(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Return whether a row moves by more than the tolerance; integers may, as routes do."""
        if not before.is_floating_point():
            return False
        norms = _real(before).float().nan_to_num(0.0, 0.0, 0.0).norm(dim=1)
        allowed = self._tolerance * torch.maximum(norms, norms.median())
        return not (_distances(_real(before), _real(after)) <= allowed).all()

    def _over_tokens(self, value: Any) -> Iterator[torch.Tensor]:
        """Yield views of all tensors with a dimension of tokens, with that dimension first."""
        if isinstance(value, torch.Tensor):
            if self._num_tokens in value.shape:
                yield value.movedim(value.shape.index(self._num_tokens), 0)
            return
        if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
            value = vars(value)
        if isinstance(value, (list, tuple, Mapping)):
            for part in value.values() if isinstance(value, Mapping) else value:
                yield from self._over_tokens(part)


def vocabulary_of(model: nn.Module) -> tuple[str, torch.Tensor, int]:
    """Return the class of the model without wrappers, its usable ids, and its longest sequence.

    Read from the configuration, or else the embeddings. Ids that may stand for an image, padding or
    an end are left out, unless fewer than two remain.
    """
    for wrapped in model.modules():
        module: Any = getattr(wrapped, "_orig_mod", wrapped)  # of torch.compile
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            text = config.get_text_config()
            special = {
                number
                for name, value in (*vars(config).items(), *vars(text).items())
                if name.endswith(("_token_id", "_token_index"))
                for number in (value if isinstance(value, list) else [value])
            }
            ids = [number for number in range(text.vocab_size) if number not in special]
            ids = ids if len(ids) > 1 else list(range(text.vocab_size))
            longest = getattr(text, "max_position_embeddings", None)
            longest = longest if isinstance(longest, int) and longest > 0 else max(LENGTHS)
            return _owner(module, config), torch.tensor(ids), longest
        embeddings = getattr(module, "get_input_embeddings", lambda: None)()
        if embeddings is not None:
            return type(module).__name__, torch.arange(len(embeddings.weight)), max(LENGTHS)
    raise TypeError(
        f"{type(model).__name__} must have a config or get_input_embeddings(), which say how "
        "many tokens it knows"
    )


def _owner(module: nn.Module, config: Any) -> str:
    """Return the class of the model of a configuration; a wrapper such as PEFT's shows it too."""
    for inner in module.modules():  # transformers is not imported to ask for its class
        is_model = any(of.__name__ == "PreTrainedModel" for of in type(inner).__mro__)
        if is_model and (inner is module or getattr(inner, "config", None) is config):
            return type(inner).__name__
    return type(module).__name__


def _real(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of real numbers, ``[rows, numbers]``."""
    return (torch.view_as_real(rows) if rows.is_complex() else rows).reshape(len(rows), -1)


def _distances(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the distance of rows, float32 ``[rows]``; 0 between infinities of one sign."""
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
def restoring(model: nn.Module) -> Iterator[None]:
    """Run without gradients and compilation, and restore modes and buffers."""
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
