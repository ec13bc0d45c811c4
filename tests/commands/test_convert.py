"""``trajpack convert``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.command import call, refusal
from trajpack import GRPO, PackedBatch, TokenField, Trajectory, Turn, load, pack, save
from trajpack.packing.adapters import areal, prime_rl, slime, torchtitan

TRAJECTORIES = [
    Trajectory(
        name, [Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5, 6], [-1.0, -2.0], reward)], "g"
    )
    for name, reward in (("g_0", 1.0), ("g_1", -1.0))
]


@pytest.fixture
def batch() -> PackedBatch:
    return pack(TRAJECTORIES)


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_slime_to_prime_rl_with_advantages(batch: PackedBatch, tmp_path: Path) -> None:
    file, out = (
        lines(tmp_path / "in.jsonl", slime.to_samples(batch)),
        tmp_path / "new" / "out.jsonl",
    )
    command = ("convert", file, "--from", "slime", "--to", "prime-rl", "--out", out)
    done = call(*command, "--advantages", "grpo")
    assert done.status == 0, done.stderr
    assert f"written    {out}\n" in done.stdout
    assert rows_of(out) == prime_rl.to_training_samples(batch.with_advantages(GRPO()))
    assert f"{out} exists; --force replaces it" in refusal(*command)
    assert call(*command, "--force").status == 0
    assert rows_of(out)[0]["advantages"] is None


def test_the_dump_of_a_slime_rollout_is_read_and_written(
    batch: PackedBatch, tmp_path: Path
) -> None:
    file, out = tmp_path / "0.pt", tmp_path / "1.pt"
    torch.save({"rollout_id": 0, "samples": slime.to_samples(batch)}, file)
    done = call("convert", file, "--from", "slime", "--to", "slime", "--out", out)
    assert done.status == 0, done.stderr
    written = torch.load(out, weights_only=True)["samples"]
    assert [row["tokens"] for row in written] == [row["tokens"] for row in slime.to_samples(batch)]
    assert [row["reward"] for row in written] == [1.0, -1.0]


def test_padded_rows_become_a_batch(batch: PackedBatch, tmp_path: Path) -> None:
    torch.save(areal.to_padded_dict(batch, rewards="rewards"), tmp_path / "padded.pt")
    out = tmp_path / "batch.safetensors"
    done = call(
        "convert", tmp_path / "padded.pt", "--from", "areal", "--to", "trajpack", "--out", out
    )
    assert done.status == 0, done.stderr
    read = load(out)
    assert torch.equal(read.input_ids, batch.input_ids)
    assert torch.equal(read.loss_mask, batch.loss_mask)
    assert torch.equal(read.turn_rewards, batch.turn_rewards)


def test_a_batch_becomes_samples(batch: PackedBatch, tmp_path: Path) -> None:
    file, out = tmp_path / "batch.safetensors", tmp_path / "out.jsonl"
    save(batch, file)
    command = ("convert", file, "--from", "trajpack", "--to", "torchtitan", "--out", out)
    assert "name an estimator with --advantages" in refusal(*command)
    assert not out.exists()
    assert call(*command, "--advantages", "grpo").status == 0
    assert rows_of(out) == torchtitan.to_training_samples(batch.with_advantages(GRPO()))


def test_rewards_that_are_missing_are_refused_or_given(batch: PackedBatch, tmp_path: Path) -> None:
    file = lines(tmp_path / "in.jsonl", prime_rl.to_training_samples(batch))
    out = tmp_path / "out.jsonl"
    command = ("convert", file, "--from", "prime-rl", "--to", "slime", "--out", out)
    assert "give --missing-reward 0 to take 0 instead" in refusal(*command)
    assert not out.exists()
    assert call(*command, "--missing-reward", "0.25").status == 0
    assert [row["reward"] for row in rows_of(out)] == [0.25, 0.25]


def test_what_is_left_out_is_named_with_the_remedy(batch: PackedBatch, tmp_path: Path) -> None:
    samples = slime.to_samples(batch)
    routes = [sample | {"rollout_routed_experts": [[[0, 1]]] * 5} for sample in samples]
    out = tmp_path / "out.jsonl"
    after = ("--to", "torchtitan", "--advantages", "grpo", "--force", "--out", out)
    done = call("convert", lines(tmp_path / "in.jsonl", routes), "--from", "slime", *after)
    assert done.status == 0
    reader = "trajpack.packing.adapters.slime.from_samples(samples, fields=[...])"
    said = f"left out, not read from slime: rollout_routed_experts; {reader} reads extra fields"
    assert f"trajpack: {said}\n" in done.stderr
    masks = {"rollout_top_p_token_ids": [3, 5, 6], "rollout_top_p_token_offsets": [0, 1, 1, 2, 3]}
    masked = lines(tmp_path / "in.jsonl", [sample | masks for sample in samples])
    refused = refusal("convert", masked, "--from", "slime", *after)
    assert reader.replace("...", '"sampling_mask"') in refused
    values = TokenField("values", torch.float32)
    turn = Turn([1, 2], [3], [-0.5], fields={"values": [1.0]})
    save(pack([Trajectory("a", [turn])], fields=[values]), tmp_path / "batch.safetensors")
    done = call("convert", tmp_path / "batch.safetensors", "--from", "trajpack", *after)
    assert "trajpack: left out, not in samples of torchtitan: values\n" in done.stderr
