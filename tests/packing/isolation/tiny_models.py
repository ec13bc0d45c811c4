"""Tiny models with random weights, of the families of causal language models in transformers."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.packing.isolation.model_kernels import recurrent_kernels

VOCABULARY = 128
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
SIZES = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 16,
    "head_dim": 8,
    **dict.fromkeys(["hidden_size", "n_embd", "d_model"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers"], 4),
    **dict.fromkeys(["decoder_layers", "encoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim"], 64),
    **dict.fromkeys(["decoder_ffn_dim", "encoder_ffn_dim"], 64),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], 512),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["n_shared_experts", "n_group", "topk_group"], 1),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 8),
}
"""What a configuration is given of these, where it has a field of the name."""
KEPT_NONE = ("q_lora_rank", "sliding_window")
"""Fields that stay ``None`` where they are so by default: another value is another architecture."""

HYBRID = {"layer_types": [LINEAR, FULL], "num_hidden_layers": 2}
LATENT = {"num_key_value_heads": 4, "head_dim": None}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
MAMBA2 |= {"mamba_chunk_size": 16}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
DELTA |= {"linear_num_value_heads": 4}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
INDEXER |= {"indexer_budget": 8, "indexer_compress_ratio": 4}
NGRAMS = {"ple_layer_ids": [1], "ngram_vocab_size_base": 64, "split_ngram_parts": 1}
NGRAMS |= {"heads_per_ngram": 2}
EMBEDDINGS = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
EMBEDDINGS |= {"layer_types": [SLIDING, FULL] * 2}

SHORT_WINDOWS = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
SHORT_WINDOWS |= {"sliding_window_size": 16, "rel_extent": 32}

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"], LATENT),
    **dict.fromkeys(["glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"], LATENT),
    **dict.fromkeys(["hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"], ROPE),
    "codegen": {"rotary_dim": 4},
    "falcon": {"head_dim": None},
    "gptj": {"rotary_dim": 4},
    "nemotron": {"head_dim": None},
    **dict.fromkeys(["qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"], HYBRID | DELTA),
    "bailing_hybrid": HYBRID | {"num_key_value_heads": 4, "num_mtp_layers": 0},
    "cpmant": {"dim_head": 8, "dim_ff": 64},
    "bamba": MAMBA2 | {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 64, "num_hidden_layers": 2},
    "gemma3n_text": EMBEDDINGS
    | {"num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2}
    | {"activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": EMBEDDINGS | {"global_head_dim": 8},
    "gemma4_unified_text": {"global_head_dim": 8, "layer_types": [SLIDING, FULL] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4}
    | {"hidden_size": 32, "num_heads": 4, "window_size": 16},
    "granitemoehybrid": HYBRID | MAMBA2,
    **dict.fromkeys(["inkling_text", "inkling2_text", "inkling2_loop_text"], SHORT_WINDOWS),
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": HYBRID | {"num_key_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4},
    "lara_mini": DELTA,
    "lfm2": HYBRID | {"layer_types": ["conv", FULL]},
    "lfm2_moe": HYBRID | {"layer_types": ["conv", FULL], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "minimax": HYBRID | {"block_size": 16},
    "nemotron_h": {"layers_block_type": [LINEAR, "moe", FULL], "mamba_num_heads": 8}
    | {"mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 16},
    "olmo_hybrid": HYBRID | DELTA | {"linear_num_key_heads": 4, "linear_value_head_dim": 16},
    "prophetnet": {"num_hidden_layers": None, "num_decoder_layers": 2, "num_encoder_layers": 2},
    "qwen4_exp_text": HYBRID | DELTA | INDEXER | NGRAMS | {"hc_lowrank": 8},
    "recurrent_gemma": {"attention_window_size": 16, "lru_width": 32},
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {"v_head_dim": None, "num_heads": 4},
    "zamba": {"layers_block_type": [LINEAR, "hybrid"] * 2, "n_mamba_heads": 2} | LATENT,
    "zamba2": {"layers_block_type": [LINEAR, "hybrid"] * 2, "n_mamba_heads": 8}
    | {"mamba_d_state": 8, "chunk_size": 16}
    | LATENT,
    "zaya": {"num_experts_per_tok": 1},
}
"""What else a family needs to be tiny and to have layers of all its kinds; ``None`` takes away."""

OF_TEXT = ("emu3", "mllama")
"""Families whose model of text takes a part of the configuration."""

NOT_TINY = {
    "another's model": ["data2vec-text", "gpt-sw3", "internlm3", "iquestcoder"],
    "a text model that is in the list under its own name": [
        *("gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama4", "qwen3_5", "qwen3_5_moe"),
        "qwen4_exp",
    ],
    "has no module in the wheel": ["exaone", "sarvam_mla", "sarvam_moe"],
    "needs images, sound or another model": [
        *("fuyu", "gemma4_assistant", "gemma4_unified_assistant", "git", "got_ocr2"),
        *("moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal"),
    ],
    "has no small sizes, or some that the others do not have": [
        *("blt", "cohere_compass_text", "dbrx", "dots3_note", "dots3_note_text"),
        *("longcat_flash", "reformer", "roc_bert", "xmod"),
    ],
}
"""Families that are left out, by reason."""
FAMILIES = [
    family
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not any(family in families for families in NOT_TINY.values())
]
"""Model types that there is a tiny model of."""


def tiny_config(family: str) -> Any:
    """Return a configuration of a model type, for a model that takes milliseconds to make."""
    kind = CONFIG_MAPPING[family]
    if family in OF_TEXT:
        kind = kind.sub_configs["text_config"]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    names = {name: name if name in fields else kind.attribute_map.get(name) for name in SIZES}
    sizes = {
        names[name]: value
        for name, value in SIZES.items()
        if names[name] in fields and not (name in KEPT_NONE and fields[names[name]].default is None)
    }
    given = sizes | OVERRIDES.get(family, {})
    return kind(**{name: value for name, value in given.items() if value is not None})


def tiny_model(family: str, *, kernels: bool = False, flash: bool = False) -> Any:
    """Return a model of a type, with weights that let no layer do nothing.

    Args:
        family: A model type of transformers.
        kernels: Whether it finds the stand-ins of `model_kernels` for recurrent layers.
        flash: Whether its attention is flash attention; needs the fixture of that name.
    """
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    torch.manual_seed(0)
    model = getattr(modeling(family, kernels=kernels), name)(tiny_config(family)).eval()
    with torch.no_grad():
        for weight in model.parameters():  # some are 0 until they have learned
            weight.add_(0.1 * torch.randn_like(weight))
    if flash:
        model.config._attn_implementation = "flash_attention_2"
    return model


def tiny_model_with_pictures(folder: str, prefix: str) -> Any:
    """Return a model of Qwen's that takes pictures beside text, by its folder and its classes."""
    kind = CONFIG_MAPPING[folder]
    text, vision = (kind.sub_configs[f"{part}_config"] for part in ("text", "vision"))
    sizes = {name: value for name, value in SIZES.items() if name in _names(text)}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    seen = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4}
    seen |= {"intermediate_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
    config = kind(
        text_config=text(**sizes, rope_parameters=rope).to_dict(),
        vision_config=vision(**{k: v for k, v in seen.items() if k in _names(vision)}).to_dict(),
        image_token_id=120,
        video_token_id=121,
        vision_start_token_id=122,
        vision_end_token_id=123,
    )
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    torch.manual_seed(0)
    return getattr(module, f"{prefix}ForConditionalGeneration")(config).eval()


def _names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def modeling(family: str, *, kernels: bool) -> ModuleType:
    """Import the module of a model; with kernels a second time, under a name of its own."""
    folder = model_type_to_module_name(family)
    name = f"transformers.models.{folder}.modeling_{folder}"
    if not kernels:
        return importlib.import_module(name)
    with_kernels = f"{name}_with_kernels"
    if with_kernels not in sys.modules:
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        spec = spec_from_file_location(with_kernels, found.origin)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[with_kernels] = module_from_spec(spec)
        with recurrent_kernels():
            spec.loader.exec_module(module)
    return sys.modules[with_kernels]


def takes_kernels(family: str) -> bool:
    """Tell whether a model looks for kernels of recurrent layers."""
    return hasattr(modeling(family, kernels=False), "use_kernel_func_from_hub_with_fallback")
