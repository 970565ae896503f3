"""Tiny models with random weights, one for each way in which models differ for a KV cache.

Weights are drawn so that attention is neither flat nor a choice of one token: query and key entries have a deviation
near 1.2, so logits deviate by 1.4 and a query spreads over a tenth of what it sees. Biases and norm weights are drawn too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 256
LAYERS = 3
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "torch_dtype": "bfloat16"}
LLAMA_LIKE = {
    **COMMON,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
QWEN2 = {**LLAMA_LIKE, "hidden_size": 256}  # SGLang takes the head dimension from it
QWEN2.pop("head_dim")


@dataclass(frozen=True)
class Family:
    """A way to differ."""

    config_class: str
    config: dict[str, Any]
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "bfloat16"


def _longrope(head_dim: int) -> dict[str, Any]:
    pairs = head_dim // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.02 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.2 * i for i in range(pairs)],
        "original_max_position_embeddings": 256,
    }


FAMILIES: dict[str, Family] = {
    "gpt2_learned_positions": Family(
        "GPT2Config",
        {**COMMON, "n_embd": 128, "n_head": 2, "n_layer": LAYERS, "n_positions": 1024},
    ),
    "llama_yarn": Family(
        "LlamaConfig",
        {
            **LLAMA_LIKE,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "llama_llama3_one_kv_head": Family(
        "LlamaConfig",
        {
            **LLAMA_LIKE,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
        kv_heads=1,
    ),
    "phi3_longrope_head_dim_96": Family(
        "Phi3Config",
        {
            **LLAMA_LIKE,
            "hidden_size": 192,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 96,
            "original_max_position_embeddings": 256,
            "rope_parameters": _longrope(96),
            "sliding_window": None,
        },
        kv_heads=1,
        head_dim=96,
    ),
    "phi_partial_rotary_head_dim_80": Family(
        "PhiConfig",
        {
            **LLAMA_LIKE,
            "hidden_size": 160,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 80,
            "intermediate_size": 640,  # SGLang knows only four times the hidden size
            "partial_rotary_factor": 0.4,
        },
        head_dim=80,
    ),
    "gptj_interleaved_partial_rotary": Family(
        "GPTJConfig",
        {**COMMON, "n_embd": 128, "n_head": 2, "n_layer": LAYERS, "n_positions": 1024, "rotary_dim": 32},
    ),
    "qwen3_qk_norm_head_dim_128": Family("Qwen3Config", {**LLAMA_LIKE, "head_dim": 128}, head_dim=128),
    "qwen2_biased_qkv": Family("Qwen2Config", QWEN2),
    "llama_float32": Family("LlamaConfig", {**LLAMA_LIKE}, dtype="float32"),
}


def build(folder: Path, family: Family, seed: int = 0) -> nn.Module:
    """Write a model with random weights to `folder` and return it; `save` it again after changing it."""
    import transformers

    config = getattr(transformers, family.config_class)(**family.config)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Rounded to bf16 here, so that a run in fp32 has the same weights.
            weight.copy_(_mean(name) + _deviation(name, weight) * torch.randn(weight.shape, generator=generator))
    save(model, folder)
    return model


def save(model: Any, folder: Path) -> None:
    """Write `model` as SGLang loads it."""
    model.save_pretrained(folder)


def _is_norm(name: str) -> bool:
    return "norm" in name or ".ln_" in name


def _mean(name: str) -> float:
    return 1.0 if _is_norm(name) and name.endswith("weight") else 0.0


def _deviation(name: str, weight: torch.Tensor) -> float:
    if _is_norm(name):
        return 0.1
    if weight.ndim == 1:
        return 0.3
    if "wpe" in name:
        return 0.15
    if "embed" in name or "wte" in name or "lm_head" in name:
        return 2.5 / weight.shape[1] ** 0.5  # logits deviate by 2.5, tied to the embedding or not
    # GPT-2 keeps its matrices transposed.
    fan_in = weight.shape[0] if ".c_" in name else weight.shape[1]
    gain = 1.2 if any(part in name for part in ("q_proj", "k_proj", "qkv", "c_attn")) else 1.0
    return gain / fan_in**0.5
