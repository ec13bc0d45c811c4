"""Rows, lists and round trips of all formats, beside loops over the sequences of a batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.adapters.cases import conversation, padded, random_batch, sequences_of, told_of
from trajpack import TokenField, Trajectory, Turn, TurnReturns, pack
from trajpack.packing.adapters import (
    areal,
    nemo_rl,
    openrlhf,
    prime_rl,
    skyrl,
    slime,
    torchtitan,
    trl,
    verl,
)
from trajpack.packing.rows.layout import row_scores, row_trajectories
from trajpack.testing import assert_same_bits, trajectory_lists

PAD = 99
KEYS = """
areal    input_ids                ids        whole    99 int32
areal    attention_mask           there      whole    0  bool
areal    versions                 versions   whole    0  int32
areal    loss_mask                mask       whole    0  int32
areal    logprobs                 logprobs   whole    0  float32
update   input_ids                ids        whole    99 int32
update   attention_mask           there      whole    0  bool
update   versions                 versions   whole    0  int32
update   loss_mask                mask       shifted  0  float32
update   logprobs                 logprobs   shifted  0  float32
update   prox_logp                logprobs   shifted  0  float32
update   advantages               advantages shifted  0  float32
update   returns                  returns    shifted  0  float32
areal    values                   values     shifted  0  float32
update   values                   values     shifted  0  float32
nemo_rl  values                   values     blocks   0  float32
openrlhf values                   values     early    0  float32
skyrl    values                   values     response 0  float32
verl     values                   values     response 0  float32
nemo_rl  input_ids                ids        blocks   99 int64
nemo_rl  generation_logprobs      logprobs   blocks   0  float32
nemo_rl  prev_logprobs            logprobs   blocks   0  float32
nemo_rl  advantages               advantages blocks   0  float32
nemo_rl  token_mask               mask       blocks   0  float32
openrlhf sequences                ids        whole    99 int64
openrlhf attention_mask           there      whole    0  int64
openrlhf action_mask              mask       early    0  int64
openrlhf rollout_log_probs        logprobs   early    0  float32
openrlhf advantages               advantages early    0  float32
openrlhf returns                  returns    early    0  float32
skyrl    sequences                ids        whole    99 int64
skyrl    attention_mask           there      whole    0  int64
skyrl    response_mask            there      response 0  int64
skyrl    loss_mask                mask       response 0  float32
skyrl    rollout_logprobs         logprobs   response 0  float32
skyrl    advantages               advantages response 0  float32
skyrl    returns                  returns    response 0  float32
trl      prompt_ids               ids        prompt   99 int64
trl      prompt_mask              there      prompt   0  int64
trl      completion_ids           ids        response 99 int64
trl      completion_mask          there      response 0  int64
trl      tool_mask                mask       response 1  int64
trl      sampling_per_token_logps logprobs   response 0  float32
trl      advantages               advantages response 0  float32
verl     prompts                  ids        prompt   99 int64
verl     responses                ids        response 99 int64
verl     response_mask            mask       response 0  int64
verl     rollout_log_probs        logprobs   response 0  float32
verl     advantages               advantages response 0  float32
verl     returns                  returns    response 0  float32
"""
"""Format, key, column of the batch, part of the sequence, padding, dtype."""
WIDTHS = ("max_prompt_length", "max_response_length")
ROWS: dict[str, Any] = {
    "areal": areal.to_padded_dict,
    "update": areal.to_update_dict,
    "nemo_rl": partial(nemo_rl.to_loss_inputs, sequence_multiple=64),
    "openrlhf": openrlhf.to_experience_dict,
    "skyrl": skyrl.to_training_input,
    "trl": trl.to_grpo_inputs,
    "verl": lambda batch, **options: verl.to_data_proto_dict(batch, **options)["tensors"],
}
WIDER = {"skyrl": WIDTHS[1:], "verl": WIDTHS}
"""Widths that are options of a format."""
LISTS: dict[Any, dict[str, tuple[str, str]]] = {
    skyrl.to_generator_output: {
        "prompt_token_ids": ("ids", "prompt"),
        "response_ids": ("ids", "response"),
        "loss_masks": ("mask", "response"),
        "rollout_logprobs": ("logprobs", "response"),
    },
    prime_rl.to_training_samples: {
        "token_ids": ("ids", "whole"),
        "mask": ("mask", "whole"),
        "logprobs": ("logprobs", "whole"),
        "advantages": ("advantages", "whole"),
    },
    torchtitan.to_training_samples: {
        "token_ids": ("ids", "whole"),
        "loss_mask": ("mask", "whole"),
        "logprobs": ("logprobs", "whole"),
        "advantage": ("advantages", "whole"),
    },
}


def columns_of(batch):
    """Return each column of a batch as lists, one for each sequence, cut into its parts."""
    columns = {
        "ids": batch.input_ids,
        "there": torch.ones_like(batch.input_ids),
        "mask": batch.loss_mask,
        "logprobs": batch.rollout_logprobs,
        "versions": batch.policy_versions,
        "advantages": batch.advantages,
        "returns": batch.returns,
        "values": batch.fields["values"],
    }
    pieces = {name: [x.tolist() for x in sequences_of(batch, of)] for name, of in columns.items()}
    splits = [mask.index(True) if True in mask else len(mask) for mask in pieces["mask"]]
    return {
        (name, part): [
            {"prompt": row[:split], "response": row[split:], "early": row[1:], "shifted": row[1:]}
            .get(part, row)
            for row, split in zip(rows, splits, strict=True)
        ]
        for name, rows in pieces.items()
        for part in ("whole", "prompt", "response", "early", "shifted", "blocks")
    }  # fmt: skip


@settings(max_examples=25)
@given(trajectory_lists(), st.sampled_from(["merged", "turns"]), st.sampled_from([None, 0, 3]))
def test_rows_and_lists_are_the_sequences_cut_and_padded(trajectories, layout, more):
    batch = pack(trajectories, layout=layout, device="cpu").with_advantages(TurnReturns())
    values = torch.arange(batch.num_tokens, dtype=torch.float32)
    batch = batch.with_field(TokenField("values", torch.float32), values)
    expected, longest = columns_of(batch), batch.max_seqlen
    prompt, response = (
        max(map(len, expected["ids", part]), default=0) for part in ("prompt", "response")
    )
    options = dict(zip(WIDTHS, (prompt + (more or 0), response + (more or 0)), strict=True))
    found = {}
    for name, convert in ROWS.items():
        given_widths = {} if more is None else {key: options[key] for key in WIDER.get(name, ())}
        found[name] = convert(batch, pad_token_id=PAD, **given_widths)
    for line in KEYS.strip().splitlines():
        name, key, column, part, fill, dtype = line.split()
        wider = (more or 0) if name in WIDER else 0
        width = {
            "prompt": prompt + wider,
            "response": response + wider,
            "early": max(longest - 1, 0),
            "blocks": -(-longest // 64) * 64,
        }.get(part, longest)
        side = "left" if part == "prompt" or name == "skyrl" else "right"
        rows = [padded(row, width, int(fill), side) for row in expected[column, part]]
        assert found[name][key].dtype == getattr(torch, dtype), line
        assert found[name][key].tolist() == rows, line
    for convert, keys in LISTS.items():
        found = convert(batch)
        for key, where in keys.items():
            lists = found[key] if isinstance(found, dict) else [sample[key] for sample in found]
            assert lists == expected[where], key


FORMATS: dict[str, tuple[Any, Any]] = {
    "areal": (partial(areal.to_padded_dict, rewards="rewards"), areal.from_padded_dict),
    "verl": (verl.to_data_proto_dict, verl.from_data_proto),
    "skyrl": (skyrl.to_generator_output, skyrl.from_generator_output),
    "slime": (slime.to_samples, slime.from_samples),
    "prime-rl": (
        prime_rl.to_training_samples,
        lambda samples: prime_rl.from_training_samples(samples, rewards=[6.0] * len(samples)),
    ),
}


@settings(max_examples=25)
@given(trajectory_lists(), st.sampled_from(["merged", "turns"]))
def test_tokens_and_rewards_come_back_up_to_the_last_generated_token(trajectories, layout):
    batch = pack(trajectories, layout=layout, device="cpu")
    names = ("input_ids", "loss_mask", "rollout_logprobs")
    rows = list(zip(*(sequences_of(batch, getattr(batch, name)) for name in names), strict=True))
    for name, (write, read) in FORMATS.items():
        if not len(batch):
            continue
        written = write(batch)  # without ids, by which sequences of one trajectory are joined
        for one in written if name == "slime" else [written]:
            if name != "prime-rl":
                one.update(dict.fromkeys(("trajectory_ids", "rollout_id", "rollout_ids")))
        again = pack(read(written), device="cpu")
        for number, columns in enumerate(rows):
            mask = columns[1]
            known = int(mask.nonzero().max()) + 1 if mask.any() else len(mask)
            for key, column in zip(names, columns, strict=True):
                ours = sequences_of(again, getattr(again, key))[number]
                assert torch.equal(ours, column[:known]), (name, key)
        if name in ("areal", "slime"):  # others lose those of silent rows
            torch.testing.assert_close(row_scores(again), row_scores(batch), msg=name)


ENDS: dict[str, Any] = {
    "nemo-rl": lambda batch: nemo_rl.to_message_logs(batch)["truncated"].tolist(),
    "openrlhf": lambda batch: openrlhf.to_experience_dict(batch)["truncated"].tolist(),
    "skyrl": lambda batch: [
        reason != "stop" for reason in skyrl.to_generator_output(batch)["stop_reasons"]
    ],
    "slime": lambda batch: [one["status"] == "truncated" for one in slime.to_samples(batch)],
    "slime, train": lambda batch: slime.to_train_data(batch)["truncated"],
}
"""Whether each row was cut off, in the formats that have a place for it."""


@settings(max_examples=25)
@given(trajectory_lists(), st.sampled_from(["merged", "turns"]))
def test_an_episode_counts_once_and_ends_as_it_did(trajectories, layout):
    batch = pack(trajectories, layout=layout, device="cpu")
    owners = row_trajectories(batch)
    cut = [trajectory.is_truncated for trajectory in trajectories]
    for name, ends in ENDS.items():
        assert ends(batch) == [cut[owner] for owner in owners], name
    by_trace = {"ids": map(str, owners), "rewards": row_scores(batch).tolist()}
    readers = FORMATS | {
        "verl": (
            partial(verl.to_data_proto_dict, scores="last"),
            partial(verl.from_data_proto, ids=[str(owner) for owner in owners]),
        ),
        "skyrl": (partial(skyrl.to_generator_output, rewards="rows"), FORMATS["skyrl"][1]),
        "prime-rl": (FORMATS["prime-rl"][0], partial(prime_rl.from_training_samples, **by_trace)),
    }
    sums = [sum(turn.reward for turn in one.turns) for one in trajectories]
    of_all = ["skyrl", "slime", "prime-rl"]
    if min(batch.tables.generated_lens, default=1):  # verl loses rewards of rows without a response
        of_all.append("verl")
    for name in of_all:
        write, read = readers[name]
        back = read(write(batch))
        again = [sum(turn.reward for turn in one.turns) for one in back]
        assert again == pytest.approx(sums, abs=1e-5), name
        if name not in ("prime-rl", "verl"):  # which have no place for it
            assert [one.is_truncated for one in back] == cut, name


def test_the_reason_of_an_engine_comes_back():
    turns = [Turn([1], [2], [-0.5], truncated=True, stop_reason="abort"), Turn([3], [4], [-0.5])]
    batch = pack([Trajectory("a", turns[:1]), Trajectory("b", turns[1:])])
    back = skyrl.from_generator_output(skyrl.to_generator_output(batch))
    assert [one.turns[-1].stop_reason for one in back] == ["abort", "stop"]
    assert [one.is_truncated for one in back] == [True, False]


PER_TURN = ("verl", "skyrl")
"""Formats that keep the reward of each turn."""


@pytest.mark.parametrize("name", FORMATS)
def test_conversations_come_back_with_turns_rewards_and_groups(name):
    write, read = FORMATS[name]
    trajectories = [conversation("a", 3, group="task"), conversation("b", 3, group="task")]
    back = read(write(pack(trajectories)))
    for ours, theirs in zip(back, trajectories, strict=True):
        expected = told_of(theirs)
        if name not in PER_TURN:  # a reward of the row, for its last turn
            expected = [
                (*turn[:3], 6.0 * (number == 2), turn[4]) for number, turn in enumerate(expected)
            ]
        assert told_of(ours) == expected
    group = {"verl": "task", "skyrl": "task", "slime": "0"}.get(name)
    assert [one.group for one in back] == [group] * 2
    ids = ["0", "1"] if group is None else [f"{group}_0", f"{group}_1"]
    assert [one.id for one in back] == ids


ROUTES = TokenField("routed_experts", torch.uint8, (2, 3), generated_only=False)
MASK = TokenField("sampling_mask", torch.int32, ragged=True)
TEACHER = TokenField("teacher_log_probs", torch.float32)
TEMPERATURES = TokenField("temperatures", torch.float32)
WITH_FIELDS: dict[str, tuple[Any, Any, list[TokenField]]] = {
    "skyrl": (*FORMATS["skyrl"], [ROUTES, MASK]),
    "slime": (*FORMATS["slime"], [ROUTES, MASK, TEACHER]),
    "prime-rl": (
        prime_rl.to_training_samples,
        partial(prime_rl.from_training_samples, missing_reward=0.0),
        [ROUTES, MASK, TEMPERATURES],
    ),
}


@pytest.mark.parametrize("name", WITH_FIELDS)
@pytest.mark.parametrize("seed", [5, 25, 27])
def test_extra_fields_come_back_where_they_are_named(name, seed):
    write, read, fields = WITH_FIELDS[name]
    batch = random_batch(np.random.default_rng(seed), fields=fields)
    names, given_out = [field.name for field in fields], write(batch)
    again = pack(read(given_out, fields=names), fields=fields)
    assert again.seqlens == batch.seqlens
    for kept, given_rows in zip(
        again.generated[MASK.name], batch.generated[MASK.name], strict=True
    ):
        assert_same_bits(kept, given_rows)
    for field in names[2:]:
        values = batch.fields[field]
        if field == "temperatures":  # of prompts too, which are not of a turn
            values = torch.where(batch.loss_mask, values, 0.0)
        assert_same_bits(again.fields[field], values, field)
    routes = batch.fields["routed_experts"].clone()
    if name != "prime-rl":  # without the last token, which no engine forwards
        routes[batch.cu_seqlens[1:].long() - 1] = torch.arange(3, dtype=torch.uint8)
    assert_same_bits(again.fields["routed_experts"], routes)
    with pytest.raises(ValueError, match="name sampling_mask in fields, or take them out"):
        read(given_out, fields=[field for field in names if field != "sampling_mask"])
