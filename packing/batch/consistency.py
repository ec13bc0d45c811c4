"""Checks that the fields of a batch agree, made before a file is written and after it is read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.kernels.fields.build import FIELD_DTYPES
from trajpack.kernels.runs import MAX_TOKENS
from trajpack.packing.batch.batch import PackedBatch, number_groups
from trajpack.packing.conversion import FLOAT32_MAX, INT32_MAX, shown
from trajpack.packing.layout import LAYOUTS
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.turn_fields import TURN_FIELDS

TURN_DTYPES = {
    **{field.name: field.dtype for field in TURN_FIELDS},
    "turn_returns": torch.float32,
    "turn_sequence": torch.int32,
    "turn_spans": torch.int32,
    "turn_begin": torch.int32,
}
BOUNDS = ("cu_seqlens", "cu_turns", "cu_generated")
TABLES = TURN_DTYPES | dict.fromkeys((*BOUNDS, "group_ids"), torch.int32)
LATER_DTYPES = {"advantages": torch.float32, "metrics": torch.float64}
"""Dtypes of optional tensors."""
DTYPES = FIELD_DTYPES | TABLES | LATER_DTYPES
LABELS: dict[str, tuple[type, ...]] = {
    "ids": (str,),
    "groups": (str, type(None)),
    "task_ids": (int, type(None)),
    "birth_times_ms": (int, type(None)),
    "turn_discounts": (float,),
}
HOST = {field.name for field in dataclasses.fields(PackedBatch)} - {
    *DTYPES,
    "fields",
    "ragged_values",
}
FIELD_PREFIX = "fields."
"""Prefix of the names of extra fields in a file."""
VALUES_PREFIX = "ragged_values."
"""Prefix of the names of ragged fields' values in a file."""
PIECE = 1 << 18
"""Tokens that are read and compared at a time, which bounds memory."""
RETURNS_TOLERANCE = 1e-6
"""Tolerance of a turn's return, relative to the discounted sum of absolute rewards: the order of
the float64 sums differs between implementations."""

REMEDIES = {
    "loss_mask": "call `narrow` after the batch is loaded, or weigh the loss (`loss_weights`)",
    "turn_returns": "pack trajectories with other rewards",
}
"""Remedies for fields that callers change."""

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Check = Callable[[Array, slice], None]
Read = Callable[[str, "Check | None"], torch.Tensor]


class InconsistentBatch(ValueError):
    """Fields that make no packed batch."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy
        """Advice to the caller; may be empty."""


class Described(NamedTuple):
    """Dtype and shape of a tensor that is not read yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Turns(NamedTuple):
    """Checked tables of the turns and sequences of a batch."""

    starts: Ints
    """``[sequences + 1]`` boundaries of the sequences."""
    spans: Ints
    """``[turns, 2]`` boundaries of the completions."""
    order: Ints
    """``[turns]`` turns in the order of their completions in the batch."""
    begin: Ints
    """``[turns]`` first token that is new with each turn."""
    cu_turns: Ints
    """``[trajectories + 1]`` boundaries of the trajectories' turns."""


def checked_batch(described: Mapping[str, Described], host: Any, read: Read) -> PackedBatch:
    """Make a batch from tensors and host values, and check it.

    Values that follow from lengths, turns and labels are computed again and compared bit for bit,
    `turn_returns` up to rounding. Any values are accepted in ``advantages``, ``metrics`` and extra
    fields, and in ``returns`` beside advantages.

    Args:
        described: Dtype and shape of every tensor; names of extra fields begin with `FIELD_PREFIX`,
            those of ragged fields' values with `VALUES_PREFIX`.
        host: All other fields by name, as read from JSON.
        read: Function that returns a tensor by name, contiguous and on the host; called once for
            each, first for tensors over turns. It calls the given check with the tensor as a numpy
            array and a slice of rows, whenever `PIECE` more rows were read.

    Raises:
        InconsistentBatch: If fields disagree. It names the field, the expected and the found value.

    Cost: a pass over all tensors, and memory for a few times `PIECE` tokens.
    """
    _require(isinstance(host, dict), "its metadata must be a JSON object")
    _require(set(host) == HOST, f"its metadata must be {sorted(HOST)}, got {sorted(host)}")
    _check_host(host)
    declared = _declared(host["token_fields"])
    _check_described(described, host, declared)
    tensors = {name: read(name, None) for name in TABLES}
    tables = {name: tensor.numpy() for name, tensor in tensors.items()}
    turns = _check_tables(tables, host)
    _check_returns(tensors, host["turn_discounts"])
    tensors |= _check_tokens(turns, tables, read, has_credit="advantages" in described)
    if host["layout"] == "turns":
        _check_prefixes(tensors["input_ids"].numpy(), turns)
    fields = {field.name: read(FIELD_PREFIX + field.name, None) for field in declared}
    for name, rows in fields.items():
        _check_bools(f"field {name!r}", rows)
    ragged = [field.name for field in declared if field.ragged]
    values = {name: read(VALUES_PREFIX + name, None) for name in ragged}
    for name in ragged:
        _check_bools(f"values of field {name!r}", values[name])
        _check_ragged(name, fields[name].numpy(), tensors["turn_ids"].numpy(), len(values[name]))
    tensors |= {name: read(name, None) for name in LATER_DTYPES if name in described}
    parts: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in host.items()}
    parts |= {**tensors, "fields": fields, "token_fields": declared, "ragged_values": values}
    return PackedBatch(**parts)


def _require(holds: object, otherwise: str, remedy: str = "") -> None:
    if not holds:
        raise InconsistentBatch(otherwise, remedy)


def _check_host(host: dict[str, Any]) -> None:
    _require(
        isinstance(host["layout"], str) and host["layout"] in LAYOUTS,
        f"layout must be one of {list(LAYOUTS)}, got {shown(host['layout'])}",
    )
    for name in ("num_generated", "num_groups"):
        got = shown(host[name])
        _require(type(host[name]) is int, f"{name} must be an integer, got {got}")
    for name, kinds in (LABELS | {"seqlens": (int,), "metric_names": (str,)}).items():
        values = host[name]
        _require(isinstance(values, list), f"{name} must be a list, got {shown(values)}")
        names = " or ".join(kind.__name__ for kind in kinds)
        _refuse(name, values, (type(value) not in kinds for value in values), f"be {names}")
    for name in LABELS:
        count, expected = len(host[name]), len(host["ids"])
        _require(count == expected, f"{name} must have {expected} entries as ids has, got {count}")
    seqlens = host["seqlens"]
    _refuse("seqlens", seqlens, (length < 1 for length in seqlens), "be at least 1")
    _require(sum(seqlens) <= MAX_TOKENS, f"seqlens must come to at most {MAX_TOKENS} tokens")
    for name in ("task_ids", "birth_times_ms"):
        wide = (number is not None and not -(2**63) <= number < 2**63 for number in host[name])
        _refuse(name, host[name], wide, "fit int64")
    discounts = host["turn_discounts"]
    far = (not abs(discount) <= FLOAT32_MAX for discount in discounts)
    _refuse("turn_discounts", discounts, far, "be finite float32")


def _refuse(name: str, values: Sequence[Any], wrong: Iterator[bool], expected: str) -> None:
    """Raise for the first of the values that is wrong."""
    index = next((index for index, is_wrong in enumerate(wrong) if is_wrong), None)
    if index is not None:
        got = shown(values[index])
        raise InconsistentBatch(f"{name} must {expected}, got {got} at index {index}")


def _declared(described: Any) -> tuple[TokenField, ...]:
    _require(isinstance(described, list), f"token_fields must be a list, got {shown(described)}")
    try:
        declared = check_fields(TokenField.from_json(field) for field in described)
        for field in declared:
            field.name.encode()
    except (TypeError, ValueError) as error:
        raise InconsistentBatch(f"token_fields must describe fields: {error}") from error
    return declared


def _check_described(
    described: Mapping[str, Described], host: dict[str, Any], declared: Sequence[TokenField]
) -> None:
    """Check names, dtypes and shapes of the tensors."""
    fields = {FIELD_PREFIX + field.name: field for field in declared}
    ragged = {VALUES_PREFIX + field.name: field for field in declared if field.ragged}
    for name in described:
        is_field = name.startswith(FIELD_PREFIX)
        _require(
            name in DTYPES or name in fields or name in ragged,
            f"field {name.removeprefix(FIELD_PREFIX)!r} is not declared in token_fields"
            if is_field
            else f"{shown(name)} is no tensor of a batch",
            "add it with PackedBatch.with_field" if is_field else "",
        )
    for name in (*FIELD_DTYPES, *TABLES, *fields, *ragged):
        _require(name in described, f"{called(name)} is missing")
    turns = described["turn_rewards"].shape
    _require(len(turns) == 1, f"turn_rewards must have shape [turns], got {list(turns)}")
    [num_turns], num_tokens = turns, sum(host["seqlens"])
    num_trajectories, num_metrics = len(host["ids"]), len(host["metric_names"])
    _require(num_turns <= INT32_MAX, f"turn_rewards must have at most {INT32_MAX} entries")
    shapes = dict.fromkeys((*FIELD_DTYPES, "advantages"), (num_tokens,))
    shapes |= dict.fromkeys(TURN_DTYPES, (num_turns,))
    shapes |= {"cu_seqlens": (len(host["seqlens"]) + 1,), "cu_turns": (num_trajectories + 1,)}
    shapes |= {"cu_generated": (num_turns + 1,), "group_ids": (num_trajectories,)}
    shapes |= {"metrics": (num_metrics,)}
    sizes: dict[str, tuple[int, ...]] = {**shapes, "turn_spans": (num_turns, 2)}
    sizes |= {name: (num_tokens, *field.layout.shape) for name, field in fields.items()}
    dtypes = DTYPES | {name: field.layout.dtype for name, field in fields.items()}
    for name, field in ragged.items():  # as many as there are
        total = described[name].shape[:1] or (0,)
        sizes[name], dtypes[name] = (*total, *field.shape), field.dtype
    for name, (dtype, shape) in described.items():
        wanted = dtypes[name]
        remedy = f"convert it with .to({wanted})"
        _require(dtype == wanted, f"{called(name)} must be {wanted}, got {dtype}", remedy)
        expected = list(sizes[name])
        got = f"{called(name)} must have shape {expected}, got {list(shape)}"
        _require(list(shape) == expected, got)
    _require(
        "metrics" in described or not num_metrics, "metric_names must be empty without metrics"
    )


def called(name: str) -> str:
    """Return the name of a tensor in an error message."""
    if name.startswith(VALUES_PREFIX):
        return f"values of field {name.removeprefix(VALUES_PREFIX)!r}"
    is_field = name.startswith(FIELD_PREFIX)
    return f"field {name.removeprefix(FIELD_PREFIX)!r}" if is_field else name


def _check_tables(tables: Mapping[str, Array], host: dict[str, Any]) -> Turns:
    """Check boundaries, groups, and the tables of the turns but for their returns."""
    starts = np.cumsum([0, *host["seqlens"]], dtype=np.int64)
    _same("cu_seqlens", tables["cu_seqlens"], starts, "as seqlens say")
    num_turns = len(tables["turn_rewards"])
    cu_turns = tables["cu_turns"].astype(np.int64)
    _require(
        cu_turns[0] == 0 and cu_turns[-1] == num_turns and (np.diff(cu_turns) > 0).all(),
        f"cu_turns must grow from 0 to the {num_turns} turns, with each trajectory",
    )
    group_ids, num_groups = number_groups(host["groups"], {}, 0)
    _same("group_ids", tables["group_ids"], np.array(group_ids, np.int64), "as groups say")
    got = host["num_groups"]
    _require(got == num_groups, f"num_groups must be {num_groups}, as groups say, got {got}")
    rewards = tables["turn_rewards"]
    _first_wrong("turn_rewards", rewards, ~(np.abs(rewards) <= FLOAT32_MAX), "be finite float32")
    _check_bools("turn_truncated", torch.from_numpy(tables["turn_truncated"]))
    first, last = tables["turn_version_start"], tables["turn_version_end"]
    _first_wrong("turn_version_start", first, first < 0, "be 0 or more")
    _first_wrong("turn_version_end", last, last < first, "be no less than turn_version_start")
    _check_sequences(tables["turn_sequence"], cu_turns, len(host["seqlens"]), host["layout"])
    turns = _check_spans(tables, starts, cu_turns, host["layout"])
    sizes = turns.spans[:, 1] - turns.spans[:, 0]
    generated = np.append(0, np.cumsum(sizes))
    _same("cu_generated", tables["cu_generated"], generated, "as turn_spans say")
    got, expected = host["num_generated"], int(generated[-1])
    _require(got == expected, f"num_generated must be {expected}, as turn_spans say, got {got}")
    return turns


def _check_sequences(sequence: Array, cu_turns: Ints, num_sequences: int, layout: str) -> None:
    """Check that sequences are numbered in the order of their first turns."""
    name = "turn_sequence"
    if layout == "turns":
        _require(
            len(sequence) == num_sequences,
            f"seqlens must have {len(sequence)} entries, one a turn, got {num_sequences}",
        )
        _same(name, sequence, np.arange(len(sequence)), "one a turn")
        return
    newest = np.maximum.accumulate(sequence.astype(np.int64))
    opened = np.diff(newest, prepend=-1)
    firsts = cu_turns[:-1]
    must_open = np.zeros(len(sequence), np.bool_)
    must_open[firsts] = True
    oldest = np.repeat(newest[firsts], np.diff(cu_turns))
    wrong = (opened > 1) | (must_open & (opened != 1)) | (sequence < oldest)
    _first_wrong(name, sequence, wrong, "number sequences as the trajectories' turns open them")
    count = int(newest[-1]) + 1 if len(newest) else 0
    _require(
        count == num_sequences,
        f"turn_sequence must name each of {num_sequences} sequences, it names {count}",
    )


def _check_spans(tables: Mapping[str, Array], starts: Ints, cu_turns: Ints, layout: str) -> Turns:
    """Check the order of completions in their sequences; the last must end with its sequence."""
    sequence = tables["turn_sequence"].astype(np.int64)
    spans, begin = tables["turn_spans"].astype(np.int64), tables["turn_begin"].astype(np.int64)
    order = np.argsort(sequence, kind="stable")
    of, (first, end) = sequence[order], spans[order].T
    opens = np.diff(of, prepend=-1) != 0
    context = np.where(opens, starts[of], np.roll(end, 1))  # first token that is new with a turn
    closes = np.roll(opens, -1)
    wrong = np.empty(len(order), np.bool_)
    wrong[order] = (first < context) | (first <= starts[of]) | (end < first)
    wrong[order] |= (end > starts[of + 1]) | (closes & (end != starts[of + 1]))
    told = "leave a prompt before it, follow the turn before, and end with its sequence"
    _first_wrong("turn_spans", spans, wrong, told)
    if layout == "merged":
        expected = np.empty_like(begin)
        expected[order] = context
        _same("turn_begin", tables["turn_begin"], expected, "as turn_spans say")
    wrong = (begin < starts[sequence]) | (begin > spans[:, 0])
    _first_wrong("turn_begin", begin, wrong, "be in the context of its turn")
    return Turns(starts, spans, order, begin, cu_turns)


def _check_returns(tensors: Mapping[str, torch.Tensor], discounts: list[float]) -> None:
    """Compare returns with discounted rewards, except where powers of a discount overflow."""
    rewards, cu_turns = tensors["turn_rewards"], tensors["cu_turns"]
    by = torch.tensor(discounts, dtype=torch.float64, device="cpu")
    expected = discounted_returns(rewards, cu_turns, by, "torch").numpy()
    sizes = discounted_returns(rewards.abs(), cu_turns, by.abs(), "torch").numpy()
    got = tensors["turn_returns"].numpy()
    with np.errstate(all="ignore"):
        off = np.abs(got.astype(np.float64) - expected)
        close = off <= RETURNS_TOLERANCE * sizes.astype(np.float64) + np.finfo(np.float32).tiny
    wrong = ~close & np.isfinite(sizes)
    told = "be turn_rewards discounted by turn_discounts"
    _first_wrong("turn_returns", got, wrong, told)


def _check_tokens(
    turns: Turns, tables: Mapping[str, Array], read: Read, *, has_credit: bool
) -> dict[str, torch.Tensor]:
    """Read and check the tensors over tokens one by one."""
    tokens: dict[str, torch.Tensor] = {}

    def take(name: str, check: Check | None) -> Array:
        tokens[name] = read(name, check)
        return tokens[name].numpy()

    def rebuilt(name: str, source: str, rebuild: Callable[[slice], Array]) -> Array:
        def check(array: Array, at: slice) -> None:
            _same(name, array[at], rebuild(at), f"as {source} say", first=at.start)

        return take(name, check)

    starts = turns.starts
    numbers, firsts = np.arange(len(starts) - 1), starts[:-1]

    def positions(at: slice) -> Array:
        return np.arange(at.start, at.stop) - _spread(starts, firsts, at)

    rebuilt("position_ids", "seqlens", positions)
    rebuilt("sequence_ids", "seqlens", lambda at: _spread(starts, numbers, at))
    filled = turns.order[turns.spans[turns.order, 1] > turns.spans[turns.order, 0]]
    bounds = np.concatenate([[0], turns.spans[filled].reshape(-1), starts[-1:]])
    owners = np.append(np.stack([np.full_like(filled, -1), filled], 1).reshape(-1), -1)
    of = rebuilt("turn_ids", "turn_spans", lambda at: _spread(bounds, owners, at))
    rebuilt("prompt_mask", "turn_spans", lambda at: of[at] < 0)
    rebuilt("loss_mask", "turn_spans", lambda at: of[at] >= 0)
    versions = take("policy_versions", partial(_check_versions, of, tables))
    _check_ends(versions, turns.spans, tables)
    take("rollout_logprobs", partial(_check_logprobs, of))
    if has_credit:
        take("returns", None)
    else:
        values = np.append(tables["turn_returns"], np.float32(0))  # index -1: not generated
        rebuilt("returns", "turn_returns", lambda at: values[of[at]])
    take("input_ids", _check_ids)
    return tokens


def check_spans(name: str, spans: Array, num_values: int) -> None:
    """Raise unless the rows of a ragged field are int32 ``[tokens, 2]`` and name its values."""
    is_table = spans.dtype == np.int32 and spans.ndim == 2 and spans.shape[1] == 2
    got = f"{spans.dtype} {list(spans.shape)}"
    _require(is_table, f"field {name!r} must be int32 [tokens, 2], got {got}")
    first, counts = spans.astype(np.int64).T
    wrong = (first < 0) | (counts < 0) | (first + counts > num_values)
    _first_wrong(f"field {name!r}", spans, wrong, f"name some of the {num_values} values")


def _check_ragged(name: str, spans: Array, turn_ids: Array, num_values: int) -> None:
    """Check that the values of a ragged field follow in the order of the generated tokens."""
    called, counts = f"field {name!r}", spans[:, 1].astype(np.int64)
    expected = np.where((turn_ids >= 0) & (counts > 0), counts, 0)
    _same(called, spans[:, 1], expected, "where nothing was generated, and not negative")
    first = np.where(counts > 0, np.cumsum(counts) - counts, 0)
    _same(called, spans[:, 0], first, "the number of values before")
    total = int(counts.sum())
    _require(num_values == total, f"{called} must have {total} values, got {num_values}")


def _check_ids(ids: Array, at: slice) -> None:
    wrong = (ids[at] < 0) | (ids[at] > INT32_MAX)
    _first_wrong("input_ids", ids[at], wrong, f"be in [0, {INT32_MAX}]", first=at.start)


def _check_logprobs(turn_ids: Array, logprobs: Array, at: slice) -> None:
    name, got = "rollout_logprobs", logprobs[at]
    _first_wrong(name, got, ~np.isfinite(got), "be finite", first=at.start)
    expected = np.where(turn_ids[at] >= 0, got, np.float32(0))
    _same(name, got, expected, "where nothing was generated", first=at.start)


def _check_versions(
    turn_ids: Array, tables: Mapping[str, Array], versions: Array, at: slice
) -> None:
    """Check that versions are in the range of their turn, and do not decrease in a turn."""
    least = np.append(tables["turn_version_start"], np.int32(-1))  # index -1: not generated
    most = np.append(tables["turn_version_end"], np.int32(-1))
    name, of, got = "policy_versions", turn_ids[at], versions[at]
    wrong = (got < least[of]) | (got > most[of])
    told = "be from turn_version_start to turn_version_end of its turn, -1 where it has none"
    _first_wrong(name, got, wrong, told, first=at.start)
    here = slice(max(at.start - 1, 0), at.stop)  # with the previous token
    falls = (np.diff(versions[here]) < 0) & (np.diff(turn_ids[here]) == 0)
    told = "not run backwards within a turn"
    _first_wrong(name, versions[here][1:], falls, told, first=here.start + 1)


def _check_ends(versions: Array, spans: Ints, tables: Mapping[str, Array]) -> None:
    """Check that a turn's versions cover its range, or are all the start of the range."""
    filled = np.flatnonzero(spans[:, 1] > spans[:, 0])
    first, last = versions[spans[filled, 0]], versions[spans[filled, 1] - 1]
    start = tables["turn_version_start"][filled]
    wrong = (first != start) | ((last != start) & (last != tables["turn_version_end"][filled]))
    if wrong.any():
        turn = int(filled[wrong.argmax()])
        raise InconsistentBatch(
            f"policy_versions must run from turn_version_start to turn_version_end of turn {turn}, "
            "or stay at the former"
        )


def _spread(bounds: Ints, values: Ints, at: slice) -> Ints:
    """Return for each token of slice ``at`` the value of its segment; ``bounds`` are boundaries."""
    low = int(np.searchsorted(bounds, at.start, side="right")) - 1
    high = int(np.searchsorted(bounds, at.stop, side="left"))
    return np.repeat(values[low:high], np.diff(bounds[low : high + 1].clip(at.start, at.stop)))


def _check_prefixes(ids: Array, turns: Turns) -> None:
    """Check in layout ``"turns"`` that a prompt repeats an earlier turn up to `turn_begin`.

    A prompt may be all new: `pack_resident` does not compare prompts.
    """
    starts, cu_turns = turns.starts, turns.cu_turns
    held = turns.begin - starts[:-1]
    repeating = np.unique(np.searchsorted(cu_turns, np.flatnonzero(held), side="right") - 1)
    for trajectory in repeating.tolist():
        ends: Counter[bytes] = Counter()  # turns that no later turn extends
        for turn in range(cu_turns[trajectory], cu_turns[trajectory + 1]):
            text = ids[starts[turn] : starts[turn + 1]].astype(np.int32).tobytes()
            if held[turn]:
                earlier = text[: held[turn] * 4]
                _require(
                    ends[earlier],
                    f"turn_begin must be where the prompt of turn {turn} goes on from an earlier "
                    f"turn of its trajectory, or where it begins, got {turns.begin[turn]}",
                )
                ends[earlier] -= 1
            ends[text] += 1


def _same(name: str, got: Array, expected: Array, why: str, *, first: int = 0) -> None:
    """Raise unless ``got`` has the bits of ``expected``, converted to the dtype of ``got``.

    ``why`` names the source of the expected values, ``first`` is the index of the first entry.
    """
    expected = expected.astype(got.dtype, copy=False)
    if got.dtype == np.bool_:
        got, expected = got.view(np.uint8), expected.view(np.uint8)
    bits = np.dtype(f"u{got.itemsize}")
    wrong = got.view(bits) != expected.view(bits)
    if wrong.any():
        index = int(wrong.argmax())
        raise InconsistentBatch(
            f"{name} must be {expected[index]} at index {first + index}, {why}, got {got[index]}",
            REMEDIES.get(name, ""),
        )


def _first_wrong(name: str, got: Array, wrong: Array, expected: str, *, first: int = 0) -> None:
    """Raise for the first entry that is wrong."""
    if wrong.any():
        index = int(wrong.argmax())
        value = got[index].tolist()
        raise InconsistentBatch(
            f"{name} must {expected}, got {value} at index {first + index}", REMEDIES.get(name, "")
        )


def _check_bools(name: str, tensor: torch.Tensor) -> None:
    """Raise if a byte of a bool tensor is neither 0 nor 1, for which torch is undefined."""
    if tensor.dtype == torch.bool and tensor.numel():
        most = int(tensor.view(torch.uint8).max())
        _require(most <= 1, f"{name} must be bytes of 0 or 1, got {most}")
