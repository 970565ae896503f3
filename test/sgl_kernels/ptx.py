"""The few PTX instructions that open codes, on numpy vectors of 32-bit registers."""

import re

import numpy as np


def run(text: str, words: np.ndarray, outputs: int) -> np.ndarray:
    """Run inline assembly on uint32 `words` (n,); returns its fp16 outputs (n, outputs) as uint16."""
    registers: dict[str, np.ndarray] = {f"${outputs}": words.astype(np.uint32)}
    halves: dict[str, np.ndarray] = {}

    def value(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full(words.shape, int(name, 0), dtype=np.uint32)

    for line in re.findall(r"([a-z][\w.]*)\s+([^;]*);", text.replace("{\n", "\n", 1)):
        name, operands = line[0], re.findall(r"\{[^}]*\}|[$\w]+", line[1])
        if name == "mov.b32" and operands[0].startswith("{"):
            low, high = re.findall(r"\$\d+", operands[0])
            halves[low] = (value(operands[1]) & 0xFFFF).astype(np.uint16)
            halves[high] = (value(operands[1]) >> 16).astype(np.uint16)
        elif not name.startswith("reg"):
            registers[operands[0]] = _execute(name, [value(x) for x in operands[1:]])
    return np.stack([halves[f"${i}"] for i in range(outputs)], -1)


def _execute(name: str, x: list[np.ndarray]) -> np.ndarray:
    match name:
        case "mov.b32":
            return x[0]
        case "and.b32":
            return x[0] & x[1]
        case "shl.b32":
            return x[0] << x[1]
        case "shr.u32":
            return x[0] >> x[1]
        case "mad.lo.u32":
            return x[0] * x[1] + x[2]
        case "sub.f16x2":
            return (x[0].view(np.float16) - x[1].view(np.float16)).view(np.uint32)
        case "lop3.b32":
            return _lop3(x[0], x[1], x[2], int(x[3][0]))
        case "prmt.b32":
            return _prmt(*x)
    raise NotImplementedError(name)


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """PTX ISA: bit i of the result is bit (a b c) of the table."""
    out = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            out |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return out


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """PTX ISA, default mode: each nibble picks one of eight bytes; its top bit would spread the sign of that byte."""
    pool = np.concatenate((a[:, None].view(np.uint8), b[:, None].view(np.uint8)), 1)
    out = np.zeros((a.size, 4), dtype=np.uint8)
    for byte in range(4):
        nibble = selector >> np.uint32(4 * byte) & np.uint32(15)
        picked = np.take_along_axis(pool, (nibble & 7)[:, None].astype(np.int64), 1)[:, 0]
        out[:, byte] = np.where(nibble & 8, np.where(picked & 0x80, 0xFF, 0), picked)
    return out.reshape(-1).view(np.uint32)
