"""Triton kernels behind a page store, in the interpreter: against the torch reference, and on a device of their own."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from interpreted import interpreted
from other_device import DEVICE, DeviceTensor, MixedDevicesError, PretendedDevice
from recorded_graph import RecordedGraph, poison
from torch import Tensor

from csa2.attention import make_attention
from csa2.capacity import plan_arena
from csa2.codec.assembly import codec_and_ladder
from csa2.codec.channels import make_rotation
from csa2.cuda_attention import CudaAttention
from csa2.errors import OptionError
from csa2.formats import PLAIN
from csa2.options import CacheOptions
from csa2.sequences import Sequences
from csa2.store import PageStore
from sgl_kernels.page_layout import PageGeometry
from sgl_kernels.triton.plan import PART_PAGES, PROGRAMS_PER_MULTIPROCESSOR, split_count

PAGE = 32
GEOMETRY = PageGeometry(2, 1, 32, PAGE, torch.bfloat16, (1,))
OPTIONS = CacheOptions(ratio="8", hot_tokens=PAGE, warm_tokens=2 * PAGE)
CODEC, LADDER = codec_and_ladder(OPTIONS, GEOMETRY, make_rotation(32, neox=True), None)
HEADS = 2
BATCH = 2
CHUNKS = (5 * PAGE + 3, 1, PAGE - 3, 1)
"""New tokens of each forward pass: a page gets full in the last but one."""
SCALE = 32**-0.5


@pytest.fixture(scope="module", autouse=True)
def kernels_are_interpreted() -> Iterator[None]:
    with interpreted():
        yield


def served(impl: str, device: torch.device | str = "cpu") -> tuple[list[Tensor], PageStore]:
    """Attention of each forward pass and layer, (layers, tokens, H, D) each, and the store at the end."""
    sizes = LADDER.page_bytes
    store = PageStore(LADDER, plan_arena(20 * sizes[PLAIN], sizes, LADDER.guard), 40, CODEC, device)
    sequences = Sequences(store, make_attention(store, impl, HEADS), OPTIONS, BATCH)
    random = torch.Generator().manual_seed(7)
    outs = []
    for new in CHUNKS:
        sequences.begin(new)
        layers = []
        for layer in range(GEOMETRY.num_layers):
            joint = torch.randn(BATCH * new, HEADS + 2, GEOMETRY.head_dim, generator=random).to(GEOMETRY.dtype).to(device)
            query, keys, values = joint[:, :HEADS].contiguous(), joint[:, HEADS : HEADS + 1], joint[:, HEADS + 1 :]
            sequences.write(keys, values, layer)
            layers.append(sequences.attend(query, keys, values, layer, SCALE).cpu())
        outs.append(torch.stack(layers))
        sequences.end()
        store.check_integrity()
    return outs, store


@pytest.fixture(scope="module")
def on_the_host() -> tuple[list[Tensor], PageStore]:
    return served("cuda")


def test_pages_of_a_store_are_read_as_by_the_reference(on_the_host: tuple[list[Tensor], PageStore]) -> None:
    """Both compute in fp32 and round to bf16, in another order of sums: at most one step of bf16 (2^-8) apart."""
    (expected, reference), (found, store) = served("reference"), on_the_host
    assert store.arena.counts == reference.arena.counts
    assert {"bf16", "fp4", "csa2-8x"} <= {name for name, n in zip(LADDER.names, store.arena.counts, strict=True) if n}
    for want, got in zip(expected, found, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-8 * float(want.abs().max()))


def test_nothing_meets_a_tensor_of_another_device(on_the_host: tuple[list[Tensor], PageStore]) -> None:
    """Page table, facts and plans on the host, bytes and queries on the device: the same results, bit for bit."""
    expected, _ = on_the_host
    with PretendedDevice():
        found, store = served("cuda", DEVICE)
        assert isinstance(store.arena.buffer, DeviceTensor)
        assert not isinstance(store.arena.formats, DeviceTensor)
    assert all(torch.equal(want, got) for want, got in zip(expected, found, strict=True))


def test_the_pretended_device_is_strict() -> None:
    with PretendedDevice():
        store = PageStore(LADDER, plan_arena(20 * LADDER.page_bytes[0], LADDER.page_bytes, LADDER.guard), 40, CODEC, DEVICE)
        with pytest.raises(MixedDevicesError):
            store.map_pages(torch.tensor([1]).to(DEVICE))


def test_a_recorded_graph_reads_what_its_plan_holds_at_replay(on_the_host: tuple[list[Tensor], PageStore]) -> None:
    """Recorded with nothing to read, replayed over pages of three formats, then with a request less, then with more pages:
    what the same kernels compute without a graph, bit for bit but for how pages are split over programs."""
    _, store = on_the_host
    attention = CudaAttention(store, HEADS)
    mapped = torch.nonzero(store.arena.formats[1:] >= 0).squeeze(-1) + 1
    assert mapped.numel() == 14
    query = torch.zeros(BATCH, HEADS, GEOMETRY.head_dim, dtype=GEOMETRY.dtype)
    plan = attention.capture_plan(BATCH, depth=7)
    graph = RecordedGraph()
    with graph.record():
        out = attention.attend(query, query[:, :1], query[:, :1], plan, 0, SCALE)
    for step, (depth, lengths) in enumerate([(4, (100, 128)), (2, (33, 0)), (7, (7 * PAGE, 5 * PAGE + 1))]):
        query.copy_(torch.randn(query.shape, generator=torch.Generator().manual_seed(step)))
        pages = mapped.view(BATCH, 7)[:, :depth]
        poison(out)
        attention.refill(plan, pages, torch.tensor(lengths))
        graph.replay()
        eager = attention.plan(pages, torch.tensor(lengths), torch.ones(BATCH, dtype=torch.int64))
        expected = attention.attend(query, query[:, :1], query[:, :1], eager, 0, SCALE)
        real = torch.tensor(lengths) > 0
        assert torch.equal(out[real], expected[real])
        assert bool(expected[real].any())


def test_a_plan_in_a_graph_refuses_pages_that_are_gone(on_the_host: tuple[list[Tensor], PageStore]) -> None:
    store = on_the_host[1]
    attention = CudaAttention(store, HEADS)
    free = int(torch.nonzero(store.arena.formats < 0)[0])
    with pytest.raises(ValueError, match=f"page {free} is read but not mapped"):
        attention.refill(attention.capture_plan(1, 1), torch.tensor([[free]]), torch.tensor([1]))


def test_an_arena_beyond_what_places_can_say_is_refused(on_the_host: tuple[list[Tensor], PageStore]) -> None:
    """Places are int32 in units of 64 bytes; beyond, they would wrap and other pages be read."""
    buffer = torch.empty(1, dtype=torch.uint8, device="meta").expand(2**37 + 1)
    store = SimpleNamespace(arena=SimpleNamespace(buffer=buffer), ladder=LADDER)
    with pytest.raises(OptionError, match=r"less than 128 GiB, and this one has 128 GiB: give a smaller --csa2-arena-size"):
        CudaAttention(store, HEADS)


@pytest.mark.parametrize(
    ("programs", "pages", "multiprocessors", "parts"),
    [
        (1, 1, 132, 1),
        (8, 10_000, 132, -(-132 * PROGRAMS_PER_MULTIPROCESSOR // 8)),
        (8, 5 * PART_PAGES, 132, 5),
        (8, 5 * PART_PAGES + 1, 132, 6),
        (4096, 512, 132, 1),
        (0, 0, 132, 1),
    ],
)
def test_parts_fill_the_device_and_are_not_too_short(programs: int, pages: int, multiprocessors: int, parts: int) -> None:
    assert split_count(programs, pages, multiprocessors) == parts
