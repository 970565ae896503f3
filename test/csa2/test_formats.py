"""The ladder of page formats."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2.errors import PageFormatError
from csa2.formats import FP8, MERGE, PLAIN, FormatLadder, even_heads, make_ladder, packing
from csa2.options import CODE_FORMATS, SHARED_FORMATS, TAIL_FORMATS
from sgl_kernels.page_layout import KeyClass, PageGeometry

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CLASSES = (KeyClass("int4", 12), KeyClass("lloyd2", 12))
TAILS = (None, "bf16", "fp8", "k8v4", *MERGE)
SHARED = (None, "bf16", "fp8", "k8v4", "fp4")


def ladder_of(tail: str | None, shared: str | None = "fp8", kv_format: str = "fp4", size: int = 64) -> FormatLadder:
    geometry = PageGeometry(2, 1, 64, size, torch.bfloat16)
    reduced = {tail: even_heads(tail, (CLASSES,) * 2, geometry)} if tail in MERGE else {}
    return make_ladder(geometry, kv_format, tail, shared, reduced)


fixed = settings(derandomize=True, deadline=None, max_examples=150)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_format", CODE_FORMATS)
def test_names_follow_the_dtype_and_the_codes(kv_format, dtype):
    ladder = make_ladder(PageGeometry(2, 1, 64, 64, dtype), kv_format)
    assert ladder.names == (DTYPES[dtype], "fp8", kv_format)
    assert [layout.is_plain for layout in ladder.layouts] == [True, False, False]
    assert [ladder.index(name) for name in ladder.names] == [PLAIN, FP8, ladder.warm]
    assert (ladder.warm, ladder.tail, ladder.end, ladder.guard) == (2, 2, 2, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_format", CODE_FORMATS)
@pytest.mark.parametrize("shared", SHARED_FORMATS)
def test_every_shared_format_option_names_a_rung(shared, kv_format, dtype):
    ladder = make_ladder(PageGeometry(2, 1, 64, 64, dtype), kv_format, shared=None if shared == "tail" else shared)
    names = {"bf16": DTYPES[dtype], "fp4": kv_format, "tail": None}
    want = names.get(shared, shared)
    assert (None if ladder.shared is None else ladder.names[ladder.shared]) == want
    assert ("k8v4" in ladder.names) == (shared == "k8v4")


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("tail", TAILS)
def test_a_ladder_has_the_formats_it_uses_and_no_other(tail, shared):
    ladder = ladder_of(tail, shared)
    k8v4, merged = ("k8v4",) * ("k8v4" in (tail, shared)), (tail,) * (tail in MERGE)
    assert ladder.names == ("bf16", "fp8", *k8v4, "fp4", *merged)
    assert list(ladder.page_bytes) == sorted(ladder.page_bytes, reverse=True)
    assert len(set(ladder.page_bytes)) == len(ladder.page_bytes)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("tail", TAILS)
def test_roles_of_the_rungs(tail, shared):
    ladder = ladder_of(tail, shared)
    assert ladder.names[ladder.warm] == "fp4"
    assert ladder.names[ladder.tail] == (tail or "fp4")
    assert ladder.end == len(ladder.names) - 1
    assert ladder.shared == (None if shared is None else ladder.names.index(shared))
    # The first page of a sequence goes as far as all others, but not where entries are merged.
    assert ladder.names[ladder.guard] == ("fp4" if tail in ("csa2-4x", "csa2-8x") else ladder.names[-1])
    assert ladder.warm <= ladder.guard <= ladder.end
    assert not ladder.layouts[ladder.guard].is_merged


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize(("name", "merge"), MERGE.items())
def test_merged_formats_have_fewer_entries(name, merge, size):
    layout = ladder_of(name, size=size).layouts[-1]
    assert layout.name == name
    assert layout.entries == size // merge
    assert layout.is_merged == (merge > 1)
    assert all(head.key_classes == CLASSES and head.value_kind == "lloyd2" for head in layout.heads)


def test_heads_without_classes_keep_all_channels():
    geometry = PageGeometry(2, 1, 64, 64, torch.bfloat16, (1,))
    layout = make_ladder(
        geometry, "fp4", "csa2-2x", reduced={"csa2-2x": even_heads("csa2-2x", (CLASSES, ()), geometry)}
    ).layouts[-1]
    assert [head.basis for head in layout.heads] == ["reduced", "identity"]
    assert [head.key_channels for head in layout.heads] == [24, 64]
    assert [head.channel_scales for head in layout.heads] == [False, True]


@fixed
@given(
    st.integers(16, 128).map(lambda n: 2 * n),
    st.integers(1, 16),
    st.integers(1, 4),
    st.sampled_from(list(DTYPES)),
    st.sampled_from(CODE_FORMATS),
    st.booleans(),
    st.sampled_from([name for name in TAIL_FORMATS if name != "ratio"]),
)
def test_every_rung_is_smaller_than_the_one_before(dim, heads, layers, dtype, kv_format, identity, tail):
    g = PageGeometry(layers, heads, dim, 64, dtype, (0,) if identity else ())
    ladder = make_ladder(g, kv_format, tail)
    assert list(ladder.page_bytes) == sorted(set(ladder.page_bytes), reverse=True)
    assert ladder.page_bytes[0] == layers * 2 * heads * 64 * dim * dtype.itemsize
    assert ladder.geometry is g
    # Codes and pieces start on a cache line, and words of eight bytes are what the arena moves.
    assert all(size % 64 == 0 for size in ladder.page_bytes)
    bits = {"fp8": 16, "k8v4": 12, kv_format: 8}
    for layout in ladder.layouts[1:]:
        codes = layers * heads * 64 * dim * bits[layout.name] // 8
        assert layout.page_bytes == codes + layout.metadata_bytes


def test_the_ladder_of_the_demo_model_stores_what_the_documents_say():
    g = PageGeometry(30, 3, 64, 64, torch.bfloat16)
    plain, fp8, k8v4, small = make_ladder(g, "fp4", "k8v4").page_bytes
    assert round(fp8 / plain, 3) == 0.516
    assert round(k8v4 / plain, 3) == 0.391
    assert round(small / plain, 3) == 0.266


@pytest.mark.parametrize("dim", [0, 2, 30, 33, 63, 65, 255, 258, 512])
def test_head_dims_that_the_codec_cannot_store_are_refused(dim):
    with pytest.raises(PageFormatError) as caught:
        make_ladder(PageGeometry(1, 1, dim, 64, torch.bfloat16), "fp4")
    assert str(caught.value) == f"head_dim {dim} cannot be compressed: it must be an even number from 32 to 256"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float64, torch.int8], ids=str)
def test_dtypes_that_are_no_model_dtype_are_refused(dtype):
    with pytest.raises(PageFormatError) as caught:
        make_ladder(PageGeometry(1, 1, 64, 64, dtype), "fp4")
    assert str(dtype) in str(caught.value)
    assert str(caught.value).endswith("must be one of bf16, fp16, fp32")


def test_unknown_codes_are_refused():
    with pytest.raises(PageFormatError, match="kv format 'nf4' does not exist: choose one of fp4, int4"):
        make_ladder(PageGeometry(1, 1, 64, 64, torch.bfloat16), "nf4")


def test_unknown_names_are_refused():
    ladder = make_ladder(PageGeometry(1, 1, 64, 64, torch.float16), "int4")
    with pytest.raises(PageFormatError, match="page format 'k8v4' does not exist: choose one of fp16, fp8, int4"):
        ladder.index("k8v4")
    with pytest.raises(PageFormatError, match="page format 'csa2-3x' does not exist"):
        make_ladder(PageGeometry(1, 1, 64, 64, torch.float16), "int4", "csa2-3x")


@fixed
@given(st.integers(1, 10**6), st.lists(st.integers(1, 10**5), min_size=1, max_size=4))
def test_packing_is_the_most_that_fits(slab, sizes):
    for n, size in zip(packing(slab, sizes), sizes, strict=True):
        assert n * size <= slab < (n + 1) * size
