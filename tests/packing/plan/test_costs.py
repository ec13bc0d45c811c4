"""Costs of models, compared with counted operations."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trajpack import TransformerCost, plan_micro_batches

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000,
}  # fmt: skip


EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}


LATENT = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24,
    "first_k_dense_replace": 3, "num_key_value_heads": 4,
}  # fmt: skip


MODELS = {
    "Qwen3Config": SMALL | {"head_dim": 32},
    "LlamaConfig": SMALL,
    "GPT2Config": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 60_000},
    "Qwen3MoeConfig": SMALL | EXPERTS | {"num_experts": 8, "mlp_only_layers": [1]},
    "MixtralConfig": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3Config": SMALL | LATENT | {"q_lora_rank": 24},
    "DeepseekV2Config": SMALL | LATENT | {"q_lora_rank": None},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_cost_is_what_a_model_works(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**MODELS[name])
    one_by_one = {"experts_implementation": "eager"} if "xpert" in str(MODELS[name]) else {}
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", **one_by_one
    )
    cost = TransformerCost.from_config(config)
    for length in (16, 96):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.ones(1, length, dtype=torch.long), use_cache=False)
        masked = cost.quadratic * length**2  # plain attention works on what it masks, too
        assert counter.get_total_flops() == cost([length])[0] + masked


def test_models_as_published_work_as_published():
    """Twice the parameters that a token meets, embeddings apart."""
    transformers = pytest.importorskip("transformers")
    for name, billions in (("MixtralConfig", 12.9), ("DeepseekV3Config", 37), ("LlamaConfig", 6.6)):
        cost = TransformerCost.from_config(getattr(transformers, name)())
        assert cost.linear == pytest.approx(2e9 * billions, rel=0.02)


def test_a_window_bounds_what_a_token_attends_to():
    cost = TransformerCost(1.0, 0.0, windowed=3.0, window=5)
    for length in range(1, 20):
        pairs = sum(min(position - 0.5, 5) for position in range(1, length + 1))
        assert cost([length])[0] == pytest.approx(length + 3.0 * 2 * pairs)


def test_kinds_of_layers_are_told_apart():
    plain = SimpleNamespace(**SMALL)
    whole = TransformerCost.from_config(plain)
    kinds = ["sliding_attention", "full_attention", "linear_attention"]
    mixed = SimpleNamespace(**SMALL, layer_types=kinds, sliding_window=8)
    cost = TransformerCost.from_config(mixed)
    assert (cost.quadratic, cost.windowed, cost.window) == (
        whole.quadratic / 3, whole.quadratic / 3, 8,
    )  # fmt: skip
    assert cost.linear == whole.linear
    alike = SimpleNamespace(**SMALL, sliding_window=8)
    assert TransformerCost.from_config(alike).windowed == whole.quadratic
    unused = SimpleNamespace(**SMALL, sliding_window=8, use_sliding_window=False)
    assert TransformerCost.from_config(unused) == whole
    off = SimpleNamespace(**SMALL, layer_types=kinds[:2] * 2, sliding_window=None)
    assert TransformerCost.from_config(off).windowed == 0


def test_layers_that_attend_within_chunks_cost_as_many_pairs_as_chunks_have():
    kinds = ["chunked_attention", "full_attention", "chunked_attention"]
    chunked = SimpleNamespace(**SMALL, layer_types=kinds, attention_chunk_size=16)
    cost, whole = (
        TransformerCost.from_config(config) for config in (chunked, SimpleNamespace(**SMALL))
    )
    assert (cost.windowed, cost.window) == (whole.quadratic * 2 / 3, 8)
    one_more = cost([16_016])[0] - cost([16_000])[0] - 16 * cost.linear
    one_more -= cost.quadratic * (16_016**2 - 16_000**2)
    assert one_more == pytest.approx(cost.windowed * 16**2)
    unbounded = SimpleNamespace(**SMALL, layer_types=kinds, attention_chunk_size=None)
    assert TransformerCost.from_config(unbounded) == whole


def test_a_configuration_that_lacks_something_is_told():
    with pytest.raises(ValueError, match="must have num_hidden_layers, got SimpleNamespace"):
        TransformerCost.from_config(SimpleNamespace())


def test_costs_of_a_model_balance_micro_batches():
    lengths = np.random.default_rng(0).integers(100, 8000, 500)
    cost = TransformerCost(1e6, 1e4)
    plans = {
        name: plan_micro_batches(lengths, 60_000, algorithm=name, cost=cost, min_bins=38)
        for name in ("best_fit_decreasing", "karmarkar_karp")
    }
    spread = {name: plan.statistics().cost_imbalance for name, plan in plans.items()}
    assert spread["karmarkar_karp"] < 1.01
    assert spread["best_fit_decreasing"] > 1.3
