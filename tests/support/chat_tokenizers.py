"""Tokenizers of transformers with the real chat templates of model families, made without a hub."""

from functools import cache
from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FAMILIES = {
    "qwen2_5": ("<|im_end|>", "<|im_start|>"),
    "qwen3": ("<|im_end|>", "<|im_start|>"),
    "qwen3_5_think": ("<|im_end|>", "<|im_start|>"),
    "deepseekv3": ("<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"),
    "gemma3": ("<eos>", "<start_of_turn>", "<end_of_turn>"),
    "gptoss": ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
    "llama3_1": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "phi3": ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"),
    "smolvlm": ("<end_of_utterance>", "<|im_start|>"),
}
"""End-of-sequence token of each family, and its other special tokens."""
TEXT = [
    "<think>\nTwo and three are five.\n</think>\n\nThe sum is 5.",
    "user\nWhat is 2+3?\n\nassistant\n5",
    "\n\n",
]


@cache
def chat_tokenizer(family):
    """Return a byte-level tokenizer with the template and the special tokens of a family."""
    template = Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja"
    end, *others = FAMILIES[family]
    return trained(template.read_text(), end, others)


def trained(template, end, others=(), *, use_regex=True):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<bos>", end, *others],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<bos>",
        eos_token=end,
        pad_token="<pad>",
        additional_special_tokens=list(others),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def thought(text, answer):
    return said("assistant", f"<think>\n{text}\n</think>\n\n{answer}")


def sums(num_turns, thinking=True):
    """Return a conversation of several sums."""
    chat = []
    for number in range(num_turns):
        chat.append(said("user", f"What is {number}+{number + 2}?"))
        answer = f"The sum is {2 * number + 2}."
        thoughts = f"{number} and {number + 2}"
        chat.append(thought(thoughts, answer) if thinking else said("assistant", answer))
    return chat
