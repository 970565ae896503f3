"""LoRA adapters with random weights for tests, in the folder format of PEFT."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

RANK = 8
SCALE = 0.2
"""Standard deviation of the entries of both factors: enough that answers change."""


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Write an adapter of the attention projections of the Llama `model`, drawn with `seed`; the folder."""
    shape = json.loads((model / "config.json").read_text())
    hidden = shape["hidden_size"]
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
    chance = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, count in heads.items():
            out = shape[count] * shape["head_dim"]
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=chance) * SCALE / hidden**0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(out, RANK, generator=chance) * SCALE
    folder.mkdir(parents=True)
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(heads),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
