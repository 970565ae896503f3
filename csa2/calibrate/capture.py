"""Running a model with transformers and looking at the queries, keys and values of every attention layer, and at what its
predictions make of their output."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csa2.calibrate.offline import attend, joined, rows
from csa2.codec.channels import Rotation
from csa2.codec.queries import QuerySamples
from csa2.codec.rope import config_rotation, make_rope
from csa2.errors import CalibrationError
from sgl_kernels.rope import Rope

_NAME = "csa2_capture"

Visit = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
"""Called with layer, queries (H, T, D) scaled, keys (G, T, D) and values (G, T, D) of one sample, fp32, rotated. What it
returns, (H, T, D), stands for the attention output; None leaves that to SDPA."""


@dataclass(frozen=True)
class CapturedLayer:
    """Inputs of one attention layer for a sample of T tokens, fp32, keys and queries rotated."""

    asked: Tensor
    """(H, T - context, D) queries of the tokens after the context, softmax scale included."""
    sample: Tensor
    """(1, G, M, D) what a server would keep of the queries of the context; see `QuerySamples`."""
    keys: Tensor
    """(G, T, D)"""
    values: Tensor
    """(G, T, D)"""


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
        self.model.to(device).eval().requires_grad_(False)
        self.device = device

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, without special ones."""
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def run(self, tokens: list[int], visit: Visit) -> None:
        """One forward pass over `tokens`."""
        with _watching(visit), torch.inference_mode():
            self.model(torch.tensor([tokens], device=self.device), use_cache=False, logits_to_keep=1)

    def capture(self, tokens: Sequence[int], context: int) -> list[CapturedLayer]:
        """What every attention layer sees of `tokens`, whose first `context` are the past of the others."""
        found: dict[int, CapturedLayer] = {}

        def visit(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
            kept = QuerySamples(1, keys.shape[0])
            kept.record_extend(0, 0, queries[:, :context].transpose(0, 1), 1.0)
            sample = kept.of(torch.zeros(1, dtype=torch.int64))
            if sample is None:
                raise CalibrationError(f"layer {layer} asks no queries")
            found[layer] = CapturedLayer(queries[:, context:].clone(), sample, keys.clone(), values.clone())

        self.run(list(tokens), visit)
        return [found[layer] for layer in sorted(found)]

    def output_gradients(self, tokens: Sequence[int], layers: Sequence[CapturedLayer], seed: int) -> list[Tensor]:
        """Gradient (H, T - context, D) of the summed log-probability of labels with respect to the output of every attention
        layer. Labels are drawn from the model's own distribution.

        Args:
            layers: from `capture` with the same tokens.
        """
        context = len(tokens) - layers[0].asked.shape[1]
        outputs: dict[int, Tensor] = {}

        def replay(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            past = rows(layers[layer].keys, layers[layer].values, 0, context)
            own = rows(keys, values, 0, keys.shape[1])
            output = attend(queries, joined((past, own)))
            if not output.requires_grad:
                output.requires_grad_()
            output.retain_grad()
            outputs[layer] = output
            return output

        positions = torch.arange(context, len(tokens), device=self.device)[None]
        with _watching(replay), torch.enable_grad():
            asked = torch.tensor([tokens[context:]], device=self.device)
            logits = self.model(asked, position_ids=positions, use_cache=False).logits[0]
            log_probability = torch.log_softmax(logits.float(), -1)
            random = torch.Generator(self.device).manual_seed(seed)
            labels = torch.multinomial(log_probability.detach().exp(), 1, generator=random)
            torch.autograd.backward(log_probability.gather(-1, labels).sum())
        return [_gradient(outputs[layer]) for layer in sorted(outputs)]

    def rotation(self, head_dim: int) -> Rotation:
        """Which channels rotate together, as transformers applies it (the two halves of the rotated part)."""
        return config_rotation(self.model.config.get_text_config(), head_dim)

    def rope(self, head_dim: int) -> Rope:
        """How fast they rotate.

        Raises:
            OptionError: in a way that keys cannot be separated from.
        """
        parameters = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        return make_rope(self.rotation(head_dim), parameters)


def _gradient(output: Tensor) -> Tensor:
    """The gradient of `output`, zero where no prediction depends on it."""
    return torch.zeros_like(output) if output.grad is None else output.grad


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
    """Make transformers know an attention that shows its inputs and then, unless told the output, does what SDPA does."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _visit is not None:
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            output = _visit(module.layer_idx, query[0].float() * scale, key[0].float(), value[0].float())
            if output is not None:
                return output.to(query.dtype).transpose(0, 1)[None].contiguous(), None
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(_NAME, watched)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
