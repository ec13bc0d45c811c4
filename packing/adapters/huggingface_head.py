"""Decoder and LM head of a Hugging Face causal model, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trajpack.packing.isolation.trees import check_tree_attention
from trajpack.packing.tree.nodes import TreeNodes
from trajpack.packing.tree_attention.huggingface import NAME, tree_table

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.micro_batches.micro_batch import MicroBatch


class LMHead:
    """Computes log-probabilities of generated tokens by a causal model, without its logits.

    The decoder runs on all tokens, the LM head on the rows that predict generated ones. A soft-cap
    (``final_logit_softcapping``) and a scale (``logit_scale``, ``logits_scaling``) are read from
    the model's configuration.

    Args:
        model: A causal language model of transformers. Models that keep packed sequences apart pass
            `check_isolation`. Those that compute trees pass `check_tree_attention`, which runs here
            if the model's attention is ``"trajpack_tree"``, else before the first tree.

    Raises:
        TypeError: If the model has no ``get_decoder`` or no output embeddings.
        ValueError: If the logits of a trial input differ from those that the head computes, because
            the model makes them in another way; if `check_tree_attention` refuses the model.

    Cost: two forward passes over eight tokens, for trees also those of `check_tree_attention`, six
        of up to 132 tokens; then nothing is compared again.

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

    def __init__(self, model: Any) -> None:
        self._model, name = model, type(model).__name__
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
        """Return `PackedBatch.logprobs` of a batch or micro-batch, or `TreeBatch.logprobs`.

        Args:
            batch: The inputs: ``batch.model_inputs()``. Trees need a model whose attention is
                ``"trajpack_tree"``.
            temperature: Temperature of sampling, as of `trajpack.kernels.token_logprobs`.
            options: ``entropy``, ``most``, ``support``, ``group`` and ``impl``, as there.

        Returns:
            float32 ``[num_generated]``, of trees ``[entries]``; with ``entropy`` a pair of such.

        Raises:
            TypeError, ValueError: As the method of the batch; ValueError also if the model does not
                compute trees.

        Cost: a forward pass of the decoder, and that of `PackedBatch.logprobs`.
        """
        if isinstance(batch, TreeNodes) and not self._is_tree_checked:
            self._check_trees(type(self._model).__name__)
        options |= {"softcap": self._softcap, "temperature": temperature * self._temperature}
        hidden = self._model.get_decoder()(**batch.model_inputs())[0]
        return batch.logprobs(hidden, self._model.get_output_embeddings(), **options)

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
        """Raise unless the head makes the logits that the model does."""
        head = self._model.get_output_embeddings()
        ids = torch.arange(8, device=head.weight.device)[None] % head.weight.shape[0]
        inputs = {"input_ids": ids, "use_cache": False}
        if self._model.config._attn_implementation == NAME:
            depths = torch.arange(8, device=ids.device)
            inputs["attention_mask"] = tree_table(torch.full_like(depths, 8).int(), depths)
        was_training = self._model.training
        with torch.no_grad():
            expected = self._model.eval()(**inputs).logits[0].double()
            logits = head(self._model.get_decoder()(**inputs)[0])[0].double()
        self._model.train(was_training)
        if self._softcap:
            logits = (logits / self._softcap).tanh() * self._softcap
        logits = logits / self._temperature
        largest = expected.abs().max().item()
        apart = (logits - expected).abs().max().item()
        if apart > (1e-4 if head.weight.dtype == torch.float32 else 2e-2) * largest:
            raise ValueError(
                f"LMHead: {name} makes its logits in another way than by decoder, output "
                f"embeddings, soft-cap and scale: they differ by {apart:.3g}, the largest is "
                f"{largest:.3g}; call PackedBatch.logprobs with its own hidden states"
            )
