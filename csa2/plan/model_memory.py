"""What a model takes: bytes of keys and values per token, and of weights, from its config.json alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from csa2.codec.channels import Rotation
from csa2.codec.rope import config_rotation
from csa2.errors import Csa2Error

CONFIG = "config.json"
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class PlanError(Csa2Error, ValueError):
    """A model or machine that cannot be planned for."""


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What matters of a model for its memory."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """Of weights and cache: "bfloat16", "float16" or "float32"."""
    max_context: int
    parameters: int
    """Estimated from the shapes that config.json names."""
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    rotated_channels: int
    window_layers: int = 0
    """Layers with a sliding window."""
    window: int = 0
    """Tokens of it."""
    latent_channels: int = 0
    """Channels of a latent per token and layer (MLA); 0: keys and values by head."""

    @property
    def item_bytes(self) -> int:
        """Bytes of a value."""
        return _ITEM_BYTES[self.dtype]

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of a token in one layer, uncompressed."""
        values = self.latent_channels or 2 * self.num_kv_heads * self.head_dim
        return values * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers, uncompressed, inside the window where layers have one."""
        return self.num_layers * self.layer_token_bytes

    @property
    def formula(self) -> str:
        """How `token_bytes` comes about."""
        if self.latent_channels:
            return f"{self.num_layers} layers x {self.latent_channels} latent channels x {self.item_bytes} bytes"
        parts = f"2 (keys, values) x {self.num_layers} layers x {self.num_kv_heads} KV heads x {self.head_dim} channels"
        return f"{parts} x {self.item_bytes} bytes"

    @property
    def unserved(self) -> str | None:
        """Why the compressed cache refuses this model, or None."""
        if self.latent_channels:
            return "its attention caches latents (MLA)"
        return f"{self.window_layers} of its layers have a sliding window" if self.window_layers else None

    @property
    def rotation(self) -> Rotation:
        """Which channels of keys rotate together."""
        config = SimpleNamespace(rope_theta=1.0 if self.rotated_channels else None)
        return config_rotation(config, self.rotated_channels)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of a sequence of `tokens`, uncompressed."""
        full = (self.num_layers - self.window_layers) * tokens
        return (full + self.window_layers * min(tokens, self.window)) * self.layer_token_bytes

    def weights_bytes(self) -> int:
        """Estimated bytes of the weights."""
        return self.parameters * self.item_bytes


def read_model(path: Path) -> ModelMemory:
    """The model of a folder or a config.json.

    Raises:
        PlanError: there is none, or it lacks what is needed.
    """
    path = path / CONFIG if path.is_dir() else path
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PlanError(f"--model {path}: no config.json of a model ({error}): give its folder or that file") from error
    config = {**config, **(config.get("text_config") or {})}
    missing = [name for name in ("num_hidden_layers", "num_attention_heads", "hidden_size") if not _count(config, name)]
    if missing:
        raise PlanError(f"--model {path}: {', '.join(missing)} must be there, numbers above 0")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in _ITEM_BYTES:
        raise PlanError(f"--model {path}: dtype {dtype!r} is unknown: plan with one of {', '.join(_ITEM_BYTES)}")
    return _model(config, dtype)


def weights_in(folder: Path) -> int | None:
    """Bytes of the weight files in a folder, or None where there are none."""
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    return sum(file.stat().st_size for file in files) or None


def _model(config: dict[str, Any], dtype: str) -> ModelMemory:
    layers, heads, hidden = (config[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    head_dim = _count(config, "head_dim") or hidden // heads
    kv_heads = _count(config, "num_key_value_heads") or heads
    latent = _count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim") if _count(config, "kv_lora_rank") else 0
    window_layers, window = _windows(config, layers)
    rotates = config.get("rope_theta") is not None or config.get("rope_parameters")
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    intermediate = _count(config, "intermediate_size") or 4 * hidden
    vocab = _count(config, "vocab_size")
    attention = hidden * head_dim * 2 * (heads + kv_heads)
    experts = _count(config, "num_local_experts") or _count(config, "num_experts") or _count(config, "n_routed_experts") or 1
    width = _count(config, "moe_intermediate_size") or intermediate if experts > 1 else intermediate
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelMemory(
        num_layers=layers,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        max_context=_count(config, "max_position_embeddings"),
        parameters=embeddings + layers * (attention + 3 * hidden * width * experts),
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocab,
        rotated_channels=int(head_dim * share) if rotates else 0,
        window_layers=window_layers,
        window=window,
        latent_channels=latent,
    )


def _windows(config: dict[str, Any], layers: int) -> tuple[int, int]:
    """Layers with a sliding window, and its tokens."""
    window = _count(config, "sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types")
    return (sum(kind == "sliding_attention" for kind in kinds) if kinds else layers), window


def _count(config: dict[str, Any], name: str) -> int:
    """A number above 0, or 0 where there is none."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
