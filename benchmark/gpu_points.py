"""What benchmark/gpu_check.py times: attention of one layer over pages of one format, ours and others'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from gpu_timing import Call, Machine
from torch import Tensor

from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.flashinfer.plan import DenseFormat, plan_dense
from sgl_kernels.page_codec.reference import CodecBases, Entries, seal_pages
from sgl_kernels.page_layout import KeyClass, PageGeometry, PageLayout, coded_layout, plain_layout, reduced_layout
from sgl_kernels.triton.attention import TritonAttention
from sgl_kernels.triton.launch import EXTEND_COLUMNS, decode_columns
from sgl_kernels.triton.plan import BatchPlan, plan_batch, query_blocks

PAGE = 64
CODED = {"fp8": ("e4m3", "e4m3"), "k8v4": ("e4m3", "e2m1"), "fp4": ("e2m1", "e2m1"), "int4": ("int4", "int4")}
REDUCED = {"csa2-2x": (1, 3), "csa2-4x": (2, 2), "csa2-8x": (4, 2)}
"""Tokens of an entry, and eighths of the channels at 2 bits, beside three eighths at 4."""
FORMATS = ("bf16", *CODED, *REDUCED)
DIFFERENT_PAGES = 16
COLD_BYTES = 192 << 20
"""Calls rotate through as many pages, several times the last-level cache."""
MOST_SETS = 16
GRAPH_CALLS = 8
WAVES = 3
"""Programs for each multiprocessor, at least, where there are pages for them."""
Pages = tuple[Tensor, Tensor]
"""An arena of pages of one format, and which ones each call reads, (sets, B, P)."""


@dataclass(frozen=True)
class Shape:
    """Of the attention of a model."""

    name: str
    heads: int
    groups: int
    dim: int


SHAPES = (Shape("Llama-3-8B", 32, 8, 128), Shape("Qwen-2.5-7B", 28, 4, 128))
TINY = (Shape("tiny", 4, 2, 32),)


@dataclass(frozen=True)
class Point:
    """One comparison: all formats at one shape, context and batch."""

    kind: str
    """ "decode" or "extend"."""
    shape: Shape
    context: int
    batch: int
    new_tokens: int = 1
    """Of each request."""

    @property
    def name(self) -> str:
        context = f"{self.context // 1024}k" if self.context >= 1024 else str(self.context)
        new = "" if self.kind == "decode" else f" +{self.new_tokens}"
        return f"{self.kind} {self.shape.name} {context}{new} x{self.batch}"

    @property
    def pages(self) -> int:
        """Of a request."""
        return self.context // PAGE

    @property
    def columns(self) -> int:
        """Of a block of queries."""
        return decode_columns(self.shape.heads // self.shape.groups) if self.kind == "decode" else EXTEND_COLUMNS


@dataclass(frozen=True)
class Model:
    """What the kernels are bound to: one layer of a shape."""

    shape: Shape
    layouts: tuple[PageLayout, ...]
    bases: CodecBases
    """On the host, to seal."""
    kernels: TritonAttention
    group: int


@cache
def model_of(machine: Machine, shape: Shape) -> Model:
    """All formats of a shape, with random bases."""
    g = PageGeometry(1, shape.groups, shape.dim, PAGE, machine.dtype)
    eighth = shape.dim // 8
    reduced = []
    for name, (merge, low) in REDUCED.items():
        classes = (KeyClass("int4", 3 * eighth), KeyClass("lloyd2", low * eighth))
        reduced.append(reduced_layout(name, (classes,) * shape.groups, "lloyd2", merge, g))
    layouts = (plain_layout("bf16", g), *(coded_layout(n, *kinds, g) for n, kinds in CODED.items()), *reduced)
    random = torch.Generator().manual_seed(0)
    turns = torch.linalg.qr(torch.randn(shape.groups, shape.dim, shape.dim, generator=random)).Q
    bases = CodecBases(orthonormal_basis(shape.dim), turns)
    on_device = CodecBases(bases.flat.to(machine.device), turns.to(machine.device))
    operands = torch.float16
    kernels = TritonAttention(layouts, on_device, operands, machine.dtype)
    return Model(shape, layouts, bases, kernels, shape.heads // shape.groups)


@cache
def different_pages(machine: Machine, shape: Shape, index: int) -> Tensor:
    """(DIFFERENT_PAGES, page_bytes) uint8 on the host."""
    model = model_of(machine, shape)
    layout, random = model.layouts[index], torch.Generator().manual_seed(1)
    size = (DIFFERENT_PAGES, shape.groups, layout.entries, shape.dim)
    keys, values = torch.randn(2, *size, generator=random)
    if layout.is_plain:
        return torch.stack((keys, values), 1).to(machine.dtype).view(torch.uint8).view(DIFFERENT_PAGES, -1)
    bias = torch.rand(size[:3], generator=random) if layout.is_merged else None
    return seal_pages(Entries(keys, values, bias), layout, model.bases)


def sets_of(point: Point, page_bytes: int) -> int:
    """How many calls read pages of their own."""
    used = point.batch * point.pages * page_bytes
    return min(MOST_SETS, -(-COLD_BYTES // used))


def arena_of(machine: Machine, point: Point, different: Tensor) -> Pages:
    """An arena full of copies of `different` (n, page bytes), in which every page is read by one request of one set."""
    page_bytes = different.shape[1]
    sets = 1 if machine.dry else sets_of(point, page_bytes)
    count = sets * point.batch * point.pages
    arena = torch.empty(count, page_bytes, dtype=torch.uint8, device=machine.device)
    source = different.to(machine.device)
    for start in range(0, count, len(source)):
        arena[start : start + len(source)] = source[: count - start]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
    return arena.view(-1), order.view(sets, point.batch, point.pages)


def splits_of(machine: Machine, point: Point) -> int:
    """Parts of the pages of a request: as many programs as the device holds a few times, and 8 pages each at least."""
    blocks = point.batch * (
        1 if point.kind == "decode" else -(-point.new_tokens * point.shape.heads // point.shape.groups // 128)
    )
    wanted = -(-WAVES * machine.multiprocessors * 2 // (blocks * point.shape.groups))
    return max(1, min(wanted, point.pages // 8))


def query_of(machine: Machine, point: Point) -> Tensor:
    """(T, H, D)."""
    tokens = point.batch * point.new_tokens
    random = torch.Generator().manual_seed(3)
    query = torch.randn(tokens, point.shape.heads, point.shape.dim, generator=random)
    return query.to(machine.device, machine.dtype)


def plan_of(
    machine: Machine, point: Point, table: Tensor, index: int, page_bytes: int, splits: int
) -> Callable[[], BatchPlan]:
    """Planning of one step, on tensors that are on the device."""
    model = model_of(machine, point.shape)
    count = int(table.max()) + 1 if table.numel() else 1
    pages = table.to(machine.device)
    lengths = torch.full((point.batch,), point.context, device=machine.device)
    formats = torch.full((count,), index, dtype=torch.int8, device=machine.device)
    offsets = torch.arange(count, device=machine.device) * page_bytes
    block_tokens = max(1, point.columns // model.group) if point.kind == "extend" else 1
    blocks = query_blocks([point.new_tokens] * point.batch, block_tokens, machine.device)
    return lambda: plan_batch(
        pages, lengths, formats, offsets, blocks, num_formats=len(model.layouts), page_size=PAGE, splits=splits
    )


def our_calls(machine: Machine, point: Point, index: int, pages: Pages, splits: int | None = None) -> list[Call]:
    """Attention of one layer over pages of format `index`, one call for each set."""
    model = model_of(machine, point.shape)
    arena, table = pages
    query, scale = query_of(machine, point), point.shape.dim**-0.5
    parts = splits or splits_of(machine, point)
    plans = [plan_of(machine, point, one, index, model.layouts[index].page_bytes, parts)() for one in table]

    def call(plan: BatchPlan) -> Tensor:
        return model.kernels.attend(query, arena, plan, 0, scale, columns=point.columns, formats=(index,))

    return [lambda p=plan: call(p) for plan in plans]


def e4m3_rows(machine: Machine, shape: Shape) -> tuple[DenseFormat, Tensor]:
    """A format that the ladder does not have, bare E4M3 rows, and different pages of it."""
    g = replace(model_of(machine, shape).layouts[0].geometry, dtype=torch.float8_e4m3fn)
    layout = plain_layout("e4m3", g)
    values = torch.randn(DIFFERENT_PAGES, layout.page_bytes, generator=torch.Generator().manual_seed(1))
    return DenseFormat(0, layout), values.to(g.dtype).view(torch.uint8)


def flashinfer_calls(
    machine: Machine, point: Point, dense: DenseFormat, pages: Pages
) -> tuple[list[Call], Callable[[], None]]:
    """The same through FlashInfer, and planning of one step, tables on the host."""
    from sgl_kernels.flashinfer.wrappers import WORKSPACE_BYTES, DenseAttention, GraphLimits

    arena, table = pages
    query, shape = query_of(machine, point), point.shape
    extends = point.kind == "extend"
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=machine.device)
    formats = torch.full((table.numel(),), dense.index, dtype=torch.int8)
    offsets = torch.arange(table.numel()) * dense.layout.page_bytes
    lengths = torch.full((point.batch,), point.context)
    new_tokens = [point.new_tokens] * point.batch if extends else None
    limits = GraphLimits(point.batch, point.batch * point.pages)
    calls: list[Call] = []
    plans: list[Callable[[], None]] = []
    for one in table:
        attention = DenseAttention(
            (dense,), shape.heads, machine.dtype, shape.dim**-0.5, workspace,
            extends=extends, graph=limits,
        )  # fmt: skip

        plans.append(lambda t=one, a=attention: a.plan(plan_dense(t, lengths, formats, offsets, (dense,), PAGE), new_tokens))
        plans[-1]()
        calls.append(lambda a=attention: a.run(query, arena, 0).out[0])
    return calls, plans[0]


def sdpa_calls(machine: Machine, point: Point, count: int) -> list[Call]:
    """torch's own attention over contiguous keys and values, `count` of them, for where there is no FlashInfer."""
    shape = point.shape
    size = (2, point.batch, shape.groups, point.context, shape.dim)
    caches = [torch.randn(size, device=machine.device, dtype=machine.dtype) for _ in range(count)]
    query = query_of(machine, point).view(point.batch, point.new_tokens, shape.groups, -1, shape.dim)
    # Query heads of a KV head as rows of one query: keys and values are read once.
    grouped = query.permute(0, 2, 1, 3, 4).reshape(point.batch, shape.groups, -1, shape.dim)

    def call(cache: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(grouped, *cache, scale=shape.dim**-0.5)

    return [lambda c=cache: call(c) for cache in caches]


def in_graph(calls: Sequence[Call], least: int) -> list[Call]:
    """The calls over and over, `least` of them at least."""
    return list(calls) * max(1, -(-least // len(calls)))
