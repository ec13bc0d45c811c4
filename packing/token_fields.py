"""`TokenField`: declaration of an extra per-token field."""

from __future__ import annotations

import cmath
import dataclasses
import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.fields.build import FIELD_DTYPES
from trajpack.kernels.fields.gather_fields import FieldLayout
from trajpack.packing.conversion import host_tensor, shown
from trajpack.packing.equality import same_bytes
from trajpack.packing.ragged import Ragged, flattened

Bytes: TypeAlias = npt.NDArray[np.uint8]
Rows: TypeAlias = Bytes | Ragged
"""Converted rows of a field; a `Ragged` has bytes ``[total, bytes of a value]``."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
        torch.int64,
        torch.float8_e5m2,
        torch.float8_e4m3fn,
        torch.float8_e5m2fnuz,
        torch.float8_e4m3fnuz,
        torch.float8_e8m0fnu,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
    )
}
"""Dtypes of fields by their names in files."""
OPTIONAL = {"ragged", "new_only"}
"""Attributes that `TokenField.as_json` leaves out where they are False."""
MAX_DIMENSIONS = 63
"""Dimensions of a token's row at most: numpy holds one more."""


@dataclass(frozen=True)
class TokenField:
    """An extra field with one row for each token.

    For instance routed experts, values, log-probabilities of a reference model, temperatures. The
    field is declared once, at the buffer; each turn has its rows in `Turn.fields`.
    `TrajectoryBuffer.pack`, `PackedBatch.unpack` and `trajpack.save` include it.
    `PackedBatch.with_field` adds rows that are computed after packing.

    Attributes:
        name: Key in `Turn.fields` and in `PackedBatch.fields`.
        dtype: Dtype of the packed field. Rows of another dtype are converted; a conversion that
            changes an integer or a bool raises.
        shape: Shape of a token's row: ``(layers, k)`` for routed experts, ``()`` for a number.
        fill: Value of tokens without a row: padding, and prompt tokens if ``generated_only``.
        generated_only: Whether a turn has rows for its completion only, or for its prompt and
            completion. In the second case a turn extends a chain only if the rows of the chain are
            equal too.
        new_only: Whether a turn has rows for its new tokens alone: those behind the chain that it
            extends, or all of them where it begins one. Needs ``generated_only=False``.
        ragged: Whether a generated token has any number of values, each of ``shape``: a turn brings
            a list of lists, or `Ragged`. Then ``PackedBatch.fields[name]`` is int32 ``[tokens,
            2]``: the first value and the number of values in ``PackedBatch.ragged_values[name]``,
            and ``PackedBatch.generated[name]`` has the values in the order of the generated tokens.

    Example:
        >>> from trajpack import TokenField, Trajectory, Turn, pack
        >>> values = TokenField("values", torch.float32)
        >>> turn = Turn([1, 2], [3], [-0.5], fields={"values": [0.25]})
        >>> pack([Trajectory("a", [turn])], fields=[values]).fields["values"]
        tensor([0.0000, 0.0000, 0.2500])
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    fill: float | int | bool = 0
    generated_only: bool = True
    ragged: bool = False
    new_only: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"field name must be a str that is not empty, got {self.name!r}")
        if self.name in FIELD_DTYPES:
            raise ValueError(f"field {self.name!r}: a packed batch has a field of that name")
        if self.dtype not in DTYPES.values():
            raise TypeError(
                f"field {self.name!r}: dtype must be a torch dtype of at most 8 bytes, one of "
                f"{', '.join(DTYPES)}, got {shown(self.dtype)}"
            )
        if not isinstance(self.shape, (tuple, list, torch.Size)):
            raise TypeError(f"field {self.name!r}: shape must be a tuple, got {self.shape!r}")
        object.__setattr__(self, "shape", tuple(self.shape))
        wrong = (type(size) is not int or size < 1 for size in self.shape)
        if any(wrong) or len(self.shape) > MAX_DIMENSIONS:
            raise ValueError(
                f"field {self.name!r}: shape must hold up to {MAX_DIMENSIONS} sizes >= 1, "
                f"got {shown(self.shape)}"
            )
        filled = self._filled()
        object.__setattr__(self, "fill", filled.item())
        self._check_flags()
        fill = filled.view(torch.uint8).numpy().tobytes()
        layout = FieldLayout(self.dtype, self.shape, fill, self.generated_only)
        if self.ragged:
            layout = FieldLayout(torch.int32, (2,), bytes(4), generated_only=True)
        object.__setattr__(self, "_layout", layout)

    def _check_flags(self) -> None:
        for name in ("generated_only", "ragged", "new_only"):
            if type(flag := getattr(self, name)) is not bool:
                got = shown(flag)
                raise TypeError(f"field {self.name!r}: {name} must be a bool, got {got}")
        if self.new_only and self.generated_only:
            raise ValueError(
                f"field {self.name!r}: new_only must have generated_only=False, got True"
            )
        if self.ragged and (not self.generated_only or self.fill != 0):
            raise ValueError(
                f"field {self.name!r}: a ragged field must have rows of generated tokens, "
                f"without a fill, got generated_only={self.generated_only}, fill={self.fill}"
            )

    @property
    def layout(self) -> FieldLayout:
        """Layout of the field for the kernels."""
        layout: FieldLayout = self._layout  # type: ignore[attr-defined]
        return layout

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row."""
        return self.layout.row_bytes

    @property
    def value_bytes(self) -> int:
        """Bytes of a value of a ragged field."""
        return math.prod(self.shape) * self.dtype.itemsize

    def values_in(self, words: torch.Tensor) -> torch.Tensor:
        """Return an int32 stream as values of a ragged field, a view."""
        whole = 4 * words.shape[0] // math.lcm(4, self.value_bytes) * math.lcm(4, self.value_bytes)
        if not whole:  # torch cannot view no bytes as another dtype
            return words.new_empty((0, *self.shape), dtype=self.dtype)
        return words[: whole // 4].view(self.dtype).view(-1, *self.shape)

    def as_json(self) -> dict[str, Any]:
        """Return the declaration as JSON values, for `from_json`."""
        dtype = str(self.dtype).removeprefix("torch.")
        fill = bytes(self.dtype.itemsize) if self.ragged else self.layout.fill
        described = dataclasses.asdict(self) | {"dtype": dtype, "shape": list(self.shape)}
        for name in OPTIONAL:  # as before there were such fields
            if not described[name]:
                del described[name]
        return described | {"fill": fill.hex()}

    @classmethod
    def from_json(cls, described: Any) -> TokenField:
        """Return the field of a declaration from `as_json`.

        Raises:
            TypeError: If a value is of the wrong kind.
            ValueError: If the values describe no field.
        """
        keys = {field.name for field in dataclasses.fields(cls)} - OPTIONAL
        if not isinstance(described, dict) or set(described) - OPTIONAL != keys:
            raise ValueError(f"a field must have {sorted(keys)}, got {shown(described)}")
        name, fill = described["dtype"], described["fill"]
        dtype = DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(name)}")
        raw = bytearray.fromhex(fill) if isinstance(fill, str) else b""
        if len(raw) != dtype.itemsize:
            raise ValueError(f"fill must be {dtype.itemsize} bytes of {dtype}, got {shown(fill)}")
        if dtype == torch.bool and raw[0] > 1:
            raise ValueError(f"fill must be a byte of 0 or 1, got {shown(fill)}")
        value = torch.frombuffer(raw, dtype=dtype).item()
        return cls(**{**described, "dtype": dtype, "fill": value})

    def _filled(self) -> torch.Tensor:
        """Return the fill as a tensor; raise if it does not fit the dtype."""
        filled = self._converted([self.fill])
        wide = filled if filled.is_complex() else filled.double()
        if cmath.isfinite(self.fill) and not bool(wide.isfinite()):
            raise ValueError(f"field {self.name!r}: fill must fit {self.dtype}, got {self.fill}")
        return filled

    def as_rows(self, values: Any, num_rows: int | None) -> Rows:
        """Convert the rows of a turn: to ``[num_rows, row_bytes]`` if the field is not ragged.

        ``None`` stands for any number of rows.

        Raises:
            TypeError: If the values are no numbers, or rows of a ragged field no sequences.
            ValueError: If the shape is not ``[num_rows, *shape]``, ``dtype`` changes a value, or a
                ragged field has another number of rows.
        """
        if not self.ragged:
            return self._as_bytes(values, num_rows)
        try:
            cu, flat = flattened(values)
        except Exception as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"field {self.name!r} must be lists or Ragged: {error}") from error
        if num_rows is not None and len(cu) != num_rows + 1:
            raise ValueError(f"field {self.name!r} must have {num_rows} rows, got {len(cu) - 1}")
        return Ragged(cu, self._as_bytes(flat, int(cu[-1])))

    def _as_bytes(self, values: Any, num_rows: int | None) -> Bytes:
        is_plain = type(values) is np.ndarray and values.dtype == _numpy_dtype(self.dtype)
        rows: Any = values if is_plain else self._converted(values)
        if num_rows is None:
            num_rows = len(rows) if rows.ndim else 0
        row_bytes, expected = self.value_bytes, (num_rows, *self.shape)
        if tuple(rows.shape) != expected and (num_rows or math.prod(rows.shape)):
            raise ValueError(
                f"field {self.name!r} must have shape {list(expected)}, got {list(rows.shape)}"
            )
        if not num_rows:
            return np.empty((0, row_bytes), np.uint8)
        if is_plain:
            return np.ascontiguousarray(rows).view(np.uint8).reshape(num_rows, row_bytes)
        try:
            flat = rows.contiguous().as_strided((rows.numel(),), (1,))  # an entry may have stride 0
            raw = np.asarray(flat.view(torch.uint8).numpy()).reshape(num_rows, row_bytes)
        except Exception as error:  # the storage does not fit the shape
            raise TypeError(f"field {self.name!r} cannot be read: {shown(error)}") from error
        return raw if self.dtype != torch.bool else (raw != 0).view(np.uint8)

    def _converted(self, values: Any) -> torch.Tensor:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # torch warns when it drops an imaginary part
                given = host_tensor(values)
                rows = given.to(self.dtype)
        except Exception as error:  # includes warnings
            raise TypeError(f"field {self.name!r} cannot be read as numbers: {error}") from error
        exact = rows.dtype.is_floating_point or rows.dtype.is_complex
        if not exact and given.dtype != rows.dtype and not torch.equal(rows.to(given.dtype), given):
            raise ValueError(f"field {self.name!r} has values that {self.dtype} does not hold")
        return rows


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return the dtype of arrays whose bytes are those of a field; a bool may have others."""
    try:
        read = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        return None if read == np.bool_ else read
    except TypeError:  # bfloat16 and narrower floats
        return None


def check_fields(fields: Iterable[TokenField]) -> tuple[TokenField, ...]:
    """Return the declared fields in order.

    Raises:
        TypeError: If one is no `TokenField`.
        ValueError: If two have one name.
    """
    if not isinstance(fields, Iterable):
        raise TypeError(f"fields must be several TokenField, got {type(fields).__name__}")
    declared = tuple(fields)
    for field in declared:
        if not isinstance(field, TokenField):
            raise TypeError(f"fields must be TokenField, got {type(field).__name__}")
    names = [field.name for field in declared]
    if len(set(names)) != len(names):
        raise ValueError(f"fields must have names of their own, got {names}")
    return declared


def rows_of_turn(
    declared: Sequence[TokenField],
    given: Mapping[str, Any] | None,
    sizes: tuple[int, int],
) -> list[Rows]:
    """Convert the rows of a turn for each declared field.

    Args:
        declared: The fields.
        given: Rows by name.
        sizes: Tokens of the prompt and of the completion.

    Raises:
        TypeError, ValueError: As `TokenField.as_rows`; also if a field is missing or was not
            declared.
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"fields must be a mapping, got {type(given).__name__}")
    rows = dict(given or {})
    expected = {field.name for field in declared}
    if rows.keys() != expected:
        got = sorted(map(str, rows))
        unknown = sorted(set(got) - expected)
        remedy = f"; declare fields=[TokenField({unknown[0]!r}, ...)]" if unknown else ""
        raise ValueError(f"fields must be those declared, {sorted(expected)}, got {got}{remedy}")
    return [
        field.as_rows(
            rows[field.name],
            None if field.new_only else sizes[1] if field.generated_only else sum(sizes),
        )
        for field in declared
    ]


def extend_rows(
    declared: Sequence[TokenField],
    rows: list[Any],
    history: tuple[Sequence[Any], int],
    num_tokens: int,
) -> None:
    """Put the rows of the chain that a turn extends before those of fields with ``new_only``.

    Args:
        declared: The fields.
        rows: Rows of the turn. Those of such fields become lists: the rows of each turn of a chain.
        history: Rows of the chain and number of its tokens; none if the turn begins one.
        num_tokens: Tokens of the turn, with its prompt.

    Raises:
        ValueError: If a field has another number of rows than the turn has new tokens.
    """
    earlier, num_stored = history
    for number, field in enumerate(declared):
        if field.new_only:
            expected, got = num_tokens - num_stored, len(rows[number])
            if got != expected:
                raise ValueError(
                    f"field {field.name!r} must have {expected} rows, of the tokens behind the "
                    f"{num_stored} that the turn repeats of its history, got {got}"
                )
            rows[number] = [*(earlier[number] if earlier else ()), rows[number]]


def first_differing(
    declared: Sequence[TokenField], history: Sequence[Any], rows: Sequence[Any], num_tokens: int
) -> str:
    """Return the first field whose rows differ between a chain and a turn that repeats it, or ''.

    ``num_tokens`` are the tokens of the chain.
    """
    for field, mine, theirs in zip(declared, history, rows, strict=True):
        is_compared = not (field.generated_only or field.new_only)
        if is_compared and not same_bytes(mine, theirs[:num_tokens]):
            return field.name
    return ""
