"""Batches for the tests of formats made of rows, and rows made of them one token at a time."""

from trajpack import Trajectory, Turn, pack


def conversation(name, num_turns=2, first=10, **labels):
    """Return turns of which each prompt repeats all before and then observes two tokens."""
    heard, turns = [first, first + 1], []
    for turn in range(num_turns):
        said = [100 + 10 * turn + token for token in range(turn + 1)]
        logprobs = [-0.5 - token / 8 - turn for token in range(turn + 1)]
        turns.append(
            Turn(heard, said, logprobs, reward=1.0 + turn, version_start=turn, version_end=turn)
        )
        heard = [*heard, *said, 7, 8]
    return Trajectory(name, turns, **labels)


def plain_batch(**options):
    """Return a batch of which each trajectory is one sequence, of different lengths."""
    trajectories = [
        conversation("a", 2, group="task"),
        conversation("b", 1, group="task"),
        conversation("c", 3),
    ]
    return pack(trajectories, **options)


def forked_batch(**options):
    """Return a batch with a rewritten history, a completion of nothing and a truncated turn."""
    forked = Trajectory(
        "forked",
        [
            Turn([1, 2], [3, 4], [-0.5, -0.25], 1.0, version_start=3, version_end=4),
            Turn([1, 2, 3, 4, 5], [], [], 2.0, version_start=4, version_end=4),
            Turn([9, 9], [6], [-2.0], 4.0, truncated=True, version_start=5, version_end=5),
            Turn([1, 2, 3, 4, 5, 8], [7], [-1.0], 8.0, version_start=5, version_end=6),
        ],
        "task",
    )
    silent = Trajectory("silent", [Turn([1, 2, 3], [], [], 16.0)], "task")
    return pack([forked, silent, conversation("long", 3)], **options)


def rows_by_loop(batch):
    """Return prompt, response and the response's mask and log-probabilities of each sequence."""
    rows, begin = [], 0
    for length in batch.seqlens:
        of = slice(begin, begin + length)
        ids, mask = batch.input_ids[of].tolist(), batch.loss_mask[of].tolist()
        split = mask.index(True) if True in mask else length
        logprobs = batch.rollout_logprobs[of].tolist()
        rows.append((ids[:split], ids[split:], mask[split:], logprobs[split:]))
        begin += length
    return rows


def padded(values, width, value, side="right"):
    """Return a list brought to ``width``."""
    filling = [value] * (width - len(values))
    return [*filling, *values] if side == "left" else [*values, *filling]
