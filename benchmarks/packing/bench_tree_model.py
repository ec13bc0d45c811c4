"""A small Hugging Face model on trees and on rows: forward and backward, gradients compared.

One thread, processor time, so that other work on the machine counts little. Rows run one by one,
each by a call without a mask, and add their gradients up. The last lines of the table say what was
shared, and which part of the token ratio came out as speed. Asserted is `LEAST` of it over separate
turns, but for little work.
"""

from functools import partial
from itertools import pairwise

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.contest import OURS, Contender, Contest, as_record, processor_clock, race
from benchmarks.packing import bench_tree
from benchmarks.workloads import single_turns
from trajpack import Trajectory, Turn, pack, pack_tree
from trajpack.kernels import token_logprobs
from trajpack.packing.adapters.huggingface import register_tree_attention
from trajpack.packing.tree_attention.attention import TreeAttention
from trajpack.testing import random_trajectory

JOB = "forward and backward of a model on trees"
MERGED, TURNS = f"{OURS}, rows of layout merged", f"{OURS}, a row for each turn"
VOCABULARY, HEADS = 1024, 4
LEAST = 0.55
"""Speed-up over separate turns, by the token ratio."""
LONG = {"rounds": 3, "seconds": 60.0, "slow": 60.0}
"""Every contender has a warm-up and three rounds."""
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64}


def conversation(num_turns):
    """Return a conversation whose prompts hold all that came before."""
    lengths = {"prompt": (5, 15), "completion": (10, 30), "vocabulary": VOCABULARY}
    generator = np.random.default_rng(15)
    return [random_trajectory(generator, "0", num_turns=num_turns, **lengths)]


def answers(scale):
    """Return 20 answers of 8 tokens to a prompt of 40: little work."""
    generator = np.random.default_rng(14)
    prompt = bench_tree.drawn(generator, max(1, round(40 * scale)))
    turns = [bench_tree.turn_of(generator, prompt, max(1, round(8 * scale))) for _ in range(20)]
    return [Trajectory(str(index), [turn]) for index, turn in enumerate(turns)]


LITTLE = "20 answers of 8 tokens"
WORKLOADS = {
    "a group of 16, long prompt": lambda scale: bench_tree.groups(scale / 8)[:16],
    "a conversation of 32 turns": lambda scale: conversation(max(1, round(32 * scale))),
    "thinking stripped": lambda scale: bench_tree.stripped(scale / 8)[:1],
    "compaction": lambda scale: bench_tree.compacted(scale / 16)[:1],
    "nothing shared": lambda scale: single_turns(np.full(8, max(2, round(256 * scale)))),
    LITTLE: answers,
}


def within_vocabulary(trajectories):
    return [
        Trajectory(
            one.id,
            [
                Turn(
                    turn.prompt_ids % VOCABULARY,
                    turn.completion_ids % VOCABULARY,
                    turn.completion_logprobs,
                )
                for turn in one.turns
            ],
        )
        for one in trajectories
    ]


def small_model():
    torch.manual_seed(0)
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **SIZES, **heads)).train()


def hidden_of(model, **inputs):
    return model.model(**inputs).last_hidden_state[0]


def losses_of_tree(model, batch):
    """Yield the loss of all entries."""
    hidden = hidden_of(model, **batch.model_inputs())
    yield -(batch.logprobs(hidden, model.lm_head.weight) * batch.rollout_logprobs).sum()


def losses_of_rows(model, batch):
    """Yield the loss of each sequence."""
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        ids, generated = batch.input_ids[begin:end], batch.loss_mask[begin:end].nonzero()[:, 0]
        if len(generated):
            hidden = hidden_of(model, input_ids=ids[None], use_cache=False)
            head = model.lm_head.weight
            logprobs = token_logprobs(hidden, head, generated - 1, ids[generated])
            yield -(logprobs * batch.rollout_logprobs[begin:end][generated]).sum()


def gradients(attention, model, losses, batch):
    """Return the sum of losses and of their gradients of all weights."""
    register_tree_attention()
    model.set_attn_implementation(attention)
    model.zero_grad()
    total = torch.zeros(())
    for loss in losses(model, batch):
        loss.backward()
        total += loss.detach()
    return torch.cat([total[None], *(weight.grad.reshape(-1) for weight in model.parameters())])


def contest(workload, scale=1.0):
    """Return the contest, its contenders, and a function that returns `facts` of the workload."""
    trajectories = within_vocabulary(WORKLOADS[workload](scale))
    tree, merged, turns = pack_tree(trajectories), pack(trajectories), pack(trajectories, "turns")
    model, first = small_model(), []

    def agrees(got):
        first.append(first[0] if first else got)
        distance = float((got - first[0]).norm() / first[0].norm())
        assert distance < 1e-5, f"gradients differ by {distance:.1e}"

    def of_rows(batch):
        return partial(gradients, "sdpa", model, losses_of_rows, batch)

    nodes = f"{tree.num_nodes:,}"
    entrants = [
        Contender(TURNS, of_rows(turns), f"{turns.num_tokens:,}"),
        Contender(MERGED, of_rows(merged), f"{merged.num_tokens:,}"),
        Contender(OURS, partial(gradients, "trajpack_tree", model, losses_of_tree, tree), nodes),
    ]
    held = Contest(JOB, workload, turns.num_tokens, agrees, clock=processor_clock, **LONG)
    return held, entrants, partial(facts, tree, merged, turns)


def facts(tree, merged, turns):
    """Return numbers of a workload, by their names in the table."""
    calls = TreeAttention(tree.tree_end, tree.position_ids).calls(None, torch.float32)
    theirs = bench_tree.with_tree_row(merged)["tree_kv_index"] if bench_tree.has_trl() else None
    return {
        "tokens of turns / of layout merged, by nodes": (
            f"{turns.num_tokens / tree.num_nodes:.2f} / {merged.num_tokens / tree.num_nodes:.2f}"
        ),
        "rows of the LM head: nodes / turns": f"{tree.num_trained:,} / {tree.num_entries:,}",
        "bytes of masks: tree_end / ours / all pairs": (
            f"{4 * tree.num_nodes:,} / {sum(call.mask.nbytes for call in calls):,} / "
            f"{4 * tree.num_nodes**2:,}"
        ),
        "K/V rows that are gathered a layer: ours / TRL's": (
            f"{sum(len(call.keys) for call in calls):,} / "
            f"{'-' if theirs is None else f'{len(theirs):,}'}"
        ),
    }


def share_of_ratio(record, slow, ratio):
    """Return how many times as fast the tree was as rows, by their tokens for each node."""
    best = {entry["contender"]: entry["best_ms"] for entry in record["entries"]}
    return best[slow] / best[OURS] / ratio


def bench_models_of_trees(keep):
    records, missed = [], []
    for workload in WORKLOADS:
        held, entrants, facts_of = contest(workload)
        record, said = as_record(held, race(held, entrants)), facts_of()
        counted = [int(one.wrote.replace(",", "")) for one in entrants[:3]]
        of_turns, of_merged = (
            share_of_ratio(record, slow, tokens / counted[2])
            for slow, tokens in zip((TURNS, MERGED), counted, strict=False)
        )
        said["speed-up by token ratio, over turns / merged"] = f"{of_turns:.2f} / {of_merged:.2f}"
        record["facts"] = said
        records.append(record)
        keep(record)
        if of_turns < LEAST and workload != LITTLE:
            missed.append(f"{workload}: {of_turns:.2f} of the token ratio over separate turns")
    bench_tree.join_wrote(records)
    assert not missed, "; ".join(missed)
