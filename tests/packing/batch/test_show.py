"""What `trajpack inspect` shows of a batch."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.commands.command import call
from tests.packing.batch.test_description import conversation
from trajpack import PackedBatch, Trajectory, Turn, pack, save
from trajpack.packing.batch.show import chosen_sequences, sequence_panel
from trajpack.packing.text import printable


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


def lines_of(batch: PackedBatch) -> list[str]:
    shown = render(sequence_panel(batch, 0, spelled))
    return [" ".join(line.strip("│╭─╮ ").split()) for line in shown.splitlines()[:-1]]


def test_a_panel_shows_turns_and_spans() -> None:
    assert lines_of(pack([conversation()])) == [
        "sequence 0: a of group g, 7 tokens",
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
    assert lines_of(dataclasses.replace(batch, advantages=torch.arange(7) / 2))[1:] == [
        "prompt 1 <1>",
        "turn 0 reward 1, return -1, mean advantage 0.75, mean log-probability -0.2, version 0",
        "generated 2 <2> <3>",
        "observation 1 <4>",
        "turn 1 reward -2, return -2, version 0",
        "generated 0",
    ]


def test_kinds_have_colours_of_their_own_on_a_terminal() -> None:
    shown = render(sequence_panel(pack([conversation()]), 0), on_terminal=True)
    for code, kind in (("36", "prompt"), ("33", "observation"), ("1;32", "generated")):
        assert re.search(rf"\x1b\[{code}m *{kind}\x1b\[0m", shown)


def test_a_batch_prints_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [Turn([1, 2], [3], [-0.1], 1.0), Turn([1, 4], [5], [-0.2], -1.0)]
    batch = pack([conversation(), Trajectory("b", turns)])
    save(batch, tmp_path / "PackedBatch")
    batch.show(2, order="worst", full=True)
    printed = capsys.readouterr().out
    command = call(
        "inspect", tmp_path / "PackedBatch", "--sequences", 2, "--order", "worst", "--full"
    )
    assert printed == command.stdout
    assert re.findall(r"─ sequence (\d): (\w+)", printed) == [("1", "b"), ("2", "b")]
    assert "of b: at 1 came 4, turn 0 has 2; it left the history" in printed
    pack([]).show()
    batch.show(0, group="g")
    assert "more sequences, of" not in printed
    assert "1 more sequence, of 1" in capsys.readouterr().out
    with pytest.raises(ValueError, match="order must be one of 'batch', 'best', 'worst', got 'no'"):
        batch.show(order="no")  # type: ignore[arg-type]


def many_turns() -> PackedBatch:
    ids, turns = [1], []
    for _ in range(100):
        turns.append(Turn(list(ids), [2], [-1.0]))
        ids += [2, 3]
    return pack([Trajectory("a", turns)])


def test_much_is_cut_short_but_in_full() -> None:
    long = pack([Trajectory("a", [Turn(list(range(1000)), [5], [-1.0])])])
    decoded: list[int] = []
    shown = render(sequence_panel(long, 0, lambda ids: decoded.extend(ids) or spelled(ids)))  # type: ignore[func-returns-value]
    assert "[... 872 tokens ...]" in " ".join(shown.replace("│", "").split())
    assert decoded == [*range(96), *range(968, 1000), 5]
    words = render(sequence_panel(long, 0, full=True)).replace("│", " ").split()
    assert {str(token) for token in range(1000)} <= set(words)
    assert "..." not in words
    shown = render(sequence_panel(many_turns(), 0))
    assert "... and 176 more spans" in shown
    assert len(shown.splitlines()) < 60
    shown = render(sequence_panel(many_turns(), 0, full=True))
    assert (shown.count("generated"), "turn 99" in shown, "... and" in shown) == (100, True, False)


def test_sequences_are_found_by_trajectory_group_and_reward() -> None:
    broken = Trajectory("b", [Turn([1], [2], [-0.1], 0.5), Turn([9], [2], [-0.1], 1.0)], group="h")
    batch = pack([conversation("a"), broken, conversation("c")])
    assert chosen_sequences(batch) == [0, 1, 2, 3]
    assert chosen_sequences(batch, name="b") == [1, 2]
    assert chosen_sequences(batch, group="g") == [0, 3]
    assert chosen_sequences(batch, order="best") == [1, 2, 0, 3]
    assert chosen_sequences(batch, order="worst", group="g") == [0, 3]
    with pytest.raises(ValueError, match="is called 'd'; the first are 'a', 'b', 'c'"):
        chosen_sequences(batch, name="d")
    with pytest.raises(ValueError, match="no trajectory has the group 'x'; the first are 'g', 'h'"):
        chosen_sequences(batch, group="x")


def test_text_is_neither_markup_nor_control_characters() -> None:
    text = "[bold red]x[/] \x1b[31m\r\x07\x9b\u202e\u2028 :smile:"
    batch = pack([Trajectory(text, [Turn([1], [2], [-1.0])], group=text)])
    shown = render(sequence_panel(batch, 0, lambda _: text))
    assert not set("\x1b\r\x07\x9b\u202e\u2028") & set(shown)
    assert r"[bold red]x[/] \x1b[31m\r\x07\x9b\u202e\u2028 :smile:" in shown
    assert printable("naïve 数学 ∑ x²") == "naïve 数学 ∑ x²"
    assert printable("a\u00a0b\ud800") == r"a\xa0b\ud800"


def test_ends_of_lines_are_marked() -> None:
    batch = pack([Trajectory("a", [Turn([1], [2], [-1.0])])])
    shown = render(sequence_panel(batch, 0, lambda _: "\nfirst\nlast\n"))
    lines = [line.strip("│ ").split()[-1:] for line in shown.splitlines()]
    assert lines.count(["↵"]) == 2
    assert lines.count(["first↵"]) == lines.count(["last↵"]) == 2
