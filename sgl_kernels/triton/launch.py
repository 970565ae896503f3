"""How kernels are launched: columns, warps, registers."""

import torch
import triton
import triton.language as tl

from sgl_kernels.errors import KernelLayoutError

STAGES = 3
"""Tiles of which bytes are in flight."""
MIN_COLUMNS = 8
"""Tensor cores take no fewer."""
EXTEND_COLUMNS = 128
"""Columns of a block of new tokens, laid out WIDE (`softmax`): as many as two warpgroups have registers for."""
WARPS = {8: 4, 16: 4, 32: 8, EXTEND_COLUMNS: 8}
"""Warps of a program by columns."""
REGISTERS = {8: 168, 16: 255, 32: 255, EXTEND_COLUMNS: 255}
"""Registers of a thread at most, from sm_90 on, by columns: with 168, three programs of 4 warps share a multiprocessor. A
limit that is no limit keeps ptxas from spilling to let more programs in."""
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def is_wide(columns: int) -> bool:
    """Whether columns lie on the first axis, see `softmax`."""
    return columns >= EXTEND_COLUMNS


def decode_columns(group: int) -> int:
    """Columns of a block with one token of `group` query heads to a KV head.

    Raises:
        KernelLayoutError: more heads than the largest block has columns.
    """
    if group > EXTEND_COLUMNS:
        raise KernelLayoutError(f"{group} query heads to a KV head: the Triton kernels take up to {EXTEND_COLUMNS}")
    columns = max(MIN_COLUMNS, int(triton.next_power_of_2(group)))
    return columns if columns in WARPS else EXTEND_COLUMNS


def launch_options(columns: int, device: torch.device) -> dict[str, int]:
    """How a kernel with so many columns is compiled for a device."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"num_warps": WARPS[columns], "maxnreg": REGISTERS[columns] if hopper else 255}


def padded(dim: int) -> int:
    """The next power of two."""
    return max(16, int(triton.next_power_of_2(dim)))
