from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, strategies as st

from trajpack.agent.models.tiny_model import build_arithmetic_model, build_tiny_model

_, TOKENIZER = build_tiny_model()


def test_equal_seeds_give_equal_weights_and_others_do_not() -> None:
    before = torch.get_rng_state()
    assert build_tiny_model(seed=1)[1].backend_tokenizer.to_str() == (
        TOKENIZER.backend_tokenizer.to_str()
    )
    first, again, other = (build_tiny_model(seed)[0].state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert torch.equal(before, torch.get_rng_state())


@given(st.text())
def test_every_string_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_model_and_tokenizer_agree_on_the_vocabulary() -> None:
    model, tokenizer = build_tiny_model()
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, len(tokenizer))


def test_the_chat_template_marks_what_the_assistant_said() -> None:
    messages = [
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "It is 2"},
        {"role": "user", "content": "Yes."},
    ]
    text = TOKENIZER.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    encoded = TOKENIZER.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    said = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert TOKENIZER.decode([token for token, mask in said if mask]) == "It is 2<|im_end|>"


@pytest.mark.slow
def test_importing_does_not_load_transformers() -> None:
    names = "models.tiny_model", "engines.transformers_engine", "runner.runner"
    modules = ", ".join(f"trajpack.agent.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_model_of_sums_has_a_token_for_each_digit() -> None:
    (model, tokenizer), (again, _), (other, _) = map(build_arithmetic_model, (0, 0, 1))
    text = "Zwölf is 12, 120 is not -7."
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    for number in ("12", "120", "-7"):
        assert len(tokenizer.encode(number, add_special_tokens=False)) == len(number)
    name = "model.embed_tokens.weight"
    weights = model.state_dict()[name]
    assert torch.equal(again.state_dict()[name], weights)
    assert not torch.equal(other.state_dict()[name], weights)
