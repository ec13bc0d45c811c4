"""Other trainers' conventions, restated as loops, beside the options that name them.

The page is docs/credit/systems.md; functions of trainers that are installed are called themselves
in tests/packing/adapters/test_conventions.py.
"""

import ast
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.packing.credit.credit_cases import generated, given_beside, inputs_of, some_trajectories
from trajpack import (
    GAE,
    GRPO,
    GroupEstimator,
    KLPenalty,
    Trajectory,
    Turn,
    pack,
)
from trajpack.kernels import Correction, Rejection, gae, group_advantages, kl_penalty

NUM = 60
ROOT = Path(__file__).parents[2]


def groups_of(rng, largest=8):
    """Scores, and the group of each, in any order; of few values half of the time."""
    sizes = rng.integers(1, largest + 1, int(rng.integers(1, 7)))
    ids = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    few = rng.random() < 0.5
    scores = rng.integers(0, 2, len(ids)) if few else rng.standard_normal(len(ids))
    return scores.astype(np.float32).astype(np.float64), ids, len(sizes)


def packed(scores, ids):
    """One trajectory of one token for each score."""
    trajectories = [
        Trajectory(str(number), [Turn([1], [2], [-0.5], reward=float(score))], group=str(group))
        for number, (score, group) in enumerate(zip(scores, ids, strict=True))
    ]
    return pack(trajectories, device="cpu")


def check_group(rule, loop, estimator):
    """Compare on `NUM` random batches: the kernel, and the estimator of a batch."""
    for seed in range(NUM):
        scores, ids, num_groups = groups_of(np.random.default_rng(seed))
        expected = torch.zeros(len(scores), dtype=torch.float64)
        for group in range(num_groups):
            rows = np.flatnonzero(ids == group)
            expected[rows] = torch.tensor(loop(scores[rows].tolist()), dtype=torch.float64)
        found = group_advantages(
            torch.from_numpy(scores), torch.from_numpy(ids), num_groups=num_groups, **rule
        )
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-6)
        batch = packed(scores, ids).with_advantages(estimator)
        torch.testing.assert_close(generated(batch, batch.advantages), found, rtol=1e-6, atol=1e-7)


def nemo_rl_grpo(scores):
    """GRPOAdvantageEstimator with its defaults: others' mean, others' deviation where above 0."""
    found = []
    for index, score in enumerate(scores):
        others = scores[:index] + scores[index + 1 :]
        if not others:
            found.append(0.0)
            continue
        mean = sum(others) / len(others)
        variance = sum((other - mean) ** 2 for other in others)
        if len(others) > 1 and variance > 1e-20:
            found.append((score - mean) / (math.sqrt(variance / (len(others) - 1)) + 1e-6))
        else:  # of one other 0 · ∞ is taken for 0
            found.append(score - mean)
    return found


def test_nemo_rls_default_grpo():
    rule = {"baseline": "leave_one_out", "scale": "leave_one_out_std", "singleton": "zero"}
    check_group(rule, nemo_rl_grpo, GRPO(**rule))


def nemo_rl_grpo_without_leaving_out(scores):
    """The same with ``use_leave_one_out_baseline=False``."""
    mean = sum(scores) / len(scores)
    variance = sum((score - mean) ** 2 for score in scores)
    if len(scores) == 1 or variance < 1e-20:
        return [0.0] * len(scores)
    return [(score - mean) / (math.sqrt(variance / (len(scores) - 1)) + 1e-6) for score in scores]


def test_nemo_rls_grpo_by_the_mean_of_all():
    check_group({"singleton": "zero"}, nemo_rl_grpo_without_leaving_out, GRPO(singleton="zero"))


def test_prime_rls_maxrl_is_zero_where_the_mean_is_not_positive():
    def loop(scores):
        mean = sum(scores) / len(scores)
        return [0.0 if mean <= 0 else (score - mean) / mean for score in scores]

    check_group({"scale": "mean", "singleton": "zero"}, loop, GroupEstimator("max_rl"))


def test_nemo_rls_reinforce_plus_plus_with_a_baseline_is_as_the_pages_say():
    named = re.compile(
        r"NeMo-RL[^`|]*`GroupEstimator\(\"reinforce_plus_plus_baseline\", ([^`]*)\)`"
    )
    pages = [ROOT / "docs" / "credit" / name for name in ("systems.md", "groups.md")]
    (given,) = {argument for page in pages for argument in named.findall(page.read_text())}
    estimator = GroupEstimator(
        "reinforce_plus_plus_baseline",
        **{name: ast.literal_eval(of) for name, of in re.findall(r"(\w+)=([^,]+)", given)},
    )
    num_alone = 0
    for seed in range(NUM):
        trajectories = some_trajectories(12, 6, seed)
        batch = pack(trajectories, device="cpu")
        groups = {}
        for index, one in enumerate(trajectories):
            groups.setdefault(index if one.group is None else one.group, []).append(index)
        rows = []
        for index, one in enumerate(trajectories):
            own = next(members for members in groups.values() if index in members)
            scores = [sum(t.reward for t in trajectories[i].turns) for i in own]
            above = sum(t.reward for t in one.turns) - sum(scores) / len(scores)
            rows += [above] * sum(len(turn.completion_ids) for turn in one.turns)
        mean = sum(rows) / len(rows)
        variance = max(sum((row - mean) ** 2 for row in rows) / len(rows), 1e-8)
        expected = torch.tensor([(row - mean) / math.sqrt(variance) for row in rows])
        found = generated(batch, batch.with_advantages(estimator).advantages)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        num_alone += any(len(own) == 1 for own in groups.values())
    assert num_alone > NUM / 4


def conversations(rng):
    """Trajectories that are one sequence each; some end with an observation."""
    found = []
    for number in range(int(rng.integers(1, 5))):
        said, turns = [1], []
        for _ in range(int(rng.integers(2, 5))):
            said = said + rng.integers(2, 9, int(rng.integers(0, 4))).tolist()
            size = int(rng.integers(0 if turns else 1, 5))
            completion = rng.integers(2, 9, size).tolist()
            turns.append(Turn(said, completion, (-rng.random(size)).tolist()))
            said = said + completion
        turns[-1] = Turn(said, [], [], reward=float(rng.integers(-2, 3)))
        found.append(Trajectory(str(number), turns))
    return found


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_slimes_ppo_charges_the_penalty_to_observations_too(estimator):
    """Ours charges what was generated alone; with rewards of one's own both can be had."""
    num_other = 0
    for seed in range(NUM):
        rng = np.random.default_rng(seed)
        batch = pack(conversations(rng), device="cpu")
        values, logprobs, refs = (
            torch.from_numpy(rng.standard_normal(batch.num_tokens)).float() for _ in range(3)
        )
        kl = kl_penalty(logprobs, refs, estimator=estimator, clamp=None)
        scores = batch.turn_rewards[batch.cu_turns[1:].long() - 1].float()
        last = batch.cu_seqlens[1:].long() - 1
        rewards = (-0.1 * kl).index_add(0, last, scores)
        advantages, returns = gae(
            rewards, values, batch.cu_seqlens, gamma=0.99, lam=0.9, loss_mask=batch.loss_mask,
            observation="ignore",
        )  # fmt: skip
        every = torch.zeros(batch.num_tokens, dtype=torch.float64)
        masked = torch.zeros(batch.num_tokens, dtype=torch.float64)
        for number, (begin, end) in enumerate(
            zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
        ):
            mask = batch.loss_mask[begin:end].tolist()
            for out, charged in ((every, [True] * len(mask)), (masked, mask)):
                running = following = 0.0
                paid = len(mask) - 1 if out is every else max(np.flatnonzero(mask))
                for place in reversed(range(mask.index(True), len(mask))):
                    token = begin + place
                    reward = -0.1 * float(kl[token]) if charged[place] else 0.0
                    reward += float(scores[number]) if place == paid else 0.0
                    delta = reward + 0.99 * following - float(values[token])
                    running = delta + 0.99 * 0.9 * running
                    following = float(values[token])
                    out[token] = running if mask[place] else 0.0
        torch.testing.assert_close(advantages.double(), every, rtol=1e-5, atol=1e-5)
        expected = torch.where(batch.loss_mask, every + values, 0.0)
        torch.testing.assert_close(returns.double(), expected, rtol=1e-5, atol=1e-5)
        penalized = GAE(0.99, 0.9, "ignore", kl=KLPenalty(0.1, estimator, clamp=None))
        own = batch.with_advantages(penalized, values, refs, logprobs=logprobs).advantages
        torch.testing.assert_close(own.double(), masked, rtol=1e-5, atol=1e-5)
        num_other += not torch.allclose(every, masked, atol=1e-4)
    assert num_other > NUM / 2


def test_nemo_rls_seq_mask_tis_keeps_the_ratios_of_tokens():
    """It is no `Correction.mis`, which would weigh with the ratio of the segment."""
    num_other = 0
    for seed in range(250):
        trajectories = some_trajectories(10, 6, seed)
        batch = pack(trajectories, device="cpu")
        inputs = inputs_of(batch, GAE(kl=KLPenalty(0.1)), given_beside(trajectories, seed))
        wanted = batch.rollout_logprobs + 0.2 * (1 + inputs["logprobs"])
        logprobs = torch.where(batch.loss_mask, wanted, 0.0)
        expected, rows = [], []
        differences = (logprobs - batch.rollout_logprobs).double()
        for begin, end in batch.turn_spans.tolist():
            rows.append(differences[begin:end].tolist())
        for first, last in zip(batch.cu_turns[:-1], batch.cu_turns[1:], strict=True):
            own = [number for row in rows[int(first) : int(last)] for number in row]
            stays = bool(own) and 0.9 <= math.exp(sum(own) / len(own)) <= 1.2
            expected += [math.exp(number) if stays else 0.0 for number in own]
        rule = Correction(outside="keep", rejection=Rejection(0.9, 1.2))
        found = generated(batch, batch.importance_weights(logprobs, rule)[0])
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)
        mis = Correction.mis(0.9, 1.2, level="geometric")
        other = generated(batch, batch.importance_weights(logprobs, mis)[0])
        num_other += not torch.allclose(other, found, atol=1e-4)
    assert num_other > 200
