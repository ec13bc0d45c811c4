"""Padding never leaks: a model says the same of real tokens, however they are padded."""

from __future__ import annotations

import pytest
import torch

from tests.packing.micro_batches.test_micro_batches import ALIGNMENTS, some_batch
from trajpack.packing.plan.plan import plan_micro_batches


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("transformers")
    from trajpack.agent import build_tiny_model

    return build_tiny_model()[0]


@pytest.fixture(scope="module")
def small_ids():
    """A batch whose token ids the model has, and what the model says of each sequence alone."""
    batch = some_batch(6, fields=[])
    batch.input_ids.remainder_(384)
    return batch


@pytest.fixture(scope="module")
def alone(model, small_ids):
    rows = small_ids.input_ids.split(list(small_ids.seqlens))
    with torch.no_grad():
        return torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])


@pytest.mark.parametrize("alignment", ALIGNMENTS.values(), ids=ALIGNMENTS.keys())
def test_logits_of_real_tokens_do_not_depend_on_the_padding(model, small_ids, alone, alignment):
    plan = plan_micro_batches(small_ids.seqlens, 160, align=alignment.sequence_multiple)
    assert len(plan) > 1
    with torch.no_grad():
        logits = [
            model(**one.model_inputs()).logits[0]
            for one in small_ids.micro_batches(plan, alignment)
        ]
    merged = small_ids.merge(plan, logits, alignment)
    torch.testing.assert_close(merged, alone, rtol=0, atol=1e-5)


def test_the_model_takes_its_own_labels(model, small_ids, alone):
    """Its loss over labels at the tokens' own index is that of labels one place earlier."""
    one = small_ids.select([3, 1, 2], ALIGNMENTS["both, extending"])
    with torch.no_grad():
        output = model(**one.model_inputs(), labels=one.labels("own")[None])
    ahead = one.labels()
    loss = torch.nn.functional.cross_entropy(output.logits[0], ahead, ignore_index=-100)
    torch.testing.assert_close(output.loss, loss, rtol=1e-5, atol=1e-6)


def test_a_plan_of_parts_is_as_good_as_the_whole(model, small_ids):
    """Gradients of the micro-batches, through merged outputs, are those of the batch at once."""
    plan = plan_micro_batches(small_ids.seqlens, 160)
    weight = model.lm_head.weight
    grads = []
    for parts in (small_ids.split(plan), [small_ids]):
        logits = [model(**one.model_inputs()).logits[0] for one in parts]
        scores = [
            one.shift(row.log_softmax(-1).amax(-1), "right")
            for one, row in zip(parts, logits, strict=True)
        ]
        merged = small_ids.merge(plan, scores) if len(parts) > 1 else scores[0]
        (grad,) = torch.autograd.grad(merged[small_ids.loss_mask].sum(), weight)
        grads.append(grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
