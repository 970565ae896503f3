"""Number formats: every code, every rounding interval, every edge."""

import math

import pytest
import torch
from codec_bounds import BITS, CODE_VALUES, E4M3_VALUES, UE5M3_VALUES
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernels.codes import (
    CODE_BITS,
    E2M1_MAX,
    E4M3_MAX,
    INT2_MAX,
    INT3_MAX,
    INT4_ASYMMETRIC_MAX,
    INT4_MAX,
    LLOYD2_BOUNDARY,
    LLOYD2_LEVELS,
    UE5M3_MAX,
    UE5M3_MIN,
    decode_codes,
    decode_e4m3,
    decode_ue5m3,
    encode_codes,
    encode_e4m3,
    encode_ue5m3,
    entry_scales,
    round_e2m1,
    round_int2,
    round_int3,
    round_int4,
    round_int4_asymmetric,
    round_lloyd2,
)

fixed = settings(derandomize=True, deadline=None, max_examples=200)

BYTES = torch.arange(256, dtype=torch.uint8)
UE5M3 = torch.from_numpy(UE5M3_VALUES)
E4M3 = torch.from_numpy(E4M3_VALUES)
ROUNDINGS = {
    "e2m1": round_e2m1,
    "int4": round_int4,
    "int4_asymmetric": round_int4_asymmetric,
    "int3": round_int3,
    "int2": round_int2,
}
TOPS = {
    "e2m1": E2M1_MAX,
    "int4": INT4_MAX,
    "int4_asymmetric": INT4_ASYMMETRIC_MAX,
    "int3": INT3_MAX,
    "int2": INT2_MAX,
}


def values_of(kind: str) -> torch.Tensor:
    """(codes,) fp32 value of every code."""
    return decode_codes(torch.arange(1 << CODE_BITS[kind]).to(torch.uint8), kind)


def every_half() -> torch.Tensor:
    """All finite fp16 and all finite bf16 values, as fp32: dense near zero, and far beyond every format."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = torch.cat((patterns.view(torch.float16).float(), patterns.view(torch.bfloat16).float()))
    return values[values.isfinite()]


def around_midpoints(table: torch.Tensor) -> torch.Tensor:
    """Every value of a sorted float64 `table`, every midpoint of neighbours, and the fp32 numbers next to each."""
    middle = (table[1:] + table[:-1]) / 2
    points = torch.cat((table, middle)).float()
    up, down = torch.full_like(points, math.inf), torch.full_like(points, -math.inf)
    return torch.cat((points, points.nextafter(up), points.nextafter(down)))


def nearest_distance(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (x.double()[:, None] - table[None, :]).abs().amin(-1)


def test_every_scale_byte_is_what_the_formula_says():
    assert torch.equal(decode_ue5m3(BYTES).double(), UE5M3)
    assert (UE5M3[0], UE5M3[255]) == (UE5M3_MIN, UE5M3_MAX)


@pytest.mark.parametrize("round_up", [False, True])
def test_every_scale_byte_round_trips(round_up):
    assert torch.equal(encode_ue5m3(decode_ue5m3(BYTES), round_up=round_up), BYTES)


def test_scales_are_monotone():
    assert bool((decode_ue5m3(BYTES).diff() > 0).all())
    points = around_midpoints(UE5M3).sort().values
    assert bool((encode_ue5m3(points).int().diff() >= 0).all())
    assert bool((encode_ue5m3(points, round_up=True).int().diff() >= 0).all())


def test_scales_round_to_nearest_in_every_interval():
    points = around_midpoints(UE5M3).clamp(UE5M3_MIN, UE5M3_MAX)
    error = (decode_ue5m3(encode_ue5m3(points)).double() - points.double()).abs()
    assert torch.equal(error, nearest_distance(points, UE5M3))


def test_scales_round_up_in_every_interval():
    points = around_midpoints(UE5M3).clamp(UE5M3_MIN, UE5M3_MAX)
    got = decode_ue5m3(encode_ue5m3(points, round_up=True)).double()
    want = UE5M3[torch.searchsorted(UE5M3, points.double())]
    assert torch.equal(got, want)


@fixed
@given(st.floats(UE5M3_MIN, UE5M3_MAX, width=32))
def test_the_stored_scale_is_within_the_bounds_that_the_codec_relies_on(scale):
    nearest = float(decode_ue5m3(encode_ue5m3(torch.tensor([scale]))))
    above = float(decode_ue5m3(encode_ue5m3(torch.tensor([scale]), round_up=True)))
    assert scale * 16 / 17 <= nearest <= scale * 18 / 17
    assert scale <= above < scale * 9 / 8


@pytest.mark.parametrize("round_up", [False, True])
def test_scales_out_of_range_saturate(round_up):
    small = torch.tensor([0.0, -0.0, 1e-45, 2.0**-126, 2.0**-16, UE5M3_MIN])
    large = torch.tensor([UE5M3_MAX, 1.2e5 + 1e4, 3e38, math.inf])
    assert encode_ue5m3(small, round_up=round_up).tolist() == [0] * len(small)
    assert encode_ue5m3(large, round_up=round_up).tolist() == [255] * len(large)


def test_scales_of_a_strided_tensor():
    wide = torch.linspace(0.01, 9, 24).view(4, 6)
    assert torch.equal(encode_ue5m3(wide.t()), encode_ue5m3(wide).t())
    assert torch.equal(encode_ue5m3(wide[:, ::2]), encode_ue5m3(wide)[:, ::2])


def test_every_e4m3_byte_is_what_the_specification_says():
    assert torch.equal(decode_e4m3(BYTES).double().nan_to_num(nan=-1e9), E4M3.nan_to_num(nan=-1e9))
    assert float(E4M3[~E4M3.isnan()].max()) == E4M3_MAX


def test_every_e4m3_byte_round_trips():
    real = BYTES[~E4M3.isnan()]
    assert torch.equal(encode_e4m3(decode_e4m3(real)), real)
    assert real.numel() == 254


def test_e4m3_rounds_to_nearest_and_ties_to_even():
    table = E4M3[~E4M3.isnan()].unique()
    points = torch.cat((around_midpoints(table), every_half())).clamp(-E4M3_MAX, E4M3_MAX)
    codes = encode_e4m3(points)
    error = (decode_e4m3(codes).double() - points.double()).abs()
    assert torch.equal(error, nearest_distance(points, table))
    middle = ((table[1:] + table[:-1]) / 2).float()
    assert bool((encode_e4m3(middle) & 1 == 0).all())


def test_e4m3_saturates_and_keeps_nan():
    assert decode_e4m3(encode_e4m3(torch.tensor([449.0, 1e30, math.inf]))).tolist() == [E4M3_MAX] * 3
    assert decode_e4m3(encode_e4m3(torch.tensor([-464.0, -1e30, -math.inf]))).tolist() == [-E4M3_MAX] * 3
    assert bool(decode_e4m3(encode_e4m3(torch.tensor([math.nan]))).isnan().all())
    assert decode_e4m3(encode_e4m3(torch.tensor([0.0, 1e-45, 2.0**-10, -1e-45]))).tolist() == [0, 0, 0, 0]
    assert float(decode_e4m3(encode_e4m3(torch.tensor([2.0**-9])))) == 2.0**-9


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_every_code_of_few_bits_round_trips(kind):
    values = values_of(kind)
    assert values.double().tolist() == CODE_VALUES[kind].tolist()
    codes = torch.arange(1 << CODE_BITS[kind], dtype=torch.uint8)
    got = ROUNDINGS[kind](values)
    if kind == "e2m1":
        assert float(values[8]) == 0
        codes[8] = 0  # minus zero comes back as zero
    if kind in ("int4", "int3"):
        codes[0] = 1  # -8 and -4 are never written
    assert torch.equal(got, codes)


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_codes_of_few_bits_round_to_nearest(kind):
    table = torch.from_numpy(CODE_VALUES[kind]).unique()
    table = table[table >= -TOPS[kind]]
    points = torch.cat((around_midpoints(table), every_half()))
    codes = ROUNDINGS[kind](points)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) < 1 << CODE_BITS[kind]
    got = values_of(kind)[codes.int()].double()
    # Three of them add a constant in fp32, to sums below 16: off by 2^-21 at most, or 2^-22 in the half steps of E2M1. So a
    # value that close to a tie may take the other neighbour, which is farther by twice that.
    slack = 0.0 if kind in ("int4", "int3") else 2.0**-20
    error = (got - points.double()).abs()
    assert bool((error <= nearest_distance(points, table) + slack).all())


def test_e2m1_ties_go_away_from_zero():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert values_of("e2m1")[round_e2m1(ties).int()].tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert values_of("e2m1")[round_e2m1(-ties).int()].tolist() == [-0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_codes_of_few_bits_saturate(kind):
    far = torch.tensor([TOPS[kind] + 0.1, 100.0, 3e38, math.inf])
    assert values_of(kind)[ROUNDINGS[kind](far).int()].tolist() == [TOPS[kind]] * 4
    assert values_of(kind)[ROUNDINGS[kind](-far).int()].tolist() == [-TOPS[kind]] * 4


@pytest.mark.parametrize("kind", ["e2m1", "int4", "int3"])
def test_zero_and_denormals_are_exact_zero(kind):
    tiny = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 2.0**-126, -(2.0**-126)])
    assert bool((values_of(kind)[ROUNDINGS[kind](tiny).int()] == 0).all())


@pytest.mark.parametrize("rounding", [round_int4, round_int3])
def test_the_unused_integer_code_is_never_written(rounding):
    assert int(rounding(every_half()).min()) == 1


def test_every_lloyd_code_round_trips():
    assert values_of("lloyd2").tolist() == CODE_VALUES["lloyd2"].astype("float32").tolist()
    assert round_lloyd2(values_of("lloyd2")).tolist() == [0, 1, 2, 3]


def test_lloyd_codes_round_to_nearest_and_saturate():
    table = torch.tensor(LLOYD2_LEVELS, dtype=torch.float64)
    points = torch.cat((around_midpoints(table), every_half()))
    codes = round_lloyd2(points)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) == 3
    error = (values_of("lloyd2")[codes.int()].double() - points.double()).abs()
    # The border is the one of Max with four digits and not the middle of the levels, 0.9814: off by 0.0002.
    assert bool((error <= nearest_distance(points, table) + 2 * 2.01e-4).all())
    assert round_lloyd2(torch.tensor([math.inf, -math.inf, 3e38, -3e38])).tolist() == [3, 0, 3, 0]


def test_lloyd_levels_are_the_best_for_a_normal_distribution():
    """Max's conditions: a border is the middle of its levels, a level the mean of what is rounded to it."""
    inner, outer = LLOYD2_LEVELS[2:]
    assert pytest.approx(LLOYD2_BOUNDARY, abs=3e-4) == (inner + outer) / 2

    def density(x):
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    beyond = math.erfc(LLOYD2_BOUNDARY / math.sqrt(2)) / 2
    assert inner == pytest.approx((density(0) - density(LLOYD2_BOUNDARY)) / (0.5 - beyond), abs=1e-4)
    assert outer == pytest.approx(density(LLOYD2_BOUNDARY) / beyond, abs=1e-3)


@fixed
@given(
    st.sampled_from(sorted(CODE_BITS)), st.lists(st.integers(1, 3), max_size=3), st.integers(1, 70), st.integers(0, 2**31)
)
def test_codes_of_any_shape_decode_to_their_values(kind, shape, last, seed):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << CODE_BITS[kind], (*shape, last), generator=random).to(torch.uint8)
    if kind == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0
    values = decode_codes(codes, kind)
    assert values.dtype == torch.float32
    assert values.shape == codes.shape
    assert torch.equal(values, torch.from_numpy(CODE_VALUES[kind]).float()[codes.int()])
    again = encode_codes(values, kind)
    lowest = {"int4": -7.0, "int3": -3.0}.get(kind)
    assert torch.equal(decode_codes(again, kind), values if lowest is None else values.clamp(min=lowest))


def test_every_kind_has_a_table_and_its_bits():
    assert BITS == CODE_BITS


@fixed
@given(
    st.sampled_from(["e4m3", "e2m1", "int4", "int3", "int2", "lloyd2"]),
    st.integers(1, 40),
    st.integers(0, 2**31),
    st.floats(1e-6, 1e6),
)
def test_the_scale_of_an_entry(kind, channels, seed, size):
    """The largest value becomes the largest code; the levels of two bits are in units of the root mean square."""
    x = torch.randn(3, channels, generator=torch.Generator().manual_seed(seed)) * size
    scale = entry_scales(x, kind)
    assert scale.shape == (3,)
    wide = x.double()
    top = {"e4m3": 448, "e2m1": 6, "int4": 7, "int3": 3, "int2": 1.5}.get(kind)
    want = wide.square().mean(-1).sqrt() if top is None else wide.abs().amax(-1) / top
    assert torch.allclose(scale.double(), want, rtol=(channels + 4) * 2.0**-24, atol=0)
    assert entry_scales(torch.zeros(2, 5), kind).tolist() == [0, 0]


@fixed
@given(st.sampled_from(["int4", "int3", "int2"]), st.integers(1, 40), st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_a_row_of_integers_is_off_by_half_a_step(kind, channels, seed, size):
    """Scale, rounding and decoding together, against float64: even steps of the largest magnitude over the largest code."""
    x = torch.randn(3, channels, generator=torch.Generator().manual_seed(seed)) * size
    scale = decode_ue5m3(encode_ue5m3(entry_scales(x, kind))).double().unsqueeze(-1)
    back = decode_codes(encode_codes(x / scale.float(), kind), kind).double() * scale
    # The stored scale is at least 16/17 of the wanted one, so the largest is clipped by no more than top / 16 of a step:
    # 7/16 at most, less than half. The quotient and its sum with an offset are rounded in fp32, below 16: 2^-20 steps.
    assert bool(((back - x.double()).abs() <= (0.5 + 2.0**-20) * scale).all())
