"""Codes of pages as numbers in registers: what `sgl_kernels.codes` defines, in Triton.

A tensor of dwords becomes one with an axis more: the codes of each dword in the order of its contraction indices. Code i of
a dword lies in byte i % 4, at bit field i // 4. On CUDA a table lookup by `prmt` opens them, half the instructions of what
can be written in Triton; that is the portable twin, which the interpreter runs and tests compare with the instructions.

Values come in units (`code_unit`) that make every code exact in fp16, but for the levels of `lloyd2`, which are rounded.
"""

import triton
import triton.language as tl

E2M1 = tl.constexpr("e2m1")
LLOYD2 = tl.constexpr("lloyd2")
INT4 = tl.constexpr("int4")
INT2 = tl.constexpr("int2")
E4M3 = tl.constexpr("e4m3")


def asm_e2m1() -> str:
    """PTX: a dword of E2M1 codes -> eight fp16.

    All eight magnitudes have a zero low byte in fp16, so `prmt` looks up four high bytes at a time; signs join bytewise.
    """
    return """{
        .reg .b32 m, h, s, t, a, b, p, q, r, v;
        and.b32 m, $8, 0x77777777;
        shr.u32 h, m, 16;
        shl.b32 s, $8, 4;
        prmt.b32 a, 0x3e3c3800, 0x46444240, m;
        prmt.b32 b, 0x3e3c3800, 0x46444240, h;
        prmt.b32 t, s, $8, 0x5140;
        lop3.b32 a, t, 0x80808080, a, 0xea;
        prmt.b32 t, s, $8, 0x7362;
        lop3.b32 b, t, 0x80808080, b, 0xea;
        prmt.b32 p, a, 0, 0x2404;
        prmt.b32 q, b, 0, 0x2404;
        prmt.b32 r, a, 0, 0x3414;
        prmt.b32 v, b, 0, 0x3414;
        mov.b32 {$0, $1}, p;
        mov.b32 {$2, $3}, q;
        mov.b32 {$4, $5}, r;
        mov.b32 {$6, $7}, v;
    }"""


def asm_int4(zero: str) -> str:
    """PTX: a dword of integer codes c -> eight fp16 2 c - zero.

    0x6400 is 1024 in fp16, whose last mantissa bit is worth 1; `zero` is 1024 plus the offset, twice, in fp16.
    """
    pairs = []
    # Bytes 0, 1 and then 2, 3 spread to halves; the low and then the high nibble of each to bits 4..1.
    for byte in (0, 1):
        pairs.append(f"prmt.b32 w, $8, 0, {'0x4140' if byte == 0 else '0x4342'};")
        pairs.append(f"shl.b32 x, w, 1;\nlop3.b32 x, x, 0x001e001e, 0x64006400, 0xea;\nsub.f16x2 p{byte}, x, z;")
        pairs.append(f"shr.u32 x, w, 3;\nlop3.b32 x, x, 0x001e001e, 0x64006400, 0xea;\nsub.f16x2 q{byte}, x, z;")
    body = "\n".join(pairs)
    return f"""{{
        .reg .b32 w, x, z, p0, p1, q0, q1;
        mov.b32 z, {zero};
        {body}
        mov.b32 {{$0, $1}}, p0;
        mov.b32 {{$2, $3}}, p1;
        mov.b32 {{$4, $5}}, q0;
        mov.b32 {{$6, $7}}, q1;
    }}"""


def asm_lloyd2() -> str:
    """PTX: a dword of 2-bit codes -> sixteen fp16: `prmt` looks up the low and the high byte of two levels at a time."""
    # fp16 bytes of -1.510, -0.4528, 0.4528, 1.510.
    low, high = lloyd2_bytes()
    steps = []
    for field in range(4):
        steps.append(f"shr.u32 x, $16, {2 * field};\nand.b32 x, x, 0x03030303;")
        steps.append("mad.lo.u32 x, x, 17, 0x40404040;\nshr.u32 y, x, 16;")
        steps.append(f"prmt.b32 a, {low}, {high}, x;\nprmt.b32 b, {low}, {high}, y;")
        steps.append(f"mov.b32 {{${4 * field}, ${4 * field + 1}}}, a;\nmov.b32 {{${4 * field + 2}, ${4 * field + 3}}}, b;")
    body = "\n".join(steps)
    return f"{{\n.reg .b32 x, y, a, b;\n{body}\n}}"


def lloyd2_bytes() -> tuple[str, str]:
    """The low and the high bytes of the four levels in fp16, as hexadecimal dwords."""
    import struct

    from sgl_kernels.codes import LLOYD2_LEVELS

    halves = [struct.pack("<e", level) for level in LLOYD2_LEVELS]
    return tuple(f"0x{bytes(h[i] for h in halves)[::-1].hex()}" for i in (0, 1))  # type: ignore[return-value]


def asm_e4m3() -> str:
    """PTX: a dword of E4M3 codes -> four fp16 in units of 2^8: the same bits a place lower, and a bias 8 larger."""
    return """{
        .reg .b32 a, b, x;
        prmt.b32 a, $4, 0, 0x1404;
        prmt.b32 b, $4, 0, 0x3424;
        shr.u32 x, a, 1;
        and.b32 x, x, 0x3f803f80;
        lop3.b32 a, a, 0x80008000, x, 0xea;
        shr.u32 x, b, 1;
        and.b32 x, x, 0x3f803f80;
        lop3.b32 b, b, 0x80008000, x, 0xea;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
    }"""


_ASM_E2M1 = tl.constexpr(asm_e2m1())
_ASM_INT4 = tl.constexpr(asm_int4("0x64106410"))
_ASM_INT4_ASYMMETRIC = tl.constexpr(asm_int4("0x640f640f"))
_ASM_LLOYD2 = tl.constexpr(asm_lloyd2())
_ASM_E4M3 = tl.constexpr(asm_e4m3())
_H4 = tl.constexpr("=h,=h,=h,=h,r")
_H8 = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r")
_H16 = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r")


@triton.jit
def join4(a, b, c, d):
    """(..., 4) of four tensors (...,)."""
    shape: tl.constexpr = a.shape + [4]
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(shape)


@triton.jit
def join8(a, b, c, d, e, f, g, h):
    """(..., 8) of eight tensors (...,)."""
    shape: tl.constexpr = a.shape + [8]
    return tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h))).reshape(shape)


@triton.jit
def code_value(code, KIND: tl.constexpr):
    """fp32 value of codes in int32, in units of `code_unit`."""
    if KIND == E2M1:
        half_steps = tl.where((code & 7) < 2, code & 7, (2 + (code & 1)) << (((code & 7) >> 1) - 1))
        value = half_steps.to(tl.float32) * 0.5
        return tl.where((code & 8) != 0, -value, value)
    elif KIND == LLOYD2:
        value = tl.where((code == 0) | (code == 3), 1.510, 0.4528)
        return tl.where(code < 2, -value, value)
    elif KIND == E4M3:
        exponent, mantissa = (code & 0x7F) >> 3, code & 7
        # 2^(exponent - 15), also 2^-14 for subnormals: in units of 2^8.
        power = (tl.maximum(exponent, 1) + (127 - 15)) << 23
        value = power.to(tl.float32, bitcast=True) * tl.where(exponent == 0, mantissa, 8 + mantissa).to(tl.float32) * 0.125
        return tl.where((code & 0x80) != 0, -value, value)
    elif KIND == INT4:
        return (2 * code - 16).to(tl.float32)
    elif KIND == INT2:
        return (2 * code - 3).to(tl.float32)
    else:
        return (2 * code - 15).to(tl.float32)


@triton.jit
def code_at(words, INDEX: tl.constexpr, KIND: tl.constexpr, CT: tl.constexpr):
    """The portable twin: value of code INDEX of each dword."""
    if KIND == E4M3:
        code = (words >> (8 * INDEX)) & 0xFF
    elif KIND == LLOYD2:
        code = (words >> (8 * (INDEX % 4) + 2 * (INDEX // 4))) & 3
    else:
        code = (words >> (8 * (INDEX % 4) + 4 * (INDEX // 4))) & 15
    return code_value(code, KIND).to(CT)


@triton.jit
def open4(words, KIND: tl.constexpr, FIRST: tl.constexpr, CT: tl.constexpr):
    """The portable twin: (..., 4) codes FIRST .. FIRST + 3 of each dword."""
    a, b = code_at(words, FIRST, KIND, CT), code_at(words, FIRST + 1, KIND, CT)
    return join4(a, b, code_at(words, FIRST + 2, KIND, CT), code_at(words, FIRST + 3, KIND, CT))


@triton.jit
def open_portably(words, KIND: tl.constexpr, CT: tl.constexpr):
    """The portable twin of `open_words`."""
    A: tl.constexpr = words.shape[0]
    B: tl.constexpr = words.shape[1]
    four = open4(words, KIND, 0, CT)
    if KIND == E4M3:
        return four.reshape(A, B * 4)
    else:
        eight = tl.join(four, open4(words, KIND, 4, CT)).permute(0, 1, 3, 2).reshape(A, B, 8)
        if KIND == LLOYD2:
            more = tl.join(open4(words, KIND, 8, CT), open4(words, KIND, 12, CT)).permute(0, 1, 3, 2).reshape(A, B, 8)
            return tl.join(eight, more).permute(0, 1, 3, 2).reshape(A, B * 16)
        else:
            return eight.reshape(A, B * 8)


@triton.jit
def open_words(words, KIND: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr):
    """(A, B) int32 -> (A, B x codes of a dword) of type CT, in units of `code_unit`.

    Args:
        ASM: whether instructions of CUDA open them; CT is fp16 then.
    """
    A: tl.constexpr = words.shape[0]
    B: tl.constexpr = words.shape[1]
    if not ASM:
        return open_portably(words, KIND, CT)
    elif KIND == E4M3:
        a, b, c, d = tl.inline_asm_elementwise(_ASM_E4M3, _H4, [words], (tl.float16,) * 4, is_pure=True, pack=1)
        return join4(a, b, c, d).reshape(A, B * 4)
    elif KIND == LLOYD2:
        a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q = tl.inline_asm_elementwise(
            _ASM_LLOYD2, _H16, [words], (tl.float16,) * 16, is_pure=True, pack=1
        )
        halves = tl.join(join8(a, b, c, d, e, f, g, h), join8(i, j, k, m, n, o, p, q))
        return halves.permute(0, 1, 3, 2).reshape(A, B * 16)
    else:
        ASM_TEXT: tl.constexpr = _ASM_E2M1 if KIND == E2M1 else _ASM_INT4 if KIND == INT4 else _ASM_INT4_ASYMMETRIC
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(ASM_TEXT, _H8, [words], (tl.float16,) * 8, is_pure=True, pack=1)
        codes = join8(a, b, c, d, e, f, g, h).reshape(A, B * 8)
        if B == 2:
            # UPSTREAM(triton 3.8.0: on sm_100 "Illegal shared layout" where this reshape feeds a matrix product; what
            # stands between them costs nothing).
            codes = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [codes], tl.float16, is_pure=True, pack=2)
        return codes


@triton.jit
def scale_value(code):
    """fp32 value of UE5M3 codes, or of any other number of eighths of a power of two."""
    return ((code.to(tl.int32) + ((127 - 15) << 3)) << 20).to(tl.float32, bitcast=True)


def code_unit(kind: str) -> float:
    """What one unit of an opened code is worth."""
    return {"e2m1": 1.0, "lloyd2": 1.0, "e4m3": 256.0}.get(kind, 0.5)
