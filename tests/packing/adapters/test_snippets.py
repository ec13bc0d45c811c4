"""The lines that pages of formats show: each is run, with stand-ins for a trainer's own calls.

Blocks marked ``python`` run by themselves, as all examples do. Blocks marked ``py`` need packages
or objects of a trainer: each defines a function or a class, which is called here. It runs alone, so
that pasted lines do not break.
"""

import asyncio
import dataclasses
import doctest
import re
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.packing.adapters.peers import VERSIONS
from trajpack import Alignment, Trajectory, Turn, plan_micro_batches

PAGES = Path(__file__).parents[3] / "docs" / "formats"
CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
TOKENIZER = SimpleNamespace(pad_token_id=0)


def run(page):
    """Return the names that the block marked ``py`` of a page defines."""
    names = {"__name__": "page"}
    (block,) = blocks_of(page, "py")
    exec(block, names)
    return names


def run_first(page):
    """Return the names that a page's first block leaves: a batch, rows of a trainer."""
    names = {"__name__": "page"}
    exec(blocks_of(page, "python")[0], names)
    return names


def blocks_of(page, kind):
    """Return the code of each block of a kind; what is to run on a GPU runs on the host."""
    text = PAGES.joinpath(f"{page}.md").read_text().replace('device="cuda"', 'device="cpu"')
    blocks = []
    for block in re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL):
        examples = doctest.DocTestParser().get_examples(block)
        source = "".join(example.source for example in examples) if examples else block
        blocks.append(compile(source, page, "exec"))
    return blocks


def stand_in(monkeypatch, module, **names):
    """Let a module that cannot be installed be imported."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[module]).update(names)


class Calls(list):
    """Keeps what it was called with: a service, a worker, an optimizer."""

    def __call__(self, *args, **kwargs):
        self.append((args, kwargs))


def two_trajectories():
    turns = [Turn([11, 12], [21], [-0.5], reward=1.0), Turn([13], [24, 25], [-1.0, -2.0])]
    return [Trajectory(str(n), [turn], group="task") for n, turn in enumerate(turns)]


def test_every_page_with_such_lines_is_run_here():
    pages = {page.stem for page in PAGES.glob("*.md") if "```py\n" in page.read_text()}
    assert pages
    assert pages == {
        name.removeprefix("test_lines_of_") for name in globals() if "lines_of" in name
    }


def test_lines_of_flash_attention(monkeypatch):
    def attend(query, key, value, *, cu_seqlens_q, cu_seqlens_k, causal, **longest):
        assert cu_seqlens_q is cu_seqlens_k
        assert set(longest) == {"max_seqlen_q", "max_seqlen_k"}
        pieces = []
        for begin, end in pairwise(cu_seqlens_q.tolist()):
            of = (x[begin:end].transpose(0, 1) for x in (query, key, value))
            pieces.append(scaled_dot_product_attention(*of, is_causal=causal).transpose(0, 1))
        return torch.cat(pieces)

    stand_in(monkeypatch, "flash_attn", flash_attn_varlen_func=attend)
    table, batch = torch.randn(9, 1, 8), run_first("flash_attention")["batch"]
    attended = run("flash_attention")["attend"](batch, *[table[batch.input_ids]] * 3)
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        alone = table[batch.input_ids[begin:end]].transpose(0, 1)
        expected = scaled_dot_product_attention(alone, alone, alone, is_causal=True)[0]
        torch.testing.assert_close(attended[begin:end, 0], expected)


def test_lines_of_megatron(peer, monkeypatch):
    package = peer("megatron-core")
    state = package.load("megatron.core.parallel_state")
    monkeypatch.setattr(package.load("megatron.core"), "parallel_state", state, raising=False)
    tokens, given = [], []
    batch = run_first("megatron")["batch"]

    def model(input_ids, position_ids, attention_mask, *, packed_seq_params):
        assert attention_mask is None
        assert input_ids.shape == position_ids.shape
        tokens.extend(input_ids[0].tolist())
        given.append(packed_seq_params)

    for rank in range(2):  # of processes that are not there
        ranks = {"context_parallel_world_size": 2, "context_parallel_rank": rank}
        for name, value in (ranks | {"tensor_model_parallel_world_size": 1}).items():
            monkeypatch.setattr(state, f"get_{name}", lambda value=value: value)
        assert list(run("megatron")["logits_of"](model, batch)) == [None]
    alignment = Alignment(sequence_multiple=4, tail="separate")
    (whole,) = batch.micro_batches(plan_micro_batches(batch.seqlens, 8192, align=4), alignment)
    assert sorted(tokens) == sorted(whole.input_ids.tolist())
    assert {type(params).__name__ for params in given} == {"PackedSeqParams"}
    assert given[0].cu_seqlens_q_padded[-1] == whole.num_tokens == len(tokens)


def test_lines_of_trl(trl):
    names, page = run("trl"), run_first("trl")
    assert issubclass(names["OurTrainer"], trl.GRPOTrainer)
    (method,) = (name for name in vars(names["OurTrainer"]) if name.startswith("_generate"))
    assert callable(getattr(trl.GRPOTrainer, method))
    trainer = SimpleNamespace(collect=lambda inputs: page["batch"], _tokenizer=TOKENIZER)
    rows = getattr(names["OurTrainer"], method)(trainer, ["one", "two"])
    assert rows["completion_ids"].tolist() == page["inputs"]["completion_ids"].tolist()


def test_lines_of_torchtitan(peer):
    peer("torchtitan")
    batch = run_first("torchtitan")["batch"]
    microbatch = run("torchtitan")["microbatch_of"](batch, seq_len=8, pad_id=9)
    for field in dataclasses.fields(microbatch):
        assert getattr(microbatch, field.name).shape == (1, 8), field.name
    assert microbatch.token_ids[0, -1] == 9


def test_lines_of_tinker(peer):
    peer("tinker")
    forward, step = Calls(), Calls()
    client = SimpleNamespace(forward_backward=forward, optim_step=step)
    run("tinker")["step"](client, run_first("tinker")["batch"])
    ((datums,), options) = forward[0]
    assert options == {"loss_fn": "importance_sampling"}
    assert [list(datum.loss_fn_inputs) for datum in datums] == [
        ["target_tokens", "logprobs", "advantages"]
    ]
    assert step[0][0][0].learning_rate == 1e-5


def test_lines_of_verl(peer):
    verl, update = peer("verl"), Calls()
    rollouts = run_first("verl")["rows"]
    run("verl")["update"](SimpleNamespace(_update_actor=update), rollouts, pad_token_id=0)
    (proto,) = update[0][0]
    assert isinstance(proto, verl.load("verl").DataProto)
    assert proto.batch["advantages"].shape == proto.batch["old_log_probs"].shape
    # what its trainer does next, before it calls the workers
    pads_off = verl.load("verl.workers.utils.padding").left_right_2_no_padding
    sent = pads_off(proto.to_tensordict())
    assert sent["input_ids"].offsets().tolist() == [0, 6, 8]
    assert torch.equal(sent["loss_mask"], proto.batch["response_mask"])


def test_lines_of_slime():
    names = run("slime")
    first = {"reward": 0.0, "group_index": 7, "tokens": [11, 12, 22], "response_length": 1}
    first |= {"loss_mask": [1], "rollout_log_probs": [-0.5]}
    train = names["convert"](SimpleNamespace(), [run_first("slime")["sample"], first])
    assert train["rewards"][0] == -train["rewards"][1] > 0
    assert train["response_lengths"] == [3, 1]


def test_lines_of_nemo_rl(monkeypatch):
    train = Calls()

    class BatchedDataDict(dict):
        def to(self, device):
            return BatchedDataDict((key, value.to(device)) for key, value in self.items())

    module = "nemo_rl.distributed.batched_data_dict"
    stand_in(monkeypatch, module, BatchedDataDict=BatchedDataDict)
    batch = run_first("nemo_rl")["batch"]
    run("nemo_rl")["train"](SimpleNamespace(train=train), print, batch, pad_token_id=0)
    ((rows, loss), _) = train[0]
    assert loss is print
    assert rows["advantages"].shape == rows["input_ids"].shape


def test_lines_of_skyrl(peer):
    peer("skyrl")

    async def roll_out(asked):
        assert asked == {"prompts": []}
        return two_trajectories()

    generator = run("skyrl")["Generator"](roll_out)
    output = asyncio.run(generator.generate({"prompts": []}))
    assert output["response_ids"] == [[21], [24, 25]]


def test_lines_of_openrlhf(peer):
    peer("openrlhf")
    kept = []
    run("openrlhf")["append"](kept, run_first("openrlhf")["batch"], pad_token_id=0)
    assert [type(experience).__name__ for experience in kept] == ["Experience"]
    assert kept[0].sequences.tolist() == [[11, 12, 21, 31, 22]]
    assert kept[0].action_log_probs.shape == kept[0].advantages.shape == (1, 4)


def test_lines_of_areal():
    update = Calls()
    rows = run_first("areal")["rows"]
    run("areal")["update"](SimpleNamespace(ppo_update=update), rows)
    ((given,),) = update[0][0]
    assert given["advantages"].shape == given["input_ids"].shape


def index_rows():
    """Return the cells of each row of the index, without its heads."""
    index = PAGES.with_suffix(".md").read_text()
    return [line.strip("|").split("|") for line in index.splitlines() if line.startswith("|")][2:]


def test_the_index_names_the_tested_version_of_each_trainer():
    """Versions are those that are installed for the tests; each has a way and a date."""
    held = {row[0].strip(): row[-1].strip() for row in index_rows() if row[0].strip()}
    for trainer, said in held.items():
        assert re.search(r"(`make test`|run once|read), 20\d\d-\d\d-\d\d", said), trainer
    pinned = dict(re.findall(r"(?m)^(transformers|trl)==(\S+)$", CONSTRAINTS.read_text()))
    others = {"kernels", "liger-kernel", "sglang"}  # tests of other things than formats run them
    assert others < {*VERSIONS}
    assert {*pinned} == {"transformers", "trl"}
    versions = {name: of for name, of in VERSIONS.items() if name not in others} | pinned
    for name, version in versions.items():
        assert sum(f"{name} {version}, `make test`" in said for said in held.values()) == 1, name
    tested = re.findall(r"([\w-]+) (\S+), `make test`", " ".join(held.values()))
    assert dict(tested) == versions


def test_the_index_has_every_page_and_every_function():
    index = PAGES.with_suffix(".md").read_text()
    linked, missing = [], []
    for trainer, *functions in (row[:3] for row in index_rows()):
        linked += re.findall(r"\(formats/(\w+)\.md\)", trainer)
        module = import_module(f"trajpack.packing.adapters.{linked[-1]}")
        names = re.findall(r"`(\w+)`", " ".join(functions))
        assert names, trainer
        missing += [name for name in names if not callable(getattr(module, name, None))]
    assert sorted(linked) == sorted(page.stem for page in PAGES.glob("*.md"))
    assert not missing
    public = {
        name
        for page in linked
        for name in vars(import_module(f"trajpack.packing.adapters.{page}"))
        if name.startswith(("to_", "from_"))
    }
    assert {name for name in public if f"`{name}`" not in index} == set()
