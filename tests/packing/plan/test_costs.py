"""Costs of models, compared with counted operations."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trajpack import TransformerCost, plan_micro_batches


def test_the_cost_is_what_a_model_works():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        num_key_value_heads=2, vocab_size=1000,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    cost = TransformerCost(2 * weights, 2 * 3 * 4 * 16)
    for length in (16, 96):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.ones(1, length, dtype=torch.long), use_cache=False)
        masked = cost.quadratic * length**2  # plain attention works on what it masks, too
        assert counter.get_total_flops() == cost([length])[0] + masked


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
