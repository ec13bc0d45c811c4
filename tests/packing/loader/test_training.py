"""Training on a `PackedDataset` is training on one conversation at a time."""

import pytest
import torch

from tests.packing.isolation.tiny_models import tiny_model
from tests.packing.tree.test_tree_models import by_rows, exact
from tests.support.chat_tokenizers import chat_tokenizer, sums
from trajpack import PackedDataset
from trajpack.agent import conversations_to_trajectories
from trajpack.packing.adapters.huggingface import LMHead, register_tree_attention


@pytest.mark.filterwarnings("ignore:from_messages. the chat template puts an empty block")
@pytest.mark.parametrize(("layout", "capacity"), [("merged", 300), ("turns", 300), ("tree", 200)])
def test_loss_and_gradients_of_a_step_are_those_of_one_conversation_at_a_time(layout, capacity):
    tokenizer, model = chat_tokenizer("qwen3"), tiny_model("qwen3")
    model.resize_token_embeddings(len(tokenizer))
    model = exact(model)
    rows = [{"messages": sums(turns, thinking=turns != 2)} for turns in (3, 1, 2, 3, 2)]
    conversations = conversations_to_trajectories(rows, tokenizer)
    expected = -by_rows(model, [*conversations]).mean()
    expected.backward()
    wanted = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    register_tree_attention()
    model.set_attn_implementation("trajpack_tree" if layout == "tree" else "sdpa")
    head, loss = LMHead(model), 0.0
    for rank in range(2):
        data_set = PackedDataset(
            conversations, capacity, rank=rank, num_ranks=2, accumulate=4, layout=layout
        )
        pieces = [*data_set]
        assert len(pieces) == 4  # one step
        for piece in pieces:
            tokens = piece.entries if layout == "tree" else piece
            weights = tokens.fields["loss_weights"][tokens.loss_mask].double()
            part = -(head.logprobs(piece) * weights).sum()
            part.backward()
            loss += part.item()
    assert loss == pytest.approx(expected.item(), rel=1e-6)  # weights are float32
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, wanted[name], rtol=1e-5, atol=1e-8)
