"""The options of the plugin as fields of SGLang's `ServerArgs`, and how the rest of the plugin reads them.

`Csa2ServerArgs` replaces `ServerArgs` in every process that loaded the plugin, so the options behave like built-in
ones: `--help`, `--config` YAML, `sgl.Engine(...)` keywords, `/server_info`, and they travel to the child processes.
"""

import math
from typing import Annotated, Any, cast

import msgspec
from sglang.srt.arg_groups.arg_utils import Arg
from sglang.srt.server_args import ServerArgs

from csa2.errors import OptionError
from csa2.options import (
    CODE_FORMATS,
    IMPLS,
    KEY_SCALES,
    PACK_WEIGHTS,
    RATIOS,
    ROPE_VARIANTS,
    SHARED_FORMATS,
    TAIL_FORMATS,
    CacheOptions,
    CodeFormat,
    Impl,
    KeyScale,
    PackWeights,
    Ratio,
    RopeVariant,
    SharedFormat,
    TailFormat,
)

SCHEME = "csa2"
"""The one value of `--kv-compress`; also the name of our attention and radix cache backends."""

CONFIG_NAMESPACE = "csa2"
"""Published as `get_context().config_bag("csa2")` in every process of the server."""

_DEFAULTS = CacheOptions()


class Csa2ServerArgs(ServerArgs, kw_only=True, dict=True):  # type: ignore[call-arg]  # msgspec's class options
    """`ServerArgs` with the plugin's options. `csa2_<name>` holds `CacheOptions.<name>`, with its default."""

    kv_compress: Annotated[
        str | None,
        Arg(
            help="Keep the KV cache compressed: recent tokens stay as the model wrote them, older pages are stored in "
            "fewer bits, so the same memory holds more conversations. 'csa2' is the only scheme. Off if left out.",
            choices=[SCHEME],
        ),
    ] = None
    csa2_arena_size: Annotated[
        str | None,
        Arg(
            help="Memory for the KV cache in bytes, with a suffix if you like: KB, MB, GB (powers of 1000), K, M, G, "
            "KiB, MiB, GiB (powers of 1024). Left out: the memory SGLang would give its own KV cache."
        ),
    ] = _DEFAULTS.arena_size
    csa2_ratio: Annotated[
        str,
        Arg(
            help="How much smaller than 4-bit pages old pages become. 1: not at all. 2: by leaving out key channels and by "
            "two-bit values. 4 and 8: by merging tokens too, which costs exact recall of long texts. auto: as memory asks, "
            "between 1 and 8; pages of prompts then wait in --csa2-shared-format while memory is free.",
            choices=list(RATIOS),
        ),
    ] = _DEFAULTS.ratio
    csa2_hot_tokens: Annotated[
        int,
        Arg(
            help="Tokens at the end of each running request that stay as the model wrote them, unless memory runs "
            "short while nothing else is left to compress."
        ),
    ] = _DEFAULTS.hot_tokens
    csa2_warm_tokens: Annotated[
        int,
        Arg(
            help="Tokens at the end of each running request that are not made smaller than 4 bits; at least as many as "
            "--csa2-hot-tokens. Without effect with --csa2-ratio 1."
        ),
    ] = _DEFAULTS.warm_tokens
    csa2_shared_format: Annotated[
        str,
        Arg(
            help="Number format of pages that other requests found in the prefix cache before they were compressed, while "
            "memory is not short; 'tail' treats them like private ones.",
            choices=list(SHARED_FORMATS),
        ),
    ] = _DEFAULTS.shared_format
    csa2_tail_format: Annotated[
        str,
        Arg(
            help="Number format of private pages that left the hot window, while memory is not short, where 4 bits are too "
            "few: 'ratio' leaves it to --csa2-ratio. Under pressure they still become 4-bit pages.",
            choices=list(TAIL_FORMATS),
        ),
    ] = _DEFAULTS.tail_format
    csa2_kv_format: Annotated[
        str,
        Arg(
            help="Codes of 4-bit pages: floating point (E2M1) or integers.",
            choices=list(CODE_FORMATS),
        ),
    ] = _DEFAULTS.kv_format
    csa2_key_scale: Annotated[
        str,
        Arg(
            help="What shares a scale in the keys of 4-bit pages: the channels of a token (entry), or the tokens of a "
            "channel, as integers around a midpoint (channel). The same bytes.",
            choices=list(KEY_SCALES),
        ),
    ] = _DEFAULTS.key_scale
    csa2_protect_tokens: Annotated[
        int,
        Arg(
            help="Tokens at the beginning of each sequence, rounded up to pages, that are never merged and stay as the "
            "model wrote them while memory is not short."
        ),
    ] = _DEFAULTS.protect_tokens
    csa2_high_watermark: Annotated[
        float,
        Arg(
            help="Share of the arena, held by pages that are read now or that several requests have used, above which "
            "--csa2-ratio auto raises the ratio."
        ),
    ] = _DEFAULTS.high_watermark
    csa2_low_watermark: Annotated[
        float,
        Arg(help="Share of the arena, counted in the same way, below which --csa2-ratio auto lowers the ratio."),
    ] = _DEFAULTS.low_watermark
    csa2_adjust_interval: Annotated[
        int,
        Arg(help="Generated tokens, all requests together, between two looks of --csa2-ratio auto at the arena."),
    ] = _DEFAULTS.adjust_interval
    csa2_guard: Annotated[
        float,
        Arg(
            help="Share of the generated tokens that are predicted again over uncompressed pages, where memory allows it, "
            "to see how often both predictions agree: each costs a prefill of its sequence. 0: none."
        ),
    ] = _DEFAULTS.guard
    csa2_guard_min: Annotated[
        float,
        Arg(
            help="Share of each 100 predictions of --csa2-guard that must agree. Below it --csa2-ratio auto goes down to "
            "the next smaller of 4, 2 and 1, and no further up until POST /csa2/ratio."
        ),
    ] = _DEFAULTS.guard_min
    csa2_documents: Annotated[
        str | None,
        Arg(
            help="Folder of documents that are encoded and pinned before the server answers, or sgl.Engine returns: *.txt "
            "and *.md as text, *.json as chat messages, the name without its ending as id. One that cannot be pinned ends "
            "the start."
        ),
    ] = _DEFAULTS.documents
    csa2_calibration: Annotated[
        str | None,
        Arg(
            help="Folder made by `csa2 calibrate` for this model: which key channels matter most, which heads need more "
            "bytes than others, in k8v4 and all smaller formats, and, where one was trained, the scorer of tokens that are "
            "merged. Left out: the slowest rotary pairs first, the same bytes for every head, which loses several times "
            "more. With --csa2-key-scale channel the 4-bit format uses none."
        ),
    ] = _DEFAULTS.calibration
    csa2_rope: Annotated[
        str,
        Arg(
            help="How compressed pages hold keys: rotated at their positions, which is fast, or separated from them, the "
            "rotation put back whenever they are read. separated: by the torch reference only, for the rotary embeddings "
            "default, linear and llama3.",
            choices=list(ROPE_VARIANTS),
        ),
    ] = _DEFAULTS.rope
    csa2_impl: Annotated[
        str,
        Arg(
            help="Who computes on compressed pages: the torch reference, compiled CPU code, or CUDA kernels. auto: "
            "compiled CPU code, with a warning and the reference where there is no compiler. cuda: never run on a GPU so "
            "far, hence to be asked for. An explicit choice that cannot run is an error.",
            choices=list(IMPLS),
        ),
    ] = _DEFAULTS.impl
    csa2_pack_weights: Annotated[
        str,
        Arg(
            help="On a CPU, keep bf16 weights in the order in which matrix products read them. layers: in place, at no cost "
            "in memory. all: also an output head that shares its weights with the embedding, as a second copy of them. "
            "none: not at all; only then can weights be read out of the server. Layers that are quantised or not bf16, "
            "experts, and servers with LoRA adapters keep plain weights.",
            choices=list(PACK_WEIGHTS),
        ),
    ] = _DEFAULTS.pack_weights

    _NS_BY_FIELD = {  # noqa: RUF012 - SGLang's name and form: field -> namespace it is published under
        **ServerArgs._NS_BY_FIELD,
        "kv_compress": CONFIG_NAMESPACE,
        **{f"csa2_{name}": CONFIG_NAMESPACE for name in CacheOptions.__struct_fields__},
    }


SCHEME_CHOICES = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "radix_cache_backend",
    "radix_eviction_policy",
)
"""Options that have a value of the scheme's name, which works only as a part of it."""


def flag_of(field: str) -> str:
    """The command line spelling of a `ServerArgs` field: `csa2_hot_tokens` -> `--csa2-hot-tokens`."""
    return "--" + field.replace("_", "-")


def enabled(server_args: Any) -> bool:
    """Whether these arguments ask for the compressed cache."""
    return getattr(server_args, "kv_compress", None) == SCHEME


def options_from(server_args: Any) -> CacheOptions:
    """The cache options in `server_args` (a record, a resolution view or the published bag), not yet validated.

    Raises:
        OptionError: a value has the wrong type, which only Python callers (`sgl.Engine`) can cause.
    """
    return CacheOptions(
        arena_size=_text_or_none(server_args.csa2_arena_size),
        ratio=cast(Ratio, str(server_args.csa2_ratio)),  # Engine(csa2_ratio=1) means "1"
        hot_tokens=_whole_number(server_args, "csa2_hot_tokens"),
        warm_tokens=_whole_number(server_args, "csa2_warm_tokens"),
        shared_format=cast(SharedFormat, server_args.csa2_shared_format),
        tail_format=cast(TailFormat, server_args.csa2_tail_format),
        kv_format=cast(CodeFormat, server_args.csa2_kv_format),
        high_watermark=_number(server_args, "csa2_high_watermark"),
        low_watermark=_number(server_args, "csa2_low_watermark"),
        adjust_interval=_whole_number(server_args, "csa2_adjust_interval"),
        guard=_number(server_args, "csa2_guard"),
        guard_min=_number(server_args, "csa2_guard_min"),
        documents=_text_or_none(server_args.csa2_documents),
        calibration=_text_or_none(server_args.csa2_calibration),
        key_scale=cast(KeyScale, server_args.csa2_key_scale),
        protect_tokens=_whole_number(server_args, "csa2_protect_tokens"),
        rope=cast(RopeVariant, server_args.csa2_rope),
        impl=cast(Impl, server_args.csa2_impl),
        pack_weights=cast(PackWeights, server_args.csa2_pack_weights),
    )


def check_unused_options(server_args: Any) -> None:
    """Refuse options of the plugin that would silently do nothing, because the scheme is off.

    Raises:
        OptionError: names the first such option, or an unknown scheme.
    """
    scheme = server_args.kv_compress
    if scheme is not None and scheme != SCHEME:
        raise OptionError(f"--kv-compress {scheme!r} is unknown: the only scheme is {SCHEME!r}. Use it or leave it out")
    if scheme is not None:
        return
    for name, default in msgspec.structs.asdict(_DEFAULTS).items():
        value = getattr(server_args, f"csa2_{name}")
        if str(value) != str(default):
            raise OptionError(
                f"{flag_of(f'csa2_{name}')} {value} does nothing without --kv-compress {SCHEME}: add that option, or "
                f"leave this one out"
            )
    for name in SCHEME_CHOICES:
        if getattr(server_args, name) == SCHEME:
            raise OptionError(
                f"{flag_of(name)} {SCHEME} works only as a part of --kv-compress {SCHEME}: use that option, it sets this one"
            )


def enabled_here() -> bool:
    """Whether the server this process belongs to runs with the compressed cache; False before SGLang published its
    configuration. Cheap enough for a hook on a hot path."""
    context = _context()
    return context.is_config_namespace_published(CONFIG_NAMESPACE) and enabled(context.config_bag(CONFIG_NAMESPACE))


def options_here() -> CacheOptions:
    """The cache options of this server. Only where `enabled_here()`; build once and keep."""
    return options_from(_context().config_bag(CONFIG_NAMESPACE))


def _context() -> Any:
    from sglang.srt.runtime_context import get_context

    return get_context()


def _whole_number(server_args: Any, field: str) -> int:
    value = getattr(server_args, field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(f"{flag_of(field)} {value!r} is not a whole number: give a number of tokens, for example 128")
    return value


def _number(server_args: Any, field: str) -> float:
    value = getattr(server_args, field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise OptionError(f"{flag_of(field)} {value!r} is not a number: give a share, for example 0.8")
    return float(value)


def _text_or_none(value: str | int | None) -> str | None:
    return None if value is None else str(value)
