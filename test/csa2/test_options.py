"""The options record: defaults, and one clear refusal for everything that cannot be honoured."""

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from csa2.errors import Csa2Error, OptionError
from csa2.formats import MERGE, even_heads, make_ladder
from csa2.options import (
    CODE_FORMATS,
    IMPLS,
    RATIOS,
    SHARED_FORMATS,
    TAIL_FORMATS,
    CacheOptions,
)
from sgl_kernels.page_layout import KeyClass, PageGeometry

MOST_TOKENS = 2**31 - 1


def refusal(**changes):
    """The message that the options with `changes` are refused with."""
    with pytest.raises(OptionError) as caught:
        CacheOptions(**changes).validate()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_defaults_are_valid():
    options = CacheOptions()
    options.validate()
    assert options.arena_bytes is None


def test_option_errors_are_caught_as_value_errors_and_as_ours():
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionError, Csa2Error)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("shared_format", SHARED_FORMATS)
@pytest.mark.parametrize("kv_format", CODE_FORMATS)
def test_everything_served_is_valid(ratio, impl, shared_format, kv_format):
    CacheOptions(ratio=ratio, impl=impl, shared_format=shared_format, kv_format=kv_format).validate()


def test_separated_keys_are_read_by_the_reference_alone():
    for impl in ("auto", "reference"):
        CacheOptions(rope="separated", impl=impl).validate()
    for impl in ("cpu", "cuda"):
        start = f"--csa2-rope separated cannot be combined with --csa2-impl {impl}"
        assert refusal(rope="separated", impl=impl).startswith(start)
    assert "choose one of rotated, separated" in refusal(rope="averaged")


def test_what_is_served():
    assert RATIOS == ("auto", "1", "2", "4", "8")
    assert {"k8v4", "tail"} <= set(SHARED_FORMATS)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, None),
        ({"ratio": "1"}, None),
        ({"ratio": "2"}, "csa2-2x"),
        ({"ratio": "4"}, "csa2-4x"),
        ({"ratio": "8"}, "csa2-8x"),
        ({"tail_format": "bf16"}, "bf16"),
        ({"tail_format": "fp8"}, "fp8"),
        ({"tail_format": "k8v4"}, "k8v4"),
    ],
)
def test_what_old_pages_become(changes, name):
    options = CacheOptions(**changes)
    options.validate()
    assert options.old_page_format == name
    # Each of them is a rung of the ladder that is made from the same options.
    geometry = PageGeometry(1, 1, 64, 64, torch.bfloat16)
    classes = (KeyClass("int4", 24), KeyClass("lloyd2", 24))
    reduced = {name: even_heads(name, (classes,), geometry)} if name in MERGE else {}
    ladder = make_ladder(geometry, options.kv_format, name, options.shared_format, reduced)
    assert ladder.names[ladder.tail] == (name or "fp4")


@pytest.mark.parametrize("ratio", [ratio for ratio in RATIOS if ratio not in ("1", "auto")])
@pytest.mark.parametrize("tail", [tail for tail in TAIL_FORMATS if tail != "ratio"])
def test_two_options_that_both_say_what_old_pages_become(tail, ratio):
    message = refusal(tail_format=tail, ratio=ratio)
    assert message.startswith(f"--csa2-tail-format {tail} and --csa2-ratio {ratio} both say")
    assert "leave one of them out" in message


@pytest.mark.parametrize(
    ("field", "option", "allowed"),
    [
        ("ratio", "--csa2-ratio", RATIOS),
        ("kv_format", "--csa2-kv-format", CODE_FORMATS),
        ("shared_format", "--csa2-shared-format", SHARED_FORMATS),
        ("tail_format", "--csa2-tail-format", TAIL_FORMATS),
        ("impl", "--csa2-impl", IMPLS),
    ],
)
def test_an_unknown_choice_lists_the_known_ones(field, option, allowed):
    message = refusal(**{field: "nonsense"})
    assert message.startswith(f"{option} 'nonsense' is unknown")
    assert message.endswith(", ".join(allowed))


@pytest.mark.parametrize(
    ("changes", "formats"),
    [
        ({}, ("csa2-2x", "csa2-4x", "csa2-8x")),
        ({"ratio": "1"}, ()),
        ({"ratio": "4"}, ("csa2-4x",)),
        ({"tail_format": "k8v4"}, ()),
    ],
)
def test_an_adaptive_ratio_needs_every_smaller_format(changes, formats):
    options = CacheOptions(**changes)
    options.validate()
    assert options.reduced_formats == formats
    assert options.is_adaptive == (not changes)


@pytest.mark.parametrize(("low", "high"), [(0.8, 0.8), (0.9, 0.8), (-0.1, 0.8), (0.5, 1.1), (math.nan, 0.8)])
def test_watermarks_that_do_not_fit_together(low, high):
    message = refusal(low_watermark=low, high_watermark=high)
    assert message.startswith(f"--csa2-low-watermark {low:g} and --csa2-high-watermark {high:g} do not fit")


@pytest.mark.parametrize("interval", [0, -1, 2**31])
def test_an_adjust_interval_out_of_range(interval):
    assert refusal(adjust_interval=interval).startswith(f"--csa2-adjust-interval {interval} is out of range")


@pytest.mark.parametrize("size", ["", "0", "-1GiB", "lots"])
def test_an_arena_size_that_is_no_size_names_the_option(size):
    assert refusal(arena_size=size).startswith(f"--csa2-arena-size {size!r} is not a size")


def test_an_arena_size_is_read_in_bytes():
    options = CacheOptions(arena_size="1.5GiB")
    options.validate()
    assert options.arena_bytes == 3 * 2**29


@pytest.mark.parametrize("value", [-1, MOST_TOKENS + 1])
@pytest.mark.parametrize("name", ["hot", "warm", "protect"])
def test_windows_out_of_range_are_refused(name, value):
    windows = {"hot_tokens": 0, "warm_tokens": MOST_TOKENS, f"{name}_tokens": value}
    message = refusal(**windows)
    assert message.startswith(f"--csa2-{name}-tokens {value} is out of range")
    assert "0 to 2147483647" in message


@given(st.integers(0, MOST_TOKENS), st.integers(0, MOST_TOKENS))
def test_the_warm_window_contains_the_hot_one(hot, warm):
    options = CacheOptions(hot_tokens=hot, warm_tokens=warm)
    if hot <= warm:
        options.validate()
        return
    with pytest.raises(OptionError, match=f"--csa2-warm-tokens {warm} is smaller than --csa2-hot-tokens {hot}"):
        options.validate()


def test_the_record_is_frozen():
    with pytest.raises(AttributeError):
        CacheOptions().ratio = "2"  # type: ignore[misc]


def test_the_record_survives_json_and_refuses_unknown_fields():
    options = CacheOptions(arena_size="2GiB", hot_tokens=64, shared_format="fp4")
    assert msgspec.json.decode(msgspec.json.encode(options), type=CacheOptions) == options
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"hot_token": 64}, CacheOptions)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"ratio": "3"}, CacheOptions)


@pytest.mark.parametrize("share", [-0.1, 1.1, 1000, math.inf])
def test_shares_of_the_guard_are_shares(share):
    assert refusal(guard=share).startswith(f"--csa2-guard {share:g} is out of range")
    assert refusal(guard=0.1, guard_min=share).startswith(f"--csa2-guard-min {share:g} is out of range")


def test_the_least_agreement_of_no_guard_is_refused():
    CacheOptions(guard=0.001, guard_min=0.5).validate()
    assert "does nothing without --csa2-guard" in refusal(guard_min=0.5)
