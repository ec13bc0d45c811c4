"""Items of `make hardware` that run models: trees beside rows, and a training step."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.hardware_items import Row, Setting, guarded, in_turn
from benchmarks.packing import bench_tree
from benchmarks.workloads import many_turns, multi_turn
from trajpack import PackedBatch, Trajectory, TreeBatch, pack, pack_tree
from trajpack.kernels import token_logprobs
from trajpack.packing.adapters.huggingface import register_tree_attention
from trajpack.packing.tree_attention.attention import TreeAttention

CAPACITY = 16_384
"""Tokens of a micro-batch of rows; trees of models have at most about as many nodes."""
LAYER: dict[str, Callable[[], list[Trajectory]]] = {
    "groups of 16, long prompt": bench_tree.groups,
    bench_tree.LONG: lambda: many_turns(32),
    "thinking stripped": lambda: bench_tree.stripped()[:4],
    "compaction": lambda: bench_tree.compacted()[:4],
    bench_tree.NOTHING: lambda: multi_turn(32),
}
"""Trajectories for one layer, at most 1.2 million tokens as turns."""
STACK: dict[str, Callable[[], list[Trajectory]]] = {
    "groups of 16, long prompt": lambda: bench_tree.groups(0.5)[:16],
    bench_tree.LONG: lambda: many_turns(4),
    "thinking stripped": lambda: bench_tree.stripped(0.5)[:1],
    "compaction": lambda: bench_tree.compacted(0.5)[:1],
    bench_tree.NOTHING: lambda: multi_turn(2),
}
"""Trajectories for a model, at most 125,000 tokens as turns."""
TINY: dict[str, Callable[[], list[Trajectory]]] = {
    "groups of 16, long prompt": lambda: bench_tree.groups(0.005)[:4],
    "compaction": lambda: bench_tree.compacted(0.003)[:1],
}
QWEN = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
"""Qwen3-0.6B."""
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32_000}


class Rows(NamedTuple):
    """Sequences one after another."""

    ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    longest: int
    trained: torch.Tensor
    """True where a token counts in the loss."""


def cut(batch: PackedBatch, capacity: int, device: str) -> list[Rows]:
    """Return the sequences of a batch as micro-batches of at most ``capacity`` tokens, if any."""
    bounds, found, begin = batch.cu_seqlens.tolist(), [], 0
    for end in range(1, len(bounds)):
        is_last = end == len(bounds) - 1
        if is_last or bounds[end + 1] - bounds[begin] > capacity:
            own = torch.tensor(bounds[begin : end + 1], dtype=torch.int32) - bounds[begin]
            tokens = slice(bounds[begin], bounds[end])
            tensors = (batch.input_ids[tokens], batch.position_ids[tokens], own)
            longest, trained = int(own.diff().max()), batch.loss_mask[tokens]
            sent = (one.to(device) for one in tensors)
            found.append(Rows(*sent, longest, trained.to(device)))
            begin = end
    return found


# --- attention over rows


def _by_sequence(query: Any, key: Any, value: Any, cu_seqlens: Any, longest: int) -> Any:
    """Attend sequence by sequence: the reference."""
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(one.split(lengths) for one in (query, key, value)), strict=True)
    gqa = query.shape[1] != key.shape[1]
    return torch.cat(
        [
            scaled_dot_product_attention(
                *(one.transpose(0, 1)[None] for one in part), is_causal=True, enable_gqa=gqa
            )[0].transpose(0, 1)
            for part in parts
        ]
    )


def _varlen(query: Any, key: Any, value: Any, cu_seqlens: Any, longest: int) -> Any:
    """Call torch's own variable-length flash attention, whose arguments differ by version."""
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    options: Row = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)


def _expanded(attend: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
    """Attend with as many heads of keys and values as of queries."""
    times = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(times, 1) for one in (key, value))
    return attend(query, key, value, *rest)


WAYS: dict[str, Callable[..., Any]] = {
    "varlen_attn": _varlen,
    "varlen_attn, heads repeated": partial(_expanded, _varlen),
    "sequence by sequence": _by_sequence,
}


def attention_of_rows(device: str) -> Iterator[tuple[Callable[..., Any], Row]]:
    """Yield the first way that gives the result and the gradients of the reference, and a row."""
    bounds = torch.tensor([0, 5, 17, 64], dtype=torch.int32, device=device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    given = [torch.randn(64, heads, 64, device=device).to(dtype) for heads in (4, 2, 2)]
    leaves = [one.requires_grad_() for one in given]

    def results(attend: Callable[..., Any]) -> list[torch.Tensor]:
        attended = attend(*leaves, bounds, 47)
        return [attended, *torch.autograd.grad(attended.float().square().sum(), leaves)]

    wanted, notes = results(_by_sequence), {}
    for name, way in WAYS.items():
        try:
            for one, other in zip(results(way), wanted, strict=True):
                assert (one - other).norm() < 2e-2 * other.norm(), "another result"
        except Exception as error:  # noqa: BLE001 - versions of torch differ
            notes[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        yield way, {"attention of rows": name, "failed": notes}
        return


# --- trees


def trees(setting: Setting) -> Iterator[Row]:
    """Attention of one layer, then a model's stack: trees, merged rows and turns."""
    for attend, row in attention_of_rows(setting.device):
        yield row
        yield from layer(setting, attend)
        yield from stack(setting, attend)


def layer(setting: Setting, attend: Callable[..., Any]) -> Iterator[Row]:
    """Forward and backward of the attention of 8 heads of 128."""
    from trajpack.packing.tree_attention.flex import block_mask  # imports Dynamo

    device = setting.device
    dtype, size = (torch.float32, 16) if setting.rehearse else (torch.bfloat16, 128)

    def drawn(*shape: int) -> list[torch.Tensor]:
        return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]

    def both(leaves: Sequence[torch.Tensor], call: Callable[..., Any]) -> Any:
        attended = call(*leaves)
        return torch.autograd.grad(attended, leaves, torch.ones_like(attended))

    def of_tree(trajectories: list[Trajectory]) -> Iterator[Row]:
        tree = pack_tree(trajectories, device=device)
        leaves = drawn(1, 8, tree.num_nodes, size)
        ends, depths = tree.tree_end, tree.position_ids
        yield from in_turn({"block mask": partial(block_mask, ends, depths)}, device)
        attention = TreeAttention(ends, depths)
        begin = time.perf_counter()
        both(leaves, attention)
        if device == "cuda":
            torch.cuda.synchronize()
        first = {"tokens": tree.num_nodes, "first_s": time.perf_counter() - begin}
        for row in in_turn({"tree": partial(both, leaves, attention)}, device):
            yield first | row

    def of_rows(trajectories: list[Trajectory], layout: Any) -> Iterator[Row]:
        (rows,) = cut(pack(trajectories, layout), 2**40, device)
        leaves = drawn(len(rows.ids), 8, size)
        call = partial(attend, cu_seqlens=rows.cu_seqlens, longest=rows.longest)
        for row in in_turn({layout: partial(both, leaves, call)}, device):
            yield {"tokens": len(rows.ids)} | row

    for name, made in (TINY if setting.rehearse else LAYER).items():
        trajectories = made()
        said = {"workload": name, "model": "one layer"}
        yield from guarded(said, of_tree(trajectories))
        for layout in ("merged", "turns"):
            yield from guarded(said | {"way": layout}, of_rows(trajectories, layout))
    yield from guarded({"model": "one layer"}, apart(device))


def apart(device: str) -> Iterator[Row]:
    """Yield how far trees and plain torch are apart, of float32 on a small tree."""
    tree = pack_tree(bench_tree.compacted(0.1)[:2], device=device)
    leaves = [torch.randn(1, 8, tree.num_nodes, 64, device=device) for _ in range(3)]
    found, wanted = (
        TreeAttention(tree.tree_end, tree.position_ids, backend)(*leaves)
        for backend in ("auto", "path")
    )
    yield {"way": "path", "most_apart": float((found - wanted).abs().max())}


class Model:
    """A Qwen3 model with random weights, and its attention over rows."""

    def __init__(self, setting: Setting, attend: Callable[..., Any], **sizes: int) -> None:
        from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

        register_tree_attention()
        AttentionInterface.register("rows", self._attend_rows)
        self.device, self.attend, self.rows = setting.device, attend, None
        config = Qwen3Config(**(SMALL if setting.rehearse else QWEN | sizes))
        torch.manual_seed(0)
        with torch.device(setting.device):
            self.model: Any = Qwen3ForCausalLM(config)
        self.model.to(torch.float32 if setting.rehearse else torch.bfloat16).train()

    def _attend_rows(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
    ) -> Any:
        rows: Any = self.rows
        given = (one[0].transpose(0, 1) for one in (query, key, value))
        return self.attend(*given, rows.cu_seqlens, rows.longest)[None], None

    def of_rows(self, rows: Rows) -> torch.Tensor:
        """Return the hidden states of rows."""
        self.rows = rows
        return self._hidden("rows", input_ids=rows.ids[None], position_ids=rows.positions[None])

    def of_padded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of padded rows, one behind another."""
        return self._hidden("sdpa", input_ids=ids)

    def of_tree(self, tree: TreeBatch) -> torch.Tensor:
        """Return the hidden states of nodes."""
        return self._hidden("trajpack_tree", **tree.model_inputs())

    def _hidden(self, attention: str, **inputs: Any) -> torch.Tensor:
        self.model.set_attn_implementation(attention)
        hidden = self.model.model(**{"use_cache": False} | inputs).last_hidden_state
        return hidden.flatten(0, 1)

    def timed(self, steps: Sequence[Callable[[], torch.Tensor]]) -> Iterator[Row]:
        """Yield the milliseconds of forward and backward of all micro-batches, after the first."""
        times: list[float] = []
        begin = time.perf_counter()
        steps[0]().backward()  # compiles
        self._wait()
        first_s = time.perf_counter() - begin
        total = 0.0
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            self.model.zero_grad()
            self._wait()
            begin = time.perf_counter()
            losses = []
            for step in steps:
                loss = step()
                loss.backward()
                losses.append(loss.detach())
            self._wait()
            times.append(1e3 * (time.perf_counter() - begin))
            total = float(torch.stack(losses).double().sum())
        row = {"ms": times, "first_s": first_s, "loss": total, "micro_batches": len(steps)}
        if self.device == "cuda":
            row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        self.model.zero_grad()
        yield row

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def stack(setting: Setting, attend: Callable[..., Any]) -> Iterator[Row]:
    """Forward and backward of a model without its head; the loss is that of trained tokens."""
    model, device = Model(setting, attend, vocab_size=32_000), setting.device

    def of_rows(rows: Rows) -> torch.Tensor:
        return (model.of_rows(rows).float().mean(1) * rows.trained).sum() / 1000

    def of_tree(tree: TreeBatch) -> torch.Tensor:
        return (model.of_tree(tree).float().mean(1) * _times_trained(tree)).sum() / 1000

    for name, made in (TINY if setting.rehearse else STACK).items():
        trajectories = made()
        tree = pack_tree(trajectories, device=device)
        ways: dict[str, tuple[int, Any, Sequence[Any]]] = {
            "tree": (tree.num_nodes, of_tree, [tree])
        }
        for layout in ("merged", "turns"):
            batch = pack(trajectories, layout)
            ways[layout] = (batch.num_tokens, of_rows, cut(batch, CAPACITY, device))
        for way, (tokens, loss, pieces) in ways.items():
            said = {"workload": name, "model": "a stack", "way": way, "tokens": tokens}
            yield from guarded(said, model.timed([partial(loss, one) for one in pieces]))


# --- a step


def step(setting: Setting) -> Iterator[Row]:
    """Time a step with the LM head: padded, turns, merged and tree; all rows or trained ones."""
    for attend, row in attention_of_rows(setting.device):
        yield row
        model, device = Model(setting, attend, num_hidden_layers=8), setting.device
        every = TINY if setting.rehearse else {name: STACK[name] for name in STACK if name in TINY}
        for name, made in every.items():
            trajectories = made()
            tree = pack_tree(trajectories, device=device)
            turns = pack(trajectories, "turns")
            rectangles = padded(turns, CAPACITY, device)
            room = sum(ids.numel() for ids, _ in rectangles)
            steps: dict[str, tuple[int, Any, Sequence[Any]]] = {
                "tree": (tree.num_nodes, _loss_of_tree, [tree]),
                "padded": (room, _loss_of_padded, rectangles),
            }
            for layout, batch in (("merged", pack(trajectories)), ("turns", turns)):
                steps[layout] = (batch.num_tokens, _loss_of_rows, cut(batch, CAPACITY, device))
            for way, (tokens, loss, pieces) in steps.items():
                for trained in (True, False):
                    said = {"workload": name, "way": way, "tokens": tokens, "trained": trained}
                    calls = [partial(loss, model, one, trained) for one in pieces]
                    yield from guarded(said, model.timed(calls))


def padded(
    batch: PackedBatch, capacity: int, device: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids and trained places of padded rows of similar length, as micro-batches."""
    lengths = batch.cu_seqlens.diff().tolist()
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    ids, masks = batch.input_ids.split(lengths), batch.loss_mask.split(lengths)
    pad = torch.nn.utils.rnn.pad_sequence
    found = []
    while order:
        count = max(1, capacity // lengths[order[0]])
        chosen, order = order[:count], order[count:]
        both = (pad([rows[i] for i in chosen], batch_first=True) for rows in (ids, masks))
        found.append(tuple(one.to(device) for one in both))
    return found


def _loss_of(
    model: Model, hidden: Any, ids: Any, counted: Any, trained: bool, after: Any
) -> torch.Tensor:
    """Return the loss of tokens that follow another, from the row before; trained ones or all."""
    chosen = (counted & after if trained else after).nonzero()[:, 0]
    head = model.model.lm_head.weight
    logprobs = token_logprobs(hidden, head, chosen - 1, ids[chosen])
    return -(logprobs * counted[chosen]).sum() / 1000


def _loss_of_rows(model: Model, rows: Rows, trained: bool) -> torch.Tensor:
    after = rows.positions > 0
    return _loss_of(model, model.of_rows(rows), rows.ids, rows.trained, trained, after)


def _loss_of_padded(model: Model, given: Any, trained: bool) -> torch.Tensor:
    ids, counted = given
    after = torch.ones_like(counted)
    after[:, 0] = False
    hidden = model.of_padded(ids)
    return _loss_of(model, hidden, ids.flatten(), counted.flatten(), trained, after.flatten())


def _loss_of_tree(model: Model, tree: TreeBatch, trained: bool) -> torch.Tensor:
    hidden, head = model.of_tree(tree), model.model.lm_head.weight
    if trained:
        return -tree.logprobs(hidden, head).sum() / 1000
    nodes = (tree.tree_parent >= 0).nonzero()[:, 0]
    logprobs = token_logprobs(hidden, head, tree.tree_parent[nodes], tree.input_ids[nodes])
    return -(logprobs * _times_trained(tree)[nodes]).sum() / 1000


def _times_trained(tree: TreeBatch) -> torch.Tensor:
    """Return how often the token of each node counts in the loss, ``[nodes]``."""
    times = torch.zeros(tree.num_nodes, device=tree.entry_node.device)
    return times.index_add_(0, tree.entry_node, torch.ones_like(times[tree.entry_node]))
