"""What a soak run came to: a table by the minute, curves, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from html import escape
from itertools import pairwise

MIB = 2**20
MIN_SECONDS_TO_JUDGE = 100
"""A process needs a minute to reach its size; of a shorter run nothing is said about memory."""
MAX_GROWTH = 0.02
"""Of its size: what memory may grow over the second half, by a straight line through it.

The first half fills caches, pools and the allocator's arenas. What is left after it is the noise
of pages that come and go with packing and with the log's segments; a leak of a single object of
200 bytes for each episode would be several times as much in ten minutes.
"""


@dataclass(frozen=True)
class Moment:
    """One second of a run."""

    seconds: float
    """Since it began."""
    rss_bytes: int
    num_turns: int
    """So far, like all that are counted."""
    num_episodes: int
    num_failed: int
    num_again: int
    """Attempts that were followed by another."""
    num_faults: int
    num_tasks: int
    """Now, like the next two."""
    num_files: int
    num_threads: int


COLUMNS = tuple(one.name for one in fields(Moment))


@dataclass
class Outcome:
    """What a run came to."""

    moments: list[Moment] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    """Episodes by the cause of their failure."""
    faults: dict[str, int] = field(default_factory=dict)
    """Faults injected, by place and kind."""
    num_started: int = 0
    num_lost: int = 0
    num_doubled: int = 0
    num_logged: int = 0
    num_packed_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    """What must not be, in words."""

    def problems(self) -> list[str]:
        """Return all that is wrong; nothing if the run is good."""
        found = list(self.wrong)
        if self.num_lost or self.num_doubled:
            found.append(f"{self.num_lost} episodes were lost, {self.num_doubled} doubled")
        growth = growth_of(self.moments)
        if growth is not None and growth > MAX_GROWTH:
            found.append(f"memory grew by {growth:.1%} over the second half")
        return found


def growth_of(moments: Sequence[Moment]) -> float | None:
    """Return by how much of its size memory grew over the second half; None if it was short."""
    if not moments or moments[-1].seconds < MIN_SECONDS_TO_JUDGE:
        return None
    half = [one for one in moments if one.seconds >= moments[-1].seconds / 2]
    times, sizes = [one.seconds for one in half], [float(one.rss_bytes) for one in half]
    mean_time, mean_size = sum(times) / len(times), sum(sizes) / len(sizes)
    above = sum((t - mean_time) * (s - mean_size) for t, s in zip(times, sizes, strict=True))
    slope = above / sum((t - mean_time) ** 2 for t in times)
    return slope * (times[-1] - times[0]) / mean_size


def rates(moments: Sequence[Moment], name: str) -> list[float]:
    """Return how much of a counted number each second has added, per second."""
    return [
        (getattr(b, name) - getattr(a, name)) / max(b.seconds - a.seconds, 1e-9)
        for a, b in pairwise(moments)
    ]


def table(outcome: Outcome, interval_s: float = 60.0) -> str:
    """Return a line for each minute, as markdown."""
    lines = [
        "| minute | turns/s | episodes/s | failed | tried again | memory, MiB | tasks | files |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    moments = outcome.moments
    begin = moments[0]
    for index, end in enumerate(moments):
        is_last = index == len(moments) - 1
        if end.seconds - begin.seconds < (1.0 if is_last else interval_s - 0.5):
            continue
        seconds = max(end.seconds - begin.seconds, 1e-9)
        cells = (
            f"{end.seconds / 60:.1f}",
            f"{(end.num_turns - begin.num_turns) / seconds:,.0f}",
            f"{(end.num_episodes - begin.num_episodes) / seconds:,.0f}",
            f"{end.num_failed - begin.num_failed:,}",
            f"{end.num_again - begin.num_again:,}",
            f"{end.rss_bytes / MIB:,.1f}",
            str(end.num_tasks),
            str(end.num_files),
        )
        lines.append(f"| {' | '.join(cells)} |")
        begin = end
    return "\n".join(lines)


def summary(outcome: Outcome) -> str:
    """Return the whole run in a few lines."""
    last = outcome.moments[-1]
    growth = growth_of(outcome.moments)
    flat = "too short to say" if growth is None else f"{growth:+.2%} over the second half"
    causes = ", ".join(f"{cause} {count:,}" for cause, count in sorted(outcome.failed.items()))
    faults = ", ".join(f"{name} {count:,}" for name, count in sorted(outcome.faults.items()))
    return "\n".join(
        [
            f"{last.num_episodes:,} episodes, {last.num_turns:,} turns in {last.seconds:,.0f} s: "
            f"{last.num_turns / last.seconds:,.0f} turns/s",
            f"lost {outcome.num_lost}, doubled {outcome.num_doubled}; logged and read back "
            f"{outcome.num_logged:,}, packed {outcome.num_packed_tokens:,} tokens",
            f"failed for good: {causes or 'none'}",
            f"faults injected: {faults}",
            f"memory: {last.rss_bytes / MIB:,.1f} MiB at the end, {flat}",
        ]
    )


def curves(outcome: Outcome, title: str) -> str:
    """Return memory and throughput over time as an SVG."""
    moments = outcome.moments
    panels: list[tuple[str, Sequence[float], Callable[[float], str]]] = [
        ("memory, MiB", [one.rss_bytes / MIB for one in moments], "{:,.0f}".format),
        ("turns per second", rates(moments, "num_turns"), "{:,.0f}".format),
        ("tasks", [float(one.num_tasks) for one in moments], "{:,.0f}".format),
    ]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 640" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="900" height="640" fill="white"/>',
        f'<text x="60" y="24" font-size="15">{escape(title)}</text>',
    ]
    duration = max(moments[-1].seconds, 1e-9)
    for row, (name, values, shown) in enumerate(panels):
        top, height = 60 + row * 190, 140
        most = max([*values, 1e-9]) * 1.1
        times = [one.seconds for one in moments][-len(values) :]
        points = " ".join(
            f"{60 + 800 * t / duration:.1f},{top + height - height * value / most:.1f}"
            for t, value in zip(times, values, strict=True)
        )
        parts += [
            f'<text x="60" y="{top - 8}">{escape(name)}</text>',
            f'<rect x="60" y="{top}" width="800" height="{height}" fill="none" stroke="#bbb"/>',
            f'<polyline points="{points}" fill="none" stroke="#1f6fb4" stroke-width="1.5"/>',
            f'<text x="54" y="{top + 10}" text-anchor="end">{shown(most)}</text>',
            f'<text x="54" y="{top + height}" text-anchor="end">0</text>',
            f'<text x="860" y="{top + height + 16}" text-anchor="end">{duration:,.0f} s</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
