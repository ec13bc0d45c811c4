"""Other ways to generalized advantages: loops over columns, time or tokens; chunks of a matmul."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

GAMMA, LAM = 0.99, 0.95
CHUNK = 128
TOO_UNEVEN = "not run: it pads to the longest sequence, and takes 25 s and more"


def is_too_uneven(lengths):
    """Return whether padding to the longest sequence takes a rival too long."""
    return lengths.max() > 10 * lengths.mean() and lengths.sum() > 1_000_000


def last_tokens(cu_seqlens):
    """Return True at each sequence's last token, bool ``[tokens, 1]``: torchrl's ``done``."""
    done = torch.zeros(int(cu_seqlens[-1]), 1, dtype=torch.bool, device=cu_seqlens.device)
    done[cu_seqlens[1:].long() - 1] = True
    return done


class Rows:
    """Packed to padded rows and back; views, where all sequences are as long."""

    def __init__(self, lengths, device="cpu"):
        self.shape = len(lengths), max(int(lengths.max()), 1)
        self.mask = None
        if int(lengths.min()) != self.shape[1]:
            lengths = torch.as_tensor(lengths, device=device)
            self.mask = torch.arange(self.shape[1], device=device) < lengths[:, None]

    def padded(self, packed):
        if self.mask is None:
            return packed.view(self.shape)
        rows = packed.new_zeros(self.shape)
        rows[self.mask] = packed
        return rows

    def packed(self, rows):
        return rows.reshape(-1) if self.mask is None else rows[self.mask]


def generated_lengths(generated, lengths):
    """Return how many tokens of each sequence were generated."""
    kept = np.append(0, np.cumsum(generated.cpu().numpy()))
    ends = np.cumsum(lengths)
    return kept[ends] - kept[ends - lengths]


def taken_out(way, rewards, values, generated):
    """Return a way that takes the generated tokens out, goes on with them, and puts them back."""
    if generated is None:
        return lambda: way(rewards, values)

    def work():
        both = []
        for kept in way(rewards[generated], values[generated]):
            result = torch.zeros_like(rewards)
            result[generated] = kept
            both.append(result)
        return both

    return work


def over_columns(rows, given):
    """Return verl's way: a step for each column of ``[sequences, time]``, ten operations each."""
    rewards, values, _, generated = given
    counted = torch.ones_like(rewards) if generated is None else generated.float()
    mask = rows.padded(counted)

    def work():
        reward, value = rows.padded(rewards), rows.padded(values)
        later, passed, found = 0.0, 0.0, []
        for time in reversed(range(reward.shape[1])):
            here = mask[:, time]
            delta = reward[:, time] + GAMMA * later - value[:, time]
            fresh = delta + GAMMA * LAM * passed
            later = value[:, time] * here + (1 - here) * later
            passed = fresh * here + (1 - here) * passed
            found.append(passed)
        advantages = torch.stack(found[::-1], dim=1)
        return rows.packed(advantages), rows.packed(advantages + value)

    return work


def differences(reward, value):
    """Return ``r + γ·v' - v`` of rows; padding is 0, and so is what follows the last."""
    later = torch.nn.functional.pad(value[:, 1:], (0, 1))
    return torch.add(reward - value, later, alpha=GAMMA)


def over_time(rows):
    """Return a way with all differences made at once, then one operation for each column."""

    def work(rewards, values):
        value = rows.padded(values)
        walked = differences(rows.padded(rewards), value).T.contiguous()
        for time in range(len(walked) - 2, -1, -1):
            walked[time].add_(walked[time + 1], alpha=GAMMA * LAM)
        advantages = rows.packed(walked.T)
        return advantages, advantages + values

    return work


def by_chunks(rows):
    """Return slime's way: a product with powers of γλ within chunks, then chunk after chunk."""

    def work(rewards, values):
        step = torch.arange(CHUNK, device=rewards.device)
        apart = (step - step[:, None]).float()
        powers = (GAMMA * LAM) ** apart.clamp(min=0) * (apart >= 0)
        backward = differences(rows.padded(rewards), rows.padded(values)).flip(1)
        width = backward.shape[1]
        chunks = torch.nn.functional.pad(backward, (0, -width % CHUNK))
        sums = chunks.view(len(backward), -1, CHUNK) @ powers
        fading = (GAMMA * LAM) ** (step + 1).float()
        for chunk in range(1, sums.shape[1]):
            sums[:, chunk] += sums[:, chunk - 1, -1:] * fading
        advantages = rows.packed(sums.reshape(len(backward), -1)[:, :width].flip(1))
        return advantages, advantages + values

    return work


def by_loop(given):
    """Return a walk of each sequence from its end, over Python floats: one thread's way."""
    rewards, values, cu_seqlens, generated = given

    def work():
        advantages, value = rewards.tolist(), values.tolist()
        mask = None if generated is None else generated.tolist()
        for begin, end in pairwise(cu_seqlens.tolist()):
            later = passed = 0.0
            for index in range(end - 1, begin - 1, -1):
                if mask is None or mask[index]:
                    delta = advantages[index] + GAMMA * later - value[index]
                    passed = delta + GAMMA * LAM * passed
                    later = value[index]
                advantages[index] = passed
        found = torch.tensor(advantages)
        return found, found + values

    return work
