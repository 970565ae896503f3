"""The demo model with heads that two ranks can share: 12 query and 4 KV heads instead of 9 and 3.

The added heads have weights of zero, so the model says what the demo model says.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4}
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template*", "generation_config.json")


def write_split_model(folder: Path, model: Path) -> Path:
    """Write the padded copy of `model`; the folder."""
    config = json.loads((model / "config.json").read_text())
    rows = {name: count * config["head_dim"] for name, count in zip("qkv", (12, 4, 4), strict=True)}
    folder.mkdir(parents=True)
    for pattern in TOKENIZER:
        for file in model.glob(pattern):
            shutil.copy(file, folder)
    weights: dict[str, Tensor] = {}
    for file in model.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            kind = name.split(".")[-2]
            if kind in ("q_proj", "k_proj", "v_proj"):
                weight = torch.nn.functional.pad(weight, (0, 0, 0, rows[kind[0]] - weight.shape[0]))
            elif kind == "o_proj":
                weight = torch.nn.functional.pad(weight, (0, rows["q"] - weight.shape[1]))
            weights[name] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, **HEADS}))
    return folder
