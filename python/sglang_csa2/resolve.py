"""Three steps in SGLang's argument resolution: refuse and force early, look at the model, verify at the end.

They run once, in the process that resolves the arguments, before any process of the server is spawned. A user mistake
ends there with a named error as the last line. UPSTREAM(sglang 0.5.23: step names of `arg_groups/resolution_hooks.py`).
"""

import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec

from csa2.document_folder import read_folder
from csa2.errors import IntegrityError, OptionError
from csa2.impl import INTERPRETER, fallback_warning, resolve_impl
from csa2.options import PAGE_SIZE, PAGE_SIZES, CacheOptions
from sglang_csa2 import plugin, refusals
from sglang_csa2.args import SCHEME, Csa2ServerArgs, check_unused_options, enabled, flag_of, options_from
from sglang_csa2.calibration import check_calibration
from sglang_csa2.rope import check_rope
from sglang_csa2.splitting import check_cores, check_heads

logger = logging.getLogger(__name__)

SOURCE = "csa2"
"""Who declared our values, in SGLang's provenance."""

Step = Callable[[Any], None]


class Forced(msgspec.Struct, frozen=True, kw_only=True):
    """An option the scheme sets. Another explicit value of the user is refused, never overwritten."""

    field: str
    value: object
    unset: object
    reason: str
    also: tuple[object, ...] = ()
    """Other values that a user may choose."""
    device: str | None = None
    """Where it is set; None: everywhere."""


FORCED: tuple[Forced, ...] = (
    Forced(
        field="page_size",
        value=PAGE_SIZE,
        unset=None,
        also=tuple(size for size in PAGE_SIZES if size != PAGE_SIZE),
        reason="pages are compressed and shared as a whole",
    ),
    Forced(field="attention_backend", value=SCHEME, unset=None, reason="it reads compressed pages"),
    Forced(field="radix_cache_backend", value=SCHEME, unset=None, reason="it says which pages are shared"),
    Forced(
        field="disable_decode_cuda_graph",
        value=True,
        unset=False,
        device="cpu",
        reason="compiled CPU code is not captured",
    ),
    Forced(field="disable_prefill_cuda_graph", value=True, unset=False, reason=refusals.EAGER_PREFILL),
    Forced(
        field="disable_overlap_schedule",
        value=True,
        unset=False,
        device="cuda",
        reason="pages change their format while the next batch would already read them",
    ),
)

SPLIT_BACKENDS = ("prefill_attention_backend", "decode_attention_backend")
"""Options that override the attention backend for one phase; only our own name may stand there."""

SERVED_DEVICES = ("cpu", "cuda")


def register() -> None:
    """Hook the three steps. Call once in a process, before the arguments are resolved."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_deprecated_dp_attention")(early)  # first step, before any default is filled in
    register_resolution_hook("handle_model_specific_adjustments")(model)  # first step that looks into the model
    register_resolution_hook("handle_amd_monokernel")(late)  # last step that may change a value


def early(server_args: Any, previous: Step) -> None:
    """Check all that the arguments alone decide, then declare the forced values.

    Raises:
        OptionError: an option has an unusable value, or cannot be combined with the scheme.
        IntegrityError: the plugin is not completely in place.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if isinstance(server_args, Csa2ServerArgs):  # a record made before the plugin loaded has none of our fields
        check_unused_options(server_args)
    if enabled(server_args):
        config = resolving_view(server_args)
        plugin.require_registration()
        options = options_from(config)
        options.validate()
        if options.documents is not None:
            read_folder(options.documents)  # here, where a mistake ends the start before anything is loaded
        _check_device(config, options)
        refusals.check_options(config)
        _check_forced(config)
        if _device(config) == "cpu":
            check_cores(config)
        values = {f.field: f.value for f in _forced(config) if getattr(config, f.field) not in f.also}
        if config.radix_eviction_policy == "lru" and not _eviction_policy_was_given(server_args):
            values["radix_eviction_policy"] = SCHEME
        declare_resolution(server_args, SOURCE, **values)
    previous(server_args)


def model(server_args: Any, previous: Step) -> None:
    """Check the model before SGLang's handlers adapt the arguments to it.

    Raises:
        UnsupportedModelError: its KV cache cannot be compressed.
        OptionError: its keys cannot be separated from their positions, as --csa2-rope asks, or its heads not split as
            --tp-size asks.
    """
    if enabled(server_args):
        from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

        model_config = model_config_of(server_args)
        refusals.check_model(model_config)
        config = resolving_view(server_args)
        check_heads(config, model_config)
        options = options_from(config)
        check_rope(options, model_config)
        check_calibration(options, config.model_path)
    previous(server_args)


def late(server_args: Any, previous: Step) -> None:
    """Verify that no later handler undid the early decisions, then wire the launcher.

    Raises:
        OptionError: a handler resolved an option to a value that is refused.
        KernelBuildError: --csa2-impl cpu cannot be compiled.
        IntegrityError: a handler replaced a forced value, or the launcher cannot be wired.
    """
    previous(server_args)
    if not enabled(server_args):
        return
    from sglang.srt.arg_groups.overrides import resolving_view

    config = resolving_view(server_args)
    refusals.check_options(config)
    for forced in _forced(config):
        value = getattr(config, forced.field)
        if value not in (forced.value, *forced.also):
            raise IntegrityError(
                f"SGLang resolved {flag_of(forced.field)} to {value!r}, but --kv-compress {SCHEME} needs "
                f"{forced.value!r}: {forced.reason}. Look in the log above for the option or model that changed it"
            )
    _prepare_kernels(options_from(config))
    plugin.wire_launcher()


def _prepare_kernels(options: CacheOptions) -> None:
    """Compile once, before the processes that would all want to."""
    implementation = resolve_impl(options.impl, options.rope)
    if implementation.fallback:
        logger.warning(fallback_warning(implementation))


def _eviction_policy_was_given(server_args: Any) -> bool:
    """Whether somebody asked for the eviction policy, which may be the one that SGLang takes by itself."""
    if server_args._radix_eviction_policy_explicitly_set:
        return True
    # UPSTREAM(sglang 0.5.23: only the command line sets that; an Engine notes its keywords in the text of the call)
    return re.match(r"Engine\((.*, )?radix_eviction_policy=", server_args.launch_command or "", re.DOTALL) is not None


def _forced(config: Any) -> tuple[Forced, ...]:
    device = _device(config)
    return tuple(forced for forced in FORCED if forced.device in (None, device))


def _check_forced(config: Any) -> None:
    for forced in _forced(config):
        fields = (forced.field, *SPLIT_BACKENDS) if forced.field == "attention_backend" else (forced.field,)
        for field in fields:
            value = getattr(config, field)
            if value not in (forced.unset, forced.value, *forced.also):
                others = "".join(f" or {other}" for other in forced.also)
                raise OptionError(
                    f"{flag_of(field)} {value} cannot be combined with --kv-compress {SCHEME}, which sets "
                    f"{flag_of(forced.field)} {forced.value}: {forced.reason}. Leave {flag_of(field)} out"
                    + (f", or give{others.removeprefix(' or')}" if others else "")
                )


def _device(config: Any) -> str:
    """The type of the device that serves."""
    from sglang.srt.utils.common import get_device

    # Upstream fills in the same device, one step later; without any platform it finds none.
    return str(config.device or (get_device() if _has_platform() else "cpu")).split(":")[0]


def _has_platform() -> bool:
    from sglang.srt.platforms import current_platform
    from sglang.srt.platforms.device_mixin import PlatformEnum

    return current_platform._enum is not PlatformEnum.UNSPECIFIED


def _check_device(config: Any, options: CacheOptions) -> None:
    """Refuse devices without kernels, CUDA unless it is asked for, and a CPU that no CPU platform of SGLang drives."""
    from sglang.srt.platforms import current_platform

    device = _device(config)
    hide = "Use --device cpu on a machine without an accelerator (CUDA_VISIBLE_DEVICES='' hides NVIDIA devices)"
    if device not in SERVED_DEVICES:
        raise OptionError(
            f"--kv-compress {SCHEME} on {device} is not available in this version: there are no kernels. {hide}"
        )
    if device == "cuda" and options.impl != "cuda":
        raise OptionError(
            f"--kv-compress {SCHEME} on {device} is served by kernels that have been compiled for GPUs and tested without "
            f"one, but have never run on one (docs/gpu.md). --csa2-impl cuda takes them all the same. {hide}"
        )
    if options.impl == "cuda":
        found = resolve_impl(options.impl)  # here, where a missing device ends the start before anything is loaded
        if device == "cpu" and found.detail != INTERPRETER:
            raise OptionError(
                "--csa2-impl cuda on --device cpu: its kernels read the memory of a GPU. Leave one of the two out"
            )
    if device == "cuda":
        return
    drives_cpu = current_platform.device_type == "cpu" and _has_platform()
    if not drives_cpu:
        raise OptionError(
            f"--kv-compress {SCHEME} on the CPU needs a CPU platform, but SGLang has "
            f"{type(current_platform).__name__}. If SGLANG_PLUGINS is set, list both csa2 and csa2_cpu in it; if "
            f"SGLANG_PLATFORM is set, unset it; if the machine has an accelerator, hide it (CUDA_VISIBLE_DEVICES='')"
        )
