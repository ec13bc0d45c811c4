"""What a sequence costs a model: work that grows with its length, and with its square."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trajpack.packing.plan.units import Floats, Ints, checked_lengths

MULTIPLY_ADD = 2
"""Floating-point operations of one weight and one token."""


@dataclass(frozen=True)
class TransformerCost:
    """Floating-point operations of a forward pass over a sequence of n tokens.

    ``linear * n + quadratic * n**2``, and for layers with a sliding window w ``windowed`` times
    n² up to n = w, and w (2 n - w) beyond: a token attends to w before it at most. A training step
    is about three forward passes for every sequence alike, so plans do not change with it.

    Args:
        linear: Operations of a token, wherever it stands.
        quadratic: Operations of attention to all that came before, over n².
        windowed: The same of layers with a sliding window.
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
        tokens: Ints = checked_lengths("TransformerCost", lengths)
        count = tokens.astype(float)
        cost = self.linear * count + self.quadratic * count**2
        if self.window is not None:
            near = count.clip(max=self.window)
            cost = cost + self.windowed * near * (2 * count - near)
        return cost

    @classmethod
    def from_config(cls, config: Any) -> TransformerCost:
        """Read the cost from a Hugging Face model configuration.

        Counted are the projections of attention, with grouped keys and values or with latent ones
        (MLA); scores and weighted values over what comes before, half of n², or a sliding window;
        the layers between, of which a mixture of experts works with the experts that a token is
        sent to, its shared ones and its router; and the head over the vocabulary. Norms, rotations
        and embeddings are not: they are few. Layers of linear attention count as projections, those
        that attend within chunks as a window of half a chunk: as many pairs in long sequences.

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
        kinds = _kinds_of_layers(config, layers)
        projections, pair = _attention(config)
        linear = layers * projections
        linear += sum(_between(config, layer) for layer in range(layers))
        linear += int(_needed(config, "hidden_size")) * int(_needed(config, "vocab_size"))
        window = _window(config, kinds)
        # half of n² pairs, each of which multiplies and adds
        return cls(
            linear=MULTIPLY_ADD * linear,
            quadratic=MULTIPLY_ADD * pair * kinds.count("full_attention") // 2,
            windowed=MULTIPLY_ADD * pair * kinds.count("sliding_attention") // 2,
            window=window,
        )


def _needed(config: Any, *names: str) -> Any:
    """Return the first of these attributes that is there and not None."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    raise ValueError(
        f"TransformerCost: the configuration must have {' or '.join(names)}, "
        f"got {type(config).__name__}"
    )


def _kinds_of_layers(config: Any, layers: int) -> list[str]:
    """Return ``"full_attention"``, ``"sliding_attention"`` or another kind for each layer."""
    kinds = getattr(config, "layer_types", None)
    windowed = getattr(config, "sliding_window", None) is not None
    if not kinds:
        slides = windowed and getattr(config, "use_sliding_window", True)
        return ["sliding_attention" if slides else "full_attention"] * layers
    if getattr(config, "attention_chunk_size", None) is None:
        kinds = ["full_attention" if "chunked" in kind else kind for kind in kinds]
    else:
        kinds = ["sliding_attention" if "chunked" in kind else kind for kind in kinds]
        windowed = True
    if not windowed:
        return ["full_attention" if "sliding" in kind else kind for kind in kinds]
    return list(kinds)


def _window(config: Any, kinds: list[str]) -> int | None:
    """Return the tokens of the window, if a layer has one."""
    if "sliding_attention" not in kinds:
        return None
    if getattr(config, "sliding_window", None) is not None:
        return int(config.sliding_window)
    return int(config.attention_chunk_size) // 2


def _attention(config: Any) -> tuple[int, int]:
    """Return the weights of a layer's projections, and the multiplications of a pair of tokens."""
    hidden, heads = int(_needed(config, "hidden_size")), int(_needed(config, "num_attention_heads"))
    latent = getattr(config, "kv_lora_rank", None)
    if latent is not None:
        return _latent_attention(config, hidden, heads, int(latent))
    size = getattr(config, "head_dim", None) or hidden // heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    return hidden * size * (2 * heads + 2 * shared), 2 * heads * size


def _latent_attention(config: Any, hidden: int, heads: int, latent: int) -> tuple[int, int]:
    rotated, plain = int(config.qk_rope_head_dim), int(config.qk_nope_head_dim)
    value = int(config.v_head_dim)
    queries = heads * (plain + rotated)
    through = getattr(config, "q_lora_rank", None)
    weights = hidden * queries if through is None else through * (hidden + queries)
    weights += hidden * (latent + rotated) + latent * heads * (plain + value)
    weights += heads * value * hidden
    return weights, queries + heads * value


def _between(config: Any, layer: int) -> int:
    """Return the weights that a token meets between two attentions."""
    hidden = int(_needed(config, "hidden_size"))
    experts = 0
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = experts or int(getattr(config, name, None) or 0)
    if not experts or not _has_experts(config, layer):
        if getattr(config, "intermediate_size", None) is None:  # as GPT-2: no gate, four times wide
            inner = getattr(config, "n_inner", None) or 4 * hidden
            return 2 * hidden * int(inner)
        return 3 * hidden * int(config.intermediate_size)
    inner = int(_needed(config, "moe_intermediate_size", "intermediate_size"))
    chosen = int(_needed(config, "num_experts_per_tok", "num_experts_per_token"))
    alike = int(getattr(config, "n_shared_experts", None) or 0) * inner
    alike += int(getattr(config, "shared_expert_intermediate_size", None) or 0)
    return hidden * experts + 3 * hidden * (chosen * inner + alike)


def _has_experts(config: Any, layer: int) -> bool:
    """Whether a layer of a model with experts has them; some are plain."""
    if layer in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    if layer < int(getattr(config, "first_k_dense_replace", None) or 0):
        return False
    step = int(getattr(config, "decoder_sparse_step", None) or 1)
    return (layer + 1) % step == 0
