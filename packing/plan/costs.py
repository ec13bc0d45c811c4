"""Cost of a sequence for a model: floating-point operations by length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trajpack.packing.plan.request import read_lengths
from trajpack.packing.plan.units import Floats

MULTIPLY_ADD = 2
"""Floating-point operations of one weight and one token."""


@dataclass(frozen=True)
class TransformerCost:
    """Floating-point operations of a forward pass over a sequence of n tokens.

    ``linear * n + quadratic * n**2``, and for layers with a sliding window w ``windowed`` times
    n² up to n = w, and w (2 n - w) beyond: a token attends to at most w before it. A training step
    is about three forward passes for every sequence alike, so plans do not change with it.

    Args:
        linear: Operations of a token at any position.
        quadratic: Operations of attention to all earlier tokens, over n².
        windowed: Operations of attention in layers with a sliding window, over n².
        window: Tokens of that window; ``None`` if no layer has one.

    Example:
        >>> TransformerCost(linear=100.0, quadratic=1.0)([10, 100])
        array([ 1100., 20000.])
        >>> TransformerCost(0.0, 0.0, windowed=1.0, window=4)([3, 4, 6])
        array([ 9., 16., 32.])
    """

    linear: float
    quadratic: float
    windowed: float = 0.0
    window: int | None = None

    def __call__(self, lengths: Any) -> Floats:
        """Return the cost of each length, float64."""
        count = read_lengths("TransformerCost", lengths).astype(float)
        cost = self.linear * count + self.quadratic * count**2
        if self.window is not None:
            near = count.clip(max=self.window)
            cost = cost + self.windowed * near * (2 * count - near)
        return cost

    @classmethod
    def from_config(cls, config: Any) -> TransformerCost:
        """Read the cost from a Hugging Face model configuration.

        Counted are the projections of attention, with grouped keys and values or with latent ones
        (MLA); scores and weighted values over earlier tokens, half of n², or a sliding window; the
        layers between, of which a mixture of experts uses the experts that a token is sent to, its
        shared ones and its router; and the head over the vocabulary. Norms, rotations and
        embeddings are left out: they are few. Layers of linear attention count as projections,
        those that attend within chunks as a window of half a chunk: as many pairs in long
        sequences.

        Args:
            config: A ``PretrainedConfig`` or anything with its attributes.

        Raises:
            ValueError: If it lacks an attribute that is needed.

        Example:
            >>> from types import SimpleNamespace
            >>> config = SimpleNamespace(
            ...     hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            ...     num_key_value_heads=1, vocab_size=100)
            >>> TransformerCost.from_config(config)
            TransformerCost(linear=3904, quadratic=32, windowed=0, window=None)
        """
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        layers = int(_needed(config, "num_hidden_layers"))
        kinds = _layer_kinds(config, layers)
        projections, pair = _attention(config)
        linear = layers * projections
        linear += sum(_feed_forward(config, layer) for layer in range(layers))
        linear += int(_needed(config, "hidden_size")) * int(_needed(config, "vocab_size"))
        window = None
        if "sliding_attention" in kinds:
            window = getattr(config, "sliding_window", None)
            window = int(config.attention_chunk_size) // 2 if window is None else int(window)
        # half of n² pairs, each of which multiplies and adds
        return cls(
            linear=MULTIPLY_ADD * linear,
            quadratic=MULTIPLY_ADD * pair * kinds.count("full_attention") // 2,
            windowed=MULTIPLY_ADD * pair * kinds.count("sliding_attention") // 2,
            window=window,
        )


def _needed(config: Any, *names: str) -> Any:
    """Return the first of these attributes that is not None."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    raise ValueError(
        f"TransformerCost: the configuration must have {' or '.join(names)}, "
        f"got {type(config).__name__}"
    )


def _number(config: Any, name: str) -> int:
    """Return an attribute as an int, 0 if it is missing or None."""
    return int(getattr(config, name, None) or 0)


def _layer_kinds(config: Any, layers: int) -> list[str]:
    """Return ``"full_attention"``, ``"sliding_attention"`` or another kind for each layer."""
    kinds = getattr(config, "layer_types", None)
    windowed = getattr(config, "sliding_window", None) is not None
    if not kinds:
        slides = windowed and getattr(config, "use_sliding_window", True)
        return ["sliding_attention" if slides else "full_attention"] * layers
    chunked = getattr(config, "attention_chunk_size", None) is not None
    known = {"sliding": windowed or chunked, "chunked": chunked}
    for word, has_window in known.items():
        replacement = "sliding_attention" if has_window else "full_attention"
        kinds = [replacement if word in kind else kind for kind in kinds]
    return list(kinds)


def _attention(config: Any) -> tuple[int, int]:
    """Return the weights of a layer's projections, and the multiplications of a pair of tokens."""
    hidden, heads = int(_needed(config, "hidden_size")), int(_needed(config, "num_attention_heads"))
    latent = getattr(config, "kv_lora_rank", None)
    if latent is None:
        size = getattr(config, "head_dim", None) or hidden // heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        return hidden * size * (2 * heads + 2 * shared), 2 * heads * size
    rotated, plain = int(config.qk_rope_head_dim), int(config.qk_nope_head_dim)
    value = int(config.v_head_dim)
    queries = heads * (plain + rotated)
    rank = getattr(config, "q_lora_rank", None)
    weights = hidden * queries if rank is None else rank * (hidden + queries)
    weights += hidden * (latent + rotated) + latent * heads * (plain + value)
    return weights + heads * value * hidden, queries + heads * value


def _feed_forward(config: Any, layer: int) -> int:
    """Return the weights that a token passes between two attentions."""
    hidden = int(_needed(config, "hidden_size"))
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(filter(None, (_number(config, name) for name in names)), 0)
    if (  # some layers of a model with experts have none
        not experts
        or layer in (getattr(config, "mlp_only_layers", None) or ())
        or layer < _number(config, "first_k_dense_replace")
        or (layer + 1) % (_number(config, "decoder_sparse_step") or 1)
    ):
        if getattr(config, "intermediate_size", None) is None:  # as GPT-2: no gate, four times wide
            return 2 * hidden * (_number(config, "n_inner") or 4 * hidden)
        return 3 * hidden * int(config.intermediate_size)
    inner = int(_needed(config, "moe_intermediate_size", "intermediate_size"))
    chosen = int(_needed(config, "num_experts_per_tok", "num_experts_per_token"))
    shared = _number(config, "n_shared_experts") * inner
    shared += _number(config, "shared_expert_intermediate_size")
    return hidden * experts + 3 * hidden * (chosen * inner + shared)
