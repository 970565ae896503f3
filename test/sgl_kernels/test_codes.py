"""Number formats: every code, every rounding interval, every edge."""

import math

import pytest
import torch
from codec_bounds import E4M3_VALUES, NIBBLE_VALUES, UE5M3_VALUES
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernels.codes import (
    E2M1_MAX,
    E4M3_MAX,
    INT4_ASYMMETRIC_MAX,
    INT4_MAX,
    UE5M3_MAX,
    UE5M3_MIN,
    decode_e4m3,
    decode_ue5m3,
    encode_e4m3,
    encode_ue5m3,
    nibble_quads,
    nibble_values,
    pack_nibbles,
    round_e2m1,
    round_int4,
    round_int4_asymmetric,
    unpack_nibbles,
)

fixed = settings(derandomize=True, deadline=None, max_examples=200)

BYTES = torch.arange(256, dtype=torch.uint8)
UE5M3 = torch.from_numpy(UE5M3_VALUES)
E4M3 = torch.from_numpy(E4M3_VALUES)
ROUNDINGS = {"e2m1": round_e2m1, "int4": round_int4, "int4_asymmetric": round_int4_asymmetric}
TOPS = {"e2m1": E2M1_MAX, "int4": INT4_MAX, "int4_asymmetric": INT4_ASYMMETRIC_MAX}


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
def test_every_4_bit_code_round_trips(kind):
    values = nibble_values(kind)
    assert values.double().tolist() == NIBBLE_VALUES[kind].tolist()
    codes = torch.arange(16, dtype=torch.uint8)
    got = ROUNDINGS[kind](values)
    if kind == "e2m1":
        assert float(values[8]) == 0
        codes[8] = 0  # minus zero comes back as zero
    if kind == "int4":
        codes[0] = 1  # -8 is never written
    assert torch.equal(got, codes)


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_4_bit_codes_round_to_nearest(kind):
    table = torch.from_numpy(NIBBLE_VALUES[kind]).unique()
    table = table[table >= -TOPS[kind]]
    points = torch.cat((around_midpoints(table), every_half()))
    codes = ROUNDINGS[kind](points)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) <= 15
    got = nibble_values(kind)[codes.int()].double()
    # Two of them add a constant in fp32, to sums below 16: off by 2^-21 at most, or 2^-22 in the half steps of E2M1. So a
    # value that close to a tie may take the other neighbour, which is farther by twice that.
    slack = 0.0 if kind == "int4" else 2.0**-20
    error = (got - points.double()).abs()
    assert bool((error <= nearest_distance(points, table) + slack).all())


def test_e2m1_ties_go_away_from_zero():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert nibble_values("e2m1")[round_e2m1(ties).int()].tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert nibble_values("e2m1")[round_e2m1(-ties).int()].tolist() == [-0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_4_bit_codes_saturate(kind):
    far = torch.tensor([TOPS[kind] + 0.1, 100.0, 3e38, math.inf])
    assert nibble_values(kind)[ROUNDINGS[kind](far).int()].tolist() == [TOPS[kind]] * 4
    assert nibble_values(kind)[ROUNDINGS[kind](-far).int()].tolist() == [-TOPS[kind]] * 4


@pytest.mark.parametrize("kind", ["e2m1", "int4"])
def test_zero_and_denormals_are_exact_zero(kind):
    tiny = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 2.0**-126, -(2.0**-126)])
    assert bool((nibble_values(kind)[ROUNDINGS[kind](tiny).int()] == 0).all())


def test_the_unused_int4_code_is_never_written():
    assert int(round_int4(every_half()).min()) == 1


@fixed
@given(st.lists(st.integers(1, 3), max_size=3), st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([*ROUNDINGS]))
def test_packed_nibbles_unpack_to_their_values(shape, half, seed, kind):
    codes = torch.randint(0, 16, (*shape, 4 * half), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (*shape, 2 * half)
    assert torch.equal(packed & 15, codes[..., ::2])
    assert torch.equal(packed >> 4, codes[..., 1::2])
    unpacked = unpack_nibbles(packed, nibble_quads(kind))
    assert unpacked.dtype == torch.float32
    assert torch.equal(unpacked, nibble_values(kind)[codes.int()])


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_every_byte_unpacks_to_low_then_high_nibble(kind):
    got = unpack_nibbles(BYTES.view(256, 1), nibble_quads(kind))
    table = torch.from_numpy(NIBBLE_VALUES[kind])
    want = torch.stack((table[(BYTES & 15).int()], table[(BYTES >> 4).int()]), -1)
    assert torch.equal(got.double(), want)
