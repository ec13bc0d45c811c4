"""Trajectories as flat arrays and labels: the serialised form of the log and of Ray."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.buffer.staging import Staging
from trajpack.packing.buffer.stored import Count, Labels, Stored
from trajpack.packing.buffer.take import take
from trajpack.packing.conversion import FLOAT32_MAX, as_version_runs, host_tensor
from trajpack.packing.ragged import Ragged, flattened, part
from trajpack.packing.token_fields import TokenField
from trajpack.packing.turn_fields import TURN_FIELDS
from trajpack.packing.types import Trajectory, Turn, VersionSpan, several_trajectories

U8, I32, F32, F64 = (np.dtype(name) for name in ("u1", "<i4", "<f4", "<f8"))
INTEGERS = (
    "chain",
    "begin",
    "size",
    "num_spans",
    *(one.attribute for one in TURN_FIELDS if not one.dtype.is_floating_point),
)
"""Columns of `TrajectoryArrays.turns`: the chain of the turn; the tokens of its prompt (the chain
up to there) and of its completion; the number of its version spans, 0 where one version sampled it;
the integers of `TURN_FIELDS`."""
FLOATS = tuple(one.attribute for one in TURN_FIELDS if one.dtype.is_floating_point)
"""Columns of `TrajectoryArrays.numbers`."""
_PLACES = [(one, (INTEGERS + FLOATS).index(one.attribute)) for one in TURN_FIELDS]
"""Each field of a turn, and its place among all numbers."""
_WORDS = [(INTEGERS.index(one.attribute), len(one.words)) for one in TURN_FIELDS if one.words]
_LABEL_KINDS: tuple[tuple[type, ...], ...] = (
    (str,),
    (str, NoneType),
    (int, NoneType),
    (int, NoneType),
    (float,),
    (bool, NoneType),
)
_Stored: TypeAlias = tuple[str, npt.NDArray[Any], *tuple[npt.NDArray[Any], ...]]
_Undeclared: TypeAlias = dict[int, dict[str, _Stored]]


@dataclass(frozen=True, eq=False)
class TrajectoryArrays:
    """Trajectories in a form that is cheap to store and to send: one array of each kind.

    Tokens are those of a buffer's chains: a turn whose prompt continues an earlier turn adds only
    its new tokens. Arrays that come out of Ray's object store are read-only memory shared by all
    processes of a node; those that `trajectories` returns are views of them.
    """

    labels: Labels
    """Id, group, task, time of birth, discount and end of each trajectory."""
    num_turns: npt.NDArray[np.int64]
    """``[trajectories]``: number of turns."""
    chain_sizes: npt.NDArray[np.int32]
    """``[chains]``: number of tokens."""
    tokens: npt.NDArray[np.int32]
    """``[tokens]``: token ids of the chains, concatenated."""
    turns: npt.NDArray[np.int32]
    """``[turns, 8]``: `INTEGERS` of each turn."""
    numbers: npt.NDArray[np.float64]
    """``[turns, 1]``: reward of each turn."""
    spans: npt.NDArray[np.int32]
    """``[spans, 3]``: version, start and end, of turns that several versions sampled."""
    logprobs: npt.NDArray[np.float32]
    """``[generated tokens]``: log-probabilities of the completions, turn after turn."""
    token_fields: tuple[TokenField, ...] = ()
    """Declared extra fields."""
    rows: tuple[npt.NDArray[np.uint8], ...] = ()
    """Bytes of the rows of each declared field, of all turns or of all chains. A ragged field has
    the values of all turns, and behind them an int32 for each generated token: its number."""
    undeclared: _Undeclared = field(default_factory=dict)
    """Dtype and values of fields that are not declared, by turn and name; `Ragged.cu` behind."""

    @classmethod
    def of(
        cls, trajectories: Iterable[Trajectory], fields: tuple[TokenField, ...] | None = None
    ) -> TrajectoryArrays:
        """Check and copy trajectories.

        Args:
            trajectories: The trajectories.
            fields: Extra fields that each turn must have, or ``None`` to take those of each turn.

        Raises:
            TypeError, ValueError: As `TrajectoryBuffer.extend`; names trajectory and turn.
        """
        undeclared: _Undeclared = {}
        if fields is None:
            trajectories, undeclared = _without_fields(trajectories)
        stored, staging = Stored.empty(fields or ()), Staging(torch.device("cpu"))
        if given := several_trajectories(trajectories):
            take(stored, staging, given, fields or ())
        columns, stream = stored.columns(), staging.region.stream
        num_tokens, num_words = stored.counts[Count.TOKENS], stored.counts[Count.WORDS]
        num_generated = stored.counts[Count.GENERATED]
        of_turns = {
            "chain": columns.chains,
            "begin": columns.begins,
            "size": columns.sizes,
            "num_spans": np.bincount(columns.spans[:, 0], minlength=len(columns.sizes)),
        } | dict(zip((one.attribute for one in TURN_FIELDS), columns.numbers, strict=True))
        return cls(
            labels=stored.labels,
            num_turns=columns.num_turns,
            chain_sizes=columns.chain_sizes.astype(I32),
            tokens=stream[:num_tokens],
            turns=np.array([of_turns[name] for name in INTEGERS], I32).T.copy(),
            numbers=np.array([of_turns[name] for name in FLOATS], F64).T.copy(),
            spans=columns.spans[:, 1:].astype(I32),
            logprobs=stream[num_tokens : num_tokens + num_generated].view(F32),
            token_fields=fields or (),
            rows=tuple(
                _rows_in(
                    stream[:num_words].view(U8),
                    declared,
                    first,
                    num_generated if declared.generated_only else num_tokens,
                )
                for declared, first in zip(fields or (), columns.rows, strict=True)
            ),
            undeclared=undeclared,
        )

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories; their arrays are views.

        Example:
            >>> path = Trajectory("a", [Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5], [-1.0])])
            >>> sent = TrajectoryArrays.of([path])
            >>> sent.tokens.tolist(), sent.trajectories() == [path]
            ([1, 2, 3, 4, 5], True)
        """
        turns = self._turns()
        bounds = pairwise(accumulate(self.num_turns.tolist(), initial=0))
        return [
            Trajectory(
                id=name,
                turns=turns[begin:end],
                group=group,
                turn_discount=discount,
                task_id=task_id,
                birth_time_ms=birth_time_ms,
                truncated=truncated,
            )
            for (begin, end), name, group, task_id, birth_time_ms, discount, truncated in zip(
                bounds, *self.labels, strict=True
            )
        ]

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a number of each turn: one of `INTEGERS` or `FLOATS`."""
        if name in FLOATS:
            return self.numbers[:, FLOATS.index(name)]
        return self.turns[:, INTEGERS.index(name)]

    def copied(self) -> TrajectoryArrays:
        """Return the same in memory of this process, so that an object store can let go of it."""
        copies: dict[str, Any] = {name: one.copy() for name, one in self._arrays().items()}
        copies["rows"] = tuple(rows.copy() for rows in self.rows)
        copies["undeclared"] = {
            turn: {
                name: (dtype, *(array.copy() for array in arrays))
                for name, (dtype, *arrays) in rows.items()
            }
            for turn, rows in self.undeclared.items()
        }
        return replace(self, **copies)

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories."""
        return len(self.num_turns)

    @property
    def num_bytes(self) -> int:
        """Bytes of the flat arrays, without extra fields."""
        return sum(array.nbytes for array in self._arrays().values())

    def check(self) -> None:
        """Raise a `ValueError` unless a buffer would take these trajectories."""
        num_turns, chain_sizes = self.num_turns, self.chain_sizes.astype(np.int64)
        labels: tuple[Any, ...] = self.labels
        for name, of, kinds in zip(Labels._fields, labels, _LABEL_KINDS, strict=True):
            wrong = [kind.__name__ for kind in set(map(type, of)) if not issubclass(kind, kinds)]
            _require(not wrong, f"{name} must not be {', '.join(wrong)}")
            _require(len(of) == len(num_turns), f"{name} is not one of each trajectory")
        _require((num_turns > 0).all(), "a trajectory has no turns")
        adds_up = num_turns.sum() == len(self.turns) == len(self.numbers)
        _require(adds_up, "num_turns does not add up")
        _require((chain_sizes > 0).all(), "a chain has no tokens")
        _require(chain_sizes.sum() == len(self.tokens), "chain_sizes does not add up to the tokens")
        _require(self.tokens.min(initial=0) >= 0, "a token id is negative")
        _require(np.isfinite(self.logprobs).all(), "a log-probability is not finite")
        for numbers in (self.numbers, np.array(self.labels.turn_discounts, F64)):
            _require(
                (np.abs(numbers) <= FLOAT32_MAX).all(), "a reward or discount is not finite float32"
            )
        num_generated = self._check_turns(chain_sizes)
        for declared, raw in zip(self.token_fields, self.rows, strict=True):
            num_rows = num_generated if declared.generated_only else len(self.tokens)
            called, num_bytes = f"field {declared.name!r}", num_rows * declared.value_bytes
            values = raw
            if declared.ragged:
                split = raw.size - 4 * num_rows
                _require(split >= 0, f"{called} has {raw.size} bytes")
                values, counts = raw[:split], raw[split:].view(I32)
                _require((counts >= 0).all(), f"{called} has negative counts")
                num_bytes = int(counts.sum(dtype=np.int64)) * declared.value_bytes
            _require(values.size == num_bytes, f"{called} has {raw.size} bytes")
            _require(declared.dtype != torch.bool or (values < 2).all(), f"{called} is not bool")

    def _check_turns(self, chain_sizes: npt.NDArray[np.int64]) -> int:
        """Check the numbers of turns, and that they fill their chains; return the sum of sizes."""
        turns = self.turns.astype(np.int64)
        chain, begin, size, count, truncated, first, last, *_ = turns.T
        end = begin + size
        fits = (chain >= 0) & (chain < len(chain_sizes)) & (begin > 0) & (size >= 0) & (count >= 0)
        fits &= (truncated >= 0) & (truncated <= 1) & (first >= 0) & (first <= last)
        for place, num_words in _WORDS:
            fits &= (turns[:, place] >= 0) & (turns[:, place] < num_words)
        fits[fits] = end[fits] <= chain_sizes[chain[fits]]
        if not fits.all():
            turn = int(fits.argmin())
            raise ValueError(f"turn {turn} has impossible numbers: {turns[turn].tolist()}")
        _require(count.sum() == len(self.spans), "the turns' version spans do not add up")
        _require(size.sum() == len(self.logprobs), "the turns' sizes do not add up")
        ends_of_spans = count.cumsum()
        for turn in np.flatnonzero(count).tolist():
            stop = int(ends_of_spans[turn])
            spans = self.spans[stop - int(count[turn]) : stop].tolist()
            versions = int(first[turn]), int(last[turn])
            as_version_runs(f"turn {turn}: ", spans, *versions, num_tokens=int(size[turn]))
        owner, order = (
            np.arange(len(self.num_turns)).repeat(self.num_turns),
            np.argsort(chain, kind="stable"),
        )
        follows = np.diff(chain[order]) == 0
        before, after = order[:-1][follows], order[1:][follows]
        filled = order[np.append(~follows, True)[: len(order)]]
        _require(
            np.array_equal(chain[filled], np.arange(len(chain_sizes)))
            and np.array_equal(end[filled], chain_sizes)
            and (begin[after] >= end[before]).all()
            and (owner[after] == owner[before]).all()
            and (np.diff(np.maximum.accumulate(chain), prepend=-1) <= 1).all(),
            "the turns do not fill their chains in order",
        )
        return int(size.sum())

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: one for name, one in vars(self).items() if isinstance(one, np.ndarray)}

    def _turns(self) -> list[Turn]:
        starts = list(accumulate(self.chain_sizes.tolist(), initial=0))
        declared = [
            (one, as_rows(one, raw, len(self.logprobs)))
            for one, raw in zip(self.token_fields, self.rows, strict=True)
        ]
        stored = starts[:-1]  # where the new tokens of each chain's next turn begin
        turns, generated, num_spans = list[Turn](), 0, 0
        tables = zip(self.turns.tolist(), self.numbers.tolist(), strict=True)
        for index, (integers, floats) in enumerate(tables):
            chain, begin, size, count, *_ = integers
            start, sampled, end = starts[chain], generated + size, num_spans + count
            middle = start + begin
            fields: dict[str, Any] = {
                one.name: part(rows, generated, sampled)
                if one.generated_only
                else rows[stored[chain] if one.new_only else start : middle + size]
                for one, rows in declared
            }
            stored[chain] = middle + size
            for name, values in self.undeclared.get(index, {}).items():
                fields[name] = _given(values)
            numbers = integers + floats
            turns.append(
                Turn(
                    prompt_ids=self.tokens[start:middle],
                    completion_ids=self.tokens[middle : middle + size],
                    completion_logprobs=self.logprobs[generated:sampled],
                    version_spans=[VersionSpan(*one) for one in self.spans[num_spans:end].tolist()]
                    if count
                    else None,
                    fields=fields or None,
                    **{one.attribute: one.value(numbers[place]) for one, place in _PLACES},
                )
            )
            generated, num_spans = sampled, end
        return turns


def as_rows(declared: TokenField, raw: npt.NDArray[np.uint8], num_generated: int) -> Any:
    """Return the rows of a declared field: an array, or a tensor if numpy lacks the dtype."""
    if declared.ragged:
        split = raw.size - 4 * num_generated
        cu = np.append(np.int64(0), raw[split:].view(I32).cumsum(dtype=np.int64))
        return Ragged(cu, as_rows(replace(declared, ragged=False), raw[:split], num_generated))
    shape = (raw.size // declared.row_bytes, *declared.shape)
    if raw.size:
        values = host_tensor(raw).view(declared.dtype).reshape(shape)
    else:  # torch does not view an empty tensor as another dtype
        values = torch.empty(shape, dtype=declared.dtype, device="cpu")
    try:
        return values.numpy()
    except TypeError:  # bfloat16 and narrower floats
        return values


def as_array(values: Any) -> tuple[str, npt.NDArray[Any]]:
    """Return the name of an array's torch dtype, and its values as numpy has them.

    Numpy has no bfloat16 or float8; such a tensor becomes integers of that size.
    """
    tensor = host_tensor(values).contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return name, tensor.numpy()
    except TypeError:
        width = {1: torch.uint8, 2: torch.int16}[tensor.dtype.itemsize]
        return name, tensor.view(width).numpy()


def as_tensor(dtype: str, array: npt.NDArray[Any]) -> torch.Tensor:
    """Return the tensor of `as_array`; it shares the array's memory if that is writable."""
    return host_tensor(array).view(getattr(torch, dtype))


def _rows_in(
    stream: npt.NDArray[np.uint8], declared: TokenField, first: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.uint8]:
    """Return the rows of a field of one call as flat bytes; of a ragged one values, then counts."""
    begin = int(first[0]) if len(first) else 0
    rows = stream[begin : begin + count * declared.row_bytes]
    if not declared.ragged:
        return rows
    spans = rows.view(I32).reshape(-1, 2)
    place = int(spans[0, 0]) * declared.value_bytes if count else 0
    size = int(spans[:, 1].sum(dtype=np.int64)) * declared.value_bytes
    return np.concatenate([stream[place : place + size], spans[:, 1].copy().view(U8)])


def _stored(values: Any) -> _Stored:
    if not isinstance(values, Ragged):
        try:
            return as_array(values)
        except (TypeError, ValueError):  # lists of different lengths
            pass
    cu, flat = flattened(values)
    return *as_array(flat), cu


def _given(stored: _Stored) -> Any:
    tensor = as_tensor(stored[0], stored[1])
    return Ragged(stored[2], tensor) if len(stored) > 2 else tensor


def _without_fields(
    trajectories: Iterable[Trajectory],
) -> tuple[list[Trajectory], _Undeclared]:
    """Return trajectories without extra fields, and these by turn and name."""
    plain, found, num_turns = list[Trajectory](), _Undeclared(), 0
    for trajectory in trajectories:
        turns, before = list(getattr(trajectory, "turns", ())), len(found)
        for number, turn in enumerate(turns):
            if getattr(turn, "fields", None) is not None:
                found[num_turns + number] = {k: _stored(v) for k, v in turn.fields.items()}
                turns[number] = replace(turn, fields=None)
        plain.append(trajectory if len(found) == before else replace(trajectory, turns=turns))
        num_turns += len(turns)
    return plain, found


def _require(holds: Any, message: str) -> None:
    if not holds:
        raise ValueError(message)
