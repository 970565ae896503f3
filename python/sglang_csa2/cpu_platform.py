"""SGLang's CPU path for any host, with the wheel that PyPI serves.

UPSTREAM(sglang 0.5.23: the in-tree CPU platform needs `SGLANG_USE_CPU_ENGINE=1` and the CPU build of sgl-kernel;
without both, building a rotary embedding imports vllm). An out-of-tree platform takes the torch code of every layer.
Remove when SGLang serves on a plain CPU by itself.
"""

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class Csa2CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without kernels of its own: torch everywhere, no graphs, gloo between processes."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int | None = 0) -> str:
        """The device name. SGLang asks with None when the user left `--device` out, and wants a string then."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """The torch attention, which runs anywhere."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Layers run their `forward_native`."""
        return "native"

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Pack the weights of a server with compressed pages."""
        from sglang_csa2.args import enabled_here, options_here

        if enabled_here():
            from sglang.srt.runtime_context import get_lora

            from sglang_csa2.packed_linear import pack_model

            pack_model(model, options_here().pack_weights, has_adapters=bool(get_lora().enable_lora))

    def get_torch_profiler_activity_str(self) -> str:
        """The profiler records CPU time; SGLang asks every out-of-tree platform."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """The torch constant of `get_torch_profiler_activity_str`."""
        return torch.profiler.ProfilerActivity.CPU
