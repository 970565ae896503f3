"""Helpers of the tests in this folder: run SGLang's argument resolution in-process, on models without weights."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt import server_args as upstream  # noqa: E402 - after the plugins replaced ServerArgs

from sglang_csa2 import plugin  # noqa: E402

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A model folder that holds a configuration only: a tiny Llama with `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def parse(*argv: str) -> Any:
    """Arguments as the command line gives them, before resolution."""
    return upstream.prepare_server_args(["--skip-tokenizer-init", *argv])


def resolve(*argv: str) -> Any:
    """Resolved arguments; the launcher stays unwired, which loads the HTTP server and is tested elsewhere."""
    record = parse(*argv)
    with mock.patch.object(plugin, "wire_launcher"):
        record.resolve_once()
    return record
