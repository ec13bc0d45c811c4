"""Fine-tune a tiny model on conversations, packed into full micro-batches.

It runs on a CPU, in a few seconds:

    python examples/sft.py

Each message of the assistant is trained with the prompt that it has at inference. The template of
this model removes the reasoning of earlier answers, so every answer has a history of its own. A
tree stores what these share once.
"""

import torch
from torch.utils.data import DataLoader

import trajpack
from trajpack.agent import build_tiny_model, conversations_to_trajectories
from trajpack.packing.adapters.huggingface import LMHead, register_tree_attention

EPOCHS, CAPACITY, ACCUMULATE = 4, 512, 2

# as Qwen3's template: only the last answer keeps its reasoning
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{{ message.content.split('</think>')[-1] if not loop.last else message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversation(first, num_turns):
    """Return a row of a data set: sums, each with some reasoning."""
    messages = []
    for number in range(first, first + num_turns):
        thought = f"<think>{number} and {number} is twice {number}.</think>"
        messages.append({"role": "user", "content": f"What is {number} + {number}?"})
        messages.append({"role": "assistant", "content": f"{thought}It is {2 * number}."})
    return {"id": f"from {first}", "messages": messages}


def main():
    """Train; return the mean loss of each epoch."""
    model, tokenizer = build_tiny_model(seed=0)
    tokenizer.chat_template = TEMPLATE
    rows = [
        conversation(first, num_turns=4) for first in range(24)
    ]  # or a data set, or a JSONL file
    trajectories = [*conversations_to_trajectories(rows, tokenizer)]
    turns, merged = (trajpack.pack(trajectories, layout=name) for name in ("turns", "merged"))
    tree = trajpack.pack_tree(trajectories)
    print(
        f"{turns.num_turns} turns: {turns.num_tokens:,} tokens one by one, "
        f"{merged.num_tokens:,} as conversations, {tree.num_nodes:,} in trees"
    )

    register_tree_attention()
    model.set_attn_implementation("trajpack_tree")
    head, optimizer = LMHead(model), torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = trajpack.PackedDataset(trajectories, CAPACITY, layout="tree", accumulate=ACCUMULATE)
    loader = DataLoader(data, batch_size=None)
    losses = []
    for epoch in range(EPOCHS):
        data.set_epoch(epoch)
        steps, loss = 0, 0.0
        for number, piece in enumerate(loader, start=1):
            part = -(head.logprobs(piece) * piece.generated["loss_weights"]).sum()
            part.backward()
            loss += part.item()
            if number % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        losses.append(loss / steps)
        print(f"epoch {epoch}: loss {losses[-1]:.3f} in {steps} steps")
    return losses


if __name__ == "__main__":
    losses = main()
    assert losses[-1] < losses[0]
