"""Whether the kernels compute on a device what they should: the scenes and the float64 oracle of the tests.

Each check returns its worst error over the bound of its own input; above 1 it failed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from gpu_timing import Machine
from torch import Tensor

from sgl_kernels.flashinfer.plan import DenseFormat, plan_dense
from sgl_kernels.flashinfer.views import bias_slab, layer_view
from sgl_kernels.page_codec.reference import BIAS_STEP, CodecBases
from sgl_kernels.page_layout import PageGeometry, plain_layout
from sgl_kernels.paged_attention import reference
from sgl_kernels.triton.attention import Partials, TritonAttention
from sgl_kernels.triton.launch import EXTEND_COLUMNS, decode_columns
from sgl_kernels.triton.plan import BatchPlan, QueryBlocks, plan_batch, query_blocks

Check = tuple[str, Callable[[], float]]
LAYERS = (0, 1)


@dataclass(frozen=True)
class Sizes:
    """Of the scenes; small where the interpreter runs them."""

    lengths: tuple[int, ...]
    groups: int
    repeat: int
    dim: int
    formats: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    new_tokens: int
    many_pages: int


def sizes_of(machine: Machine) -> Sizes:
    """What is checked here."""
    from paged_scenes import ALL_FORMATS

    if machine.dry:
        return Sizes((128, 65), 2, 2, 32, ("plain", "csa2-4x"), (torch.float16,), 3, 2)
    return Sizes((640, 65, 1), 3, 4, 128, ALL_FORMATS, (torch.bfloat16, torch.float16), 130, 150)


class SceneOnDevice:
    """A scene of the tests, with its tensors on the device."""

    def __init__(self, machine: Machine, lengths: Sequence[int], dtype: torch.dtype, only: str | None = None) -> None:
        from paged_scenes import make_scene

        sizes = sizes_of(machine)
        self.machine = machine
        self.scene = make_scene(list(lengths), (sizes.dim, sizes.groups, sizes.repeat, dtype), only=only, tail=0xFF)
        self.formats_there = sorted(set(self.scene.formats[self.scene.formats >= 0].tolist()))
        bases = self.scene.bases
        on_device = CodecBases(self.put(bases.flat), None if bases.reduced is None else self.put(bases.reduced))
        self.kernels = TritonAttention(self.scene.layouts, on_device, torch.float16, None)
        self.arena = self.put(self.scene.arena)
        self.columns = decode_columns(sizes.repeat)

    def put(self, x: Tensor) -> Tensor:
        """On the device."""
        return x.to(self.machine.device)

    def plan(self, blocks: QueryBlocks, splits: int) -> BatchPlan:
        """Of all requests."""
        s = self.scene
        tables = (self.put(x) for x in (s.table, s.lengths, s.formats, s.offsets))
        return plan_batch(*tables, blocks, num_formats=len(s.layouts), page_size=s.geometry.page_size, splits=splits)

    def decode(self, query: Tensor, layer: int, splits: int = 3, **more: object) -> Tensor:
        """One token of each request."""
        plan = self.plan(query_blocks([1] * len(query), 1, self.machine.device), splits)
        with self.machine.kernels():
            return self.kernels.attend(
                self.put(query), self.arena, plan, layer, self.scene.scale, columns=self.columns,
                **{"formats": self.formats_there, **more},
            )  # fmt: skip

    def worst(self, out: Tensor, query: Tensor, layer: int) -> float:
        """Largest error over its bound, of one token of each request."""
        from paged_scenes import UNIT, oracle

        unit = max(UNIT[query.dtype], UNIT[torch.float16])
        ratios = []
        for i, held in enumerate(self.scene.held):
            want, bound = oracle(self.scene, held, layer, query[i : i + 1], unit=unit)
            ratios.append(_ratio(out[i : i + 1], want, bound))
        return max(ratios)


def _ratio(out: Tensor, want: Tensor, bound: Tensor) -> float:
    found = float(((out.double().cpu() - want).abs() / bound).max())
    return math.inf if math.isnan(found) else found


def kernel_checks(machine: Machine) -> list[Check]:
    """Of the Triton kernels."""
    sizes = sizes_of(machine)
    checks: list[Check] = []
    for dtype in sizes.dtypes:
        name = str(dtype).removeprefix("torch.")
        checks += [(f"decode {only} {name}", lambda o=only, d=dtype: _decode(machine, d, o)) for only in sizes.formats]
        checks.append((f"extend mixed {name}", lambda d=dtype: _extend(machine, d)))
        checks.append((f"write {name}", lambda d=dtype: _write(machine, d)))
    dtype = sizes.dtypes[0]
    checks.append(("decode many pages", lambda: _many(machine, dtype)))
    checks.append(("merge with others", lambda: _merge(machine, dtype)))
    if not machine.dry:
        checks.append(("graph replays with another page table", lambda: _graph(machine, dtype)))
    return checks


def compile_cases(machine: Machine) -> list[Callable[[], float]]:
    """Calls that compile all kernels of the checks, each few."""
    sizes, cases = sizes_of(machine), []
    for dtype in sizes.dtypes:
        # Kernels over codes are the same for all dtypes of the model.
        for only in sizes.formats if dtype == sizes.dtypes[0] else ("plain",):
            cases.append(lambda d=dtype, o=only: _decode(machine, d, o))
            cases.append(lambda d=dtype, o=only: _extend(machine, d, o))
        cases.append(lambda d=dtype: _write(machine, d))
    return cases


def _decode(machine: Machine, dtype: torch.dtype, only: str) -> float:
    there = SceneOnDevice(machine, sizes_of(machine).lengths, dtype, only)
    query = there.scene.query(len(there.scene.lengths), dtype)
    return max(there.worst(there.decode(query, layer), query, layer) for layer in LAYERS)


def _many(machine: Machine, dtype: torch.dtype) -> float:
    """More pages than a program takes notes of at a time."""
    there = SceneOnDevice(machine, [sizes_of(machine).many_pages * 64], dtype, "csa2-8x")
    query = there.scene.query(1, dtype)
    return there.worst(there.decode(query, 0, splits=1), query, 0)


def _extend(machine: Machine, dtype: torch.dtype, only: str | None = None) -> float:
    from paged_scenes import MIXED, UNIT, as_written, oracle

    sizes, count = sizes_of(machine), sizes_of(machine).new_tokens
    there = SceneOnDevice(machine, [129 if machine.dry or only else MIXED], dtype, only)
    s = there.scene
    query = s.query(count, dtype)
    random = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, count, sizes.groups, sizes.dim, generator=random).to(dtype)
    plan = there.plan(query_blocks([count], EXTEND_COLUMNS // sizes.repeat, machine.device), 1)
    ratios = []
    for layer in LAYERS:
        arguments = [there.put(x) for x in (query, keys, values)]
        with machine.kernels():
            out = there.kernels.extend(
                *arguments, there.arena, plan, layer, s.scale, columns=EXTEND_COLUMNS, formats=there.formats_there
            )
        fresh = as_written(*(x.transpose(0, 1)[None].expand(2, -1, -1, -1) for x in (keys, values)))
        unit = max(UNIT[dtype], UNIT[torch.float16])
        ratios.append(_ratio(out, *oracle(s, s.held[0].followed_by(fresh), layer, query, new=count, unit=unit)))
    return max(ratios)


def _write(machine: Machine, dtype: torch.dtype) -> float:
    """0 if every byte is where the reference puts it, else infinity."""
    heads, dim, device = 3, sizes_of(machine).dim, machine.device
    layout = plain_layout("plain", PageGeometry(2, heads, dim, 64, dtype))
    places = torch.tensor([3, 1, 3, 0, 1]) * layout.page_bytes
    rows = reference.plain_rows(places, torch.tensor([0, 63, 17, 5, 62]), layout).to(device)
    keys, values = torch.randn(2, 6, heads, dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    kernels = TritonAttention((layout,), CodecBases(torch.eye(dim, device=device)))
    want, got = torch.zeros(2, 5 * layout.page_bytes, dtype=torch.uint8, device=device)
    padded = torch.cat((rows, torch.tensor([-1], device=device)))
    with machine.kernels():
        for layer in LAYERS:
            reference.write_plain(want, rows, layout, layer, keys[:5], values[:5])
            kernels.write_plain(got, padded, layer, keys, values)
    return 0.0 if torch.equal(want, got) else math.inf


def _merge(machine: Machine, dtype: torch.dtype) -> float:
    """Parts of others, natural and of base 2, one of them empty: against a weighted sum in float64 of what came alone."""
    there = SceneOnDevice(machine, sizes_of(machine).lengths, dtype)
    query = there.scene.query(len(there.scene.lengths), dtype)
    random = torch.Generator().manual_seed(0)
    out = torch.randn(2, *query.shape, generator=random).to(dtype)
    lse = torch.randn(out.shape[:-1], generator=random)
    lse[1, -1] = -math.inf
    own_lse = there.put(torch.zeros(query.shape[:2]))
    own = there.decode(query.float(), 0, lse=own_lse).double().cpu()
    ratios = []
    for base2, unit in ((True, 1.0), (False, math.log(2))):
        others = Partials(there.put(out), there.put(lse * unit), base2)
        got = there.decode(query.float(), 0, others=others).double().cpu()
        weights = torch.softmax(torch.cat((own_lse.cpu()[None], lse)).double() * math.log(2), 0)
        want = (weights[..., None] * torch.cat((own[None], out.double()))).sum(0)
        # fp32 sums of values up to 4.
        ratios.append(_ratio(got, want, torch.tensor(1e-5)))
    return max(ratios)


def _graph(machine: Machine, dtype: torch.dtype) -> float:
    """Planned and attended inside a graph; then the page table changes where it lies. Equal to the bit."""
    lengths = sizes_of(machine).lengths[:1] * 2
    there = SceneOnDevice(machine, lengths, dtype)
    s = there.scene
    table, lengths_there, formats, offsets = (there.put(x) for x in (s.table, s.lengths, s.formats, s.offsets))
    query, blocks = there.put(s.query(2, dtype)), query_blocks([1, 1], 1, machine.device)

    def step() -> Tensor:
        plan = plan_batch(table, lengths_there, formats, offsets, blocks, num_formats=len(s.layouts), page_size=64, splits=2)
        return there.kernels.attend(query, there.arena, plan, 0, s.scale, columns=there.columns)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    table.copy_(table.flip(0))
    query.copy_(query.flip(0))
    graph.replay()
    same = torch.equal(out, step())
    return max(there.worst(out.flip(0), query.flip(0).cpu(), 0), 0.0 if same else math.inf)


def flashinfer_checks(machine: Machine, kind: str) -> list[Check]:
    """Of FlashInfer through our plans and views, against float64 over the very rows; one module is compiled first.

    Args:
        kind: "bf16" or "e4m3" rows by tensor cores, the "variant" with biases by CUDA cores, or "variant-e4m3" by those.
    """
    dtype = torch.float8_e4m3fn if kind.endswith("e4m3") else torch.bfloat16
    if kind.startswith("variant"):
        return [(f"flashinfer {kind}", lambda: dense_decode(machine, dtype, 2, repeat=2, graph=False))]
    return [(f"flashinfer decode {kind}", lambda: dense_decode(machine, dtype, 1, repeat=4, graph=True))]


def dense_decode(machine: Machine, dtype: torch.dtype, merge: int, *, repeat: int, graph: bool) -> float:
    """Requests of 5 pages and a part, of one page, and of none, over rows of one dtype; merged entries have biases."""
    from sgl_kernels.flashinfer.wrappers import WORKSPACE_BYTES, DenseAttention, GraphLimits

    size, groups, dim, device = 64, 2, 128, machine.device
    one = DenseFormat(0, plain_layout("rows", PageGeometry(2, groups, dim, size // merge, dtype)), merge)
    random = torch.Generator().manual_seed(4)
    rows = torch.randn(9 * one.layout.page_bytes // dtype.itemsize, generator=random).to(dtype)
    arena = rows.view(torch.uint8).to(device)
    table = torch.tensor([[3, 1, 8, 5, 2, 0], [7, 0, 0, 0, 0, 0], [0] * 6])
    lengths = torch.tensor([5 * size + (0 if merge > 1 else 17), size, 0])
    offsets = torch.arange(9) * one.layout.page_bytes
    plan = plan_dense(table, lengths, torch.zeros(9, dtype=torch.int8), offsets, (one,), size)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    heads, scale = groups * repeat, dim**-0.5
    limits = GraphLimits(3, 32) if graph else None
    attention = DenseAttention((one,), heads, machine.dtype, scale, workspace, graph=limits)
    attention.plan(plan)
    query = torch.randn(3, heads, dim, generator=random).to(device, machine.dtype)
    slab = bias_slab(arena.numel(), one, device)
    slab.copy_(torch.randint(0, 64, slab.shape, generator=random, dtype=torch.uint8))
    worst = 0.0
    for layer in LAYERS:
        got = attention.run(query, arena, layer, {0: slab} if merge > 1 else None)
        view = layer_view(arena, one, layer).float().double()
        for b in range(3):
            ids = plan.parts[0].indices[plan.parts[0].indptr[b] : plan.parts[0].indptr[b + 1]].long().to(device)
            if not len(ids):
                worst = max(worst, 0.0 if bool((got.lse[0, b] == -math.inf).all()) else math.inf)
                continue
            used = (len(ids) - 1) * one.entries + int(plan.parts[0].last_page_len[b])
            k, v = (view[ids, i].transpose(0, 1).flatten(1, 2)[:, :used].repeat_interleave(repeat, 0) for i in (0, 1))
            logits = torch.einsum("hd,hnd->hn", query[b].double(), k) * scale
            if merge > 1:
                steps = slab[ids, layer].transpose(0, 1).flatten(1, 2)[:, :used].repeat_interleave(repeat, 0)
                logits = logits + steps.double() * BIAS_STEP
            want = torch.einsum("hn,hnd->hd", torch.softmax(logits, -1), v)
            # Weights and results are rounded to bf16: twice 2^-8 of the largest value that takes part.
            bound = 2.0**-7 * v.abs().amax(1)
            worst = max(worst, _ratio(got.out[0, b], want.cpu(), bound.cpu()))
            lse_error = (got.lse[0, b].double() * math.log(2) - torch.logsumexp(logits, -1)).abs().max()
            worst = max(worst, float(lse_error) / 2.0**-7)
    return worst
