"""Whether the parts of a batch that came from outside fit together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trajpack.kernels.build import FIELD_DTYPES
from trajpack.packing.batch import PackedBatch
from trajpack.packing.layout import LAYOUTS
from trajpack.packing.tables import number_groups
from trajpack.packing.token_fields import TokenField, check_fields

TURN_DTYPES = {
    "turn_rewards": torch.float64,
    "turn_returns": torch.float32,
    "turn_truncated": torch.bool,
    "turn_version_start": torch.int32,
    "turn_version_end": torch.int32,
    "turn_sequence": torch.int32,
    "turn_spans": torch.int32,
    "turn_begin": torch.int32,
}
BOUNDS = ("cu_seqlens", "cu_turns", "cu_generated")
DTYPES = FIELD_DTYPES | TURN_DTYPES | dict.fromkeys((*BOUNDS, "group_ids"), torch.int32)
LATER_DTYPES = {"advantages": torch.float32, "metrics": torch.float64}
"""Of tensors that a batch may lack."""
LABELS: dict[str, tuple[type, ...]] = {
    "ids": (str,),
    "groups": (str, type(None)),
    "task_ids": (int, type(None)),
    "birth_times_ms": (int, type(None)),
    "turn_discounts": (float,),
}
HOST = {field.name for field in dataclasses.fields(PackedBatch)}
HOST -= {*DTYPES, *LATER_DTYPES, "fields"}
FIELD_PREFIX = "fields."
"""Before the names of extra fields, among the tensors of a file."""


class InconsistentBatch(ValueError):
    """Parts that make no packed batch."""


def checked_batch(tensors: Mapping[str, torch.Tensor], host: Any) -> PackedBatch:
    """Put a batch together from host tensors and what stays on the host of it.

    Raises:
        InconsistentBatch: If a part is missing, foreign, of the wrong dtype, shape or type,
            or if boundaries, lengths and turns do not tell one story.
    """
    fields = {name: t for name, t in tensors.items() if name.startswith(FIELD_PREFIX)}
    tensors = {name: t for name, t in tensors.items() if name not in fields}
    _require(
        set(DTYPES) == set(tensors) - set(LATER_DTYPES), "its tensors are not those of a batch"
    )
    _require(isinstance(host, dict) and set(host) == HOST, "its metadata is not that of a batch")
    for name, tensor in tensors.items():
        dtype = (DTYPES | LATER_DTYPES)[name]
        _require(tensor.dtype == dtype, f"{name} is not {dtype}")
    _check_host(host)
    _check_shapes(tensors, host)
    _check_boundaries(tensors, host["seqlens"])
    _check_turns(tensors, host["seqlens"])
    _check_groups(tensors["group_ids"], host)
    parts: dict[str, Any] = dict(tensors)
    parts |= {name: tuple(v) if isinstance(v, list) else v for name, v in host.items()}
    declared = _declared(host["token_fields"])
    _check_fields(fields, declared, sum(host["seqlens"]))
    parts["token_fields"] = declared
    parts["fields"] = {field.name: fields[FIELD_PREFIX + field.name] for field in declared}
    return PackedBatch(**parts)


def _declared(described: Any) -> tuple[TokenField, ...]:
    _require(isinstance(described, list), "token_fields is not a list")
    try:
        return check_fields(TokenField.from_json(field) for field in described)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InconsistentBatch(f"token_fields do not describe fields: {error}") from error


def _check_fields(
    fields: Mapping[str, torch.Tensor], declared: Sequence[TokenField], num_tokens: int
) -> None:
    names = {FIELD_PREFIX + field.name for field in declared}
    _require(set(fields) == names, "its extra fields are not those it declares")
    for field in declared:
        got = fields[FIELD_PREFIX + field.name]
        _require(got.dtype == field.dtype, f"field {field.name} is not {field.dtype}")
        expected = (num_tokens, *field.shape)
        _require(
            tuple(got.shape) == expected,
            f"field {field.name} has shape {list(got.shape)}, expected {list(expected)}",
        )


def _check_host(host: dict[str, Any]) -> None:
    _require(host["layout"] in LAYOUTS, "its layout is unknown")
    for name in ("num_generated", "num_groups"):
        _require(type(host[name]) is int, f"{name} is not an integer")
    for name, kinds in {**LABELS, "seqlens": (int,), "metric_names": (str,)}.items():
        values = host[name]
        _require(
            isinstance(values, list) and all(type(value) in kinds for value in values),
            f"{name} is not a list of the right type",
        )
        fits = name not in LABELS or len(values) == len(host["ids"])
        _require(fits, f"{name} has a wrong length")


def _check_shapes(tensors: Mapping[str, torch.Tensor], host: dict[str, Any]) -> None:
    num_tokens, num_turns = sum(host["seqlens"]), tensors["turn_rewards"].numel()
    shapes = dict.fromkeys(FIELD_DTYPES, (num_tokens,))
    shapes |= dict.fromkeys(TURN_DTYPES, (num_turns,))
    shapes["cu_seqlens"] = (len(host["seqlens"]) + 1,)
    shapes["cu_turns"] = (len(host["ids"]) + 1,)
    shapes["cu_generated"] = (num_turns + 1,)
    shapes["group_ids"] = (len(host["ids"]),)
    shapes["advantages"], shapes["metrics"] = (num_tokens,), (len(host["metric_names"]),)
    _require("metrics" in tensors or not host["metric_names"], "metric_names name nothing")
    for name, tensor in tensors.items():
        expected = (*shapes[name], 2) if name == "turn_spans" else shapes[name]
        got = tuple(tensor.shape)
        _require(got == expected, f"{name} has shape {list(got)}, expected {list(expected)}")
    trained = int(tensors["loss_mask"].sum())
    _require(trained == host["num_generated"], "num_generated is not what loss_mask selects")


def _check_boundaries(tensors: Mapping[str, torch.Tensor], seqlens: list[int]) -> None:
    cu_seqlens, cu_turns = tensors["cu_seqlens"].long(), tensors["cu_turns"]
    _require(
        cu_seqlens[0] == 0
        and cu_seqlens.diff().tolist() == seqlens
        and min(seqlens, default=0) >= 0,
        "cu_seqlens and seqlens disagree",
    )
    num_turns = tensors["turn_rewards"].numel()
    _require(
        cu_turns[0] == 0 and cu_turns[-1] == num_turns and bool((cu_turns.diff() >= 0).all()),
        "cu_turns does not run from 0 to the number of turns",
    )


def _check_turns(tensors: Mapping[str, torch.Tensor], seqlens: list[int]) -> None:
    cu_seqlens, cu_generated = tensors["cu_seqlens"].long(), tensors["cu_generated"]
    sequence, spans = tensors["turn_sequence"].long(), tensors["turn_spans"]
    _require(
        bool(((sequence >= 0) & (sequence < len(seqlens))).all()), "turn_sequence is out of range"
    )
    begins, ends = spans.unbind(1)
    inside = (cu_seqlens[sequence] <= begins) & (ends <= cu_seqlens[sequence + 1])
    _require(bool((inside & (begins <= ends)).all()), "turn_spans leave their sequences")
    turn_begin = tensors["turn_begin"]
    inside = (cu_seqlens[sequence] <= turn_begin) & (turn_begin <= begins)
    _require(bool(inside.all()), "turn_begin leaves its turns' contexts")
    _require(
        cu_generated[0] == 0 and torch.equal(cu_generated.diff(), ends - begins),
        "cu_generated and turn_spans disagree",
    )


def _check_groups(group_ids: torch.Tensor, host: dict[str, Any]) -> None:
    expected, num_groups = number_groups(host["groups"], {}, 0)
    _require(group_ids.tolist() == expected, "group_ids do not number groups")
    _require(num_groups == host["num_groups"], "num_groups is not what group_ids number")


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise InconsistentBatch(otherwise)
