"""Entry point of the platform group: the CPU path of SGLang for a machine with no accelerator."""

import importlib.util
import os

import torch

CPU_PLATFORM = "sglang_csa2.cpu_platform.Csa2CpuPlatform"

UNSEEN_ACCELERATORS = ("habana_frameworks", "torch_npu", "torch_musa")
"""Packages of devices that SGLang supports and torch cannot see before the package is imported."""


def activate() -> str | None:
    """Name the CPU platform where SGLang would otherwise find no device, else step aside.

    Runs at the first use of SGLang's `current_platform`, possibly before the plugin registered: it must not import
    SGLang. An answer other than None would take precedence over SGLang's own detection.
    """
    if torch.cuda.is_available() or torch.accelerator.is_available():
        return None
    if any(importlib.util.find_spec(package) is not None for package in UNSEEN_ACCELERATORS):
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None  # the user chose SGLang's own CPU engine
    return CPU_PLATFORM
