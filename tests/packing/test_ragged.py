"""Ragged fields: any number of values a token, from the turn through batches back to the turn."""

import dataclasses
import pickle
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.kernels.test_launches import OPS, VIEWS, RecordedOps
from trajpack import (
    GRPO,
    Alignment,
    TokenField,
    Trajectory,
    TrajectoryBuffer,
    TrajectoryLog,
    Turn,
    load,
    pack,
    pack_tree,
    plan_micro_batches,
    save,
)
from trajpack.packing.buffer.stored import Labels
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays
from trajpack.packing.ragged import Ragged
from trajpack.testing import trajectory_lists

MASK = TokenField("mask", torch.int32, ragged=True)
TEACHER = TokenField("teacher", torch.float64, (3,), ragged=True)
BYTES = TokenField("bytes", torch.uint8, (3,), ragged=True)
PLAIN = TokenField("plain", torch.int16, fill=-1)
FIELDS = [MASK, TEACHER, PLAIN, BYTES]


def rows_of(turn, seed):
    """Give each token of a completion 0 to 4 values that tell turn, token and field apart."""
    mixed = [
        7 * seed + 13 * place + int(token) % 999 for place, token in enumerate(turn.completion_ids)
    ]
    mask = [[31 * number + i for i in range(number * 5 % 4)] for number in mixed]
    teacher = [[[number, i, i / 3] for i in range(number % 3)] for number in mixed]
    return {
        "mask": mask,
        "teacher": teacher,
        "plain": [number % 99 for number in mixed],
        "bytes": [[[number % 256, i, 1] for i in range(number % 5)] for number in mixed],
    }


def with_rows(trajectories):
    return [
        dataclasses.replace(
            one,
            turns=[
                dataclasses.replace(turn, fields=rows_of(turn, seed))
                for seed, turn in enumerate(one.turns, number)
            ],
        )
        for number, one in enumerate(trajectories)
    ]


def lists_of(ragged):
    """Return the rows of a `Ragged` as lists of lists."""
    cu = ragged.cu.tolist()
    values = ragged.values.tolist()
    return [values[begin:end] for begin, end in pairwise(cu)]


def rows_by_token(batch, trajectories, name):
    """Return the expected rows of `loss_mask`, found by turn and place in the completion."""
    turns = [turn for one in trajectories for turn in one.turns]
    expected = []
    for place in batch.loss_mask.nonzero().flatten().tolist():
        turn = int(batch.turn_ids[place])
        is_before = (batch.turn_ids == turn) & (batch.sequence_ids == batch.sequence_ids[place])
        expected.append(turns[turn].fields[name][int(is_before[:place].sum())])
    return expected


@pytest.mark.parametrize("layout", ["merged", "turns"])
@given(drawn=trajectory_lists(), calls=st.integers(1, 3))
@settings(max_examples=12)
def test_lists_of_lists_come_back_from_a_batch(drawn, layout, calls):
    trajectories = with_rows(drawn)
    buffer = TrajectoryBuffer(fields=FIELDS)
    for begin in range(calls):  # each call has its own place in the stream
        buffer.extend(trajectories[begin::calls])
    trajectories = [one for begin in range(calls) for one in trajectories[begin::calls]]
    batch = buffer.pack(layout)
    buffer.clear()
    buffer.extend(with_rows(drawn)[::-1])  # writes over the memory that was packed
    assert batch.unpack() == trajectories
    for field in (MASK, TEACHER, BYTES):
        ragged = batch.generated[field.name]
        assert (ragged.cu.dtype, ragged.values.dtype) == (torch.int32, field.dtype)
        assert ragged.values.shape == (batch.value_counts[field.name][0], *field.shape)
        assert lists_of(ragged) == rows_by_token(batch, trajectories, field.name)


@pytest.mark.parametrize("layout", ["merged", "turns"])
@given(drawn=trajectory_lists().filter(len), data=st.data())
@settings(max_examples=12)
def test_micro_batches_have_the_values_of_their_tokens(drawn, layout, data):
    trajectories = with_rows(drawn)
    batch = pack(trajectories, layout, fields=FIELDS)
    if data.draw(st.booleans(), "credited"):
        batch = batch.with_advantages(GRPO())
    order = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=4), "sequences")
    capacity = data.draw(st.integers(1, batch.max_seqlen), "capacity")
    plan = plan_micro_batches(
        batch.seqlens, capacity, oversized="truncate_at_turn", turn_ends=batch.turn_ends()
    )
    for one in (batch.select(order), *batch.micro_batches(plan)):
        found = lists_of(one.generated["mask"])
        expected = rows_by_token(one, trajectories, "mask")
        assert found[: len(expected)] == expected
        assert not any(found[len(expected) :])  # tokens that were cut off


def test_the_rows_of_a_field_name_their_values():
    turn = Turn([1, 2], [3, 4], [0, 0], fields={"mask": [[3, 8], [4]]})
    batch = pack([Trajectory("a", [turn])], fields=[MASK])
    first, count = batch.fields["mask"].T.tolist()
    assert count == [0, 0, 2, 1]
    values = batch.ragged_values["mask"].tolist()
    assert [values[begin : begin + 2] for begin in first[2:3]] == [[3, 8]]
    piece = batch.select([0], Alignment(max_generated=4))
    assert lists_of(piece.generated["mask"]) == [[3, 8], [4], [], []]


def test_values_are_taken_from_any_container():
    rows = [[3, 8], [], [4]]
    forms = [
        rows,
        tuple(map(tuple, rows)),
        [np.array(row, np.int64) for row in rows],
        [torch.tensor(row, dtype=torch.int32) for row in rows],
        Ragged([0, 2, 2, 3], [3, 8, 4]),
        Ragged(np.array([0, 2, 2, 3], np.uint16), torch.tensor([3, 8, 4])),
    ]
    turns = [Turn([1], [2, 2, 2], [0] * 3, fields={"mask": form}) for form in forms]
    for turn in turns:
        batch = pack([Trajectory("a", [turn])], fields=[MASK])
        assert lists_of(batch.generated["mask"]) == rows
        assert turn == turns[0] == batch.unpack()[0].turns[0]
    other = dataclasses.replace(turns[0], fields={"mask": [[3], [8], [4]]})
    assert other not in turns
    assert dataclasses.replace(turns[0], fields={"mask": [[3, 8], [], [5]]}) not in turns


@given(drawn=trajectory_lists())
@settings(max_examples=6)
def test_trees_carry_them_with_their_entries(drawn):
    trajectories = with_rows(drawn)
    tree = pack_tree(trajectories, fields=FIELDS)
    assert tree.unpack() == trajectories
    turns = [turn for one in trajectories for turn in one.turns]
    expected = [row for turn in turns for row in turn.fields["mask"]]
    assert lists_of(tree.generated["mask"]) == expected


@given(drawn=trajectory_lists().filter(len), data=st.data())
@settings(max_examples=12)
def test_micro_batches_of_trees_have_the_values_of_their_entries(drawn, data):
    tree = pack_tree(with_rows(drawn), fields=FIELDS)
    if data.draw(st.booleans(), "credited"):
        tree = tree.with_advantages(GRPO())
    of_place = {}  # of an entry by its turn and its place in the turn
    for row, turn in zip(
        lists_of(tree.generated["mask"]), tree.entries.turn_ids.tolist(), strict=True
    ):
        of_place.setdefault(turn, []).append(row)
    capacity = max(tree.seqlens, default=1)
    pieces = list(tree.micro_batches(tree.plan_micro_batches(capacity)))
    found = {}
    for piece in pieces:
        turns = piece.entries.turn_ids.tolist()
        for row, turn in zip(lists_of(piece.generated["mask"]), turns, strict=True):
            found.setdefault(turn, []).append(row)
    assert found == of_place


def test_a_device_sends_all_values_of_the_entries_of_a_tree():
    mask = {"mask": [[3, 5], [4]]}
    turns = [Turn([1, 2], [3, 4], [0, 0], fields=mask)]
    others = [Turn([1, 2], [3, 5], [0, 0], fields={"mask": [[3, 5], [5, 6]]})]
    both = [Trajectory("a", turns), Trajectory("b", others)]
    tree = pack_tree(both, device="meta", fields=[MASK])
    assert tree.generated["mask"].values.shape == (7,)
    plan = tree.plan_micro_batches(4)  # a node that both have is repeated or not
    sizes = [one.generated["mask"].values.shape[0] for one in tree.micro_batches(plan)]
    assert sum(sizes) == 7


@pytest.mark.parametrize("mask", [[[3, 1], [], [2, 5, 7]], [[3], [4, 0], [5]]])
def test_a_mask_is_the_support_of_the_entries_of_a_tree(mask):
    first = Turn([1, 2], [3, 4, 5], [0] * 3, fields={"mask": mask})
    other = Turn([1, 2], [3, 6], [0] * 2, fields={"mask": [[3, 8], [6, 2]]})
    tree = pack_tree([Trajectory("a", [first]), Trajectory("b", [other])], fields=[MASK])
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tree.num_nodes, 8, generator=generator)
    weight = torch.randn(9, 8, generator=generator)
    expected = []
    for row, target, allowed in zip(
        tree.entry_parent.tolist(),
        tree.entries.input_ids.tolist(),
        [*mask, [3, 8], [6, 2]],
        strict=True,
    ):
        logits = weight @ hidden[row]
        within = logits[allowed] if allowed else logits
        is_allowed = not allowed or target in allowed
        wanted = logits[target] - within.logsumexp(0)
        expected.append(wanted if is_allowed else torch.tensor(-torch.inf))
    found = tree.logprobs(hidden, weight, support="mask")
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_what_an_interrupted_call_left_is_not_packed(monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    trajectories = with_rows([Trajectory(name, [Turn([1], [2, 3], [0, 0])]) for name in "ab"])
    buffer = TrajectoryBuffer(device="cpu", fields=FIELDS)
    buffer.add(trajectories[0])
    with monkeypatch.context() as patch:
        patch.setattr(Labels, "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            buffer.add(trajectories[1])
    assert buffer.pack().unpack() == trajectories[:1]
    buffer.add(trajectories[1])
    assert buffer.pack().unpack() == trajectories


def test_a_pack_is_one_copy_and_the_launches_of_extra_fields():
    trajectories = with_rows([Trajectory("a", [Turn([1], [2, 3], [0, 0])])])
    buffer = TrajectoryBuffer(device="meta", fields=FIELDS)
    buffer.extend(trajectories)
    with RecordedOps("meta") as recorded:
        batch = buffer.pack()
    launched = {op: count for op, count in recorded.counts.items() if op not in VIEWS}
    copies = launched.pop("aten._to_copy.default")
    launched = {op: count for op, count in launched.items() if op.startswith("trajpack")}
    assert (copies, launched) == (1, OPS | {"trajpack.gather_fields.default": 1})
    for known in (batch, batch.with_advantages(GRPO())):
        micro_batch = known.select([0])  # a meta tensor whose value is read raises
        assert micro_batch.generated["mask"].values.shape == (batch.value_counts["mask"][0],)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([[1]], ValueError, "'mask' must have 2 rows, got 1"),
        ([1, 2], TypeError, "'mask' must be lists or Ragged"),
        (3, TypeError, "'mask' must be lists or Ragged: rows must be several sequences"),
        ([[1], ["x"]], TypeError, "'mask' cannot be read as numbers"),
        ([[1], [2**40]], ValueError, "values that torch.int32 does not hold"),
        ([[1], [[2, 3]]], TypeError, "cannot be read as numbers"),
        ([[[1]], [[2]]], ValueError, r"'mask' must have shape \[2\], got \[2, 1\]"),
        (Ragged([0, 1], [5]), ValueError, "must have 2 rows, got 1"),
        (Ragged([0, 1, 3], [5, 6]), ValueError, "cu must end at the 2 values, got 3"),
        (Ragged([0, 2, 1], [5]), ValueError, "cu must grow from 0"),
        (Ragged([1, 1, 1], [5]), ValueError, "cu must grow from 0"),
        (Ragged([[0, 1, 1]], [5]), ValueError, "cu must grow from 0"),
        (Ragged([0.0, 1.0, 1.0], [5]), TypeError, "cu must be integers"),
    ],
)
def test_bad_rows_are_refused_before_anything_is_stored(values, error, message):
    buffer = TrajectoryBuffer(fields=[MASK])
    with pytest.raises(error, match=f"trajectory 'a', turn 0: .*{message}"):
        buffer.add(Trajectory("a", [Turn([1], [2, 3], [0, 0], fields={"mask": values})]))
    assert buffer.num_tokens == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"generated_only": False}, ValueError),
        ({"fill": -1}, ValueError),
        ({"ragged": 1}, TypeError),
    ],
)
def test_bad_declarations_are_refused(options, error):
    with pytest.raises(error, match="ragged"):
        TokenField("mask", torch.int32, **{"ragged": True} | options)


def test_what_does_not_hold_them_says_so():
    batch = pack([], fields=[MASK])
    assert batch.generated["mask"].cu.tolist() == [0]
    with pytest.raises(ValueError, match="'more': a ragged field must be packed"):
        batch.with_field(TokenField("more", torch.int32, ragged=True), torch.zeros(0, 2).int())
    with pytest.raises(KeyError, match=r"no 'other' among .*\['mask'\]"):
        batch.generated["other"]


def test_declarations_of_other_fields_are_written_as_before():
    assert set(PLAIN.as_json()) == {"name", "dtype", "shape", "fill", "generated_only"}
    assert TokenField.from_json(MASK.as_json()) == MASK
    assert TokenField.from_json(PLAIN.as_json()) == PLAIN


@pytest.mark.parametrize("layout", ["merged", "turns"])
@given(drawn=trajectory_lists())
@settings(max_examples=6)
def test_files_hold_them(drawn, layout, tmp_path_factory):
    trajectories = with_rows(drawn)
    path = tmp_path_factory.mktemp("batch") / "batch.safetensors"
    batch = pack(trajectories, layout, fields=FIELDS)
    save(batch, path)
    loaded = load(path)
    assert loaded.unpack() == trajectories
    assert loaded.token_fields == batch.token_fields
    assert loaded.value_counts == batch.value_counts
    assert torch.equal(loaded.generated["teacher"].values, batch.generated["teacher"].values)
    save(loaded, path)
    assert load(path).unpack() == trajectories


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows - 1,
        lambda rows: rows + 1000,
        lambda rows: rows.long(),
        lambda rows: rows[:, :1],
        lambda _: None,
        lambda rows: rows.flip(0),
    ],
)
def test_a_batch_whose_rows_were_changed_is_not_saved(change, tmp_path):
    turn = Turn([1], [2, 3], [0, 0], fields={"mask": [[1], [2, 3]]})
    batch = pack([Trajectory("a", [turn])], fields=[MASK])
    fields = {"mask": change(batch.fields["mask"])}
    with pytest.raises(ValueError, match=r"^the batch cannot be saved: "):
        save(dataclasses.replace(batch, fields=fields), tmp_path / "batch")


@pytest.mark.parametrize("declared", [tuple(FIELDS), None])
@given(drawn=trajectory_lists())
@settings(max_examples=8)
def test_arrays_hold_them(drawn, declared):
    trajectories = with_rows(drawn)
    if declared is None:  # fields that nobody declared
        for turn in (turn for one in trajectories for turn in one.turns):
            rows = turn.fields.pop("mask")
            values = [value for row in rows for value in row]
            turn.fields["ragged"] = Ragged(np.cumsum([0, *map(len, rows)]), values)
            turn.fields["lists"] = rows
    arrays = TrajectoryArrays.of(trajectories, declared)
    arrays.check()
    sent = pickle.loads(pickle.dumps(arrays.copied()))
    assert sent.trajectories() == trajectories


def test_arrays_that_contradict_themselves_are_refused():
    turn = Turn([1], [2, 3], [0, 0], fields={"mask": [[1], [2, 3]]})
    arrays = TrajectoryArrays.of([Trajectory("a", [turn])], (MASK,))
    raw = arrays.rows[0].view(np.int32)
    assert raw.tolist() == [1, 2, 3, 1, 2]
    for wrong, message in [
        ([1, 2, 3, 1, 3], "has 20 bytes"),
        ([1, 2, 3, 4, -1], "negative counts"),
        ([1], "has 4 bytes"),
    ]:
        rows = (np.array(wrong, np.int32).view(np.uint8),)
        with pytest.raises(ValueError, match=f"field 'mask' {message}|field 'mask' has {message}"):
            dataclasses.replace(arrays, rows=rows).check()


def test_a_log_keeps_them(tmp_path):
    turns = [
        Turn([1] * 5, list(range(9)), [-0.5] * 9),
        Turn([1] * 5 + list(range(9)) + [1], [7, 8], [-1, -1]),
    ]
    trajectories = with_rows([Trajectory("a", turns), Trajectory("b", turns[:1])])
    with TrajectoryLog.open(tmp_path / "log", fields=FIELDS) as log:
        log.append("one", trajectories)
        log.flush()
    with TrajectoryLog.open(tmp_path / "log") as log:
        assert log.fields == tuple(FIELDS)
        (episode,) = log.replay()
        assert list(episode.trajectories) == trajectories
        buffer = TrajectoryBuffer(fields=log.fields)
        buffer.extend(episode.trajectories)
        assert buffer.pack().unpack() == trajectories


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_logprobs_are_normalised_over_a_named_support(layout):
    turns = [Turn([1, 2], [3, 4, 5], [0] * 3), Turn([1, 2, 3, 4, 5, 6], [7, 8], [0, 0])]
    masks = [[[3, 1], [], [2, 5, 7]], [[7], [0, 8, 4, 1]]]
    turns = [
        dataclasses.replace(turn, fields={"mask": mask})
        for turn, mask in zip(turns, masks, strict=True)
    ]
    batch = pack([Trajectory("a", turns)], layout, fields=[MASK])
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(batch.num_tokens, 8, generator=generator)
    weight = torch.randn(9, 8, generator=generator)
    rows, targets = batch.generated.predicted_by, batch.generated.input_ids
    expected = []
    for row, target, mask in zip(rows.tolist(), targets.tolist(), chain(*masks), strict=True):
        logits = weight @ hidden[row]
        allowed = logits[mask] if mask else logits
        expected.append(logits[target] - allowed.logsumexp(0))
    found = batch.logprobs(hidden, weight, support="mask")
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)
    dropped = batch.with_loss_mask(batch.input_ids != 4)
    left = dropped.logprobs(hidden, weight, support="mask")
    torch.testing.assert_close(left, found.where(targets != 4, 0.0))
    with pytest.raises(KeyError, match="no 'other' among"):
        batch.logprobs(hidden, weight, support="other")


@pytest.mark.parametrize("layout", ["merged", "turns"])
@given(drawn=trajectory_lists())
@settings(max_examples=12)
def test_the_host_knows_how_many_values_sequences_have(drawn, layout):
    woven = [[1], [2], [1, 7, 7], [2, 7, 7], [1, 7, 7, 7, 7]]  # turns of two chains, in turn
    turns = [Turn(prompt, [7, 7], [0, 0]) for prompt in woven]
    batch = pack(with_rows([*drawn, Trajectory("woven", turns)]), layout, fields=FIELDS)
    for name, lengths in batch.tables.value_lens.items():
        counts, generated = batch.fields[name][:, 1], batch.turn_ids >= 0
        rows = torch.stack([counts, generated & (counts == 0)], 1)
        assert lengths.tolist() == [one.sum(0).tolist() for one in rows.split(batch.seqlens)]
    assert sum(one for one, _ in batch.value_counts.values()) > 0
