"""What turns and trajectories say of themselves is in every form of a batch."""

import pickle
from dataclasses import replace

import pytest
import torch

import trajpack
from trajpack.agent.ray import TrajectoryArrays
from trajpack.packing import TrajectoryLog, pack_resident
from trajpack.packing.turn_fields import TURN_FIELDS

VALUES = {"reward": 0.1, "truncated": True, "version_start": 3, "version_end": 5}
VALUES |= {"stop_reason": "tool"}
OTHER = {"reward": 0.2, "truncated": False, "version_start": 4, "version_end": 6}
OTHER |= {"stop_reason": None}
TENSORS = {
    "prompt_ids": torch.tensor([1, 2]),
    "completion_ids": torch.tensor([3, 4]),
    "completion_logprobs": torch.tensor([-0.5, -0.5]),
}
TURN = trajpack.Turn(**TENSORS, **VALUES)
GIVEN = [trajpack.Trajectory(str(end), [TURN], truncated=end) for end in (None, True, False)]


def test_the_table_has_every_number_of_a_turn():
    assert {field.attribute for field in TURN_FIELDS} == {*VALUES}


def forms(folder):
    """Return the trajectories as each form gives them back, and the batches among these."""
    packed, tree = trajpack.pack(GIVEN), trajpack.pack_tree(GIVEN)
    batches = {"batch": packed, "device batch": pack_resident(GIVEN), "tree": tree.merged()}
    batches["dropped"] = packed.with_loss_mask(packed.prompt_mask)
    batches["pickled"] = pickle.loads(pickle.dumps(packed))
    for name, batch in (("batch", packed), ("tree", tree)):
        trajpack.save(batch, folder / name)
        batches[f"file of a {name}"] = trajpack.load(folder / name)
    with TrajectoryLog.open(folder / "log") as log:
        log.append("a", GIVEN)
        log.flush()
        found = {"log": [one for logged in log.replay() for one in logged.trajectories]}
    found["ray"] = pickle.loads(pickle.dumps(TrajectoryArrays.of(GIVEN))).trajectories()
    return found | {name: batch.unpack() for name, batch in batches.items()}, batches


def test_every_form_has_them(tmp_path):
    found, batches = forms(tmp_path)
    for name, trajectories in found.items():
        assert trajectories == GIVEN, name
        for attribute, value in VALUES.items():
            got = getattr(trajectories[0].turns[0], attribute)
            assert (type(got), got) == (type(value), value), name
    for name, batch in batches.items():
        assert batch.truncated.tolist() == [True, True, False], name
        for field in TURN_FIELDS:
            tensor, number = getattr(batch, field.name), field.plain(VALUES[field.attribute])
            assert (tensor.dtype, tensor.tolist()) == (field.dtype, [number] * 3), name


@pytest.mark.parametrize("attribute", VALUES)
def test_turns_that_say_other_things_differ(attribute):
    assert replace(TURN) == TURN != replace(TURN, **{attribute: OTHER[attribute]})


@pytest.mark.parametrize("reason", ["stopped", 1, ["stop"]])
def test_an_unknown_stop_reason_is_refused(reason):
    with pytest.raises(ValueError, match=r"trajectory 'a', turn 0: stop_reason must be one of"):
        trajpack.pack([trajpack.Trajectory("a", [replace(TURN, stop_reason=reason)])])
