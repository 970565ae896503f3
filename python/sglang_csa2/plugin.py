"""Entry point of the plugin group: `register()` puts our pieces where SGLang looks for them, process by process.

SGLang loads plugins in the launcher, the scheduler and the detokenizer, and swallows what a plugin raises: the failure
is only logged. So nothing here is trusted to have worked. `require_registration()` runs while the arguments are
resolved, `require_hooks()` in the scheduler, and both look at the live objects of SGLang.
"""

import pkgutil
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple

from csa2.errors import IntegrityError

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
ENGINE_MODULE = "sglang.srt.entrypoints.engine"
HTTP_MODULE = "sglang.srt.entrypoints.http_server"
WHY = f"See all of it with: python -c 'import {SCHEDULER_MODULE}; from sglang_csa2 import plugin; plugin.register()'"


class Hook(NamedTuple):
    """One function of ours on one function or method of SGLang."""

    target: str
    function: Callable[..., Any]
    kind: str
    """Name of a `HookType`: AFTER, AROUND, BEFORE."""


class _Registration:
    """What `register()` achieved in this process. As a context manager it remembers how its body failed."""

    def __init__(self) -> None:
        self.complete = False
        self.failure: BaseException | None = None

    def __enter__(self) -> None:
        self.failure = None

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self.failure = failure
        self.complete = failure is None


_registration = _Registration()


def register() -> None:
    """Add our options, and in a process that has loaded the scheduler our pool, attention, radix cache and hooks.

    Everything checks for the flag when it runs, so without it SGLang behaves as it would without the plugin.
    """
    if _registration.complete:
        return
    with _registration:
        _register_arguments()  # first: a later failure can then be reported where the flag is used
        if SCHEDULER_MODULE in sys.modules:
            _register_scheduler()


def registration_complete() -> bool:
    """Whether `register()` ran to its end in this process."""
    return _registration.complete


def require_registration() -> None:
    """Raise IntegrityError with the reason unless `register()` ran to its end in this process."""
    if not _registration.complete:
        reason = f": {_registration.failure!r}" if _registration.failure else ""
        raise IntegrityError(f"the csa2 plugin is not registered completely in this process{reason}. {WHY}")


def require_hooks() -> None:
    """Check in the scheduler process that each of our hooks really wraps its target, and both factories are known.

    Raises:
        IntegrityError: names what is missing.
    """
    require_registration()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.registry import get_radix_cache_factory

    missing = _not_applied(_scheduler_hooks())
    if ATTENTION_BACKENDS.get("csa2") is not _make_attention_backend:
        missing.append("attention backend csa2")
    if get_radix_cache_factory("csa2") is not _make_radix_cache:
        missing.append("radix cache backend csa2")
    if missing:
        raise IntegrityError(_missing_message(missing))


def wire_launcher() -> None:
    """Add the control messages and HTTP routes to the process that launches the server.

    Called when the arguments are resolved, so that a server without the flag never loads them.

    Raises:
        IntegrityError: SGLang did not apply the hook of the routes.
    """
    from sglang_csa2 import control, engine_documents

    control.install()
    engine_documents.install()
    hooks = _launcher_hooks()
    if _not_applied(hooks):
        _apply(hooks)
    if missing := _not_applied(hooks):
        raise IntegrityError(_missing_message(missing))


def _register_arguments() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_csa2 import resolve
    from sglang_csa2.args import SCHEME, Csa2ServerArgs

    HookRegistry.register("sglang.srt.server_args.ServerArgs", Csa2ServerArgs, HookType.REPLACE)
    if SCHEME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([SCHEME])
    if SCHEME not in choices.RADIX_EVICTION_POLICY_CHOICES:
        choices.add_radix_eviction_policy_choices([SCHEME])
    resolve.register()
    engine = sys.modules.get(ENGINE_MODULE)
    if engine is not None:
        # UPSTREAM(sglang 0.5.23: a replaced class is not replaced where it is a class attribute).
        engine.Engine.server_args_class = Csa2ServerArgs


def _register_scheduler() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from sglang_csa2.args import SCHEME

    # The factories first: they call require_hooks(), which reports whatever fails below.
    register_attention_backend(SCHEME)(_make_attention_backend)
    register_radix_cache_backend(SCHEME, _make_radix_cache)

    from sglang_csa2 import control

    # Here, because the controller of --dp-size, which passes messages on, has no scheduler of its own.
    control.register_types()
    _add(_scheduler_hooks())


def _make_attention_backend(runner: Any) -> Any:
    require_hooks()
    from sglang_csa2.attention import make_backend

    return make_backend(runner)


def _make_radix_cache(context: Any) -> Any:
    require_hooks()
    from sglang_csa2.radix import make_radix_cache

    return make_radix_cache(context)


def _scheduler_hooks() -> tuple[Hook, ...]:
    from sglang_csa2 import cpu_lora, decode_log, documents, memory, own_requests, request_options, scheduler

    of_scheduler = f"{SCHEDULER_MODULE}.Scheduler."
    of_parts = "sglang.srt.managers.scheduler_components."
    of_platform = "sglang.srt.platforms.interface.SRTPlatform."
    return (
        Hook(f"{of_scheduler}__init__", scheduler.after_scheduler_init, "AFTER"),
        Hook(f"{of_scheduler}init_request_dispatcher", scheduler.after_init_request_dispatcher, "AFTER"),
        Hook(f"{of_scheduler}_add_request_to_queue", request_options.before_add_request_to_queue, "BEFORE"),
        Hook(f"{of_scheduler}run_batch", scheduler.before_run_batch, "BEFORE"),
        Hook(f"{of_scheduler}process_batch_result", scheduler.around_process_batch_result, "AROUND"),
        Hook(f"{of_scheduler}send_abort_output", own_requests.around_send_abort_output, "AROUND"),
        Hook(f"{of_scheduler}flush_cache", documents.around_flush_cache, "AROUND"),
        Hook(
            f"{of_parts}weight_updater.SchedulerWeightUpdaterManager.flush_cache_after_weight_update",
            documents.around_flush_after_weights,
            "AROUND",
        ),
        Hook(
            f"{of_parts}output_streamer.SchedulerOutputStreamer.stream_output", own_requests.around_stream_output, "AROUND"
        ),
        Hook(f"{of_platform}get_kv_pool_cls", memory.around_get_kv_pool_cls, "AROUND"),
        Hook(f"{of_platform}get_paged_allocator_cls", memory.around_get_paged_allocator_cls, "AROUND"),
        Hook(
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
            memory.around_config_from_budget,
            "AROUND",
        ),
        Hook("sglang.srt.models.utils.enable_fused_set_kv_buffer", memory.around_enable_fused_set_kv_buffer, "AROUND"),
        *(Hook(target, cpu_lora.around_lora, "AROUND") for target in cpu_lora.TARGETS),
        # After ours on Scheduler.__init__: the report reads what that hook makes.
        *(Hook(target, function, "AFTER") for target, function in decode_log.HOOKS),
    )


def _launcher_hooks() -> tuple[Hook, ...]:
    from sglang_csa2 import dashboard, http

    return (
        Hook(f"{HTTP_MODULE}._setup_and_run_http_server", http.before_setup_and_run_http_server, "BEFORE"),
        Hook("sglang.srt.utils.auth.add_api_key_middleware", dashboard.after_add_api_key_middleware, "AFTER"),
    )


def _add(hooks: Iterable[Hook]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource("csa2", "sglang-csa2")
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind], source=source)


def _apply(hooks: Iterable[Hook]) -> None:
    """Register hooks after SGLang applied those of all plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    _add(hooks)
    HookRegistry.apply_hooks()


def _not_applied(hooks: Iterable[Hook]) -> list[str]:
    return [hook.target for hook in hooks if not _wraps(pkgutil.resolve_name(hook.target), hook.function)]


def _wraps(live: Any, function: Callable[..., Any]) -> bool:
    """Whether `function` is one of the hooks around `live`.

    UPSTREAM(sglang 0.5.23: `hook_registry._wrap_fn` closes over the hook and keeps the original in `__wrapped__`).
    """
    while live is not None:
        code = getattr(live, "__code__", None)
        if code is not None and "hook" in code.co_freevars:
            cell = live.__closure__[code.co_freevars.index("hook")]
            if cell.cell_contents is function:
                return True
        live = getattr(live, "__wrapped__", None)
    return False


def _missing_message(missing: list[str]) -> str:
    return (
        f"--kv-compress csa2 is not completely in place in this process: SGLang did not apply {', '.join(missing)}. "
        f"Another plugin may have replaced it (SGLANG_PLUGINS=csa2,csa2_cpu loads ours alone), or this SGLang is not "
        f"the version that sglang-csa2 was made for"
    )
