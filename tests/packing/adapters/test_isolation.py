"""`check_isolation`: it finds every way in which sequences see each other, and nothing else."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.packing.adapters.tiny_models import tiny_model
from trajpack.agent import build_tiny_model
from trajpack.packing.adapters.huggingface import check_isolation, to_padding_free
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.micro_batches.alignment import Alignment

WIDTH = 16


def same_sequence(seq):
    return (seq[:, :, None] == seq[:, None]).float()


class Apart(nn.Module):
    """A token sees the mean of its sequence so far."""

    def forward(self, x, seq, positions):
        seen = same_sequence(seq).to(x.dtype).tril()
        return seen @ x / seen.sum(-1, keepdim=True)


class Convolution(nn.Module):
    """A token sees the three before it, of whatever sequence."""

    def forward(self, x, seq, positions):
        return sum(F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] for back in range(4)) / 4


class State(nn.Module):
    """A state that fades, and that no sequence resets."""

    def forward(self, x, seq, positions):
        tokens = torch.arange(x.shape[1])
        fading = 0.5 ** (tokens[:, None] - tokens).clamp(0).to(x.dtype)
        return fading.tril() @ x


class Following(nn.Module):
    """A token sees the next one."""

    def forward(self, x, seq, positions):
        return F.pad(x, (0, 0, 0, 1))[:, 1:]


class Beyond(nn.Module):
    """Only tokens from the ninth on see the sequence before theirs, and no other."""

    def forward(self, x, seq, positions):
        before = (seq[:, :, None] == seq[:, None] + 1) & (positions[:, :, None] >= 8)
        return before.to(x.dtype) @ x / 16


class EveryOther(nn.Module):
    """A token sees sequences whose number is odd like its own, or even."""

    def forward(self, x, seq, positions):
        return same_sequence(seq % 2).to(x.dtype).tril() @ x / 64


class Weak(nn.Module):
    """A token sees a thousandth of the one before it."""

    def forward(self, x, seq, positions):
        return x + 1e-3 * x.roll(1, 1)


class Capacity(nn.Module):
    """Two experts take half of the row each, and drop what comes on top."""

    def forward(self, x, seq, positions):
        expert = (x[..., 0] > 0).long()
        rank = F.one_hot(expert, 2).cumsum(1).gather(2, expert[..., None])
        return torch.where(rank <= x.shape[1] // 2, x, 0.0)


class InTraining(Convolution):
    """Another kernel in training mode, and that one does not know of sequences."""

    def forward(self, x, seq, positions):
        if self.training:
            return super().forward(x, seq, positions)
        return Apart.forward(self, x, seq, positions)


class Rounding(nn.Module):
    """All tokens together decide how a sum is rounded, and its last bits which gates are open."""

    def __init__(self):
        super().__init__()
        self.sum, self.gate = RoundedSum(), Gate()

    def forward(self, x, seq, positions):
        return self.gate(self.sum(x))


class RoundedSum(nn.Module):
    def forward(self, x):
        steps = (x.float().sum() * 1e4).floor() % 2
        return x * (1 + steps * torch.finfo(x.dtype).eps).to(x.dtype)


class Gate(nn.Module):
    """Not continuous: the last bits decide for one token in 32."""

    def forward(self, x):
        return torch.where(x.view(torch.uint8)[..., :1] % 32 == 0, -x, x)


class Model(nn.Module):
    """Embeddings, a layer, and a head."""

    def __init__(self, layer, num_ids=50):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(num_ids, WIDTH), nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList([Apart(), layer])
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", [Apart, Rounding])
def test_a_model_that_keeps_sequences_apart_passes(layer, dtype):
    check_isolation(Model(layer()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "layer", [Convolution, State, Following, Beyond, EveryOther, Capacity], ids=lambda x: x.__name__
)
def test_a_layer_that_mixes_sequences_is_named(layer, dtype):
    model = Model(layer()).to(dtype)
    with pytest.raises(
        ValueError, match=rf"layers\.1 \({layer.__name__}\), in evaluation"
    ) as caught:
        check_isolation(model)
    assert str(caught.value).startswith("Model lets sequences of a packed batch see each other")


def test_a_weak_leak_is_found_in_float32():
    with pytest.raises(ValueError, match=r"layers\.1 \(Weak\)"):
        check_isolation(Model(Weak()))


@pytest.mark.parametrize(
    ("layer", "changed", "moved"), [(State, 0, 1), (Following, 1, 0), (EveryOther, 0, 2)]
)
def test_the_message_says_which_sequence_moves_which(layer, changed, moved):
    with pytest.raises(ValueError, match=f"sequence {changed} move logits of sequence {moved},"):
        check_isolation(Model(layer()))


def test_a_leak_of_training_mode_alone_is_found():
    with pytest.raises(ValueError, match=r"layers\.1 \(InTraining\), in training mode"):
        check_isolation(Model(InTraining()))


def test_a_leak_behind_rounding_is_found_and_the_rounding_is_not_blamed():
    model = Model(Rounding())
    model.layers.append(Convolution())
    with pytest.raises(ValueError, match=r"layers\.2 \(Convolution\)"):
        check_isolation(model)


def test_a_model_without_modules_of_its_own_is_named_itself():
    class Functional(Model):
        def forward(self, input_ids, **kwargs):
            x = self.tokens.weight[input_ids].cumsum(1)
            return x @ self.tokens.weight.T  # logits may come by themselves

    with pytest.raises(ValueError, match="first in Functional, in evaluation"):
        check_isolation(Functional(Apart()))


def test_a_leak_between_modules_is_found_behind_rounding_too():
    """The head is a module, whose input has moved already; what it returns is compared."""

    class Between(Model):
        def forward(self, input_ids, **kwargs):
            x = self.layers[1](self.tokens(input_ids), kwargs["seq_idx"], None)
            return SimpleNamespace(logits=self.head(x.cumsum(1)))

    for layer in (Apart, Rounding):
        with pytest.raises(ValueError, match="first in Between, in evaluation"):
            check_isolation(Between(layer()))


def test_a_model_that_counts_positions_over_the_row_is_refused():
    class OverTheRow(Model):
        def forward(self, input_ids, position_ids=None, **kwargs):
            return super().forward(input_ids, None, **kwargs)

    with pytest.raises(ValueError, match="other logits than the same sequence alone"):
        check_isolation(OverTheRow(Apart()))


def test_a_model_that_does_not_take_the_arguments_is_refused_with_its_own_error():
    class Strict(Model):
        def forward(self, input_ids, position_ids=None):
            return super().forward(input_ids, position_ids)

    with pytest.raises(
        ValueError, match=r"Strict cannot take packed sequences: .*seq_idx"
    ) as caught:
        check_isolation(Strict(Apart()))
    assert isinstance(caught.value.__cause__, TypeError)


def test_memory_that_ends_says_nothing_about_sequences():
    class Large(Model):
        def forward(self, **kwargs):
            raise torch.OutOfMemoryError("too large")

    with pytest.raises(torch.OutOfMemoryError):
        check_isolation(Large(Apart()))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda logits: logits * torch.nan, ValueError, "NaN"),
        (torch.zeros_like, ValueError, "do not depend on its tokens"),
        (lambda logits: logits[:, -1:], ValueError, r"must return logits of shape .* got \[1, 1,"),
        (lambda logits: logits.tolist(), TypeError, "must return logits, got SimpleNamespace"),
    ],
)
def test_logits_that_tell_nothing_are_refused(change, error, message):
    class Odd(Model):
        def forward(self, *args, **kwargs):
            return SimpleNamespace(logits=change(super().forward(*args, **kwargs).logits))

    with pytest.raises(error, match=message):
        check_isolation(Odd(Apart()))


def test_logits_may_be_infinite_where_ids_are_padding():
    class Padded(Model):
        def forward(self, *args, **kwargs):
            logits = super().forward(*args, **kwargs).logits
            return SimpleNamespace(logits=F.pad(logits, (0, 14), value=-torch.inf))

    class Functional(Padded):
        def forward(self, *args, **kwargs):
            logits = super().forward(*args, **kwargs).logits
            return SimpleNamespace(logits=logits.cumsum(1))

    check_isolation(Padded(Apart()))
    with pytest.raises(ValueError, match="first in Functional"):
        check_isolation(Functional(Apart()))


@pytest.mark.parametrize("form", ["tuple", "dict", "dataclass", "namespace"])
def test_a_module_may_return_tensors_in_whatever_form(form):
    """Only what is in a form of no known kind is not named, but the model."""

    @dataclasses.dataclass
    class Output:
        hidden: torch.Tensor

    forms = {
        "tuple": lambda x: (None, [x]),
        "dict": lambda x: {"hidden": x},
        "dataclass": Output,
        "namespace": lambda x: SimpleNamespace(hidden=x),
    }

    class Wrapped(State):
        def forward(self, x, seq, positions):
            return forms[form](super().forward(x, seq, positions))

    class Unwrapping(Apart):
        def __init__(self):
            super().__init__()
            self.wrapped = Wrapped()

        def forward(self, x, seq, positions):
            out = self.wrapped(x, seq, positions)
            if form == "tuple":
                return out[1][0]
            return out["hidden"] if form == "dict" else out.hidden

    name = r"layers\.1\.wrapped \(Wrapped\)" if form != "namespace" else r"layers\.1 \(Unwr"
    with pytest.raises(ValueError, match=f"first in {name}"):
        check_isolation(Model(Unwrapping()))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (len, TypeError, "model must be a torch module, got builtin_function"),
        (nn.Linear(2, 2), TypeError, "Linear must have a config or get_input_embeddings"),
        (Model(Apart(), num_ids=1), ValueError, "Model must know two tokens or more, got 1"),
        (Model(Apart()).to("meta"), ValueError, "Model must have weights"),
    ],
)
def test_what_is_no_model_is_refused(model, error, message):
    with pytest.raises(error, match=message):
        check_isolation(model)


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
        check_isolation(Model(Apart()), inputs=inputs)


@pytest.mark.parametrize("tail", ["sequence", "extend", "separate"])
@pytest.mark.parametrize("positions", ["continue", "zero"])
def test_inputs_of_micro_batches_are_tried(tail, positions):
    alignment = Alignment(
        sequence_multiple=8, total=512, max_sequences=9, tail=tail, positions=positions
    )

    def inputs(batch):
        return batch.select([3, 0, 5, 2, 4, 1], alignment).model_inputs()

    check_isolation(Model(Apart()), inputs=inputs)
    check_isolation(build_tiny_model(seed=0)[0], inputs=inputs)
    with pytest.raises(ValueError, match="Following"):
        check_isolation(Model(Following()), inputs=inputs_without_padding)


def inputs_without_padding(batch):
    return batch.select([3, 0, 5]).model_inputs()


@pytest.mark.parametrize("change", [{"use_cache": True}, {"attention_mask": None}])
def test_inputs_that_let_sequences_see_each_other_are_found(change):
    def inputs(batch):
        mask = {"attention_mask": torch.ones(1, batch.num_tokens, dtype=torch.long)}
        return batch.model_inputs() | (mask if "attention_mask" in change else change)

    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn \(Qwen3Attention\)"):
        check_isolation(build_tiny_model(seed=0)[0], inputs=inputs)


def test_the_collated_form_is_tried_too():
    check_isolation(
        build_tiny_model(seed=0)[0],
        inputs=lambda batch: to_padding_free(batch, labels="all") | {"use_cache": False},
    )


def test_pure_mamba2_is_named():
    with pytest.raises(
        ValueError, match=r"Mamba2ForCausalLM .* backbone\.layers\.0\.mixer \(Mamba2"
    ):
        check_isolation(tiny_model("mamba2"))


def test_everything_is_left_as_it_was():
    class Counting(Apart):
        """Counts its passes in a buffer when it is trained, as batch norm does."""

        def __init__(self):
            super().__init__()
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x, seq, positions):
            self.passes += self.training
            return super().forward(x, seq, positions)

    model = Model(Counting())
    model.train()
    model.layers[0].eval()
    model.head.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    check_isolation(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [weight.requires_grad for weight in model.head.parameters()] == [False, False]
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.is_grad_enabled()

    model.layers[1] = State()  # and if it raises, no hook is left either
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="State"):
        check_isolation(model)
    assert [module.training for module in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_dropout_that_draws_by_the_routing_does_not_disturb():
    class Experts(nn.Module):
        """Drops out where an expert is chosen, and draws as often."""

        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x, seq, positions):
            chosen = x[..., 0] > 0
            out = x.clone()
            out[chosen] = self.dropout(x[chosen])
            return F.dropout(out, 0.5, self.training)  # draws as often in each pass

    check_isolation(Model(Experts()))


def test_the_model_runs_uncompiled_and_its_graphs_are_left_alone():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = build_tiny_model(seed=0)[0]
    compiled = torch.compile(model, backend=backend)
    check_isolation(compiled)
    assert not graphs
    with pytest.raises(ValueError, match=r"Model lets .* _orig_mod\.layers\.1 \(State\)"):
        check_isolation(torch.compile(Model(State()), backend=backend))
    assert not graphs


def test_a_model_that_is_wrapped_for_data_parallelism(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel
        check_isolation(wrapped(build_tiny_model(seed=0)[0]))
        with pytest.raises(ValueError, match=r"Model lets .* module\.layers\.1 \(State\)"):
            check_isolation(wrapped(Model(State())))
    finally:
        torch.distributed.destroy_process_group()


def test_special_ids_and_short_limits_are_respected():
    """No id that may stand for an image is drawn, and no sequence is longer than positions are."""
    model = build_tiny_model(seed=0)[0]
    model.config.max_position_embeddings = 40
    model.config.image_token_id = 7
    model.config.eos_token_id = [8, 9]
    seen = []

    def inputs(batch: PackedBatch):
        seen.append(batch)
        return batch.model_inputs()

    check_isolation(model, inputs=inputs)
    assert seen[0].seqlens == (40, 1, 40, 2, 40, 40)
    ids = torch.cat([batch.input_ids for batch in seen])
    assert not {7, 8, 9} & set(ids.tolist())
    assert int(ids.max()) < model.config.vocab_size


def test_each_sequence_is_changed_once_and_in_all_of_its_tokens():
    seen = []
    check_isolation(Model(Apart()), inputs=lambda batch: seen.append(batch) or batch.model_inputs())
    first, *others = seen
    assert len(others) == len(first) == 6
    for sequence, batch in enumerate(others):
        assert torch.equal(batch.input_ids != first.input_ids, first.sequence_ids == sequence)
        assert torch.equal(batch.cu_seqlens, first.cu_seqlens)


def test_it_takes_as_many_passes_as_it_says():
    class Counted(Model):
        passes = 0

        def forward(self, *args, **kwargs):
            Counted.passes += 1
            return super().forward(*args, **kwargs)

    check_isolation(Counted(Apart()))
    assert Counted.passes == 18


class OverRow(Model):
    """Counts positions over the row, to which each sequence begins at another place."""

    def forward(self, input_ids, **kwargs):
        places = self.places(torch.arange(input_ids.shape[1])[None])
        return SimpleNamespace(logits=self.head(self.tokens(input_ids) + 0.029 * places))


def test_a_weak_effect_of_positions_over_the_row_is_found_in_float32():
    with pytest.raises(ValueError, match="of a packed batch other logits than"):
        check_isolation(OverRow(Apart()))


class Diluted(nn.Module):
    """A residual connection with a leak of a few hundredths in it, as attention of Bloom has."""

    def forward(self, x, seq_idx, position_ids):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + 0.04 * before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_leak_beside_a_residual_is_found_in_every_dtype(dtype):
    with pytest.raises(ValueError, match=r"see each other.*first in layers\.1 \(Diluted\)"):
        check_isolation(Model(Diluted()).to(dtype))


@pytest.mark.parametrize("num_ids", [2, 3, 4])
def test_a_vocabulary_of_special_ids_alone_is_drawn_from(num_ids):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=num_ids,
        num_hidden_layers=1,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=0,
        **sizes,
    )
    check_isolation(LlamaForCausalLM(config))


def test_logits_may_come_in_a_dictionary():
    class Dictionary(Model):
        def forward(self, **row):
            return {"logits": super().forward(**row).logits}

    check_isolation(Dictionary(Apart()))


def test_an_error_without_a_text_and_missing_embeddings_are_named():
    class Silent(Model):
        def forward(self, input_ids, **kwargs):
            raise KeyError

    with pytest.raises(ValueError, match="Silent cannot take packed sequences: KeyError"):
        check_isolation(Silent(Apart()))

    class Without(Model):
        def get_input_embeddings(self):
            return None

    with pytest.raises(TypeError, match="Without must have a config or get_input_embeddings"):
        check_isolation(Without(Apart()))


def test_a_buffer_that_a_pass_replaces_is_put_back():
    class Counting(Model):
        def __init__(self, layer):
            super().__init__(layer)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("last", None)

        def forward(self, input_ids, **row):
            self.count = self.count + 1
            self.last = input_ids
            return super().forward(input_ids, **row)

    model = Counting(Apart())
    count = model.count
    check_isolation(model)
    assert model.count is count
    assert (float(count), model.last) == (0.0, None)


def test_the_model_in_a_wrapper_that_shows_its_configuration_is_named():
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.base_model, self.config = model, model.config

        def forward(self, **row):
            return self.base_model(**row)

    with pytest.raises(ValueError, match=r"^Mamba2ForCausalLM lets sequences"):
        check_isolation(Wrapper(tiny_model("mamba2")))


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: float(torch.rand(()))])
def test_a_model_that_draws_numbers_passes_and_generators_are_left_as_they_were(draw):
    class Drawing(Model):
        def forward(self, **row):
            return SimpleNamespace(logits=super().forward(**row).logits * (1 + draw()))

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = draw()
    model = Drawing(Apart()).eval()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    check_isolation(model)
    assert draw() == expected
