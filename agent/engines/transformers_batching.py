"""What transformers' continuous batching is given: its options, requests and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from trajpack.agent.protocols import SamplingParams
from trajpack.packing.conversion import as_ids, check_memory, shown

_MIN_TEMPERATURE = 1e-5
"""Below it logits divided by the temperature may leave the range of float32."""

_NOT_SUPPORTED: dict[str, object] = {
    "n": 1,
    "n_samples": 1,
    "min_new_tokens": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "ignore_eos": False,
}
"""Fields of other libraries' sampling objects, with the only supported value."""


class Limits(NamedTuple):
    """Limits of a request: token ids, and tokens of prompt and completion together."""

    vocabulary_size: int
    max_request_tokens: int


def read_sampling(sampling: Any, limits: Limits) -> SamplingParams:
    """Read sampling parameters from any object that has ``max_new_tokens``.

    ``greedy`` means temperature 0. A ``top_k`` below 1 or beyond the vocabulary takes every token.
    ``stop`` may be one string. A value that is missing, out of range or not supported raises.
    """
    for name, only in _NOT_SUPPORTED.items():
        value = getattr(sampling, name, only)
        if value != only and value:
            raise ValueError(f"{name}={value!r} cannot be honoured by this engine, only {only!r}")
    greedy = bool(getattr(sampling, "greedy", False))
    top_k = int(getattr(sampling, "top_k", 0))
    stop = getattr(sampling, "stop", None) or ()
    params = SamplingParams(
        max_new_tokens=int(sampling.max_new_tokens),
        temperature=0.0 if greedy else float(getattr(sampling, "temperature", 1.0)),
        top_p=float(getattr(sampling, "top_p", 1.0)),
        top_k=top_k if 0 < top_k < limits.vocabulary_size else 0,
        stop=(stop,) if isinstance(stop, str) else stop,
        stop_token_ids=getattr(sampling, "stop_token_ids", None) or (),
    )
    if 0 < params.temperature < _MIN_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0 or at least {_MIN_TEMPERATURE}, got {params.temperature}"
        )
    return params


def read_prompt(token_ids: Sequence[int], max_new_tokens: int, limits: Limits) -> list[int]:
    """Return ``token_ids`` as a list of ints; one that breaks a limit would end all generation.

    A `TypeError` or `ValueError` says what is wrong with them, or that there is no room for
    ``max_new_tokens``.
    """
    ids = as_ids("token ids", token_ids)
    if not ids.size:
        raise ValueError("the prompt must be non-empty")
    size = limits.vocabulary_size
    if (largest := int(ids.max())) >= size:
        raise ValueError(f"token id {largest} is out of vocabulary (0 to {size - 1})")
    if ids.size + max_new_tokens > limits.max_request_tokens:
        asked = f"a prompt of {ids.size} tokens and {max_new_tokens} new ones"
        raise ValueError(f"{asked} exceed the {limits.max_request_tokens} tokens of a request")
    prompt: list[int] = ids.tolist()
    return prompt


def processor_arguments(params: SamplingParams, vocabulary_size: int) -> dict[str, float | int]:
    """Translate sampling parameters to the per-request arguments of continuous batching."""
    if params.temperature == 0:  # greedy: the likeliest token at temperature 1
        return {"temperature": 1.0, "top_p": 1.0, "top_k": 1}
    top_k = params.top_k or vocabulary_size
    return {"temperature": params.temperature, "top_p": params.top_p, "top_k": top_k}


def build_batching(
    model: Any,
    *,
    eos_token_ids: frozenset[int],
    num_blocks: int | None,
    page_size: int | None,
    max_batch_tokens: int | None,
    seed: int,
) -> Any:
    """Return a continuous batching loop for ``model``: cache allocated, not yet started.

    Requests never share cache blocks: a block that outlives a weight update would carry
    keys and values of the older weights into new requests.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    on_cpu = model.device.type == "cpu"
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    page_name = "page_size" if "page_size" in known else "block_size"
    options: dict[str, Any] = {
        "return_logprobs": True,
        "per_request_processors": True,
        "allow_block_sharing": False,
        "use_async_batching": False,
        "use_cuda_graph": False,
        "seed": seed,
        # Left open, a CPU spends many seconds and most of its memory on the cache.
        "num_blocks": 512 if num_blocks is None and on_cpu else num_blocks,
        "max_batch_tokens": 512 if max_batch_tokens is None and on_cpu else max_batch_tokens,
        page_name: page_size or (32 if on_cpu else 256),
    }
    if "auto_switch_to_flash" in known:
        options["auto_switch_to_flash"] = False
    # A processor exists only where the default differs from the neutral value; each request
    # brings its own values, so these are never used.
    placeholders = {"temperature": 0.5, "top_p": 0.5, "top_k": 1, "max_new_tokens": 1}
    eos = sorted(eos_token_ids) or -1
    batching = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=True, eos_token_id=eos, **placeholders),
        continuous_batching_config=ContinuousBatchingConfig(**options),
    )
    neutral_values = {"top_k": model.config.get_text_config().vocab_size, "top_p": 1.0}
    for processor in batching.logit_processor.logits_processor:
        for name in neutral_values.keys() & getattr(processor, "supported_kwargs", {}).keys():
            processor.__class__ = _skipping(type(processor), name, neutral_values[name])
    batching.warmup()
    return batching


def read_limits(model: Any, batching: Any) -> Limits:
    """Return the limits of requests to ``batching``: its cache and the model's positions."""
    options, config = batching.continuous_batching_config, model.config.get_text_config()
    page_size = options.page_size if hasattr(options, "page_size") else options.block_size
    capacity = int(batching.batch_processor.cache.num_blocks) * page_size
    positions = getattr(config, "max_position_embeddings", None)
    return Limits(int(config.vocab_size), min(capacity, positions or capacity))


def check_weights(own: Mapping[str, torch.Tensor], state_dict: Mapping[str, Any]) -> None:
    """Check all weights before the first is copied: a load that fails halfway cannot be undone."""
    unknown = sorted(set(state_dict) - set(own))
    loaded = {own[name].data_ptr() for name in set(own) & set(state_dict)}
    missing = sorted(
        name for name in set(own) - set(state_dict) if own[name].data_ptr() not in loaded
    )
    if unknown or missing:
        raise ValueError(f"weights unknown to the model: {unknown}; missing: {missing}")
    for name, weight in state_dict.items():
        is_dense = (
            isinstance(weight, torch.Tensor)
            and type(weight.detach()) is torch.Tensor  # no subclass, such as a sharded one
            and weight.layout is torch.strided
            and weight.device.type != "meta"
            and not (weight.is_quantized or weight.is_complex())
        )
        if not is_dense:
            raise TypeError(f"{name} must be a dense, real torch.Tensor, got {shown(weight)}")
        if weight.shape != own[name].shape:
            shapes = f"{tuple(weight.shape)}, the model's {tuple(own[name].shape)}"
            raise ValueError(f"{name} has shape {shapes}")
        check_memory(weight)
        dtype = own[name].dtype
        if not weight.detach().to(dtype).isfinite().all():
            raise ValueError(f"{name} must be finite in {dtype}")


def _skipping(stock: Any, name: str, neutral: float) -> Any:
    """Return a filter that does not sort the vocabulary where no request of a batch uses it."""

    class SkippedWhenNeutral(stock):  # type: ignore[misc]
        idle = False

        def prepare_tensor_args(self, requests: list[Any]) -> Any:
            values = (request.state.logit_processor_kwargs.get(name) for request in requests)
            self.idle = all(value == neutral for value in values)
            return super().prepare_tensor_args(requests)

        def __call__(self, scores: Any, tensor_arg: Any) -> Any:
            return scores if self.idle else super().__call__(scores, tensor_arg)

    return SkippedWhenNeutral
