"""Extra per-token fields, from the turn through buffer, batch and file back to the turn."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from trajpack import TokenField, Trajectory, TrajectoryBuffer, Turn, load, pack, pack_tree, save
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays
from trajpack.testing import assert_batches_equal, trajectory_lists

EXPERTS = TokenField("experts", torch.uint8, (2, 3), fill=255, generated_only=False)
VALUES = TokenField("values", torch.float32)
TEMPERATURE = TokenField("temperature", torch.bfloat16, fill=1.0)
STATE = TokenField("state", torch.int64, (1,), fill=-1)
FIELDS = [EXPERTS, VALUES, TEMPERATURE, STATE]


def with_rows(trajectory, seed=0):
    """Give every turn rows that agree wherever its tokens do: functions of place and token."""
    turns = []
    for turn in trajectory.turns:
        ids = np.array([*turn.prompt_ids, *turn.completion_ids], np.int64)
        size = len(turn.completion_ids)
        mixed = np.cumsum(ids % 251 + seed)
        experts = (mixed[:, None] + np.arange(6)).astype(np.uint8).reshape(-1, 2, 3)
        rows = {
            "experts": experts,
            "values": torch.from_numpy(mixed[len(ids) - size :] / 4).float(),
            "temperature": torch.arange(size) % 8 / 4,
            "state": mixed[len(ids) - size :, None],
        }
        turns.append(dataclasses.replace(turn, fields=rows))
    return dataclasses.replace(trajectory, turns=turns)


def test_rows_stand_at_their_tokens():
    first = Turn([1, 2], [3], [0.0], fields={"v": [5.0], "e": [[1], [2], [3]]})
    second = Turn(
        [1, 2, 3, 4], [6, 7], [0, 0], fields={"v": [8.0, 9.0], "e": [[i] for i in range(1, 7)]}
    )
    fields = [
        TokenField("v", torch.float32, fill=-1.0),
        TokenField("e", torch.int16, (1,), generated_only=False),
    ]
    merged = pack([Trajectory("a", [first, second])], fields=fields)
    assert merged.fields["v"].tolist() == [-1, -1, 5, -1, 8, 9]
    assert merged.fields["e"].flatten().tolist() == [1, 2, 3, 4, 5, 6]
    assert (merged.fields["e"].dtype, merged.fields["e"].shape) == (torch.int16, (6, 1))
    turns = pack([Trajectory("a", [first, second])], "turns", fields=fields)
    assert turns.fields["v"].tolist() == [-1, -1, 5, -1, -1, -1, -1, 8, 9]
    assert turns.fields["e"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("layout", ["merged", "turns"])
@given(drawn=trajectory_lists())
@settings(max_examples=6)
def test_unpack_returns_the_rows_that_were_packed(drawn, layout, impl):
    trajectories = [with_rows(trajectory) for trajectory in drawn]
    batch = pack(trajectories, layout, impl=impl, fields=FIELDS)
    assert batch.unpack() == trajectories


NEW = dataclasses.replace(EXPERTS, new_only=True)


def with_new_rows(trajectories):
    """Leave out the rows of the tokens that a turn repeats."""
    batch = pack(trajectories, "turns", "cpu", fields=[EXPERTS])
    starts = batch.cu_seqlens[batch.turn_sequence.long()]
    repeated = iter((batch.turn_begin - starts).tolist())

    def cut(turn):
        rows = turn.fields["experts"][next(repeated) :]
        return dataclasses.replace(turn, fields={"experts": rows})

    return [
        dataclasses.replace(one, turns=[cut(turn) for turn in one.turns]) for one in trajectories
    ]


@given(drawn=trajectory_lists())
@settings(max_examples=12)
def test_rows_of_new_tokens_alone_make_the_same_batch(tmp_path_factory, drawn):
    whole = [with_rows(one) for one in drawn]
    for one in whole:
        for turn in one.turns:
            for name in ("values", "temperature", "state"):
                del turn.fields[name]
    new = with_new_rows(whole)
    sent = TrajectoryArrays.of(new, (NEW,))
    sent.check()
    assert sent.trajectories() == new
    path = tmp_path_factory.mktemp("files") / "batch.safetensors"
    for layout in ("merged", "turns"):
        batch = pack(new, layout, "cpu", fields=[NEW])
        expected = pack(whole, layout, "cpu", fields=[EXPERTS])
        assert_batches_equal(dataclasses.replace(batch, token_fields=(EXPERTS,)), expected)
        assert batch.unpack() == new
        save(batch, path)
        assert load(path).unpack() == new
    tree = pack_tree(new, device="cpu", fields=[NEW])
    assert torch.equal(tree.fields["experts"], pack_tree(whole, fields=[EXPERTS]).fields["experts"])
    assert tree.merged().unpack() == new


def test_the_wrong_number_of_new_rows_is_named():
    field = TokenField("e", torch.uint8, generated_only=False, new_only=True)
    first = Turn([1], [2], [0], fields={"e": [1, 1]})
    turn = Turn([1, 2, 3], [4], [0], fields={"e": [1, 1, 1, 1]})
    rule = "field 'e' must have 2 rows, of the tokens behind the 2 that the turn repeats"
    with pytest.raises(ValueError, match=f"^trajectory 'it', turn 1: {rule} .*, got 4"):
        pack([Trajectory("it", [first, turn])], fields=[field])
    with pytest.raises(ValueError, match="new_only must have generated_only=False, got True"):
        TokenField("e", torch.uint8, new_only=True)


@pytest.mark.parametrize("shape", [(), (3,), (2, 8)])
def test_a_row_that_differs_anywhere_breaks_a_chain(shape):
    field = TokenField("e", torch.uint8, shape, generated_only=False)
    rows = np.arange(7 * np.prod(shape, dtype=int), dtype=np.uint8).reshape(7, *shape)
    first = Turn([1, 2, 3], [4, 5], [0, 0], fields={"e": rows[:5]})
    for place in range(rows.size):
        changed = rows.copy()
        changed.reshape(-1)[place] += 1
        turn = Turn([1, 2, 3, 4, 5, 6], [7], [0], fields={"e": changed})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = pack([Trajectory("it", [first, turn])], fields=[field])
        assert len(batch.seqlens) == 1 + (place < rows[:5].size)


def test_a_buffer_with_fields_is_filled_again_and_again():
    buffer = TrajectoryBuffer(device="cpu", fields=FIELDS)
    for seed in range(4):
        count = 1 + 70 * seed
        trajectories = [
            with_rows(Trajectory(str(i), [Turn([1, i], [3] * (i % 5), [0] * (i % 5))]), seed)
            for i in range(count)
        ]
        for layout in ("merged", "turns"):
            buffer.clear()
            buffer.extend(trajectories[: count // 2])
            for trajectory in trajectories[count // 2 :]:
                buffer.add(trajectory)
            assert buffer.pack(layout).unpack() == trajectories


@pytest.mark.parametrize(
    ("rows", "error", "match"),
    [
        (None, ValueError, r"fields must be those declared, \['v'\], got \[\]"),
        ({"v": [1], "w": [1]}, ValueError, r"declared, \['v'\], got \['v', 'w'\]"),
        ({"v": [1, 2]}, ValueError, r"field 'v' must have shape \[1, 2\], got \[2\]"),
        ({"v": [[1, 2], [1, 2]]}, ValueError, r"must have shape \[1, 2\], got \[2, 2\]"),
        ({"v": [[1, 300]]}, ValueError, "field 'v' has values that torch.uint8 does not hold"),
        ({"v": [[1, 0.5]]}, ValueError, "field 'v' has values that torch.uint8 does not hold"),
        ({"v": [["a", "b"]]}, TypeError, "field 'v' cannot be read as numbers"),
    ],
)
def test_bad_rows_are_refused_by_name_and_leave_nothing_behind(rows, error, match):
    buffer = TrajectoryBuffer(fields=[TokenField("v", torch.uint8, (2,))])
    good = Turn([1], [2], [0], fields={"v": [[1, 2]]})
    with pytest.raises(error, match=f"^trajectory 'it', turn 1: .*{match}"):
        buffer.add(Trajectory("it", [good, Turn([1], [2], [0], fields=rows)]))
    assert len(buffer) == buffer.num_bytes == 0


def test_rows_that_nobody_declared_are_refused():
    with pytest.raises(
        ValueError,
        match=r"declared, \[\], got \['v'\]; declare fields=\[TokenField\('v', \.\.\.\)\]",
    ):
        pack([Trajectory("it", [Turn([1], [2], [0], fields={"v": [1]})])])


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("", torch.int8), TypeError, "field name must be a str that is not empty"),
        (("input_ids", torch.int8), ValueError, "a packed batch has a field of that name"),
        (("v", "int8"), TypeError, "dtype must be a torch dtype"),
        (("v", torch.complex128), TypeError, "of at most 8 bytes"),
        (("v", torch.int8, (0,)), ValueError, r"shape must hold up to 63 sizes >= 1, got \(0,\)"),
        (("v", torch.uint8, (), 300), ValueError, "has values that torch.uint8 does not hold"),
    ],
)
def test_a_field_that_cannot_be_is_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        TokenField(*arguments)


def test_fields_have_names_of_their_own():
    with pytest.raises(ValueError, match="names of their own"):
        TrajectoryBuffer(fields=[VALUES, VALUES])
    with pytest.raises(TypeError, match="fields must be TokenField, got str"):
        TrajectoryBuffer(fields=["values"])


def test_turns_are_equal_when_their_rows_are():
    turn = Turn([1], [2], [0], fields={"v": [1.0]})
    assert turn == Turn([1], [2], [0], fields={"v": np.ones(1, np.float32)})
    assert turn != Turn([1], [2], [0], fields={"v": [2.0]})
    assert turn != Turn([1], [2], [0])
    assert Turn([1], [2], [0], fields={}) == Turn([1], [2], [0])


NUMBERS = torch.complex(torch.ones(3), torch.ones(3)).conj()
LATER = TokenField("later", torch.float32)


def freed():
    rows = torch.ones(3)
    rows.untyped_storage().resize_(0)
    return rows


@pytest.mark.parametrize(
    ("field", "rows", "error", "words"),
    [
        (VALUES, torch.zeros(3), ValueError, "fields must have names of their own"),
        ("later", torch.zeros(3), TypeError, "fields must be TokenField, got str"),
        (LATER, np.zeros(3), TypeError, "must be torch.float32, got nda"),
        (LATER, torch.zeros(3).char(), TypeError, "rows must be torch.float32, got torch.int8"),
        (LATER, torch.zeros(2), ValueError, r"shape \[3\] on cpu, got \[2\]"),
        (LATER, torch.zeros(3, 1), ValueError, r"got \[3, 1\] on cpu"),
        (LATER, torch.zeros(3, device="meta"), ValueError, "on meta"),
        (LATER, torch.ones(3).to_sparse(), ValueError, "'later': rows must be dense, got torch.sp"),
        (LATER, freed(), ValueError, "'later': rows cannot be read: .* memory was freed"),
    ],
)
def test_a_field_that_does_not_fit_is_not_added(field, rows, error, words):
    batch = pack([with_rows(Trajectory("a", [Turn([1, 2], [3], [0])]))], fields=FIELDS)
    with pytest.raises(error, match=words):
        batch.with_field(field, rows)


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_a_field_added_later_has_its_fill_where_nothing_was_generated(layout):
    turns = [Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5, 6], [0.0, -0.25])]
    batch = pack([Trajectory("a", turns)], layout)
    numbers = torch.arange(batch.num_tokens).float()
    everywhere = TokenField("everywhere", torch.float32, generated_only=False)
    both = batch.with_field(dataclasses.replace(LATER, fill=-7.0), numbers)
    both = both.with_field(everywhere, numbers)
    assert torch.equal(both.fields["later"], torch.where(batch.loss_mask, numbers, -7.0))
    assert torch.equal(both.fields["everywhere"], numbers)
    begin, end = batch.turn_spans[1].tolist()
    assert both.unpack()[0].turns[1].fields["later"].tolist() == list(range(begin, end))
    assert not batch.fields


def test_rows_of_any_view_are_added():
    batch = pack([Trajectory("a", [Turn([1, 2], [3], [-0.5])])])
    field = TokenField("conjugate", torch.complex64)
    assert batch.with_field(field, NUMBERS).fields["conjugate"].tolist() == [0, 0, 1 - 1j]
    assert batch.with_field(LATER, NUMBERS.imag).fields["later"].tolist() == [0, 0, -1]
