"""Extra fields: routed experts of every token, ``[2, 8]`` uint8, gathered by the table of runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.kernels.build_job import held
from trajpack import TokenField
from trajpack.kernels.fields.gather_fields import gather_fields
from trajpack.kernels.runs import Run
from trajpack.testing import assert_same_bits

JOB = "gather_fields, [2, 8] uint8 a token"
EXPERTS = TokenField("routed_experts", torch.uint8, (2, 8), fill=255, generated_only=False)


def with_experts(trajectories):
    """Return the trajectories with experts that follow from the token ids."""

    def rows(turn):
        ids = np.concatenate((turn.prompt_ids, turn.completion_ids))
        return (ids[:, None] + np.arange(16, dtype=np.int32)).astype(np.uint8).reshape(-1, 2, 8)

    return [
        dataclasses.replace(
            trajectory,
            turns=[
                dataclasses.replace(turn, fields={EXPERTS.name: rows(turn)})
                for turn in trajectory.turns
            ],
        )
        for trajectory in trajectories
    ]


def gather_contest(workload, trajectories, device="cuda"):
    """Return what `hold_on_device` takes."""
    region, known = held(with_experts(trajectories), (EXPERTS,))
    tables = region.tables["runs"], region.tables["field_sources"]
    layouts, tokens = [EXPERTS.layout], known.num_tokens
    expected = torch.cat(
        [
            torch.from_numpy(np.asarray(turn.fields[EXPERTS.name]))
            for trajectory in with_experts(trajectories)
            for turn in trajectory.turns
        ]
    )
    words, runs, sources = (one.to(device) for one in (region.stream, *tables))
    run = torch.repeat_interleave(runs[:, Run.START].diff(), output_size=tokens)
    offset = torch.arange(tokens, device=device) - runs[run, Run.START]
    places = sources[run, 0] // EXPERTS.row_bytes + offset
    rows = words[: len(words) // 4 * 4].view(torch.uint8).view(-1, *EXPERTS.shape)
    distinct = int(torch.unique(places).numel())

    def check(gathered):
        assert_same_bits(gathered, expected)

    entrants = [
        Contender(OURS, lambda: gather_fields(words, runs, sources, layouts, tokens)[0], "1 field"),
        Contender("index, made before", lambda: rows[places], "1 field"),
        Contender(
            "index_select, made before", lambda: torch.index_select(rows, 0, places), "1 field"
        ),
    ]
    read = EXPERTS.row_bytes * distinct + runs.nbytes + sources.nbytes
    moved = read, EXPERTS.row_bytes * tokens
    return Contest(JOB, workload, tokens, check), entrants, moved, device
