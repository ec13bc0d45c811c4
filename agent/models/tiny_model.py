"""Tiny causal models with their tokenizers, for demonstrations and tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trajpack.packing.optional import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

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
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
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

    The model has 2 layers of width 64 and 384 tokens of vocabulary. The tokenizer is a
    byte-pair encoding that every Unicode string survives, with a ChatML chat template
    that declares tools and marks the assistant's tokens (``return_assistant_tokens_mask``); a
    message ends with ``<|im_end|>``, and ``<|endoftext|>`` pads. Nothing is downloaded, and both
    can be written with their ``save_pretrained``.

    Args:
        seed: Seed of the weights; the tokenizer is always the same. The state of torch's random
            generators does not change.

    Returns:
        The model, in evaluation mode and float32 on the CPU, and its tokenizer.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
    """
    require("tokenizers", "transformers")
    from tokenizers import pre_tokenizers

    tokenizer = _train_tokenizer(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        _TEXT,
        special_tokens=(_PAD, _END, _START),
        vocab_size=384,
        chat_template=_CHAT_TEMPLATE,
    )
    # Wide enough that the next token is far from uniform, and that temperature matters.
    return _build_qwen3(tokenizer, seed, max_positions=8192, initializer_range=0.2), tokenizer


def build_arithmetic_model(seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build a tiny Qwen3 as `build_tiny_model`, with 512 positions and one token for each digit.

    A message ends with ``<|end|>``, ``<|pad|>`` pads.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
    """
    require("tokenizers", "transformers")
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    # Without a split at words, the agent's feedback becomes a single token.
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = _train_tokenizer(
        pre_tokenizers.Sequence([digits, words]),
        _ARITHMETIC_TEXT,
        special_tokens=("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"),
        vocab_size=512,
        chat_template=_ARITHMETIC_TEMPLATE,
    )
    # The default initializer range learns several times slower at this width.
    return _build_qwen3(tokenizer, seed, max_positions=512, initializer_range=0.1), tokenizer


def _build_qwen3(
    tokenizer: PreTrainedTokenizerBase, seed: int, *, max_positions: int, initializer_range: float
) -> PreTrainedModel:
    """Build a Qwen3 of 2 layers of width 64 for a tokenizer, with random weights on the CPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_positions,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # The default generator alone: torch.manual_seed would reseed every device.
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = Qwen3ForCausalLM(config)
    return model.eval()


def _train_tokenizer(
    pre_tokenizer: Any,
    text: Iterable[str],
    *,
    special_tokens: Sequence[str],
    vocab_size: int,
    chat_template: str,
) -> PreTrainedTokenizerBase:
    """Train a byte-pair encoding; the special tokens are padding, end of a message, and others."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pad, end, *others = special_tokens
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizer
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[pad, *others, end],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=end,
        pad_token=pad,
        additional_special_tokens=others,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
