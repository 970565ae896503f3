"""The kernels that the gate compiles, as a model with 128 channels and 4 query heads to a KV head calls them."""

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import triton.language as tl

from sgl_kernels.page_layout import (
    HeadLayout,
    KeyClass,
    PageGeometry,
    coded_layout,
    identity_head,
    plain_layout,
    reduced_layout,
)
from sgl_kernels.triton.attend import attend_items
from sgl_kernels.triton.causal import attend_new
from sgl_kernels.triton.groups import merge_groups
from sgl_kernels.triton.launch import EXTEND_COLUMNS, MIN_COLUMNS, REGISTERS, STAGES, WARPS, is_wide
from sgl_kernels.triton.merge import merge_partials
from sgl_kernels.triton.open import open_keys, open_plain, open_values
from sgl_kernels.triton.pieces import TILE, Piece, coded_piece, plain_piece
from sgl_kernels.triton.seal import seal_keys, seal_values
from sgl_kernels.triton.stored import launch_options, stored_piece
from sgl_kernels.triton.write import write_rows

DIM, GROUP = 128, 4
EXTENDED = ("fp4", "csa2-2x", "csa2-8x", "identity basis")
"""Formats that stand for all in extend: they take the most registers."""
RUN_STACK = 128
"""Bytes that kernels with many columns may spill, nearly all between runs of pages."""
LOOP_SPILLS = {"extend identity basis": 8, "new tokens": 2}
"""The exceptions: on sm_80, and the first one on sm_100."""
_GEOMETRY = PageGeometry(1, 1, DIM, 64, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One kernel with its constants."""

    name: str
    kernel: Any
    signature: dict[str, str]
    """Type of each argument, in order."""
    constants: dict[str, Any]
    warps: int
    loop_limits: MappingProxyType[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """By architecture: instructions of the main loop, at most."""
    registers: int = 255
    """Registers of a thread, at most, from sm_90 on: so that more programs fit."""
    stack_bytes: int = 0
    """Of registers that may be spilled."""
    loop_spills: int = 0
    """Instructions of the main loop that may read or write them."""


def _signature(arguments: str, constants: dict[str, Any]) -> dict[str, str]:
    """From "name:type ..."; constants come last."""
    return dict(item.split(":") for item in arguments.split()) | dict.fromkeys(constants, "constexpr")


def _heads() -> dict[str, HeadLayout]:
    """A head of each format. 2x: 24 of 64 rotary pairs at 4 bits and 24 at 2; 4x and 8x: 24 and 16."""
    codes = {"fp8": ("e4m3", "e4m3"), "k8v4": ("e4m3", "e2m1"), "fp4": ("e2m1", "e2m1"), "int4": ("int4", "int4")}
    heads = {name: coded_layout(name, *kinds, _GEOMETRY).heads[0] for name, kinds in codes.items()}
    for name, merge, coarse in (("csa2-2x", 1, 48), ("csa2-4x", 2, 32), ("csa2-8x", 4, 32)):
        classes = (KeyClass("int4", 48), KeyClass("lloyd2", coarse))
        heads[name] = reduced_layout(name, (classes,), "lloyd2", merge, _GEOMETRY).heads[0]
    return heads | {"identity basis": identity_head("int4", "int4", _GEOMETRY)}


def _attend(name: str, piece: Piece, columns: int) -> Case:
    operands = tl.bfloat16 if piece.basis == "plain" else tl.float16
    constants = {
        "PIECES": (piece,), "GROUP": GROUP, "M": columns, "CT": operands, "ASM": True, "STAGES": STAGES,
        "WIDE": is_wide(columns),
    }  # fmt: skip
    arguments = (
        "arena:*u8 pages:*i32 lengths:*i32 items:*i32 table:*i32 q_codes:*fp32 q_means:*fp32 notes:*fp32 codes_max:*i32 "
        "out:*fp32 lse:*fp32 num_heads:i32"
    )
    case = Case(name, attend_items, _signature(arguments, constants), constants, WARPS[columns])
    return replace(case, registers=REGISTERS[columns], stack_bytes=RUN_STACK if is_wide(columns) else 0)


def _others() -> list[Case]:
    constants: dict[str, Any] = {"D": DIM, "DIM": DIM, "GROUP": GROUP, "M": 8}
    arguments = (
        "spans:*i32 out:*fp32 lse:*fp32 others:*bf16 others_lse:*fp32 plain:*fp32 coded:*fp32 total:*fp32 num_formats:i32 "
        "num_blocks:i32 splits:i32 num_others:i32 num_tokens:i32 num_heads:i32 plain_formats:i32 other_unit:fp32"
    )
    merge = Case("merge", merge_partials, _signature(arguments, constants), constants, 1)
    constants = {
        "D": DIM, "DIM": DIM, "GROUP": GROUP, "M": EXTEND_COLUMNS, "TILE": TILE, "CT": tl.bfloat16, "STAGES": STAGES,
        "WIDE": True,
    }  # fmt: skip
    arguments = (
        "query:*bf16 keys:*bf16 values:*bf16 spans:*i32 out:*fp32 lse:*fp32 key_stride:i32 value_stride:i32 num_heads:i32 "
        "scale:fp32"
    )
    warps = WARPS[EXTEND_COLUMNS]
    new = Case("new tokens", attend_new, _signature(arguments, constants), constants, warps, stack_bytes=RUN_STACK)
    constants = {"D": DIM, "DIM": DIM}
    arguments = "keys:*bf16 values:*bf16 table:*bf16 rows:*i64 key_stride:i32 value_stride:i32 first_row:i32 page_size:i32 "
    arguments += "values_behind:i32"
    write = Case("write", write_rows, _signature(arguments, constants), constants, 1)
    return [new, merge, write]


OPENED = {"keys": ("fp4", "csa2-2x", "identity basis"), "values": ("fp4",)}
"""Heads whose keys, or values, stand for those of other formats in opening and sealing."""


def _codec() -> list[Case]:
    row = "num_heads:i32 page_entries:i32"
    kernels = {
        "seal keys": (
            seal_keys,
            f"keys:*fp32 weight:*fp32 packed:*u8 table:*i32 flat:*fp32 reduced:*fp32 {row} page_bytes:i32 columns:i32",
        ),
        "seal values": (
            seal_values,
            f"values:*fp32 bias:*fp32 weight:*fp32 packed:*u8 table:*i32 flat:*fp32 {row} page_bytes:i32",
        ),
        "open keys": (
            open_keys,
            f"arena:*u8 offsets:*i64 table:*i32 flat:*fp32 reduced:*fp32 keys:*fp32 bias:*fp32 {row} columns:i32",
        ),
        "open values": (open_values, f"arena:*u8 offsets:*i64 table:*i32 flat:*fp32 values:*fp32 {row}"),
    }
    cases = []
    for name, (kernel, arguments) in kernels.items():
        for head in OPENED[name.split()[1]]:
            constants: dict[str, Any] = {"P": stored_piece(_heads()[head])}
            cases.append(_whole(f"{name} {head}", kernel, arguments, constants, DIM))
    constants = {"D": DIM, "DIM": DIM, "S": _GEOMETRY.page_size}
    arguments = "arena:*bf16 offsets:*i64 out:*fp32 item_bytes:i32 num_kv_heads:i32"
    cases.append(_whole("open plain", open_plain, arguments, constants, DIM))
    constants = {"HAS_BIAS": True, "E": _GEOMETRY.page_size, "GROUPS": _GEOMETRY.page_size // 2, "D": DIM}
    arguments = (
        "keys:*fp32 values:*fp32 bias:*fp32 weight:*fp32 pivots:*i64 heads:*i64 out_keys:*fp32 out_values:*fp32 "
        "out_bias:*fp32 num_heads:i32 page_groups:i32 rounding:fp32"
    )
    cases.append(_whole("merge entries", merge_groups, arguments, constants, DIM // 2))
    return cases


def _whole(name: str, kernel: Any, arguments: str, constants: dict[str, Any], columns: int) -> Case:
    """A kernel of the codec, whose programs have a page of one head in their registers."""
    options = launch_options(_GEOMETRY.page_size, columns)
    signature = _signature(arguments, constants)
    return Case(name, kernel, signature, constants, options["num_warps"], registers=options["maxnreg"])


LOOP_LIMITS = {
    "decode fp8": (720, 740, 840),
    "decode k8v4": (745, 715, 820),
    "decode fp4": (710, 685, 785),
    "decode int4": (650, 615, 770),
    "decode csa2-2x": (705, 680, 830),
    "decode csa2-4x": (750, 710, 855),
    "decode csa2-8x": (750, 720, 850),
    "decode identity basis": (790, 710, 845),
    "decode plain": (390, 370, 510),
    "extend fp4": (1240, 880, 920),
    "extend csa2-2x": (1360, 1010, 1130),
    "extend csa2-8x": (1840, 1530, 1530),
    "extend identity basis": (2140, 1480, 1370),
    "extend plain": (755, 500, 615),
    "new tokens": (825, 650, 660),
}
"""Instructions of the main loops for sm_80, sm_90 and sm_100: what was reached when they were written, and a few more."""


def _cases() -> tuple[Case, ...]:
    cases = [_attend(f"decode {name}", coded_piece(head), MIN_COLUMNS) for name, head in _heads().items()]
    plain = plain_piece(plain_layout("bf16", _GEOMETRY))
    cases.append(_attend("decode plain", plain, MIN_COLUMNS))
    cases += [_attend(f"extend {name}", coded_piece(_heads()[name]), EXTEND_COLUMNS) for name in EXTENDED]
    cases.append(_attend("extend plain", plain, EXTEND_COLUMNS))
    cases += [*_others(), *_codec()]
    limits = {name: MappingProxyType(dict(zip((80, 90, 100), row, strict=True))) for name, row in LOOP_LIMITS.items()}
    return tuple(
        replace(case, loop_limits=limits.get(case.name, case.loop_limits), loop_spills=LOOP_SPILLS.get(case.name, 0))
        for case in cases
    )


CASES = _cases()
