"""LoRA adapters on a host without an accelerator.

UPSTREAM(sglang 0.5.23: LoRA puts its small index tensors into pinned memory, on the CPU too, and pinning fails where there
is no driver of an accelerator. Remove when SGLang asks its platform first).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

BACKEND = "torch_native"
"""The LoRA backend of SGLang that computes on a CPU; the others are GPU kernels."""


class Unpinned(TorchFunctionMode):
    """Inside, tensors that torch should pin stay in ordinary memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` without its request to pin."""
        if func is Tensor.pin_memory:
            return args[0]
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **kwargs)


def around_lora(orig: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function of SGLang's LoRA that pins; AROUND hook of all in `TARGETS`."""
    from sglang_csa2.args import enabled_here

    if not enabled_here() or torch.cuda.is_available():
        return orig(*args, **kwargs)
    with Unpinned():
        return orig(*args, **kwargs)


TARGETS = tuple(
    f"sglang.srt.lora.lora_manager.LoRAManager.{name}" for name in ("__init__", "fetch_new_loras", "prepare_lora_batch")
)
