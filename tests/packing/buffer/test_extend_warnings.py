"""Warnings of `TrajectoryBuffer.extend`: what is unusual, and its remedy."""

import asyncio
import warnings

import pytest
import torch

from trajpack import TokenField, Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.packing.buffer import buffer as buffer_module

pytestmark = pytest.mark.usefixtures("either_take")


def trajectory(*logprobs):
    return Trajectory("a", [Turn([1], [2] * len(logprobs), list(logprobs))])


@pytest.mark.parametrize("add", [lambda one: pack([one]), lambda one: TrajectoryBuffer().add(one)])
def test_positive_log_probabilities_are_warned_of_at_the_callers_line(add):
    with pytest.warns(UserWarning, match="positive numbers.*give the natural logarithm") as caught:
        add(trajectory(-0.5, 0.5))
    (warning,) = caught
    assert warning.filename == __file__


@pytest.mark.parametrize("long", [0, 100])
def test_an_event_loop_is_warned_at_the_line_that_awaits(monkeypatch, long):
    monkeypatch.setattr(buffer_module, "LONG", long)

    async def main():
        await TrajectoryBuffer(device="cpu").aadd(trajectory(0.5))

    with pytest.warns(UserWarning, match="positive numbers") as caught:
        asyncio.run(main())
    (warning,) = caught
    assert warning.filename == __file__


def test_a_loop_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            pack([trajectory(0.5)])
    assert len(caught) == 1


@pytest.mark.parametrize("logprobs", [(), (0.0,), (-0.5, 1e-3)])
def test_no_warning_of_zero_and_of_rounding(logprobs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack([trajectory(*logprobs)])


HISTORY = list(range(20, 60))


def two_turns(prompt):
    """Return a conversation of 40 tokens, then a turn with this prompt."""
    return Trajectory("a", [turn_of(HISTORY[:30], HISTORY[30:]), turn_of(prompt, [1])])


def turn_of(prompt, completion):
    return Turn(prompt, completion, [-0.5] * len(completion))


RETOKENIZED = [
    [*HISTORY[:33], 7, *HISTORY[35:], 8, 9],  # one token for two
    [*HISTORY[:33], 7, 7, *HISTORY[34:]],  # two for one
]
OTHERWISE = [
    [*HISTORY, 8, 9],  # no break
    [*HISTORY[:30], *HISTORY[36:], 8],  # stripped reasoning
    HISTORY[:30],  # a second attempt
    [*HISTORY[:30], *range(70, 90), 8],  # another history
    [*HISTORY[:10], *range(70, 80), *HISTORY[20:], 8],  # a rewritten message
    [*HISTORY[:20], 7, *HISTORY[21:], 8],  # another prompt of one template
]


@pytest.mark.parametrize("prompt", RETOKENIZED)
def test_re_tokenized_text_is_warned_of_at_the_callers_line(prompt):
    with pytest.warns(UserWarning, match="replaces a few tokens.*sampled token ids") as caught:
        pack([two_turns(prompt)])
    (warning,) = caught
    assert warning.filename == __file__


@pytest.mark.parametrize("prompt", OTHERWISE)
def test_no_warning_of_other_breaks(prompt):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack([two_turns(prompt)])


def test_the_first_breaks_of_a_call_are_looked_at():
    breaks = [two_turns(OTHERWISE[2])] * 4
    with pytest.warns(UserWarning, match="replaces a few tokens"):
        pack([*breaks[:3], two_turns(RETOKENIZED[0])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack([*breaks, two_turns(RETOKENIZED[0])])


def with_rows(*rows):
    """Return two turns, the second of which repeats the first; rows of a field for all tokens."""
    turns = [([1, 2], [3]), ([1, 2, 3, 4], [5])]
    return Trajectory(
        "a",
        [
            Turn(prompt, completion, [-0.5], fields={"state": of})
            for (prompt, completion), of in zip(turns, rows, strict=True)
        ],
    )


STATE = TokenField("state", torch.int32, generated_only=False)


def test_rows_that_differ_where_tokens_agree_are_warned_of_and_kept():
    contradicting = with_rows([1, 2, 3], [1, 9, 3, 4, 5])
    said = r"trajectory 'a', turn 1: field 'state' has other rows for tokens of the turns before"
    with pytest.warns(UserWarning, match=said) as caught:
        batch = pack([with_rows([1, 2, 3], [1, 2, 3, 4, 5]), contradicting], fields=[STATE])
    (warning,) = caught
    assert warning.filename == __file__
    assert batch.fields["state"].tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 1, 9, 3, 4, 5]
    assert batch.num_prefix_breaks == 1


def test_no_warning_of_rows_that_agree_and_of_rows_behind_another_prompt():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack([with_rows([1, 2, 3], [1, 2, 3, 4, 5])], fields=[STATE])
        turns = [Turn([1, 2], [3], [-0.5], fields={"state": [1, 2, 3]})] * 2  # a second attempt
        pack([Trajectory("a", turns)], fields=[STATE])
