"""The options of the compressed cache: one frozen record, shared by every layer above."""

from typing import Literal, get_args

import msgspec

from csa2.errors import OptionError
from csa2.units import parse_bytes

PAGE_SIZE = 64
"""Tokens of a page unless SGLang's `--page-size` names another of `PAGE_SIZES`."""
PAGE_SIZES = (32, 64, 128)

Ratio = Literal["auto", "1", "2", "4", "8"]
CodeFormat = Literal["fp4", "int4"]
SharedFormat = Literal["bf16", "fp8", "k8v4", "fp4", "tail"]
TailFormat = Literal["ratio", "bf16", "fp8", "k8v4"]
KeyScale = Literal["entry", "channel"]
RopeVariant = Literal["rotated", "separated"]
Impl = Literal["auto", "reference", "cpu", "cuda"]
PackWeights = Literal["all", "layers", "none"]

RATIOS: tuple[str, ...] = get_args(Ratio)
CODE_FORMATS: tuple[str, ...] = get_args(CodeFormat)
SHARED_FORMATS: tuple[str, ...] = get_args(SharedFormat)
TAIL_FORMATS: tuple[str, ...] = get_args(TailFormat)
KEY_SCALES: tuple[str, ...] = get_args(KeyScale)
ROPE_VARIANTS: tuple[str, ...] = get_args(RopeVariant)
IMPLS: tuple[str, ...] = get_args(Impl)
PACK_WEIGHTS: tuple[str, ...] = get_args(PackWeights)

GUARD_MIN = 0.9


class CacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a user can set. Defaults are the recommended values."""

    arena_size: str | None = None
    ratio: Ratio = "auto"
    hot_tokens: int = 128
    warm_tokens: int = 1024
    shared_format: SharedFormat = "fp8"
    tail_format: TailFormat = "ratio"
    kv_format: CodeFormat = "fp4"
    key_scale: KeyScale = "entry"
    protect_tokens: int = 64
    high_watermark: float = 0.8
    low_watermark: float = 0.6
    adjust_interval: int = 64
    guard: float = 0.0
    guard_min: float = GUARD_MIN
    documents: str | None = None
    calibration: str | None = None
    rope: RopeVariant = "rotated"
    impl: Impl = "auto"
    pack_weights: PackWeights = "all"

    @property
    def arena_bytes(self) -> int | None:
        """Bytes asked for, or None: what SGLang would give its bf16 pool."""
        return None if self.arena_size is None else parse_bytes(self.arena_size, "--csa2-arena-size")

    @property
    def is_adaptive(self) -> bool:
        """Whether the ratio of old pages follows memory."""
        return self.ratio == "auto" and self.tail_format == "ratio"

    @property
    def old_page_format(self) -> str | None:
        """Format of private pages beyond the warm window; None: the 4-bit one, from which an adaptive ratio starts."""
        if self.tail_format != "ratio":
            return self.tail_format
        return None if self.ratio in ("1", "auto") else f"csa2-{self.ratio}x"

    @property
    def reduced_formats(self) -> tuple[str, ...]:
        """Formats smaller than 4 bits that pages can get, the largest first."""
        if self.is_adaptive:
            return tuple(f"csa2-{ratio}x" for ratio in RATIOS if ratio not in ("1", "auto"))
        old = self.old_page_format
        return (old,) if old is not None and old.startswith("csa2-") else ()

    def validate(self) -> None:
        """Check values and combinations.

        Raises:
            OptionError: names the option, the value, what is allowed and how to go on.
        """
        _one_of("--csa2-ratio", self.ratio, RATIOS)
        _one_of("--csa2-kv-format", self.kv_format, CODE_FORMATS)
        _one_of("--csa2-shared-format", self.shared_format, SHARED_FORMATS)
        _one_of("--csa2-tail-format", self.tail_format, TAIL_FORMATS)
        _one_of("--csa2-key-scale", self.key_scale, KEY_SCALES)
        _one_of("--csa2-rope", self.rope, ROPE_VARIANTS)
        _one_of("--csa2-impl", self.impl, IMPLS)
        _one_of("--csa2-pack-weights", self.pack_weights, PACK_WEIGHTS)
        _ = self.arena_bytes
        if self.tail_format != "ratio" and self.ratio not in ("1", "auto"):
            raise OptionError(
                f"--csa2-tail-format {self.tail_format} and --csa2-ratio {self.ratio} both say what old pages become: leave "
                f"one of them out"
            )
        if self.rope == "separated" and self.impl in ("cpu", "cuda"):
            raise OptionError(
                f"--csa2-rope separated cannot be combined with --csa2-impl {self.impl}: compiled code reads rotated keys "
                f"only. Use --csa2-impl reference, or leave one of them out"
            )
        for name, value in (
            ("--csa2-hot-tokens", self.hot_tokens),
            ("--csa2-warm-tokens", self.warm_tokens),
            ("--csa2-protect-tokens", self.protect_tokens),
        ):
            if not 0 <= value <= 2**31 - 1:
                raise OptionError(f"{name} {value} is out of range: give a number of tokens from 0 to 2147483647")
        self._validate_controller()
        self._validate_guard()
        if self.warm_tokens < self.hot_tokens:
            raise OptionError(
                f"--csa2-warm-tokens {self.warm_tokens} is smaller than --csa2-hot-tokens {self.hot_tokens}: the warm "
                f"window contains the hot one, so give it at least as many tokens"
            )

    def _validate_controller(self) -> None:
        if not 0 <= self.low_watermark < self.high_watermark <= 1:
            raise OptionError(
                f"--csa2-low-watermark {self.low_watermark:g} and --csa2-high-watermark {self.high_watermark:g} do not fit "
                f"together: give shares of the arena, 0 <= low < high <= 1, for example 0.6 and 0.8"
            )
        if not 1 <= self.adjust_interval <= 2**31 - 1:
            raise OptionError(
                f"--csa2-adjust-interval {self.adjust_interval} is out of range: give tokens from 1 to 2147483647"
            )

    def _validate_guard(self) -> None:
        for name, value, example in (("--csa2-guard", self.guard, "0.001"), ("--csa2-guard-min", self.guard_min, "0.9")):
            if not 0 <= value <= 1:
                raise OptionError(f"{name} {value:g} is out of range: give a share from 0 to 1, for example {example}")
        if self.guard == 0 and self.guard_min != GUARD_MIN:
            raise OptionError(
                f"--csa2-guard-min {self.guard_min:g} does nothing without --csa2-guard: add that option, for example "
                f"--csa2-guard 0.001, or leave this one out"
            )


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{option} {value!r} is unknown: choose one of {', '.join(allowed)}")
