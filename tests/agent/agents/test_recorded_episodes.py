from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trajpack import pack
from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.protocols import GenerationOutput, Prompt, SamplingParams
from trajpack.packing.adapters.areal import to_sequence_sample
from trajpack.packing.types import Trajectory

ORACLES = Path(__file__).parents[3] / ".." / "shared" / "oracles"
CASES_FILE = ORACLES / "multi_turn_agent.json.gz"


class Recording:
    """The environment and the engine of a recorded episode."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.num_resets = 0
        self.actions: list[Any] = []
        self.observations: list[Any] = []

    async def reset(self) -> None:
        self.num_resets += 1

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.actions.append(list(action))
        return None, [self.case["success"][len(self.actions) - 1]], True, False, {}

    async def generate(self, obs: asyncio.Queue[Any], act: asyncio.Queue[Any]) -> None:
        for turn in self.case["turns"]:
            self.observations.append(await obs.get())
            qid, token_ids, _ = self.observations[-1]
            act.put_nowait(GenerationOutput(qid=qid, prompt_ids=token_ids, **turn))

    async def replay(self, agent: MathMultiTurnAgent) -> Trajectory:
        obs: asyncio.Queue[Any] = asyncio.Queue()
        act: asyncio.Queue[Any] = asyncio.Queue()
        prompt = Prompt(self.case["qid"], self.case["prompt_ids"], self.case["task_id"])
        (trajectory,), _ = await asyncio.gather(
            agent.collect_trajectory(prompt, self, obs, act), self.generate(obs, act)
        )
        assert obs.empty()
        assert act.empty()
        return trajectory


def load_cases() -> list[Any]:
    if not CASES_FILE.exists():
        return [pytest.param(None, marks=pytest.mark.skip(reason="the oracle is not there"))]
    cases = json.loads(gzip.decompress(CASES_FILE.read_bytes()))
    return [pytest.param(case, id=case["qid"]) for case in cases]


@pytest.fixture(scope="module")
def oracle_agent_options() -> dict[str, Any]:
    return {"gconfig": SamplingParams(), "tokenizer": ORACLES / "tokenizer"}


@pytest.mark.parametrize("case", load_cases())
def test_recorded_episodes_are_matched_exactly(
    case: dict[str, Any], oracle_agent_options: dict[str, Any], tmp_path: Path
) -> None:
    names = ("num_turns", "reward_scaling", "reward_bias", "turn_level_discount")
    options = oracle_agent_options | {name: case[name] for name in names}
    agent = MathMultiTurnAgent(answer_save_path=str(tmp_path), **options)
    recording = Recording(case)
    trajectory = asyncio.run(recording.replay(agent))

    assert recording.num_resets == 1
    assert recording.actions == case["expected"]["env_actions"]
    gconfig = oracle_agent_options["gconfig"]
    assert recording.observations == [(case["qid"], ids, gconfig) for ids in case["observations"]]
    assert (trajectory.id, trajectory.task_id) == (case["qid"], case["task_id"])
    assert trajectory.turn_discount == case["turn_level_discount"]
    turns = trajectory.turns
    assert len(turns) == case["num_turns"]
    for turn, seen, sampled in zip(turns, case["observations"], case["turns"], strict=True):
        assert list(turn.prompt_ids) == seen
        assert list(turn.completion_ids) == sampled["output_ids"]
        logprobs = np.array(sampled["output_logprobs"], np.float32)
        assert np.array_equal(turn.completion_logprobs, logprobs)
        assert turn.truncated == sampled["no_eos"]
        assert turn.version_start == sampled["version_start"]
        assert turn.version_end == sampled["version_end"]
    check_sample(trajectory, case["expected"])
    check_log(tmp_path, case)


def check_sample(trajectory: Trajectory, expected: dict[str, Any]) -> None:
    """The whole path: from the agent through buffer and kernels to what AReaL's trainer gets."""
    batch = pack([trajectory], layout="turns")
    assert batch.unpack() == [trajectory]
    sample = to_sequence_sample(batch)
    assert sample["ids"] == expected["ids"]
    assert sample["keys"] == set(expected["seqlens"])
    assert sample["seqlens"] == expected["seqlens"]
    assert {key: str(dtype) for key, dtype in sample["dtypes"].items()} == expected["dtypes"]
    for key, values in expected["data"].items():
        recorded = torch.tensor(values, dtype=sample["dtypes"][key])
        assert torch.equal(sample["data"][key], recorded), key


def check_log(folder: Path, case: dict[str, Any]) -> None:
    expected = case["expected"]
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == {*expected["files"], *expected["txt_files"]}
    lines = []
    for name, recorded in expected["files"].items():
        ours = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for line, theirs in zip(ours, recorded.splitlines(), strict=True):
            assert line.keys() >= json.loads(theirs).keys()
            for key in ("version_start", "version_end"):
                assert line[key] == json.loads(theirs)[key]
        lines += ours
    lines.sort(key=lambda line: line["turn"])
    assert [line["success"] for line in lines] == case["success"]
    assert [line["prompt_len"] for line in lines] == [len(ids) for ids in case["observations"]]
    assert [line["answer_len"] for line in lines] == [len(t["output_ids"]) for t in case["turns"]]
