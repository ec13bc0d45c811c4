"""Tokenizers of transformers with the real chat templates of model families, made without a hub."""

import copy
import os
import re
from functools import cache
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
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


FOLDERS = [Path(trl.__file__).parent / "chat_templates"]
FOLDERS += map(Path, filter(None, [os.environ.get("TRAJPACK_TEMPLATES")]))
TEMPLATES = {
    file.stem: file
    for folder in FOLDERS
    for file in sorted(folder.glob("*.jinja"))
    if not file.stem.endswith("_training")
}
"""Chat templates of the trl wheel as models ship them, and those in TRAJPACK_TEMPLATES."""
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<turn|>", "<end_of_turn>", "<|return|>", "<|eot|>"),
    *("<|END_OF_TURN_TOKEN|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>"),
    "<|endoftext|>",
)


@cache
def _plain():
    return trained(None, "<pad>")


@cache
def template_tokenizer(name):
    """Return a byte-level tokenizer with one of `TEMPLATES`, whose marks are added tokens."""
    template = TEMPLATES[name].read_text()
    marks = r"<\|[^\s<>|]*\|?>|<\w+\|>|<\uff5c[^<>\uff5c]+\uff5c>|</?\w+>|\[/?[A-Z_]{4,}\]"
    end = next((end for end in ENDS if end in template), "</s>")
    words = sorted({*re.findall(marks, template), end, "<bos>"})
    tokenizer = copy.deepcopy(_plain())
    special = [re.fullmatch(r"</?\w+>", word) is None or word == end for word in words]
    added = zip(words, special, strict=True)
    tokenizer.add_tokens(
        [AddedToken(word, special=is_special, normalized=False) for word, is_special in added]
    )
    tokenizer.bos_token, tokenizer.eos_token = "<bos>", end
    tokenizer.chat_template = template
    return tokenizer


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
