"""The ladder of page formats."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2.errors import PageFormatError
from csa2.formats import FP8, PLAIN, SMALL, make_ladder, packing
from csa2.options import CODE_FORMATS, SHARED_FORMATS
from sgl_kernels.page_layout import PageGeometry

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
fixed = settings(derandomize=True, deadline=None, max_examples=150)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_format", CODE_FORMATS)
def test_names_follow_the_dtype_and_the_codes(kv_format, dtype):
    ladder = make_ladder(PageGeometry(2, 1, 64, 64, dtype), kv_format)
    assert ladder.names == (DTYPES[dtype], "fp8", kv_format)
    assert [layout.is_plain for layout in ladder.layouts] == [True, False, False]
    assert [ladder.index(name) for name in ladder.names] == [PLAIN, FP8, SMALL]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_format", CODE_FORMATS)
@pytest.mark.parametrize(("name", "index"), [("bf16", PLAIN), ("fp8", FP8), ("fp4", SMALL)])
def test_every_shared_format_option_names_a_rung(name, index, kv_format, dtype):
    assert name in SHARED_FORMATS
    assert make_ladder(PageGeometry(2, 1, 64, 64, dtype), kv_format).index(name) == index


@fixed
@given(
    st.integers(16, 128).map(lambda n: 2 * n),
    st.integers(1, 16),
    st.integers(1, 4),
    st.sampled_from(list(DTYPES)),
    st.sampled_from(CODE_FORMATS),
    st.booleans(),
)
def test_every_rung_is_smaller_than_the_one_before(dim, heads, layers, dtype, kv_format, identity):
    g = PageGeometry(layers, heads, dim, 64, dtype, (0,) if identity else ())
    ladder = make_ladder(g, kv_format)
    plain, fp8, small = ladder.page_bytes
    assert small < fp8 < plain
    assert plain == layers * 2 * heads * 64 * dim * dtype.itemsize
    assert ladder.geometry is g
    # Words of eight bytes are what the arena moves.
    assert all(size % 8 == 0 for size in ladder.page_bytes)
    for layout in ladder.layouts:
        codes = layers * 2 * heads * 64 * layout.code_bytes
        assert layout.page_bytes == codes + layout.metadata_bytes
        assert layout.bits_per_value == pytest.approx(8 * layout.page_bytes / (layers * 2 * heads * 64 * dim))


def test_the_ladder_of_the_demo_model_stores_what_the_documents_say():
    plain, fp8, small = make_ladder(PageGeometry(30, 3, 64, 64, torch.bfloat16), "fp4").page_bytes
    assert round(fp8 / plain, 3) == 0.516
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


@fixed
@given(st.integers(1, 10**6), st.lists(st.integers(1, 10**5), min_size=1, max_size=4))
def test_packing_is_the_most_that_fits(slab, sizes):
    for n, size in zip(packing(slab, sizes), sizes, strict=True):
        assert n * size <= slab < (n + 1) * size
