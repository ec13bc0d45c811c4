"""Decoder and LM head of a Hugging Face causal model, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trajpack.kernels.logprobs.token_logprobs import token_logprobs
from trajpack.packing.isolation.trees import check_tree_attention
from trajpack.packing.micro_batches.logprobs import head_of
from trajpack.packing.tree.nodes import TreeNodes
from trajpack.packing.tree_attention.huggingface import NAME, tree_table

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.micro_batches.micro_batch import MicroBatch

TRIED = 64
"""Tokens of the vocabulary, evenly spread, whose log-probabilities are compared."""


class LMHead:
    """Computes log-probabilities of generated tokens by a causal model, without its logits.

    The decoder runs on all tokens, the LM head on the rows that predict generated ones. A soft-cap
    (``final_logit_softcapping``) and a scale (``logit_scale``, ``logits_scaling``) are read from
    the model's configuration.

    Modules around the model are left out: pass ``model.module`` of ``DistributedDataParallel``, and
    add up the gradients of the ranks yourself, because it does so only where its own ``forward``
    ran.

    Args:
        model: A causal language model of transformers. Models that keep packed sequences apart pass
            `check_isolation`. Those that compute trees pass `check_tree_attention`, which runs here
            if the model's attention is ``"trajpack_tree"``, else before the first tree.
        group: Process group over which the rows of the LM head are sharded, if they are, as of
            `trajpack.kernels.token_logprobs`.

    Raises:
        TypeError: If the model has no ``get_decoder``, or its output embeddings are no
            ``torch.nn.Linear`` without hooks, such as one with a LoRA adapter.
        ValueError: If log-probabilities of a trial input differ from those of the model's logits,
            because it makes them in another way; if `check_tree_attention` refuses the model.

    Example:
        >>> import trajpack
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"vocab_size": 9, "hidden_size": 4, "intermediate_size": 4}
        >>> layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        >>> head = LMHead(LlamaForCausalLM(LlamaConfig(**sizes, **layers)))
        >>> turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5])
        >>> head.logprobs(trajpack.pack([trajpack.Trajectory("a", [turn])])).shape
        torch.Size([2])
    """

    def __init__(self, model: Any, *, group: Any = None) -> None:
        self._model, self._group, name = model, group, type(model).__name__
        if not hasattr(model, "get_decoder") or model.get_output_embeddings() is None:
            raise TypeError(f"LMHead: model must have a decoder and output embeddings, got {name}")
        config = model.config.get_text_config()
        self._softcap = getattr(config, "final_logit_softcapping", None)
        scale = getattr(config, "logit_scale", None) or 1.0
        self._temperature = (getattr(config, "logits_scaling", None) or 1.0) / scale
        self._is_tree_checked = False
        if model.config._attn_implementation == NAME:
            self._check_trees(name)
        self._check(name)

    def logprobs(
        self,
        batch: PackedBatch | MicroBatch | TreeNodes,
        *,
        temperature: float | torch.Tensor = 1.0,
        **options: Any,
    ) -> Any:
        """Return `PackedBatch.logprobs` of a batch, a micro-batch or a tree, with its options.

        Raises:
            TypeError, ValueError: As the method of the batch; ValueError also if the model does not
                compute trees.
        """
        if isinstance(batch, TreeNodes) and not self._is_tree_checked:
            self._check_trees(type(self._model).__name__)
        hidden = self._model.get_decoder()(**batch.model_inputs())[0]
        return batch.logprobs(
            hidden,
            self._model.get_output_embeddings(),
            temperature=temperature * self._temperature,
            softcap=self._softcap,
            group=self._group,
            **options,
        )

    def _check_trees(self, name: str) -> None:
        """Raise unless the model computes trees."""
        chosen = self._model.config._attn_implementation
        if chosen != NAME:
            raise ValueError(
                f"LMHead: {name} must have the attention {NAME!r} for trees, got {chosen!r}: call "
                f"register_tree_attention() and model.set_attn_implementation({NAME!r})"
            )
        check_tree_attention(self._model)
        self._is_tree_checked = True

    def _check(self, name: str) -> None:
        """Raise unless the head has the log-probabilities that the model's logits have."""
        weight, bias = head_of(self._model.get_output_embeddings())
        ids = torch.arange(8, device=weight.device)[None] % weight.shape[0]
        inputs = {"input_ids": ids, "use_cache": False}
        if self._model.config._attn_implementation == NAME:
            depths = torch.arange(8, device=ids.device)
            inputs["attention_mask"] = tree_table(torch.full_like(depths, 8).int(), depths)
        was_training = self._model.training
        with torch.no_grad():
            logits = self._model.eval()(**inputs).logits[0].double()
            hidden = self._model.get_decoder()(**inputs)[0][0]
            tried = torch.arange(min(TRIED, logits.shape[1]), device=ids.device)
            tried = tried * logits.shape[1] // len(tried)
            each = torch.arange(9, dtype=torch.int32, device=ids.device)
            found, _ = token_logprobs(
                hidden, weight, each[:8], (each * len(tried), tried.repeat(8)),
                bias=bias, temperature=self._temperature, softcap=self._softcap, group=self._group,
            )  # fmt: skip
        self._model.train(was_training)
        largest = logits.abs().max().item()
        expected = logits.log_softmax(-1)[:, tried].flatten()
        apart = (found.double() - expected).abs().max().item()
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(hidden.dtype, 2e-2)
        if not apart <= tolerance * largest:
            raise ValueError(
                f"LMHead: {name} makes its logits in another way than by decoder, output "
                f"embeddings, soft-cap and scale: they differ by {apart:.3g}, the largest is "
                f"{largest:.3g}; call PackedBatch.logprobs with its own hidden states"
            )
