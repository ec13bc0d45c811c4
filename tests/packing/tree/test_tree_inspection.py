"""What a person sees of a tree."""

from trajpack import Trajectory, Turn, pack_tree
from trajpack.packing.tree.statistics import MOST_BREAKS, break_rows, describe_tree


def statistics_of(*turns, name="a"):
    made = [Turn(prompt, completion, [-0.5] * len(completion)) for prompt, completion in turns]
    return pack_tree([Trajectory(name, made)]).statistics()


def shown(*turns):
    [(turn, words)] = break_rows(statistics_of(*turns), ["a"])
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


def test_a_tree_without_breaks_has_no_reasons():
    grown = statistics_of(([1, 2], [3]), ([1, 2, 3, 4], [5]))
    assert describe_tree(grown) == [
        ("tree", "5 nodes in 1 tree, for 5 tokens merged (a ratio of 1.00) or 8 as turns (1.60)"),
        ("shared tokens", "3 in chains, 0 in trajectories, 0 in groups, 0 across groups"),
        ("prefix breaks", "0 of 1 continuation"),
    ]
    assert break_rows(grown, ["a"]) == []
    assert describe_tree(pack_tree([]).statistics())[2] == ("prefix breaks", "0 of 0 continuations")


def test_breaks_are_limited_and_the_rest_is_counted():
    many = statistics_of(*(([number + 1], [0]) for number in range(MOST_BREAKS + 3)))
    rows = break_rows(many, ["a"])
    assert [name for name, _ in rows] == [*(f"turn {n + 1}" for n in range(MOST_BREAKS)), "..."]
    assert rows[-1][1] == "2 more breaks"
    assert len(break_rows(many, ["a"], full=True)) == MOST_BREAKS + 2


def test_names_and_tokens_are_escaped_and_cut():
    broken = statistics_of(([1], [2]), ([3], [4]))
    evil = "x\x1b[2J\n\u202e" + "y" * 100
    [(_, words)] = break_rows(broken, [evil], lambda ids: f"<{ids[0]}>\n\x1b[31m" + "z" * 50)
    assert words.isprintable()
    assert words.startswith("of x\\x1b[2J\\n\\u202eyyy")
    assert "(47 more characters)" in words
    assert "at 0 came 3 '<3>\\n\\x1b[31m" in words
    assert "z" * 12 not in words
    assert break_rows(broken, ["a"], lambda _: "")[0][1].startswith("of a: at 0 came 3, turn 0")
