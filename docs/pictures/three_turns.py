"""Draw ``three_turns.svg``: three turns of one conversation and the packed row they become.

``python docs/pictures/three_turns.py`` writes the picture beside this file. Cells and masks are
read from batches that `trajpack.pack` returns.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import trajpack

WORDS = (
    "What", "is", "2+3", "?", "6", "end", "No,", "again", "4", "end", "No,", "again", "5", "end",
)  # fmt: skip
GENERATED = ((4, 6), (8, 10), (12, 14))
"""Tokens that each turn sampled, as half-open ranges of the conversation."""
COLOURS = ("#4c8bf5", "#1fa67a", "#e0812b")
GREY, INK, PALE = "#e4e7eb", "#1f2933", "#7b8794"
CELL, HEIGHT, LEFT = 58, 30, 130


def conversation() -> trajpack.Trajectory:
    """Return the three turns, each prompt with everything before it."""
    turns = [
        trajpack.Turn(range(begin), range(begin, end), [-0.5] * (end - begin))
        for begin, end in GENERATED
    ]
    return trajpack.Trajectory("2+3", turns)


def cell(x: int, y: int, text: str, colour: str) -> str:
    """Return one token, or one value of a mask."""
    ink = INK if colour == GREY else "#ffffff"
    return (
        f'<rect x="{x}" y="{y}" width="{CELL - 4}" height="{HEIGHT}" rx="5" fill="{colour}"/>'
        f'<text x="{x + CELL // 2 - 2}" y="{y + 20}" fill="{ink}" text-anchor="middle">'
        f"{escape(text)}</text>"
    )


def row(label: str, y: int, cells: list[tuple[str, str]]) -> str:
    """Return a labelled row of cells, each a text and a colour."""
    name = f'<text x="{LEFT - 14}" y="{y + 20}" fill="{INK}" text-anchor="end">{label}</text>'
    drawn = [cell(LEFT + CELL * i, y, *each) for i, each in enumerate(cells)]
    return "\n".join([name, *drawn])


def picture() -> str:
    """Return the SVG."""
    trajectory = conversation()
    turns = trajpack.pack([trajectory], layout="turns")
    merged = trajpack.pack([trajectory])
    parts = []
    for number, length in enumerate(turns.seqlens):
        begin = sum(turns.seqlens[:number])
        ids = turns.input_ids[begin : begin + length].tolist()
        trained = turns.loss_mask[begin : begin + length].tolist()
        cells = [
            (WORDS[i], COLOURS[number] if is_trained else GREY)
            for i, is_trained in zip(ids, trained, strict=True)
        ]
        parts.append(row(f"turn {number + 1}", 46 + 40 * number, cells))
    numbers = merged.turn_ids.tolist()  # -1 where not generated
    colours = [COLOURS[number] if number >= 0 else GREY for number in numbers]
    words = [WORDS[i] for i in merged.input_ids.tolist()]
    mask = [str(int(value)) for value in merged.loss_mask.tolist()]
    parts.append(row("input_ids", 226, list(zip(words, colours, strict=True))))
    parts.append(row("loss_mask", 266, list(zip(mask, colours, strict=True))))
    width = LEFT + CELL * merged.num_tokens + 20
    middle = LEFT + CELL * merged.num_tokens // 2
    captions = [
        (LEFT, 30, "start", f"three turns: {turns.num_tokens} tokens, prompts repeat"),
        (middle + 14, 196, "start", "trajpack.pack"),
        (LEFT, 318, "start", f"packed row: {merged.num_tokens} tokens, each stored once"),
    ]  # fmt: skip
    texts = "\n".join(
        f'<text x="{x}" y="{y}" fill="{PALE}" text-anchor="{anchor}">{text}</text>'
        for x, y, anchor, text in captions
    )
    arrow = f'<path d="M{middle} 170 v36 m-7 -8 l7 8 l7 -8" stroke="{PALE}" fill="none"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 336" width="{width}" '
        'height="336" font-family="sans-serif" font-size="14" role="img">\n'
        f'<rect width="{width}" height="336" rx="8" fill="#ffffff"/>\n'
        f"{texts}\n{arrow}\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
