"""Running a model with transformers and looking at the queries and keys of every attention layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csa2.codec.channels import Rotation, make_rotation
from csa2.errors import CalibrationError

_NAME = "csa2_capture"

Visit = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called with layer, queries (H, T, D) scaled, keys (G, T, D) and values (G, T, D) of one sample, fp32, rotated."""


class CapturedModel:
    """A causal language model whose attention inputs can be watched."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        _register()
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            self.model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype="auto", attn_implementation=_NAME, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise CalibrationError(f"the model in {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
        self.model.to(device).eval()
        self.device = device

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, without special ones."""
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def run(self, tokens: list[int], visit: Visit) -> None:
        """One forward pass over `tokens`."""
        with _watching(visit), torch.inference_mode():
            self.model(torch.tensor([tokens], device=self.device), use_cache=False, logits_to_keep=1)

    def rotation(self, head_dim: int) -> Rotation:
        """Which channels rotate together, as transformers applies it (the two halves of the rotated part)."""
        config = self.model.config.get_text_config()
        has_rope = getattr(config, "rope_theta", None) is not None or getattr(config, "rope_parameters", None)
        if not has_rope:
            return Rotation(())
        parameters = getattr(config, "rope_parameters", None) or {}
        share = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        return make_rotation(int(head_dim * share), neox=True)


_visit: Visit | None = None


@contextmanager
def _watching(visit: Visit) -> Iterator[None]:
    global _visit
    _visit = visit
    try:
        yield
    finally:
        _visit = None


def _register() -> None:
    """Make transformers know an attention that shows its inputs and then does what SDPA does."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _visit is not None:
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            _visit(module.layer_idx, query[0].float() * scale, key[0].float(), value[0].float())
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(_NAME, watched)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
