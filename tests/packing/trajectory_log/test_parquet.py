"""Parquet export of a log."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.packing.trajectory_log.log_cases import begin, write
from trajpack import TokenField, Trajectory, Turn
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.types import VersionSpan

parquet = pytest.importorskip("pyarrow.parquet")


def test_export_as_parquet(tmp_path):
    field = TokenField("v", torch.float32)
    spans = [VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)]
    first = Turn([1, 2], [3, 4], [-0.5, -1.0], 0.25, True, 1, 2, spans, {"v": [0.5, 1.5]})
    second = Turn([1, 2, 3, 4, 5], [6], [-2.0], version_start=2, version_end=2, fields={"v": [2.5]})
    turns = [first, replace(second, stop_reason="length")]
    with begin(tmp_path / "episodes", fields=[field]) as log:
        log.append("a", [Trajectory("\ud800", turns, None, 0.5, None, 7, False)])
        log.append("b", [], error="gone")
        log.append("waiting", [])
        log.flush()
        log.append("later", [])
        log.export_parquet(tmp_path / "log.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["episodes", "log.parquet"]
    table = parquet.read_table(tmp_path / "log.parquet")
    assert json.loads(table.schema.metadata[b"trajpack"]) == {"fields": [field.as_json()]}
    rows = table.to_pylist()
    assert [row["episode"] for row in rows] == [b"a", b"b", b"waiting"]
    assert rows[0] == {
        "episode": b"a", "error": None, "trajectory_id": [b"\xed\xa0\x80"], "group": [None],
        "task_id": [None], "birth_time_ms": [7], "turn_discount": [0.5], "num_turns": [2],
        "chain_size": [6], "token_ids": [1, 2, 3, 4, 5, 6], "turn_chain": [0, 0],
        "turn_begin": [2, 5], "turn_size": [2, 1], "turn_reward": [0.25, 0.0],
        "truncated": [False], "turn_stop_reason": [0, 2], "turn_truncated": [True, False],
        "turn_version_start": [1, 2],
        "turn_version_end": [2, 2], "turn_num_spans": [2, 0], "span_version": [1, 2],
        "span_start": [0, 1], "span_end": [1, 2], "rollout_logprobs": [-0.5, -1.0, -2.0],
        "field_0": np.array([0.5, 1.5, 2.5], np.float32).tobytes(),
    }  # fmt: skip
    assert (rows[1]["error"], rows[1]["token_ids"]) == (b"gone", [])


def test_export_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(tmp_path / "log", [0])
    with TrajectoryLog.open(tmp_path / "log", mode="read") as log:
        assert len(list(log.replay())) == 1
        with pytest.raises(ImportError, match=r"'pyarrow': install trajpack\[log\]"):
            log.export_parquet(tmp_path / "log.parquet")
