"""A model computes a tree as it computes the turns one by one, to the gradient."""

import gc
import inspect
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention
from transformers import AutoConfig, AutoModelForCausalLM, modeling_flash_attention_utils as flash

from tests.packing.isolation.tiny_models import VOCABULARY, tiny_model
from tests.support.slow import slow, slow_after
from trajpack import GRPO, Alignment, Trajectory, TreeBatch, Turn, pack, pack_tree
from trajpack.packing.adapters.huggingface import (
    LMHead,
    check_isolation,
    check_tree_attention,
    register_tree_attention,
)
from trajpack.packing.tree_attention import attention
from trajpack.packing.tree_attention.huggingface import _MADE

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without", "ignore:The .grad attribute of a Tensor"
)

OTHERS = ["mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "olmo2", "deepseek_v3"]
TINY = {"vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "embedding_dim": 32}
TINY |= {"num_hidden_layers": 2, "decoder_layers": 2, "num_blocks": 2, "intermediate_size": 64}
TINY |= {"decoder_attention_heads": 4, "num_attention_heads": 4, "num_heads": 8, "head_dim": 8}
TINY |= {"decoder_ffn_dim": 32, "dim_head": 8, "dim_ff": 32, "state_size": 8, "n_groups": 1}
TINY |= {"chunk_size": 8, "attention_hidden_size": 32, "max_position_embeddings": 256}
TINY |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
FAMILIES = ["mamba2", "rwkv", "xlstm", "cpmant", "bart", "mbart", "pegasus", "marian", "plbart"]
FAMILIES += ["blenderbot", "blenderbot-small"]
LONGER = 20
"""Tokens of a shared prompt: more than the sliding windows of tiny models."""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register_tree_attention()
    # torch refuses gradients of FlexAttention on the host, and computes them right uncompiled
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


def branching(seed=0):
    """Return a group with a prompt, stripped thinking, repeated turns and another tree."""
    generator = np.random.default_rng(seed)

    def ids(size):
        return generator.integers(3, VOCABULARY, size).tolist()

    def turn(prompt, completion):
        logprobs = np.log(1 / VOCABULARY) + 0.3 * generator.standard_normal(len(completion))
        return Turn(prompt, completion, logprobs, float(generator.choice([-1.0, 0.0, 1.0])))

    prompt, shared = ids(LONGER), ids(4)
    found = []
    for member in range(3):
        first = turn(prompt, shared + ids(2 + member))
        heard = prompt + list(first.completion_ids)
        second = turn(heard + ids(3), ids(4))
        third = turn(prompt + list(first.completion_ids)[2:] + ids(2), ids(3))  # stripped
        found.append(Trajectory(str(member), [first, second, third, second], "task"))
    return [*found, Trajectory("other", [turn(ids(5), ids(3))], "task")]


class ExactNorm(nn.Module):
    """A norm that computes in the dtype of its input; the models' own are float32."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, rows):
        return self.weight * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps)


class ExactRotation(nn.Module):
    """Rotations of positions in float64; the models' own are float32."""

    def __init__(self, rotation):
        super().__init__()
        self.frequencies = rotation.inv_freq.double()

    def forward(self, rows, position_ids):
        angles = (position_ids[..., None].double() * self.frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def exact(model):
    """Return the model in float64, its norms and rotations too."""
    model = model.double()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, ExactNorm(child))
            elif type(child).__name__.endswith("RotaryEmbedding"):
                setattr(module, name, ExactRotation(child))
    return model


def by_tree(model, batch: TreeBatch, attention):
    """Return the log-probabilities of the entries, from one row of nodes."""
    name, _, backend = attention.partition(", ")
    register_tree_attention(backend or "auto")
    model.set_attn_implementation(name)
    inputs = batch.model_inputs()
    if name != "trajpack_tree":
        dtype = torch.bool if attention == "sdpa" else next(model.parameters()).dtype
        inputs["attention_mask"] = batch.attention_mask(dtype)
    return batch.logprobs(model(**inputs).logits)


def by_rows(model, trajectories, attention="sdpa"):
    """Return the same, from a row for each turn."""
    model.set_attn_implementation("eager" if attention == "eager" else "sdpa")
    parts = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            ids, start = [*turn.prompt_ids, *turn.completion_ids], len(turn.prompt_ids)
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1]
            labels = torch.tensor(turn.completion_ids)
            parts.append(logits.log_softmax(-1).gather(1, labels[:, None])[:, 0])
    return torch.cat(parts)


def gspo(logprobs, batch):
    """Clip the geometric mean ratio of each turn."""
    turn = batch.entries.turn_ids.long()
    sizes = batch.entries.cu_generated.diff()
    ratios = torch.zeros(batch.num_turns, dtype=logprobs.dtype)
    ratios = (ratios.index_add(0, turn, logprobs - batch.rollout_logprobs) / sizes).exp()[turn]
    return clipped(ratios, batch).sum() / len(ratios)


def clipped(ratio, batch):
    return -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)


LOSSES = {
    "sft": lambda logprobs, batch: -logprobs.mean(),
    "reinforce": lambda logprobs, batch: -(batch.advantages * logprobs).sum(),
    "clipped": lambda logprobs, batch: (
        clipped((logprobs - batch.rollout_logprobs).exp(), batch)
        * batch.loss_weights("sequence_mean_token_mean")
    ).sum(),
    "gspo": gspo,
    "token mean": lambda logprobs, batch: (
        -(logprobs * batch.advantages * batch.loss_weights("token_mean")).sum()
    ),
}


def gradients(model, loss):
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])


def distance(got, want):
    """Return the norm of a difference by that of ``want``, computed in float64."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("dtype", "tolerance", "attention"),
    [
        (torch.float64, 1e-10, "trajpack_tree, path"),
        (torch.float64, 1e-10, "trajpack_tree, flex"),
        (torch.float64, 1e-10, "sdpa"),
        (torch.float32, 1e-6, "eager"),  # its softmax is float32 in every model
        *(slow(torch.float32, 1e-6, f"trajpack_tree, {path}") for path in ("path", "flex")),
    ],
)
@pytest.mark.parametrize("family", slow_after(1, ["qwen3", "llama"]))
def test_log_probabilities_and_gradients_are_those_of_separate_rows(
    family, dtype, tolerance, attention
):
    # Fused and unfused calls differ by 1e-6 in float32; the softmax of "eager" is float32 always
    unfused = attention == "eager" or (attention.endswith("flex") and dtype == torch.float32)
    trajectories = branching()
    batch = pack_tree(trajectories).with_advantages(GRPO())
    assert torch.bincount(batch.entry_node).max() >= 3  # a node of three members
    model = tiny_model(family).train()
    model = exact(model) if dtype == torch.float64 else model
    for name, loss in LOSSES.items():
        tree = by_tree(model, batch, attention)
        rows = by_rows(model, trajectories, "eager" if unfused else "sdpa")
        assert distance(tree, rows) <= tolerance
        want = gradients(model, loss(rows, batch))
        assert want.norm() > 0, name
        assert distance(gradients(model, loss(tree, batch)), want) <= tolerance


@pytest.mark.parametrize("backend", ["path", "flex"])
@pytest.mark.parametrize("family", ["qwen3", *slow_after(0, ["mistral", "gemma2", "gpt_oss"])])
def test_packed_rows_have_the_logits_and_gradients_of_separate_rows(family, backend):
    """Also with padding, in windows, and with labels."""
    model = tiny_model(family).train()
    register_tree_attention(backend)
    for seed, alignment in enumerate((Alignment(), Alignment(8, 16))):
        batch = pack(branching(seed), "turns")
        piece = batch.select(range(len(batch)), alignment)
        model.set_attn_implementation("trajpack_tree")
        inputs = piece.model_inputs()
        packed = model(**inputs, labels=inputs["input_ids"]).logits[0]
        model.set_attn_implementation("eager")
        begins = piece.cu_seqlens_padded[:-1].tolist()
        alone = [
            model(inputs["input_ids"][:, begin : begin + length], use_cache=False).logits[0]
            for begin, length in zip(begins, piece.seqlens, strict=True)
        ]
        own = torch.cat(
            [packed[begin : begin + len(one)] for begin, one in zip(begins, alone, strict=True)]
        )
        alone = torch.cat(alone)
        assert distance(own, alone) <= 1e-5
        random = torch.randn(alone.shape, generator=torch.Generator().manual_seed(seed))
        want = gradients(model, (alone * random).sum())
        assert distance(gradients(model, (own * random).sum()), want) <= 1e-5


def test_rows_keep_their_sequences_apart_and_models_with_dropout_are_served():
    model = tiny_model("qwen3")
    model.set_attn_implementation("trajpack_tree")
    check_isolation(model)
    model.lm_head = nn.Sequential(nn.Dropout(0.1), model.lm_head)
    model.train()(**pack(branching()).model_inputs())


@pytest.fixture
def gathering(monkeypatch):
    """Make calls so small that their keys are of several branches."""
    monkeypatch.setattr(attention, "QUERIES", 8)


def larger(seed=0):
    """Return more branches, at several depths, of longer histories."""
    found = branching(seed)
    for number, more in enumerate((branching(seed + 1), branching(seed + 2))):
        for one in more[:-1]:
            last = found[number].turns[1]
            heard = [*last.prompt_ids, *last.completion_ids]
            turns = [
                Turn(
                    [*heard, *turn.prompt_ids[LONGER:]],
                    turn.completion_ids,
                    turn.completion_logprobs,
                    turn.reward,
                )
                for turn in one.turns
            ]
            found.append(Trajectory(f"{number}.{one.id}", turns, "task"))
    return found


@pytest.mark.usefixtures("gathering")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("family", slow_after(1, ["qwen3", "llama"]))
def test_paths_that_gather_keys_give_the_gradients_of_separate_rows(family, dtype, tolerance):
    """I7 and I8, where the keys of a path are copied."""
    trajectories = larger()
    batch = pack_tree(trajectories).with_advantages(GRPO())
    model = tiny_model(family).train()
    model = exact(model) if dtype == torch.float64 else model
    for name in ("reinforce", "clipped", "gspo"):
        tree = by_tree(model, batch, "trajpack_tree, path")
        rows = by_rows(model, trajectories)
        assert distance(tree, rows) <= tolerance
        want = gradients(model, LOSSES[name](rows, batch))
        assert distance(gradients(model, LOSSES[name](tree, batch)), want) <= tolerance


@pytest.mark.parametrize("backend", ["path", slow("flex")])
def test_a_label_a_row_gives_the_log_probabilities_and_gradients_of_separate_rows(backend):
    trajectories = branching()
    batch = pack_tree(trajectories, boundary="duplicate").with_advantages(GRPO())
    assert batch.num_nodes > pack_tree(trajectories).num_nodes
    model = exact(tiny_model("qwen3").train())
    register_tree_attention(backend)
    for name, loss in LOSSES.items():
        model.set_attn_implementation("trajpack_tree")
        logits = model(**batch.model_inputs()).logits[0]
        of_nodes = -nn.functional.cross_entropy(logits, batch.labels(), reduction="none")
        tree, rows = of_nodes[batch.entry_parent], by_rows(model, trajectories)
        assert distance(tree, rows) <= 1e-10
        want = gradients(model, loss(rows, batch))
        assert want.norm() > 0, name
        assert distance(gradients(model, loss(tree, batch)), want) <= 1e-10


@pytest.mark.parametrize("backend", ["path", "flex"])
@pytest.mark.parametrize("family", OTHERS)
def test_other_models_of_attention_layers_agree(family, backend):
    trajectories = branching(1)
    batch = pack_tree(trajectories)
    model = tiny_model(family)
    with torch.no_grad():
        tree = by_tree(model, batch, f"trajpack_tree, {backend}")
        torch.testing.assert_close(tree, by_rows(model, trajectories, "eager"), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "changed", "named"),
    [
        ("qwen3_5_text", {}, "linear_attention"),
        ("qwen3_next", {}, "linear_attention"),
        ("lfm2", {}, "conv"),
        ("jamba", {}, "linear_attention"),
        ("falcon_h1", {}, "hybrid"),
        ("bamba", {}, "linear_attention"),
        ("llama4_text", {}, "chunked_attention"),
        ("qwen3_moe", {"output_router_logits": True}, "refuses output_router_logits"),
        ("mixtral", {"router_jitter_noise": 0.1}, "got router_jitter_noise"),
        ("gpt_neox", {"hidden_dropout": 0.1}, "got hidden_dropout"),
        ("phimoe", {"sliding_window": 8, "router_jitter_noise": 0.0}, "Attention hands none on"),
    ],
)
def test_layers_and_settings_that_a_tree_cannot_have_are_refused_by_name(family, changed, named):
    model = tiny_model(family).train()
    model.set_attn_implementation("trajpack_tree")
    for name, value in changed.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=f"trajpack_tree attention .*{named}"):
        model(**pack_tree(branching()).model_inputs())


def test_layers_share_one_attention_that_lives_as_long_as_the_inputs():
    model = tiny_model("qwen3")
    model.set_attn_implementation("trajpack_tree")
    inputs, before = pack_tree(branching()).model_inputs(), len(_MADE)
    with torch.no_grad():
        logits = model(**inputs).logits
        assert len(_MADE) == before + 1
        made = _MADE[inputs["attention_mask"]]["auto"]
        assert torch.equal(model(**inputs).logits, logits)
    assert _MADE[inputs["attention_mask"]]["auto"] is made
    inputs.clear()
    gc.collect()
    assert len(_MADE) <= before


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("qwen3", "sdpa"),
        ("llama", "sdpa"),
        ("qwen3", "eager"),
        ("llama", "eager"),
        slow("qwen3", "flex_attention"),
        slow("llama", "flex_attention"),
    ],
)
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 40])
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_other_layers_fail_on_the_inputs(family, attention, num_nodes):
    """I14, TRAP 1 and 2: no other attention takes the table for a mask."""
    if (attention, num_nodes) == ("flex_attention", 1):
        pytest.skip("a number that is added to the one score of a softmax is right")
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    batch = pack_tree([Trajectory("a", [Turn(range(3, 3 + num_nodes), [], [])])])
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError, IndexError)):
        model(**batch.model_inputs())


def test_kernels_of_packed_rows_take_no_table_for_a_mask():
    """I14, TRAP 3: FlashAttention would split a row where depths are 0."""
    batch = pack_tree(branching())
    table, rows = batch.model_inputs()["attention_mask"], torch.zeros(1, batch.num_nodes, 2, 8)
    with pytest.raises(IndexError):  # it takes indices of the table for those of keys
        flash._upad_input(rows, rows, rows, table, batch.num_nodes, flash._unpad_input)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2", "qwen3_moe"])
def test_labels_and_attention_weights_are_refused_by_name(family):
    model = tiny_model(family)
    model.set_attn_implementation("trajpack_tree")
    inputs = pack_tree(branching()).model_inputs()
    with pytest.raises(ValueError, match=r"refuses labels: .*CausalLM would read the row before"):
        model(**inputs, labels=inputs["input_ids"])
    with pytest.raises(ValueError, match="refuses output_attentions: it computes no weights"):
        model(**inputs, output_attentions=True)


def compiled_calls(model):
    """Return a compiled model, one whose layers are compiled, and a compiled function of it."""
    compiled = partial(torch.compile, backend="eager")
    yield compiled(model)

    @compiled
    def step(**given):
        return model(**given)

    yield step
    for layer in model.model.layers:
        layer.compile(backend="eager")
    yield model


@pytest.mark.slow
def test_compiled_models_are_checked_and_compute_the_tree():
    model, batch = tiny_model("qwen3"), pack_tree(branching())
    model.set_attn_implementation("trajpack_tree")
    inputs = batch.model_inputs()
    want = model(**inputs).logits
    for call in compiled_calls(model):
        torch._dynamo.reset()
        torch.testing.assert_close(call(**inputs).logits, want)
        with pytest.raises(ValueError, match="refuses labels"):
            call(**inputs, labels=inputs["input_ids"])
    hidden = torch._dynamo.config.patch(nested_graph_breaks=True)
    with hidden, pytest.raises(ValueError, match="hides the calls of compiled models: switch it"):
        model(**inputs)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_again_are_checked_once_and_give_the_same_gradients(reentrant):
    model, batch = tiny_model("qwen3").train(), pack_tree(branching())
    want = gradients(model, by_tree(model, batch, "trajpack_tree").sum())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    inputs = batch.model_inputs()
    with pytest.raises(ValueError, match="refuses labels"):
        model(**inputs, labels=inputs["input_ids"])
    by_tree(model, batch, "trajpack_tree").sum().backward()
    assert distance(torch.cat([w.grad.reshape(-1) for w in model.parameters()]), want) <= 1e-6


def test_a_layer_without_a_model_around_it_is_refused():
    model = tiny_model("qwen3")
    model.set_attn_implementation("trajpack_tree")
    inputs = pack_tree(branching()).model_inputs()
    hidden = model.model.embed_tokens(inputs["input_ids"])
    place = model.model.rotary_emb(hidden, inputs["position_ids"])
    with pytest.raises(ValueError, match="finds no call of a model of transformers"):
        model.model.layers[0](
            hidden, position_embeddings=place, attention_mask=inputs["attention_mask"]
        )


def test_what_is_no_tree_is_refused():
    model = tiny_model("qwen3")
    model.set_attn_implementation("trajpack_tree")
    inputs = pack_tree(branching()).model_inputs()
    for wrong in (
        {"attention_mask": None},
        {"attention_mask": torch.ones(1, inputs["input_ids"].shape[1])},
        {"attention_mask": inputs["attention_mask"][..., :-1]},
        {"use_cache": True, **filled_cache(model)},
    ):
        with pytest.raises(ValueError, match=r"takes TreeBatch.model_inputs\(\) or those of a pa"):
            model(**(inputs | wrong))
    row = pack(branching()).model_inputs()
    with pytest.raises(ValueError, match=r"takes boundaries that end at 5, got \[\d\d+\]"):
        model(**(row | {name: row[name][:, :5] for name in ("input_ids", "position_ids")}))
    model.config.attention_dropout = 0.1
    model = type(model)(model.config).train()
    with pytest.raises(ValueError, match="takes no dropout"):
        model(**inputs)


def filled_cache(model):
    model.set_attn_implementation("sdpa")
    cache = model(torch.tensor([[3, 4]]), use_cache=True).past_key_values
    model.set_attn_implementation("trajpack_tree")
    names = inspect.signature(model.forward).parameters  # its name since transformers 5.24
    return {"cache" if "cache" in names else "past_key_values": cache}


def test_a_window_counts_depths():
    batch = pack_tree(branching())
    depth = batch.position_ids
    near = batch.attention_mask(window=3)[0, 0]
    far = batch.attention_mask()[0, 0] & (depth[:, None] - depth >= 3)
    assert torch.equal(near, batch.attention_mask()[0, 0] & ~far)
    assert near.sum(1).tolist() == (depth + 1).clamp(max=3).tolist()


def test_an_unknown_backend_is_refused():
    with pytest.raises(
        ValueError, match="backend must be one of 'auto', 'path', 'flex', got 'dense'"
    ):
        register_tree_attention("dense")


@pytest.mark.usefixtures("gathering")
@pytest.mark.parametrize("backend", ["path", slow("flex")])
def test_a_token_moves_the_logits_of_its_subtree_alone(backend):
    """I10."""
    batch = pack_tree(larger())
    assert batch.num_nodes > 120
    register_tree_attention(backend)
    model = tiny_model("qwen3")
    model.set_attn_implementation("trajpack_tree")
    inputs = batch.model_inputs()
    with torch.no_grad():
        before = model(**inputs).logits[0]
        for node in range(0, batch.num_nodes, 5):
            changed = inputs["input_ids"].clone()
            changed[0, node] = (changed[0, node] + 1) % VOCABULARY
            moved = (model(**(inputs | {"input_ids": changed})).logits[0] != before).any(1)
            inside = torch.zeros(batch.num_nodes, dtype=torch.bool)
            inside[node : int(batch.tree_end[node])] = True
            assert not moved[~inside].any()
            assert moved[inside].all()


@pytest.mark.parametrize("family", ["qwen3", "mistral", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_passes_where_a_tree_is_computed(family, dtype):
    model = tiny_model(family).to(dtype).train()
    model.set_attn_implementation("trajpack_tree")
    check_tree_attention(model)
    assert model.training


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_would_ignore_the_tree_are_refused(family):
    config = AutoConfig.for_model(family)
    for name, value in TINY.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config, "is_encoder_decoder"):
        config.is_decoder, config.is_encoder_decoder = True, False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    register_tree_attention()
    model.set_attn_implementation("trajpack_tree")
    with pytest.raises(ValueError, match=rf"{type(model).__name__} (computes|cannot take) a tree"):
        check_tree_attention(model)
    batch = pack_tree(branching())
    with pytest.raises(ValueError, match=type(model).__name__):
        LMHead(model).logprobs(batch)
    if "bart" in family or family in ("pegasus", "marian", "blenderbot", "blenderbot-small"):
        with pytest.raises(ValueError, match=r"position_ids, which .* does not take"):
            model(**batch.model_inputs())


def test_the_check_finds_what_ignores_the_tree(monkeypatch):
    with pytest.raises(ValueError, match="Mamba2ForCausalLM computes a tree otherwise than"):
        check_tree_attention(tiny_model("mamba2"))
    dropping = tiny_model("gpt_neox").train()
    dropping.gpt_neox.emb_dropout.p = 0.1
    with pytest.raises(ValueError, match=r"in training, gpt_neox.emb_dropout drops 0.1"):
        check_tree_attention(dropping)
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match="Qwen3ForCausalLM cannot take a tree"):
        check_tree_attention(model)
    model.set_attn_implementation("sdpa")
    inputs = TreeBatch.model_inputs
    monkeypatch.setattr(TreeBatch, "model_inputs", lambda b: inputs(b) | {"attention_mask": None})
    with pytest.raises(ValueError, match=r"logits of turn \d differ"):  # branches begin anew
        check_tree_attention(model)
    with pytest.raises(TypeError, match="model must be a torch module, got str"):
        check_tree_attention("qwen3")
