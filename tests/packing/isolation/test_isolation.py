"""`check_isolation`: it finds every way in which sequences see each other, and nothing else."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.packing.isolation.tiny_models import tiny_model
from trajpack.agent import build_tiny_model
from trajpack.packing.adapters.huggingface import check_isolation, to_padding_free
from trajpack.packing.micro_batches.alignment import Alignment

WIDTH = 16
INF = torch.inf


def apart(self, x, seq, positions):
    """A token sees the mean of its sequence so far."""
    seen = (seq[:, :, None] == seq[:, None]).to(x.dtype).tril()
    return seen @ x / seen.sum(-1, keepdim=True)


def convolution(self, x, seq, positions):
    """A token sees the three before it, of whatever sequence."""
    return sum(F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] for back in range(4)) / 4


def state(self, x, seq, positions):
    """A state fades, and no sequence resets it."""
    tokens = torch.arange(x.shape[1])
    fading = 0.5 ** (tokens[:, None] - tokens).clamp(0).to(x.dtype)
    return fading.tril() @ x


def following(self, x, seq, positions):
    """A token sees the next one."""
    return F.pad(x, (0, 0, 0, 1))[:, 1:]


def beyond(self, x, seq, positions):
    """Only tokens from the ninth on see the sequence before theirs, and no other."""
    before = (seq[:, :, None] == seq[:, None] + 1) & (positions[:, :, None] >= 8)
    return before.to(x.dtype) @ x / 16


def every_other(self, x, seq, positions):
    """A token sees sequences whose number is odd like its own, or even."""
    return (seq[:, :, None] % 2 == seq[:, None] % 2).to(x.dtype).tril() @ x / 64


def weak(self, x, seq, positions):
    """A token sees a thousandth of the one before it."""
    return x + 1e-3 * x.roll(1, 1)


def diluted(self, x, seq, positions):
    """A residual connection has a leak of a few hundredths in it, as attention of Bloom has."""
    return x + 0.04 * F.pad(x, (0, 0, 1, 0))[:, :-1]


def capacity(self, x, seq, positions):
    """Two experts take half of the row each, and drop what comes on top."""
    expert = (x[..., 0] > 0).long()
    rank = F.one_hot(expert, 2).cumsum(1).gather(2, expert[..., None])
    return torch.where(rank <= x.shape[1] // 2, x, 0.0)


def in_training(self, x, seq, positions):
    """Another kernel in training mode does not know of sequences."""
    return (convolution if self.training else apart)(self, x, seq, positions)


def gated(self, x, seq, positions):
    """All tokens together decide how a sum is rounded, and its last bits which gates are open."""
    return self.gate(self.sum(x))


def dropout_of_experts(self, x, seq, positions):
    """Drops out where an expert is chosen, and draws as often."""
    chosen = x[..., 0] > 0
    out = x.clone()
    out[chosen] = self.dropout(x[chosen])
    return F.dropout(out, 0.5, self.training)  # draws as often in each pass


class RoundedSum(nn.Module):
    def forward(self, x):
        steps = (x.float().sum() * 1e4).floor() % 2
        return x * (1 + steps * torch.finfo(x.dtype).eps).to(x.dtype)


class Gate(nn.Module):
    """Not continuous: the last bits decide for one token in 32."""

    def forward(self, x):
        return torch.where(x.view(torch.uint8)[..., :1] % 32 == 0, -x, x)


def layer(function):
    """Return a module of a class that is named as the function."""
    name = function.__name__.title().replace("_", "")
    made = type(name, (nn.Module,), {"forward": function})()
    made.sum, made.gate, made.dropout = RoundedSum(), Gate(), nn.Dropout(0.5)
    return made


class Model(nn.Module):
    """Embeddings, layers, and a head."""

    def __init__(self, *functions, num_ids=50):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(num_ids, WIDTH), nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList([layer(function) for function in (apart, *functions)])
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, num_ids)

    def get_input_embeddings(self):
        return self.tokens

    def forward(self, input_ids, position_ids=None, seq_idx=None, **kwargs):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        if seq_idx is None:
            seq_idx = torch.zeros_like(input_ids)
        x = self.tokens(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = self.dropout(x + layer(x, seq_idx, position_ids))
        return SimpleNamespace(logits=self.head(x))


def variant(forward, *functions, name="Odd"):
    """Return a model with another forward pass, which gets the model and the keyword arguments."""

    def given(self, **row):
        return forward(self, **row)

    return type(name, (Model,), {"forward": given})(*(functions or (apart,)))


def changed(change):
    """Return a model whose logits go through a function."""
    return variant(lambda self, **row: change(Model.forward(self, **row).logits))


def between(self, input_ids, seq_idx, **row):
    """Leak between two modules: the input of the head has moved, and the head is no module's."""
    x = self.layers[1](self.tokens(input_ids), seq_idx, None)
    return SimpleNamespace(logits=self.head(x.cumsum(1)))


def over_row(self, input_ids, **row):
    """Count positions over the row, so that each sequence begins at another place."""
    places = self.places(torch.arange(input_ids.shape[1])[None])
    return SimpleNamespace(logits=self.head(self.tokens(input_ids) + 0.029 * places))


def strict(self, input_ids, position_ids=None, **row):
    if row.pop("seq_idx", None) is not None:
        raise TypeError("unexpected seq_idx")
    return Model.forward(self, input_ids, position_ids)


def raising(error):
    def forward(self, **row):
        raise error

    return variant(forward)


def padded_ids(logits):
    return F.pad(logits, (0, 14), value=-INF)


class Wrapper(nn.Module):
    """Shows the configuration of the model in it as its own, as PEFT does."""

    def __init__(self, model):
        super().__init__()
        self.base_model, self.config = model, model.config

    def forward(self, **row):
        return self.base_model(**row)


class WithoutEmbeddings(Model):
    def get_input_embeddings(self):
        return None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [apart, gated])
def test_a_model_that_keeps_sequences_apart_passes(function, dtype):
    check_isolation(Model(function).to(dtype))


def tiny_llama(num_ids):
    """Return a model of which all ids may be special ones."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=num_ids, num_hidden_layers=1, **special, **sizes)
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: changed(padded_ids),
        lambda: changed(lambda logits: {"logits": logits}),
        lambda: Model(dropout_of_experts),
        *(lambda num_ids=num_ids: tiny_llama(num_ids) for num_ids in (2, 3, 4)),
    ],
    ids=["infinite logits", "dictionary", "dropout by the routing", "2 ids", "3 ids", "4 ids"],
)
def test_models_of_these_kinds_pass_too(make):
    check_isolation(make())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "function", [convolution, state, following, beyond, every_other, capacity, diluted]
)
def test_a_layer_that_mixes_sequences_is_named(function, dtype):
    model = Model(function).to(dtype)
    name = type(model.layers[1]).__name__
    with pytest.raises(ValueError, match=rf"layers\.1 \({name}\), in evaluation") as caught:
        check_isolation(model)
    assert str(caught.value).startswith("Model lets sequences of a packed batch see each other")


REFUSED = {
    "weak": (lambda: Model(weak), r"layers\.1 \(Weak\)"),
    "diluted, float16": (lambda: Model(diluted).half(), r"first in layers\.1 \(Diluted\)"),
    "training": (lambda: Model(in_training), r"layers\.1 \(InTraining\), in training mode"),
    "behind rounding": (lambda: Model(gated, convolution), r"layers\.2 \(Convolution\)"),
    "0 moves 1": (lambda: Model(state), "sequence 0 move logits of sequence 1,"),
    "1 moves 0": (lambda: Model(following), "sequence 1 move logits of sequence 0,"),
    "0 moves 2": (lambda: Model(every_other), "sequence 0 move logits of sequence 2,"),
    "no module": (
        lambda: variant(
            lambda self, input_ids, **row: (
                self.tokens.weight[input_ids].cumsum(1) @ self.tokens.weight.T
            ),
            name="Functional",
        ),
        "first in Functional, in evaluation",
    ),
    "between modules": (lambda: variant(between), "first in Odd, in evaluation"),
    "between, rounded": (lambda: variant(between, gated), "first in Odd, in evaluation"),
    "infinite logits": (
        lambda: changed(lambda logits: padded_ids(logits).cumsum(1)),
        "first in Odd",
    ),
    "ignored positions": (
        lambda: variant(lambda self, position_ids=None, **row: Model.forward(self, **row)),
        "other logits than the same sequence alone",
    ),
    "positions over the row": (
        lambda: variant(over_row),
        "of a packed batch other logits than",
    ),
    "NaN": (lambda: changed(lambda logits: logits * torch.nan), "NaN"),
    "constant": (lambda: changed(torch.zeros_like), "do not depend on its tokens"),
    "last token": (
        lambda: changed(lambda logits: logits[:, -1:]),
        r"must return logits of shape .* got \[1, 1,",
    ),
    "mute error": (
        lambda: raising(KeyError()),
        "Odd cannot take packed sequences: KeyError",
    ),
    "other arguments": (
        lambda: variant(strict),
        r"Odd cannot take packed sequences: .*seq_idx",
    ),
    "one id": (lambda: Model(num_ids=1), "Model must know two tokens or more, got 1"),
    "meta": (lambda: Model().to("meta"), "Model must have weights"),
    "mamba2": (
        lambda: tiny_model("mamba2"),
        r"Mamba2ForCausalLM .* backbone\.layers\.0\.mixer \(Mamba2",
    ),
    "wrapper": (
        lambda: Wrapper(tiny_model("mamba2")),
        r"^Mamba2ForCausalLM lets sequences",
    ),
}


NO_MODEL = {
    "no module": (lambda: len, "model must be a torch module, got builtin_function"),
    "no model": (lambda: nn.Linear(2, 2), "Linear must have a config or get_input_embeddings"),
    "no embeddings": (WithoutEmbeddings, "Without.* must have a config or get_input_embeddings"),
    "no logits": (
        lambda: changed(lambda logits: SimpleNamespace(logits=logits.tolist())),
        "must return logits, got SimpleNamespace",
    ),
}


@pytest.mark.parametrize(
    ("make", "message", "error"),
    [
        *((*of, ValueError) for of in REFUSED.values()),
        *((*of, TypeError) for of in NO_MODEL.values()),
        (lambda: raising(torch.OutOfMemoryError("large")), "large", torch.OutOfMemoryError),
    ],
    ids=[*REFUSED, *NO_MODEL, "out of memory"],
)
def test_these_models_are_refused(make, message, error):
    with pytest.raises(error, match=message) as caught:
        check_isolation(make())
    if "seq_idx" in message:
        assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (lambda batch: {"position_ids": batch.position_ids}, TypeError, "a tensor input_ids"),
        (lambda batch: None, TypeError, "a tensor input_ids"),
        (lambda batch: {"input_ids": batch.input_ids}, ValueError, r"\[1, tokens\], got \[337\]"),
        (lambda batch: batch.select([]).model_inputs(), ValueError, "with tokens of the batch"),
    ],
)
def test_inputs_that_are_no_row_are_refused(inputs, error, message):
    with pytest.raises(error, match=f"inputs must return.*{message}"):
        check_isolation(Model(), inputs=inputs)


@pytest.mark.parametrize("tail", ["sequence", "extend", "separate"])
@pytest.mark.parametrize("positions", ["continue", "zero"])
def test_inputs_of_micro_batches_are_tried(tail, positions):
    alignment = Alignment(
        sequence_multiple=8, total=512, max_sequences=9, tail=tail, positions=positions
    )

    def inputs(batch):
        return batch.select([3, 0, 5, 2, 4, 1], alignment).model_inputs()

    check_isolation(Model(), inputs=inputs)
    check_isolation(build_tiny_model(seed=0)[0], inputs=inputs)
    check_isolation(
        build_tiny_model(seed=0)[0],
        inputs=lambda batch: to_padding_free(batch, labels="all") | {"use_cache": False},
    )
    with pytest.raises(ValueError, match="Following"):
        check_isolation(
            Model(following), inputs=lambda batch: batch.select([3, 0, 5]).model_inputs()
        )


@pytest.mark.parametrize("change", ["use_cache", "attention_mask"])
def test_inputs_that_let_sequences_see_each_other_are_found(change):
    def inputs(batch):
        mask = torch.ones(1, batch.num_tokens, dtype=torch.long)
        return batch.model_inputs() | {change: True if change == "use_cache" else mask}

    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn \(Qwen3Attention\)"):
        check_isolation(build_tiny_model(seed=0)[0], inputs=inputs)


def test_everything_is_left_as_it_was():
    def counting(self, x, seq, positions):
        self.passes += self.training  # as batch norm does
        return apart(self, x, seq, positions)

    model = Model(counting)
    model.layers[1].register_buffer("passes", torch.zeros(()))
    model.train()
    model.layers[0].eval()
    model.head.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    state_before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    check_isolation(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(v, state_before[name]) for name, v in model.state_dict().items())
    assert [weight.requires_grad for weight in model.head.parameters()] == [False, False]
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.is_grad_enabled()

    model.layers[1] = layer(state)  # and if it raises, no hook is left either
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="State"):
        check_isolation(model)
    assert [module.training for module in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_buffer_that_a_pass_replaces_is_put_back():
    def forward(self, input_ids, **row):
        self.count = self.count + 1
        self.last = input_ids
        return Model.forward(self, input_ids, **row)

    model = variant(forward)
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("last", None)
    count = model.count
    check_isolation(model)
    assert model.count is count
    assert (float(count), model.last) == (0.0, None)


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: float(torch.rand(()))])
def test_a_model_that_draws_numbers_passes_and_generators_are_left_as_they_were(draw):
    def seed():
        random.seed(5), np.random.seed(5), torch.manual_seed(5)

    model = changed(lambda logits: logits * (1 + draw())).eval()
    seed()
    expected = draw()
    seed()
    check_isolation(model)
    assert draw() == expected


def test_the_model_runs_uncompiled_and_its_graphs_are_left_alone():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    check_isolation(torch.compile(build_tiny_model(seed=0)[0], backend=backend))
    with pytest.raises(ValueError, match=r"Model lets .* _orig_mod\.layers\.1 \(State\)"):
        check_isolation(torch.compile(Model(state), backend=backend))
    assert not graphs


def test_a_model_that_is_wrapped_for_data_parallelism(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel
        check_isolation(wrapped(build_tiny_model(seed=0)[0]))
        with pytest.raises(ValueError, match=r"Model lets .* module\.layers\.1 \(State\)"):
            check_isolation(wrapped(Model(state)))
    finally:
        torch.distributed.destroy_process_group()


def test_special_ids_and_short_limits_are_respected():
    """No id that may stand for an image is drawn, and no sequence is longer than positions are."""
    model = build_tiny_model(seed=0)[0]
    model.config.max_position_embeddings = 40
    model.config.image_token_id = 7
    model.config.eos_token_id = [8, 9]
    seen = []
    check_isolation(model, inputs=lambda batch: seen.append(batch) or batch.model_inputs())
    assert seen[0].seqlens == (40, 1, 40, 2, 40, 40)
    ids = torch.cat([batch.input_ids for batch in seen])
    assert not {7, 8, 9} & set(ids.tolist())
    assert int(ids.max()) < model.config.vocab_size
