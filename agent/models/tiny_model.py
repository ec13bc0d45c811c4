"""Tiny causal models with their tokenizers, for demonstrations and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trajpack.packing.optional import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CHAT_TEMPLATE = (
    "{% set system = messages[0] if messages and messages[0]['role'] == 'system' %}"
    "{% if tools %}"
    "{{ '<|im_start|>system\n' }}{{ system['content'] + '\n\n' if system }}"
    '{{ \'Call a function as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.\n\' }}'
    "{% for tool in tools %}{{ tool['function'] | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% elif not (tools and system and loop.first) %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXT = (
    "system\nYou are a careful assistant. Think step by step, then answer the question.",
    "user\nWhat is 12 + 30? Give the final answer inside \\boxed{}.",
    "assistant\nThe sum of 12 and 30 is 42, so the answer is \\boxed{42}.",
    "user\nUnfortunately your answer is wrong. Let's try again.",
    "user\nCongratulations! You are correct!",
    "There are 7 days in a week and 24 hours in a day, so there are 168 hours in a week.",
    "If a train travels 60 miles in one hour, how many miles does it travel in 3 hours?",
    "She sold 48 clips in April and half as many in May; how many did she sell altogether?",
    "State your final answer to the following question, and show the steps of the solution.",
    "The price of the book is $15, and the price of the pen is $2. What do they cost together?",
)

_ARITHMETIC_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_ARITHMETIC_TEXT = (
    "Unfortunately your answer is wrong. Let's try again.",
    "Congratulations! You are correct!",
) * 2


def build_tiny_model(seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build a tiny Qwen3 with random weights, and a byte-level tokenizer for it.

    The model has 2 layers of width 64 and 384 tokens of vocabulary. The tokenizer is a byte-pair
    encoding that every Unicode string survives, with a ChatML chat template that declares tools and
    marks the assistant's tokens (``return_assistant_tokens_mask``); a message ends with
    ``<|im_end|>``, and ``<|endoftext|>`` pads. Nothing is downloaded.

    Args:
        seed: Seed of the weights alone; torch's random generators do not change.

    Returns:
        The model, in evaluation mode and float32 on the CPU, and its tokenizer.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
    """
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = _tokenizer(_TEXT, 384, special, _CHAT_TEMPLATE, has_digits=False)
    # Wide enough that the next token is far from uniform, and that temperature matters.
    return _model(seed, tokenizer, num_positions=8192, initializer_range=0.2), tokenizer


def build_arithmetic_model(seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build a tiny Qwen3 as `build_tiny_model`, with 512 positions and one token for each digit.

    A message ends with ``<|end|>``, ``<|pad|>`` pads.
    """
    special = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")
    tokenizer = _tokenizer(_ARITHMETIC_TEXT, 512, special, _ARITHMETIC_TEMPLATE, has_digits=True)
    # The default initializer range learns several times slower at this width.
    return _model(seed, tokenizer, num_positions=512, initializer_range=0.1), tokenizer


def _tokenizer(
    text: Sequence[str], size: int, special: Sequence[str], template: str, *, has_digits: bool
) -> PreTrainedTokenizerBase:
    """Train a tokenizer; the first special token pads, the last ends a message."""
    require("tokenizers", "transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    # Without a split at words, the agent's feedback becomes a single token.
    split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not has_digits)
    if has_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        split = pre_tokenizers.Sequence([digits, split])
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = split
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=special[-1],
        pad_token=special[0],
        additional_special_tokens=[*special[1:-1]],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _model(
    seed: int, tokenizer: Any, *, num_positions: int, initializer_range: float
) -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=num_positions,
        initializer_range=initializer_range,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # The default generator alone: torch.manual_seed would reseed every device.
        torch.default_generator.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()
