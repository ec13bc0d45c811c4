"""What a person sees of a packed batch."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from trajpack import PackedBatch, Trajectory, Turn, pack
from trajpack.packing.batch.inspection import (
    as_lines,
    as_table,
    chosen_sequences,
    describe,
    legend,
    printable,
    sequence_panel,
    sequence_spans,
    summary,
)


def conversation(name: str = "a", **options: float) -> Trajectory:
    """Prompt 1 2, completion 3, observation 4, completion 5 6, and 7 at once after it."""
    return Trajectory(
        name,
        [
            Turn([1, 2], [3], [-0.1], reward=-1.0),
            Turn([1, 2, 3, 4], [5, 6], [-0.2, -0.3], reward=0.5, truncated=True),
            Turn([1, 2, 3, 4, 5, 6], [7], [-0.4], reward=1.0, version_start=1, version_end=1),
        ],
        group="g",
        turn_discount=options.get("turn_discount", 1.0),
    )


def render(renderable: object, *, on_terminal: bool = False, width: int = 100) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=on_terminal,
        color_system="standard" if on_terminal else None,
    )
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def spelled(ids: list[int]) -> str:
    return " ".join(f"<{token}>" for token in ids)


def test_spans_of_a_merged_sequence_follow_the_conversation() -> None:
    batch = pack([conversation("other"), conversation()])
    spans = [(span.kind, span.start, span.end, span.turn) for span in sequence_spans(batch, 1)]
    assert spans == [
        ("prompt", 7, 9, -1),
        ("generated", 9, 10, 3),
        ("observation", 10, 11, -1),
        ("generated", 11, 13, 4),
        ("generated", 13, 14, 5),
    ]


def test_spans_of_a_turn_are_its_prompt_and_its_completion() -> None:
    batch = pack([conversation()], layout="turns")
    kinds = [[span.kind for span in sequence_spans(batch, sequence)] for sequence in range(3)]
    assert kinds == [["prompt", "generated"]] * 3


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_spans_cover_every_token_once(layout: str) -> None:
    batch = pack([conversation(), Trajectory("b", [Turn([1], [], [])])], layout=layout)  # type: ignore[arg-type]
    covered = [
        index
        for sequence in range(len(batch))
        for span in sequence_spans(batch, sequence)
        for index in range(span.start, span.end)
    ]
    assert covered == list(range(batch.num_tokens))


def test_description_counts_what_is_there() -> None:
    rows = dict(describe(pack([conversation(), conversation("b", turn_discount=0.0)])))
    assert rows["trajectories"] == "2 in 1 group"
    assert rows["turns"] == "6, longest trajectory 3, 2 cut off by the length limit"
    assert rows["sequences"] == "2 in layout merged, longest 7 tokens"
    assert rows["tokens"] == "14, of them 8 generated (57.1%)"
    # discounted by 1: 0.5, 1.5, 1; by 0: -1, 0.5, 1
    assert rows["returns"] == "mean 0.5833, min -1, max 1.5"
    assert rows["policy versions"] == "0 to 1"


def test_an_empty_batch_can_be_described() -> None:
    rows = dict(describe(pack([])))
    assert rows["trajectories"] == "0"
    assert "0" in render(as_table(rows.items(), "empty"))


def test_a_panel_shows_turns_and_spans() -> None:
    shown = render(sequence_panel(pack([conversation()]), 0, spelled))
    lines = [line.strip("│ ") for line in shown.splitlines()]
    assert "sequence 0: a of group g, 7 tokens" in lines[0]
    assert [" ".join(line.split()) for line in lines[1:-1] if line] == [
        "prompt 2 <1> <2>",
        "turn 0 reward -1, return 0.5, mean log-probability -0.1, version 0",
        "generated 1 <3>",
        "observation 1 <4>",
        "turn 1 reward 0.5, return 1.5, mean log-probability -0.25, version 0, cut off",
        "generated 2 <5> <6>",
        "turn 2 reward 1, return 1, mean log-probability -0.4, version 1",
        "generated 1 <7>",
    ]


def test_a_panel_shows_advantages_and_turns_without_tokens() -> None:
    turns = [Turn([1], [2, 3], [-0.1, -0.3], 1.0), Turn([1, 2, 3, 4], [], [], reward=-2.0)]
    batch = pack([Trajectory("a", turns), Trajectory("b", turns[:1])])
    advantages = torch.arange(7) / 2
    shown = render(sequence_panel(dataclasses.replace(batch, advantages=advantages), 0, spelled))
    lines = [" ".join(line.strip("│ ").split()) for line in shown.splitlines()]
    assert lines[1:-1] == [
        "prompt 1 <1>",
        "turn 0 reward 1, return -1, mean advantage 0.75, mean log-probability -0.2, version 0",
        "generated 2 <2> <3>",
        "observation 1 <4>",
        "turn 1 reward -2, return -2, version 0",
        "generated 0",
    ]


def test_kinds_have_colours_of_their_own_on_a_terminal() -> None:
    batch = pack([conversation()])
    shown = render(sequence_panel(batch, 0), on_terminal=True)
    explained = render(legend(decoded=True), on_terminal=True)
    for code, kind in (("36", "prompt"), ("33", "observation"), ("1;32", "generated")):
        assert f"\x1b[{code}m" in shown
        assert f"\x1b[{code}m{kind}\x1b[0m" in explained


def test_long_spans_are_shortened_in_the_middle() -> None:
    batch = pack([Trajectory("a", [Turn(list(range(1000)), [5], [-1.0])])])
    decoded = []

    def decode(ids: list[int]) -> str:
        decoded.extend(ids)
        return spelled(ids)

    shown = render(sequence_panel(batch, 0, decode))
    assert "[... 872 tokens ...]" in " ".join(shown.replace("│", "").split())
    assert decoded == [*range(96), *range(968, 1000), 5]


def many_turns() -> PackedBatch:
    ids = [1]
    turns = []
    for _ in range(100):
        turns.append(Turn(list(ids), [2], [-1.0]))
        ids += [2, 3]
    return pack([Trajectory("a", turns)])


def test_nothing_is_left_out_in_full() -> None:
    shown = render(sequence_panel(many_turns(), 0, full=True))
    assert "... and" not in shown
    assert shown.count("generated") == 100
    assert "turn 99" in shown
    long = pack([Trajectory("a", [Turn(list(range(1000)), [5], [-1.0])])])
    words = render(sequence_panel(long, 0, full=True)).replace("│", " ").split()
    assert {str(token) for token in range(1000)} <= set(words)
    assert "..." not in words


def test_values_are_there_on_a_narrow_terminal() -> None:
    batch = pack([conversation()])
    shown = render(summary(describe(batch), "b.safetensors", 30), width=30)
    assert "turns: 3, longest trajectory" in shown
    assert shown.splitlines()[0] == "b.safetensors"
    assert "tokens: 7, of them 4" in shown
    assert ": " not in render(summary([("a", "b")], "b", 50))
    evil = render(as_lines([("a", "[bold]\x1b")], "\x1b"))
    assert "\x1b" not in evil
    assert "[bold]" in evil


def test_sequences_are_found_by_trajectory_group_and_reward() -> None:
    broken = Trajectory("b", [Turn([1], [2], [-0.1], 0.5), Turn([9], [2], [-0.1], 1.0)], group="h")
    batch = pack([conversation("a"), broken, conversation("c")])
    assert chosen_sequences(batch) == [0, 1, 2, 3]
    assert chosen_sequences(batch, name="b") == [1, 2]
    assert chosen_sequences(batch, group="g") == [0, 3]
    assert chosen_sequences(batch, order="best") == [1, 2, 0, 3]
    assert chosen_sequences(batch, order="worst", group="g") == [0, 3]
    with pytest.raises(
        ValueError, match="no trajectory is called 'd'; the first are 'a', 'b', 'c'"
    ):
        chosen_sequences(batch, name="d")
    with pytest.raises(ValueError, match="no trajectory has the group 'x'; the first are 'g', 'h'"):
        chosen_sequences(batch, group="x")


def test_many_turns_are_cut_short() -> None:
    shown = render(sequence_panel(many_turns(), 0))
    assert "... and 176 more spans" in shown
    assert len(shown.splitlines()) < 60


def test_text_is_neither_markup_nor_control_characters() -> None:
    text = "[bold red]x[/] \x1b[31m\r\x07\x9b\u202e\u2028 :smile:"
    batch = pack([Trajectory(text, [Turn([1], [2], [-1.0])], group=text)])
    shown = render(sequence_panel(batch, 0, lambda _: text))
    title = render(as_table([("name", text)], text))
    for output in (shown, title):
        assert not set("\x1b\r\x07\x9b\u202e\u2028") & set(output)
        assert r"[bold red]x[/] \x1b[31m\r\x07\x9b\u202e\u2028 :smile:" in output


def test_ends_of_lines_are_marked() -> None:
    batch = pack([Trajectory("a", [Turn([1], [2], [-1.0])])])
    shown = render(sequence_panel(batch, 0, lambda _: "\nfirst\nlast\n"))
    lines = [line.strip("│ ").split()[-1:] for line in shown.splitlines()]
    assert lines.count(["↵"]) == 2
    assert lines.count(["first↵"]) == lines.count(["last↵"]) == 2


def test_a_sequence_of_no_turn_is_padding() -> None:
    batch = pack([conversation()])
    padded = dataclasses.replace(
        batch,
        input_ids=torch.cat([batch.input_ids, torch.zeros(2, dtype=torch.int64)]),
        turn_ids=torch.cat([batch.turn_ids, torch.full([2], -1, dtype=torch.int32)]),
        cu_seqlens=torch.tensor([0, 7, 9], dtype=torch.int32),
        seqlens=(7, 2),
    )
    assert "sequence 1: padding, 2 tokens" in render(sequence_panel(padded, 1))


def test_a_sequence_that_is_not_there_is_refused() -> None:
    with pytest.raises(IndexError, match="sequence 1 of 1"):
        sequence_panel(pack([conversation()]), 1)


def test_printable_text_is_left_as_it_is() -> None:
    assert printable("naïve 数学 ∑ x²") == "naïve 数学 ∑ x²"
    assert printable("a\u00a0b\ud800") == r"a\xa0b\ud800"
