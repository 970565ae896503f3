"""Byte counts as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csa2.errors import OptionError
from csa2.units import format_bytes, parse_bytes

FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@given(st.integers(1, 2**20), st.sampled_from(sorted(FACTORS)))
def test_every_suffix_multiplies(number, suffix):
    expected = number * FACTORS[suffix]
    for text in (f"{number}{suffix}", f" {number} {suffix.lower()} ", f"{number}{suffix.upper()}"):
        assert parse_bytes(text) == expected


@given(st.integers(1, 2**53))
def test_plain_numbers_are_bytes(number):
    assert parse_bytes(number) == parse_bytes(str(number)) == number


@pytest.mark.parametrize(
    ("text", "expected"), [("188MB", 188_000_000), ("180MiB", 188_743_680), ("1.5k", 1536), ("0.5GiB", 2**29)]
)
def test_examples(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", " ", "0", "0GiB", "-1", "-4GiB", "4 XB", "4GiBs", "GiB", "1e9", "nan", "inf", "1,5GB", "0x10", "0.1"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(OptionError) as caught:
        parse_bytes(text, "--csa2-arena-size")
    message = str(caught.value)
    assert message.startswith(f"--csa2-arena-size {text!r} is not a size")
    assert "4GiB" in message
    assert "\n" not in message


@given(st.text(max_size=12))
def test_any_text_is_a_positive_size_or_refused(text):
    try:
        assert parse_bytes(text) > 0
    except OptionError:
        return


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0 B"), (512, "512 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (-2048, "-2 KiB")],
)
def test_format_examples(number, expected):
    assert format_bytes(number) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (999.4 * 2**20, "999 MiB"),
        (999.6 * 2**20, "1000 MiB"),
        (1023 * 2**10, "1023 KiB"),
        (1023, "1023 B"),
        (1500 * 2**40, "1500 TiB"),
        (1234567 * 2**40, "1234567 TiB"),
    ],
)
def test_no_exponent_is_printed(number, expected):
    assert format_bytes(number) == expected


@given(st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]), st.integers(1, 1023))
def test_formatted_sizes_read_back(unit, number):
    text = format_bytes(number * FACTORS["" if unit == "B" else unit])
    assert text == f"{number} {unit}"
    assert parse_bytes(text) == number * FACTORS["" if unit == "B" else unit]
