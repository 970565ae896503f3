"""Every seam of SGLang that this package relies on. A new SGLang version fails here first, with one line per seam."""

import importlib.metadata
import inspect
import pkgutil

import msgspec
import pytest
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler  # noqa: F401 - the hooks below live in these two
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.platforms.interface import SRTPlatform

from sglang_csa2 import plugin
from sglang_csa2.allocator import Csa2Allocator
from sglang_csa2.attention import Csa2AttentionBackend
from sglang_csa2.budget import ByteBudget
from sglang_csa2.cpu_platform import Csa2CpuPlatform
from sglang_csa2.packed_linear import PackedHeadMethod, PackedLinearMethod
from sglang_csa2.pool import Csa2KVPool
from sglang_csa2.radix import Csa2RadixCache

SRT = "sglang.srt."
VERSION = importlib.metadata.version("sglang")

HOOKS = (*plugin._scheduler_hooks(), *plugin._launcher_hooks())

PARAMETERS = {
    # who: function of SGLang -> parameters passed or received by name or position
    "args": {
        "arg_groups.arg_utils.Arg": ("help", "choices"),
        "runtime_context.RuntimeContext.config_bag": ("name",),
        "runtime_context.RuntimeContext.is_config_namespace_published": ("name",),
    },
    "resolve": {
        "arg_groups.resolution_hooks.register_resolution_hook": ("name",),
        "arg_groups.overrides.declare_resolution": ("server_args", "source", "fields"),
        "arg_groups.overrides.resolving_view": ("server_args",),
        "arg_groups.overrides.model_config_of": ("server_args",),
        "utils.common.get_device": (),
    },
    "plugin": {
        "plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type", "source"),
        "plugins.hook_registry.HookRegistry.apply_hooks": (),
        "plugins.hook_registry.HookSource": ("plugin_name", "dist_name"),
        "arg_groups.choices.add_attention_backend_choices": ("iterable",),
        "arg_groups.choices.add_radix_eviction_policy_choices": ("iterable",),
        "layers.attention.attention_registry.register_attention_backend": ("name",),
        "mem_cache.registry.register_radix_cache_backend": ("name", "factory"),
        "mem_cache.registry.get_radix_cache_factory": ("name",),
    },
    "memory": {
        "mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget": ("self", "budget_bytes", "cap_tokens"),
        "platforms.interface.SRTPlatform.get_kv_pool_cls": ("self", "kind"),
        "platforms.interface.SRTPlatform.get_paged_allocator_cls": ("self",),
        "models.utils.enable_fused_set_kv_buffer": ("forward_batch",),
        "configs.model_config.ModelConfig.get_num_kv_heads": ("tensor_parallel_size", "dcp_size"),
    },
    "scheduler": {
        "managers.scheduler.Scheduler.init_request_dispatcher": ("self",),
        "managers.scheduler.Scheduler.run_batch": ("self", "batch"),
        "managers.scheduler.Scheduler.process_batch_result": ("self", "batch", "result"),
        "managers.scheduler.Scheduler.get_prefill_adder_class": ("self",),
    },
    "budget": {
        "managers.schedule_policy.PrefillAdder.add_one_req": ("self", "req", "has_chunked_req", "truncation_align_size"),
    },
    "pool": {"mem_cache.memory_pool.unwrap_write_loc": ()},
    "attention": {"mem_cache.memory_pool.KVWriteLoc": ("loc", "swa_loc")},
    "allocator": {"utils.get_num_new_pages": ("seq_lens", "page_size", "prefix_lens", "decode")},
    "radix": {
        "mem_cache.registry.create_unified_radix_cache": ("ctx", "cache_class"),
        "mem_cache.unified_radix_cache.UnifiedRadixCache._evict_device_leaf": ("self", "node_id", "tracker"),
        "mem_cache.unified_radix_cache.UnifiedRadixCache.path_device_indices": ("self", "node"),
    },
    "eviction": {
        "mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore._split_node": ("self", "key", "child", "split_len"),
        "mem_cache.unified_radix_cache.UnifiedRadixCache._apply_cache_actions": ("self", "actions"),
    },
    "request_options": {
        "managers.scheduler.Scheduler._add_request_to_queue": ("self", "req"),
        "managers.schedule_batch.Req.set_finish_with_abort": ("self", "error_msg"),
    },
    "control": {"managers.io_struct.hook_custom_types": ()},
    "cpu_ops": {
        "sglang.kernels.fused_op.BaseFusedOp.register_oot_forward": ("op_cls", "fn", "platform_key"),
        "layers.layernorm.RMSNorm.forward_native": ("self", "x", "residual", "post_residual_addition"),
        "layers.activation.SiluAndMul.forward_native": ("self", "x"),
        "layers.rotary_embedding.base.RotaryEmbedding.forward_native": (
            "self",
            "positions",
            "query",
            "key",
            "offsets",
            "fused_set_kv_buffer_arg",
        ),
    },
    "packed_linear": {
        "layers.logits_processor.should_apply_lm_head_quant_method": ("lm_head", "quant_method"),
        "model_loader.loader.DefaultModelLoader.postprocess_weights": ("model", "target_device"),
        "model_loader.loader.DefaultModelLoader.restore_weights_before_loading": ("model", "target_device"),
    },
    "decode_log": {
        "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_prefill_stats": ("self", "batch"),
    },
    "documents": {
        "managers.scheduler.Scheduler.abort_request": ("self", "recv_req"),
        "managers.scheduler.Scheduler.flush_cache": ("self",),
        "managers.scheduler.Scheduler.is_fully_idle": ("self", "ignore_waiting"),
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.flush_cache_after_weight_update": (
            "self",
            "recv_req",
        ),
        "mem_cache.radix_cache.RadixKey": ("token_ids", "extra_key"),
        "mem_cache.unified_radix_cache.UnifiedRadixCache.lock": ("self", "node_id"),
        "mem_cache.unified_radix_cache.UnifiedRadixCache.unlock": ("self", "lock"),
        "mem_cache.unified_radix_cache.UnifiedRadixCache.path_device_indices": ("self", "node"),
    },
    "own_requests": {
        "managers.scheduler.Scheduler.handle_generate_request": ("self", "recv_req"),
        "managers.scheduler.Scheduler.send_abort_output": ("self", "abort_req", "req"),
        "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output": ("self", "reqs"),
    },
    "guard": {
        "managers.scheduler.Scheduler.abort_request": ("self", "recv_req"),
        "managers.scheduler.Scheduler.collect_inflight_reqs": ("self",),
        "managers.scheduler.Scheduler.process_batch_result": ("self", "batch", "result"),
        "managers.scheduler.Scheduler.process_pending_chunked_abort": ("self",),
        "managers.schedule_batch.ScheduleBatch.filter_batch": ("self",),
    },
    "document_tokens": {
        "entrypoints.openai.serving_tokenize.OpenAIServingTokenize._tokenize_chat_request": ("self", "request"),
        "entrypoints.openai.serving_tokenize.OpenAIServingTokenize": ("tokenizer_manager", "template_manager"),
    },
    "document_client": {"sglang.utils.http_request": ("url", "json", "api_key", "verify", "method")},
    "frontend": {
        "sglang.lang.interpreter.StreamExecutor.submit": ("self", "expr"),
        "sglang.lang.ir.SglExprList": ("expr_list",),
        "sglang.lang.ir.SglFunction": ("func", "num_api_spec_tokens", "bind_arguments"),
        "sglang.lang.tracer.TracingScope.get_current_scope": (),
    },
    "splitting": {"utils.common.get_cpu_ids_by_node": ()},
    "dashboard": {"utils.auth.add_api_key_middleware": ("app",)},
    "http": {
        "entrypoints.http_server.get_global_state": (),
        "utils.auth.auth_level": ("level",),
        "utils.json_response.orjson_response": ("content", "status_code"),
    },
}

ATTRIBUTES = {
    # who: class of SGLang -> attributes read
    "args": {"server_args.ServerArgs": ("_NS_BY_FIELD", "resolve_once")},
    "plugin": {
        "plugins.hook_registry.HookType": ("AFTER", "AROUND", "BEFORE", "REPLACE"),
        "entrypoints.engine.Engine": ("server_args_class",),
    },
    "engine_documents": {"entrypoints.engine.Engine": ("_ensure_event_loop", "shutdown")},
    "refusals": {
        "configs.model_config.AttentionArch": ("MLA", "SSM"),
        "configs.model_config.ModelConfig": (
            "attention_arch", "attention_chunk_size", "dtype", "has_attention_sinks", "head_dim", "hf_config",
            "hf_text_config", "is_encoder_decoder", "is_generation", "is_hybrid_swa", "is_local_attention_model",
            "sliding_window_size", "v_head_dim",
        ),
    },
    "resolve": {"platforms.device_mixin.PlatformEnum": ("OOT", "UNSPECIFIED")},
    "memory": {
        "mem_cache.kv_cache_configurator.KVCacheConfigurator": ("kv_cache_dtype", "layer_info", "model", "model_config"),
        "runtime_context.ParallelContext": ("attn_tp_size", "attn_dcp_size"),
    },
    "scheduler": {
        "managers.scheduler.Scheduler": (
            "_request_dispatcher", "chunked_req", "cur_batch_for_debug", "last_batch", "max_req_input_len",
            "max_total_num_tokens", "metrics_reporter", "req_to_token_pool", "running_batch",
            "token_to_kv_pool_allocator", "tp_worker", "tree_cache",
        ),
        "managers.schedule_batch.ScheduleBatch": ("forward_mode", "prefix_lens", "reqs"),
        "managers.schedule_batch.Req": ("finished", "kv", "origin_input_ids", "priority", "sampling_params"),
        "managers.schedule_batch.ReqKvInfo": ("kv_allocated_len", "kv_committed_len", "req_pool_idx"),
        "mem_cache.memory_pool.ReqToTokenPool": ("req_to_token",),
    },
    "documents": {
        "managers.scheduler.Scheduler": (
            "_engine_paused", "chunked_prefill_size", "grammar_manager", "max_req_len", "model_config", "tree_cache",
        ),
        "managers.schedule_batch.Req": ("finished_reason", "rid"),
        "managers.io_struct.AbortReq": ("finished_reason", "rid"),
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager": ("scheduler",),
    },
    "guard": {
        "managers.scheduler.Scheduler": (
            "chunked_req", "enable_overlap", "last_batch", "max_req_input_len", "max_running_requests", "result_queue",
            "running_batch", "waiting_queue",
        ),
        "managers.schedule_batch.Req": (
            "custom_logit_processor", "finished", "grammar", "inflight_middle_chunks", "input_embeds",
            "is_retracted", "lora_id", "multimodal_inputs", "output_ids", "positional_embed_overrides", "rid",
            "skip_radix_cache_insert", "to_finish",
        ),
        "layers.logits_processor.LogitsProcessorOutput": ("next_token_logits",),
        "managers.utils.GenerationBatchResult": ("logits_output",),
        "sampling.sampling_params.SamplingParams": (
            "frequency_penalty", "logit_bias", "min_new_tokens", "presence_penalty", "repetition_penalty",
        ),
    },
    "document_tokens": {"entrypoints.openai.protocol.TokenizeRequest": ("add_generation_prompt", "messages")},
    "document_client": {
        "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint": ("api_key", "base_url", "verify"),
        "sglang.utils.HttpResponse": ("json", "status_code", "text"),
    },
    "frontend": {
        "sglang.lang.interpreter.StreamExecutor": ("backend", "cur_role", "error_", "messages_", "sync", "text_"),
        "sglang.lang.ir.SglConstantText": ("value",),
        "sglang.lang.ir.SglFunction": ("bind_arguments", "func", "num_api_spec_tokens"),
        "sglang.lang.tracer.TracerProgramState": ("backend",),
        "sglang.lang.tracer.TracingScope": ("tracer_state",),
    },
    "pool": {
        "mem_cache.memory_pool.MHATokenToKVPool": (
            "device", "dtype", "head_dim", "head_num", "k_buffer", "layer_num", "page_size", "size", "start_layer",
            "v_buffer",
        ),
    },
    "allocator": {
        "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator": (
            "_kvcache", "available_size", "get_all_free_pages", "num_pages", "page_size",
        ),
    },
    "budget": {
        "mem_cache.prefill_budget.PrefillBudget": (
            "_available_and_evictable", "ceil_paged_tokens", "current_offset", "page_size", "total_offset", "tree_cache",
        ),
    },
    "radix": {
        "mem_cache.base_prefix_cache.EvictParams": ("num_tokens",),
        "mem_cache.base_prefix_cache.EvictResult": ("num_tokens_evicted",),
        "mem_cache.base_prefix_cache.InsertParams": ("prev_prefix_len",),
        "mem_cache.base_prefix_cache.InsertResult": ("last_device_node", "prefix_len"),
        "mem_cache.cache_init_params.CacheInitParams": (
            "disable", "eviction_policy", "token_to_kv_pool_allocator", "tree_core_backend",
        ),
        "mem_cache.unified_radix_cache.UnifiedRadixCache": (
            "disable", "evictable_size", "page_size", "req_to_token_pool", "supports_prefix_sharing", "tree_components",
            "tree_core",
        ),
    },
    "eviction": {
        "mem_cache.evict_policy.EvictionStrategy": ("get_priority",),
        "mem_cache.unified_cache.component_type.ComponentType": ("FULL",),
        "mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore": ("evictable_device_leaves",),
        "mem_cache.unified_cache.unified_tree_core.UnifiedTreeNode": (
            "component_data", "id", "key", "last_access_time", "parent", "priority",
        ),
    },
    "attention": {
        "model_executor.forward_batch_info.ForwardBatch": (
            "extend_seq_lens", "forward_mode", "out_cache_loc", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu",
        ),
        "model_executor.forward_batch_info.ForwardMode": ("is_decode", "is_extend", "is_idle"),
        "model_executor.model_runner.ModelRunner": ("attn_backend", "model", "req_to_token_pool", "token_to_kv_pool"),
    },
    "model": {
        "layers.radix_attention.RadixAttention": (
            "attn_type", "is_cross_attention", "layer_id", "logit_cap", "qk_head_dim", "scaling", "sliding_window_size",
            "tp_k_head_num", "tp_q_head_num", "v_head_dim", "xai_temperature_len",
        ),
        "layers.radix_attention.AttentionType": ("DECODER",),
        "layers.rotary_embedding.base.RotaryEmbedding": ("cos_sin_cache", "is_neox_style"),
    },
    "rope": {
        "layers.rotary_embedding.base.RotaryEmbedding": (
            "base", "cos_sin_cache", "max_position_embeddings", "position_start", "rotary_dim",
        ),
        "layers.rotary_embedding.base.LinearScalingRotaryEmbedding": ("scaling_factors",),
        "layers.rotary_embedding.rope_variant.Llama3RotaryEmbedding": (
            "high_freq_factor", "low_freq_factor", "orig_max_position", "scaling_factor",
        ),
    },
    "cpu_ops": {
        "layers.layernorm.RMSNorm": (
            "cast_x_before_out_mul", "fp32_residual", "hidden_size", "override_orig_dtype", "variance_epsilon",
            "variance_size_override", "weight",
        ),
        "layers.rotary_embedding.base.RotaryEmbedding": ("cos_sin_cache", "head_size", "is_neox_style"),
        "platforms.interface.SRTPlatform": ("device_type", "get_dispatch_key_name", "is_out_of_tree"),
    },
    "packed_linear": {
        "layers.linear.LinearBase": ("quant_method",),
        "layers.logits_processor.LogitsProcessor": ("rl_on_policy_target", "use_fp32_lm_head", "use_fp32_lm_head_output"),
        "layers.vocab_parallel_embedding.VocabParallelEmbedding": ("quant_method",),
        "model_executor.model_runner_components.weight_exporter.WeightExporter": ("_weight_export_unsupported_reason",),
    },
    "decode_log": {
        "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter": (
            "current_scheduler_metrics_enabled", "decode_log_interval", "forward_ct_decode", "is_stats_logging_rank",
            "metrics_collector",
        ),
    },
    "ranks": {
        "distributed.parallel_state.GroupCoordinator": ("cpu_group", "world_size"),
        "environ.Envs": ("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER",),
    },
    "cpu_platform": {"platforms.interface.PlatformCapabilities": ("graph_capture", "supports_triton")},
}  # fmt: skip

SUBCLASSES = {
    # our class: (its base, methods that SGLang calls or we call through super)
    Csa2KVPool: (
        MHATokenToKVPool,
        ("_create_buffers", "get_contiguous_buf_infos", "get_cpu_copy", "get_device_pool_infos", "get_key_buffer",
         "get_kv_buffer", "get_kv_size_bytes", "get_value_buffer", "load_cpu_copy", "move_kv_cache", "set_kv_buffer"),
    ),
    Csa2Allocator: (
        PagedTokenToKVPoolAllocator,
        ("_release_page_ids", "alloc", "alloc_decode", "alloc_extend", "check_decode_capacity", "clear",
         "create_prefill_budget", "evict_to_free_tokens", "get_extend_allocation_demand", "max_new_tokens_for_memory",
         "verify_byte_accounting"),
    ),
    ByteBudget: (
        PrefillBudget,
        ("available_chunk_tokens", "can_allocate_prefill", "check_prefill", "fit_chunk", "remaining_current",
         "remaining_total", "reserve"),
    ),
    Csa2RadixCache: (
        UnifiedRadixCache,
        ("_evict_components", "checkpoint_into_tree", "evict", "evict_for_alloc", "insert"),
    ),
    Csa2AttentionBackend: (
        AttentionBackend,
        ("forward_decode", "forward_extend", "get_cuda_graph_seq_len_fill_value", "init_cuda_graph_state",
         "init_forward_metadata", "init_forward_metadata_out_graph", "support_triton"),
    ),
    Csa2CpuPlatform: (
        SRTPlatform,
        ("get_default_attention_backend", "get_device", "get_dispatch_key_name", "get_torch_profiler_activity",
         "get_torch_profiler_activity_str", "post_load_model"),
    ),
    PackedLinearMethod: (
        UnquantizedLinearMethod,
        ("apply", "apply_into", "process_weights_after_loading", "restore_weights_before_loading"),
    ),
    PackedHeadMethod: (
        UnquantizedEmbeddingMethod,
        ("apply", "embedding", "process_weights_after_loading", "restore_weights_before_loading"),
    ),
}  # fmt: skip

OVERRIDES = [(ours, base, name) for ours, (base, names) in SUBCLASSES.items() for name in names]


def rows(table):
    return [
        (user, path if path.startswith("sglang.") else SRT + path, names)
        for user, paths in table.items()
        for path, names in paths.items()
    ]


def label(value: object) -> str:
    """Short test names: the path alone."""
    return value.removeprefix(SRT) if isinstance(value, str) else ""


def find(path: str, user: str):
    """The object at `path`, or a failure that says who needs it."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"SGLang {VERSION} has no {path}, which sglang_csa2.{user} uses: {error}")


def has_attribute(cls: type, name: str) -> bool:
    """Whether instances of `cls` have `name`: a class attribute, a field, an annotation or an assignment to self."""
    if hasattr(cls, name) or name in getattr(cls, "__struct_fields__", ()):
        return True
    return any(
        name in vars(base).get("__annotations__", {}) or f"self.{name}" in inspect.getsource(base)
        for base in cls.__mro__
        if base.__module__.startswith("sglang.")
    )


def test_version_is_the_one_the_package_pins():
    pins = importlib.metadata.requires("sglang-csa2") or []
    assert f"sglang=={VERSION}" in pins, f"SGLang {VERSION} is installed, but the package pins {pins[:1]}"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.removeprefix(SRT))
def test_hook_target(hook):
    assert callable(find(hook.target, hook.function.__module__.removeprefix("sglang_csa2.")))


@pytest.mark.parametrize(("user", "path", "names"), rows(PARAMETERS), ids=label)
def test_function_takes_the_parameters_we_rely_on(user, path, names):
    taken = inspect.signature(find(path, user)).parameters
    missing = [name for name in names if name not in taken]
    assert not missing, f"SGLang {VERSION}: {path} takes no {missing}, which sglang_csa2.{user} relies on: {list(taken)}"


@pytest.mark.parametrize(("user", "path", "names"), rows(ATTRIBUTES), ids=label)
def test_class_has_the_attributes_we_read(user, path, names):
    cls = find(path, user)
    missing = [name for name in names if not has_attribute(cls, name)]
    assert not missing, f"SGLang {VERSION}: {path} has no {missing}, which sglang_csa2.{user} reads"


@pytest.mark.parametrize(("ours", "base", "name"), OVERRIDES, ids=lambda item: getattr(item, "__name__", item))
def test_override_has_a_base_method_with_the_same_parameters(ours, base, name):
    assert issubclass(ours, base)
    assert hasattr(base, name), f"SGLang {VERSION}: {base.__name__} has no {name}, which {ours.__name__} overrides"
    theirs, mine = getattr(base, name), getattr(ours, name)
    if isinstance(theirs, property):
        assert isinstance(mine, property), f"{base.__name__}.{name} is a property"
        return
    taken = inspect.signature(mine).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = [p.name for p in inspect.signature(theirs).parameters.values() if p.kind not in variable]
    missing = [parameter for parameter in wanted if parameter not in taken]
    assert not missing, f"SGLang {VERSION} calls {base.__name__}.{name} with {missing}, which {ours.__name__} does not take"


def test_resolution_steps_exist_and_stand_in_order():
    from sglang.srt.arg_groups import pipeline
    from sglang.srt.arg_groups.resolution_hooks import _OVERRIDABLE_HOOKS

    source = inspect.getsource(pipeline.run_resolution_pipeline)
    steps = ("handle_deprecated_dp_attention", "handle_missing_default_values", "handle_model_specific_adjustments",
             "handle_attention_backend_compatibility", "handle_amd_monokernel")  # fmt: skip
    places = [source.index(f"run_hook({step}") for step in steps]
    assert places == sorted(places), f"SGLang {VERSION} resolves in another order than {steps}"
    assert source.index("run_hook(") == places[0], f"SGLang {VERSION} has a step before {steps[0]}"
    ours = {steps[0], steps[2], steps[4]}
    assert ours <= _OVERRIDABLE_HOOKS, f"SGLang {VERSION} does not let plugins hook {ours - _OVERRIDABLE_HOOKS}"


def test_options_we_force_and_refuse_are_fields():
    from sglang_csa2 import refusals, resolve

    fields = set(find(f"{SRT}server_args.ServerArgs", "refusals").__struct_fields__)
    for forced in resolve.FORCED:
        assert forced.field in fields, f"SGLang {VERSION} has no option {forced.field}, which --kv-compress csa2 sets"
    for row in refusals.OPTIONS:
        field = row.what.removeprefix("--").replace("-", "_")
        assert not row.what.startswith("--") or field in fields, f"SGLang {VERSION} has no option {row.what}"


def test_records_keep_bookkeeping_and_fields_of_a_subclass():
    fields = msgspec.structs.fields(find(f"{SRT}server_args.ServerArgs", "args"))
    assert fields[0].name == "model_path", "the positional order of ServerArgs changed"


def test_a_replay_shows_the_backend_a_padded_batch_and_its_own_slots():
    """`sglang_csa2.attention` counts the requests by the padding, and takes the slots as they are without it."""
    path = f"{SRT}model_executor.runner.decode_cuda_graph_runner.build_replay_fb_view"
    source = inspect.getsource(find(path, "attention"))
    for line in (
        "batch_size=bs,",
        "num_padding=bs - raw_bs,",
        'out_cache_loc=getattr(forward_batch, "out_cache_loc", None),',
        "positions=buffers.positions[:num_tokens],",
        "req_pool_indices=buffers.req_pool_indices[:bs],",
        "buffers.seq_lens_cpu[:bs]",
    ):
        assert line in source, f"SGLang {VERSION} replays a decode graph without {line}"


def test_eviction_policies_are_looked_up_by_name():
    factories = find(f"{SRT}mem_cache.utils._EVICTION_POLICY_FACTORIES", "eviction")
    source = inspect.getsource(find(f"{SRT}mem_cache.utils.get_eviction_strategy", "eviction"))
    assert {"lru", "lfu", "slru", "priority", "tlru"} <= set(factories)
    assert "_EVICTION_POLICY_FACTORIES[" in source


def test_an_explicit_eviction_policy_can_be_told_from_the_default():
    fields = {field.name: field.default for field in msgspec.structs.fields(find(f"{SRT}server_args.ServerArgs", "resolve"))}
    assert fields["radix_eviction_policy"] == "lru"
    assert fields["_radix_eviction_policy_explicitly_set"] is False
    assert '"Engine("' in inspect.getsource(find(f"{SRT}entrypoints.engine.Engine.__init__", "resolve"))
    find(f"{SRT}server_args.ServerArgs.launch_command", "resolve")


def test_an_engine_takes_its_event_loop_last():
    source = inspect.getsource(find(f"{SRT}entrypoints.engine.Engine.__init__", "engine_documents"))
    assert source.strip().splitlines()[-1].strip() == "self.loop = self._ensure_event_loop()"


def test_control_messages_go_to_all_replicas():
    controller = find(f"{SRT}managers.data_parallel_controller.DataParallelController", "control")
    assert "add_fallback_fn(self.send_control_message)" in inspect.getsource(controller.init_dispatcher)
    source = inspect.getsource(find(f"{SRT}managers.data_parallel_controller", "plugin"))
    assert "load_plugins()" in source


def test_communicator_specs_are_a_list_of_pairs():
    specs = find(f"{SRT}managers.tokenizer_control_mixin._COMMUNICATOR_SPECS", "control")
    assert isinstance(specs, list)
    assert all(isinstance(spec[0], str) and isinstance(spec[1], type) for spec in specs)
