"""Program of test_turn_fields.py: prints the new numbers of a turn in every form, as JSON."""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import torch
from pyarrow import parquet

import trajpack
from trajpack.agent.ray import TrajectoryArrays
from trajpack.packing import TrajectoryLog, pack_resident

folder, new = Path(sys.argv[1]), json.loads(sys.argv[2])
assert Path(trajpack.__file__).is_relative_to(folder)
VALUES = {attribute: value for attribute, (_, _, value) in new.items()}
TURN = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5], **VALUES)
GIVEN = [trajpack.Trajectory("a", [TURN])]


def of_turns(trajectories):
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {attribute: [getattr(turn, attribute) for turn in turns] for attribute in new}


def of_batch(batch):
    return {attribute: getattr(batch, name).tolist() for attribute, (name, *_) in new.items()}


def of_log(place):
    with TrajectoryLog.open(place, mode="read") as log:
        return of_turns(one for logged in log.replay() for one in logged.trajectories)


batch = trajpack.pack(GIVEN)
trajpack.save(batch, folder / "batch")
with TrajectoryLog.open(folder / "new") as log:
    log.append("a", GIVEN)
    log.flush()
    log.export_parquet(folder / "log.parquet")
table = parquet.read_table(folder / "log.parquet")
tensors = {
    "prompt_ids": torch.tensor([1, 2]),
    "completion_ids": torch.tensor([3, 4]),
    "completion_logprobs": torch.tensor([-0.5, -0.5]),
}
resident = pack_resident([trajpack.Trajectory("a", [replace(TURN, **tensors)])])
forms = {
    "batch": of_batch(batch),
    "device batch": of_batch(resident),
    "saved file": of_batch(trajpack.load(folder / "batch")),
    "unpacked": of_turns(batch.unpack()),
    "log": of_log(folder / "new"),
    "Parquet": {name: table[f"turn_{name}"].to_pylist()[0] for name in new},
    "Ray payload": of_turns(pickle.loads(pickle.dumps(TrajectoryArrays.of(GIVEN))).trajectories()),
    "equality": {name: replace(TURN) == TURN != replace(TURN, **{name: 1}) for name in new},
}
sys.stdout.write(json.dumps(forms))
