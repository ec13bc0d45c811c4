"""Where prompts leave their history and why, against brute force over all pairs of turns."""

from itertools import takewhile

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.tree import tree_oracle as oracle
from trajpack import TokenField, Trajectory, Turn, pack
from trajpack.packing.batch.breaks import (
    MOST_BREAKS,
    RUN,
    PrefixBreak,
    break_rows,
    describe_breaks,
    reason_of,
)
from trajpack.testing import trajectory_lists


def breaks_of(trajectory):
    """Return the numbers of the turns that broke a prefix: that begin a chain, but the first."""
    sizes = [
        len(oracle.chains_of(Trajectory("", trajectory.turns[:count])))
        for count in range(len(trajectory.turns) + 1)
    ]
    return [turn for turn in range(1, len(sizes) - 1) if sizes[turn + 1] > sizes[turn]]


def shared_by(one, other):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@given(trajectory_lists(6))
@settings(max_examples=40)
def test_breaks_are_where_no_earlier_turn_goes_on(trajectories):
    expected = []
    for index, trajectory in enumerate(trajectories):
        paths = [oracle.path_of(turn) for turn in trajectory.turns]
        for turn in breaks_of(trajectory):
            prompt = paths[turn][: len(trajectory.turns[turn].prompt_ids)]
            shared = [shared_by(prompt, path) for path in paths[:turn]]
            position = max(shared)
            history = max(number for number, one in enumerate(shared) if one == position)
            came = prompt[position] if position < len(prompt) else None
            expected.append((index, turn, history, position, paths[history][position], came))
    found = pack(trajectories).prefix_breaks()
    assert pack(trajectories, "turns").prefix_breaks() == found
    assert [one[:6] for one in found] == expected
    for one in found:
        assert (one.reason == "repeated") == (one.came is None)
        back = one.reason in {"stripped", "rewritten"}
        assert (one.removed is not None, one.added is not None) == (back, back)
    assert len(found) == len(pack(trajectories)) - len(trajectories)


TASK = list(range(100, 120))
FIRST = list(range(200, 230))  # the first completion
NEW = list(range(300, 310))  # what the environment said


def the_break(*turns, fields=()):
    """Return the only break of a trajectory of these prompts and completions."""
    made = [
        Turn(prompt, completion, [-0.5] * len(completion), fields=dict(rows))
        for prompt, completion, *rows in turns
    ]
    [found] = pack([Trajectory("a", made)], fields=fields).prefix_breaks()
    return found


@pytest.mark.parametrize(
    ("prompt", "position", "tokens", "reason", "edit"),
    [
        (TASK + FIRST[20:] + NEW, 20, (200, 220), "stripped", (20, 0)),
        (TASK + FIRST[-2:] + NEW, 20, (200, 228), "stripped", (28, 0)),
        (TASK + FIRST[-1:] + NEW, 20, (200, 229), "stripped", (29, 0)),
        (TASK + FIRST[:5] + FIRST[6:] + NEW, 25, (205, 206), "stripped", (1, 0)),
        ([*TASK, 7, 8, *FIRST, *NEW], 20, (200, 7), "rewritten", (0, 2)),
        (TASK + FIRST[:10] + [7] + FIRST[11:] + NEW, 30, (210, 7), "rewritten", (1, 1)),
        (TASK + FIRST[:10] + [7] + FIRST[12:] + NEW, 30, (210, 7), "rewritten", (2, 1)),
        (TASK + FIRST[:-2] + [7] + FIRST[-1:] + NEW, 48, (228, 7), "rewritten", (1, 1)),
        ([*TASK[:5], 7, *TASK[6:], *FIRST, *NEW], 5, (105, 7), "rewritten", (1, 1)),
        (TASK + FIRST[:-1] + NEW, 49, (229, 300), "left", None),
        (TASK, 20, (200, None), "repeated", None),
        (TASK + FIRST[:5], 25, (205, None), "repeated", None),
        ([*TASK, 7, 8, 9, *NEW], 20, (200, 7), "left", None),
        (TASK + [7] * 20 + FIRST[-3:], 20, (200, 7), "left", None),
        (TASK[:12] + NEW, 12, (112, 300), "left", None),
        ([*TASK, 7, FIRST[-1], 8], 20, (200, 7), "left", None),
        (NEW, 0, (100, 300), "left", None),
        (TASK[:9] + NEW * 9, 9, (109, 300), "left", None),
        (TASK + NEW * 9, 20, (200, 300), "left", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons(prompt, position, tokens, reason, edit):
    found = the_break((TASK, FIRST), (prompt, [1]))
    removed, added = edit or (None, None)
    assert found == PrefixBreak(0, 1, 0, position, *tokens, reason, removed, added)


def test_rows_of_a_field_break_a_prefix():
    routes = TokenField("routes", torch.uint8, (), generated_only=False)
    found = the_break(
        ([1, 2], [3], ("routes", [0, 0, 0])),
        ([1, 2, 3, 4], [5], ("routes", [0, 1, 0, 0, 0])),
        fields=[routes],
    )
    assert found == PrefixBreak(0, 1, 0, 1, 2, 2, "fields", None, None)


def test_rows_of_new_tokens_alone_break_no_prefix():
    routes = TokenField("routes", torch.uint8, (), generated_only=False, new_only=True)
    found = the_break(
        ([1, 2], [3], ("routes", [0, 0, 0])),
        ([1, 2, 4], [5], ("routes", [0, 1, 0, 0])),  # computed again, with other rows
        fields=[routes],
    )
    assert found == PrefixBreak(0, 1, 0, 2, 3, 4, "left", None, None)


@given(
    removed=st.integers(0, 60),
    added=st.integers(0, 60),
    rest=st.integers(RUN, 40),
)
def test_an_edit_is_measured_if_enough_follows(removed, added, rest):
    tokens = np.arange(1000)
    history = np.concatenate([tokens[:removed], tokens[500 : 500 + rest]])
    prompt = np.concatenate([tokens[200 : 200 + added], history[removed:], tokens[900:910]])
    if not removed and not added:
        return
    expected = "rewritten" if added else "stripped"
    found = reason_of(history, prompt)
    assert found == (expected, removed, added)


ANSWER = list(range(RUN))


@pytest.mark.parametrize(
    ("history", "prompt", "found"),
    [
        # the place with fewest added tokens
        ([50, 51, *ANSWER, 52, 53, 60, 61, 62], [60, 61, 62, *ANSWER, 70], (RUN + 4, 0)),
        # a short history behind what was inserted
        ([1, 2, 3], [7, 1, 2, 3, 9], (0, 1)),
        # the longest agreement where text repeats
        ([50, 51, *ANSWER, 52, 53, *ANSWER, 60, 61], [*ANSWER, 60, 61, 70], (RUN + 4, 0)),
    ],
)
def test_one_of_several_places_is_taken(history, prompt, found):
    reason = "rewritten" if found[1] else "stripped"
    assert reason_of(np.array(history), np.array(prompt)) == (reason, *found)


def breaks_of_turns(*turns):
    made = [Turn(prompt, completion, [-0.5] * len(completion)) for prompt, completion in turns]
    return pack([Trajectory("a", made)]).prefix_breaks()


def shown(*turns):
    [(turn, words)] = break_rows(breaks_of_turns(*turns), ["a"])
    return turn, words.removeprefix("of a: ")


def test_each_reason_has_words():
    one = (range(10), range(20, 40))
    history = [*range(10), *range(20, 40)]
    assert [
        shown(one, (prompt, [1]))[1]
        for prompt in (
            [*range(10), *range(30, 40), 50],
            [*range(10), 7, 8, *range(20, 40), 50],
            [*history[:15], 7, *history[17:], 50],
            [*history[:-1], 50],
            history[:-1],
            [*range(10), 7, 8, 50],
            [7, 8],
            [*range(10), *[7] * 2000],
        )
    ] == [
        "at 10 came 30, turn 0 has 20; 10 stripped",
        "at 10 came 7, turn 0 has 20; 0 rewritten as 2",
        "at 15 came 7, turn 0 has 25; 2 rewritten as 1",
        "at 29 came 50, turn 0 has 39; it left the history",
        "at 29 came nothing, turn 0 has 39; the prompt ends there",
        "at 10 came 7, turn 0 has 20; it left the history",
        "at 0 came 7, turn 0 has 0; it left the history",
        "at 10 came 7, turn 0 has 20; it left the history",
    ]


def test_breaks_are_counted_by_reason():
    grown = breaks_of_turns(([1, 2], [3]), ([1, 2, 3, 4], [5]))
    assert (grown, break_rows(grown, ["a"])) == ((), [])
    assert describe_breaks(grown, 1) == "0 of 1 continuation"
    broken = breaks_of_turns(([1, 2], [3]), ([4], [5]), ([1, 2], [4]))
    assert describe_breaks(broken, 2) == "2 of 2 continuations: 1 left, 1 repeated"


def test_breaks_are_limited_and_the_rest_is_counted():
    many = breaks_of_turns(*(([number + 1], [0]) for number in range(MOST_BREAKS + 3)))
    rows = break_rows(many, ["a"])
    assert [name for name, _ in rows] == [*(f"turn {n + 1}" for n in range(MOST_BREAKS)), "..."]
    assert rows[-1][1] == "2 more breaks"
    assert len(break_rows(many, ["a"], full=True)) == MOST_BREAKS + 2


def test_names_and_tokens_are_escaped_and_cut():
    broken = breaks_of_turns(([1], [2]), ([3], [4]))
    evil = "x\x1b[2J\n\u202e" + "y" * 100
    [(_, words)] = break_rows(broken, [evil], lambda ids: f"<{ids[0]}>\n\x1b[31m" + "z" * 50)
    assert words.isprintable()
    assert words.startswith("of x\\x1b[2J\\n\\u202eyyy")
    assert "(47 more characters)" in words
    assert "at 0 came 3 '<3>\\n\\x1b[31m" in words
    assert "z" * 12 not in words
    assert break_rows(broken, ["a"], lambda _: "")[0][1].startswith("of a: at 0 came 3, turn 0")
