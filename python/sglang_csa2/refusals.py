"""What `--kv-compress csa2` cannot serve yet: one table of options, one of models, and the checks that read them.

The tables are also the source of docs/options.md. Options are checked before SGLang's own handlers, whose errors would
talk about something else; models as soon as their configuration is known; nothing of it starts a process.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from csa2.errors import OptionError, UnsupportedModelError
from csa2.formats import HEAD_DIMS, MODEL_DTYPES
from sglang_csa2.args import SCHEME, flag_of
from sglang_csa2.cpu_lora import BACKEND as LORA_BACKEND

SERVED_KV_DTYPES = ("auto", "bfloat16", "bf16")


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is refused.

    `found` looks at the arguments (or the model configuration) and returns the offending value, True for a bare switch,
    or None when there is nothing to refuse. `served` are the values that do work, for the documentation.
    """

    what: str
    found: Callable[[Any], object]
    reason: str
    hint: str
    served: tuple[object, ...] = ()


def check_options(config: Any) -> None:
    """Refuse options that cannot be combined with the scheme; `config` is a resolution view of the arguments.

    Raises:
        OptionError: explains the first such option and names the others.
    """
    offences = _offences(OPTIONS, config)
    if offences:
        raise OptionError(_sentence(f"--kv-compress {SCHEME} cannot be combined with", offences))


def check_model(model_config: Any) -> None:
    """Refuse models whose KV cache cannot be compressed; `model_config` is SGLang's `ModelConfig`.

    Raises:
        UnsupportedModelError: explains the first obstacle and names the others.
    """
    offences = _offences(MODELS, model_config)
    if offences:
        name = ", ".join(model_config.hf_config.architectures or ["this model"])
        raise UnsupportedModelError(_sentence(f"--kv-compress {SCHEME} cannot serve {name} because of", offences))


def _offences(table: Sequence[Refusal], subject: Any) -> list[tuple[Refusal, str]]:
    found = [(row, row.found(subject)) for row in table]
    return [(row, row.what if value is True else f"{row.what} {value}") for row, value in found if value is not None]


def _sentence(start: str, offences: list[tuple[Refusal, str]]) -> str:
    (first, name), *others = offences
    also = f" (also refused: {', '.join(other for _, other in others)})" if others else ""
    return f"{start} {name}: {first.reason}. {first.hint}{also}"


def _switch(field: str) -> Callable[[Any], object]:
    return lambda config: True if getattr(config, field) else None


def _value(field: str, *served: object) -> Callable[[Any], object]:
    return lambda config: None if getattr(config, field) in served else getattr(config, field)


def _off(field: str, reason: str, hint: str = "") -> Refusal:
    """A switch that must stay off."""
    flag = flag_of(field)
    return Refusal(what=flag, found=_switch(field), reason=reason, hint=hint or f"Leave {flag} out")


def _only(field: str, *served: object, reason: str, hint: str = "") -> Refusal:
    """An option with values of which only `served` work; the first is the one to use."""
    flag = flag_of(field)
    hint = hint or (f"Leave {flag} out" if served[0] is None else f"Use {flag} {served[0]} or leave it out")
    return Refusal(what=flag, found=_value(field, *served), reason=reason, hint=hint, served=served)


def _decode_graphs(config: Any) -> tuple[str | None, ...]:
    """What decode graphs may be."""
    return (None, "full", "disabled") if config.csa2_impl == "cuda" else (None, "disabled")


def _decode_graph(config: Any) -> object:
    backend = config.cuda_graph_backend_decode
    return None if backend in _decode_graphs(config) else backend


def _graph_phase(config: Any) -> object:
    graphs = config.cuda_graph_config
    for phase in ("decode", "prefill"):
        part = graphs.get(phase) if isinstance(graphs, dict) else getattr(graphs, phase, None)
        backend = part.get("backend") if isinstance(part, dict) else getattr(part, "backend", None)
        if backend not in (_decode_graphs(config) if phase == "decode" else (None, "disabled")):
            return f"with {phase} graphs {backend!r}"
    return None


def _lora_backend(config: Any) -> object:
    used = config.enable_lora or config.lora_paths
    return None if not used or config.lora_backend == LORA_BACKEND else config.lora_backend


def _variable(name: str, reason: str) -> Refusal:
    """An environment variable of SGLang, a switch that must stay off."""

    def found(config: Any) -> object:
        from sglang.srt.environ import envs

        return True if getattr(envs, name).get() else None

    return Refusal(what=name, found=found, reason=reason, hint="Unset that environment variable")


ROWS = "it moves KV rows by address, and compressed pages have no rows"
OTHER_POOL = "it brings a KV pool of its own"
RANKS = "compressed pages split that way are not verified in this version"
SPLIT = "it splits one sequence or one KV cache over ranks, and pages are not split"
TWO_ROLES = "the two roles exchange KV rows by address, and compressed pages have no rows"
SPECULATION = "draft and verify passes rewrite recent KV entries, which the compressed cache does not follow"
EAGER_PREFILL = "prompts are not captured: what they read changes with every chunk"
WHOLE_GRAPH = "decode steps are captured whole on a CUDA device, and not at all elsewhere"
NO_COMPILE = "the kernels for compressed pages are not traced"
HIDDEN_PAGES = "it hides pages of a session from the prefix cache, which decides what to compress"
NO_PLUGIN = "the plugin is not loaded in its processes"
EXACT = "which tokens are compressed depends on what else runs, so results are not bit-exact"
NO_CACHE = "there is no KV cache to compress"

OPTIONS: tuple[Refusal, ...] = (
    _only("pp_size", 1, reason=RANKS),
    _only("nnodes", 1, reason=RANKS),
    _off("enable_dp_attention", RANKS),
    _only("attn_dp_size", 1, reason=RANKS),
    _only("dcp_size", 1, reason=SPLIT),
    _only("attn_cp_size", 1, reason=SPLIT),
    _off("enable_prefill_cp", SPLIT),
    _off("enable_kv_cache_sharding", SPLIT),
    _only("speculative_algorithm", None, reason=SPECULATION),
    _only("decoupled_spec_role", "null", reason=SPECULATION),
    _only("kv_cache_dtype", *SERVED_KV_DTYPES, reason="pages are compressed from the entries that the model writes"),
    _off("enable_hierarchical_cache", ROWS),
    _off("enable_lmcache", ROWS),
    _off("enable_flexkv", ROWS),
    _off("enable_unified_cache_external_linker", ROWS),
    _off("enable_hisparse", ROWS),
    _only("disaggregation_mode", "null", reason=TWO_ROLES),
    _off("enable_pd_role_switch", TWO_ROLES),
    _off("encoder_only", NO_CACHE),
    _off("enable_pdmux", "prefill and decode would run at the same time on pages that change their format"),
    _off("enable_two_batch_overlap", "two halves of a batch would run at the same time on one attention plan"),
    _off("enable_unified_memory", OTHER_POOL),
    _off("enable_page_major_kv_layout", OTHER_POOL),
    _off("prefill_only_disable_kv_cache", NO_CACHE),
    _off("is_embedding", NO_CACHE),
    _only("dllm_algorithm", None, reason="diffusion decoding rewrites a block of tokens again and again"),
    _off("enable_mis", "multi-item scoring needs an attention mask that only flashinfer computes"),
    _off("enable_deterministic_inference", EXACT),
    _only("rl_on_policy_target", None, reason=EXACT),
    _off("enable_session_radix_cache", HIDDEN_PAGES),
    _off("enable_streaming_session", HIDDEN_PAGES),
    _only("kv_canary", "none", reason="it reads KV rows by address, and compressed pages have no rows"),
    Refusal(
        what="--lora-backend",
        found=_lora_backend,
        reason="with adapters the others need a GPU, and are untried there beside compressed pages",
        hint=f"Use --lora-backend {LORA_BACKEND}",
        served=(LORA_BACKEND,),
    ),
    _off("enable_lora_overlap_loading", "adapters are copied by a stream of a GPU, untried beside compressed pages"),
    _off("enable_memory_saver", "the arena is not released and restored with SGLang's own memory"),
    _off("enable_torch_compile", NO_COMPILE),
    Refusal(
        what="--cuda-graph-backend-decode",
        found=_decode_graph,
        reason=WHOLE_GRAPH,
        hint="Leave --cuda-graph-backend-decode out",
        served=("disabled", "full with --csa2-impl cuda"),
    ),
    _only("cuda_graph_backend_prefill", None, "disabled", reason=EAGER_PREFILL),
    Refusal(
        what="--cuda-graph-config",
        found=_graph_phase,
        reason=f"{WHOLE_GRAPH}, and {EAGER_PREFILL}",
        hint="Leave --cuda-graph-config out",
    ),
    _only("tokenizer_worker_num", 1, reason=NO_PLUGIN),
    _off("grpc_mode", "its server has no route for the cache"),
    _off("smg_grpc_mode", "its server has no route for the cache"),
    _off("use_ray", NO_PLUGIN),
    _variable("SGLANG_RUST_SERVER", NO_PLUGIN),
    _variable("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "what a decode graph reads is planned on the host before each replay"),
    _only(
        "model_impl",
        "auto",
        "sglang",
        reason="the rotary embedding, which old pages undo, is hidden in its layers",
    ),
)


def _model_module() -> Any:
    # Not at the top: it needs SGLang's complete argument parsing, and this file is read while a process still starts.
    from sglang.srt.configs import model_config

    return model_config


def _layer_types(model: Any, *words: str) -> object:
    """The first layer type of the model that contains one of `words`."""
    types = getattr(model.hf_text_config, "layer_types", None) or ()
    return next((kind for kind in types if any(word in kind for word in words)), None)


def _latent(model: Any) -> object:
    return True if model.attention_arch == _model_module().AttentionArch.MLA else None


def _sparse(model: Any) -> object:
    module, config = _model_module(), model.hf_config
    sparse = (module.is_deepseek_dsa, module.is_deepseek_v4, module.is_minimax_sparse)
    return True if any(is_sparse(config) for is_sparse in sparse) else None


def _recurrent(model: Any) -> object:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if model.attention_arch == _model_module().AttentionArch.SSM or mambaish_config(model) is not None:
        return True
    return True if _layer_types(model, "linear", "mamba", "conv", "recurrent") else None


def _windowed(model: Any) -> object:
    text = model.hf_text_config
    if model.is_hybrid_swa or model.is_local_attention_model or model.attention_chunk_size:
        return True
    if getattr(text, "layer_types", None):
        return True if _layer_types(model, "sliding", "chunked") else None
    window = model.sliding_window_size
    return f"of {window} tokens" if window and getattr(text, "use_sliding_window", True) else None


def _head_dim(model: Any) -> object:
    return None if model.head_dim in HEAD_DIMS else model.head_dim


def _value_dim(model: Any) -> object:
    return None if model.v_head_dim == model.head_dim else f"{model.head_dim} and {model.v_head_dim}"


def _dtype(model: Any) -> object:
    name = str(model.dtype).removeprefix("torch.")
    return None if name in MODEL_DTYPES else name


ANOTHER_MODEL = "Serve this model without --kv-compress"
OTHER_ENTRIES = "its cache does not hold one key and one value for each head and token"

MODELS: tuple[Refusal, ...] = (
    Refusal(what="sparse attention with an index", found=_sparse, reason=OTHER_ENTRIES, hint=ANOTHER_MODEL),
    Refusal(what="multi-head latent attention (MLA)", found=_latent, reason=OTHER_ENTRIES, hint=ANOTHER_MODEL),
    Refusal(
        what="state-space or linear-attention layers",
        found=_recurrent,
        reason="their state is kept in another pool",
        hint=ANOTHER_MODEL,
    ),
    Refusal(
        what="sliding-window attention",
        found=_windowed,
        reason="windows end inside pages, which this version does not mask",
        hint=ANOTHER_MODEL,
    ),
    Refusal(
        what="attention sinks",
        found=lambda model: True if model.has_attention_sinks else None,
        reason="the attention over compressed pages does not add them",
        hint=ANOTHER_MODEL,
    ),
    Refusal(
        what="cross-attention with an encoder",
        found=lambda model: True if model.is_encoder_decoder else None,
        reason="a page holds entries of one sequence, in order",
        hint=ANOTHER_MODEL,
    ),
    Refusal(
        what="its task (embedding, reward or classification)",
        found=lambda model: None if model.is_generation else True,
        reason="it never reads its KV cache again",
        hint=ANOTHER_MODEL,
    ),
    Refusal(
        what="attention logits capped at",
        found=lambda model: getattr(model.hf_text_config, "attn_logit_softcapping", None),
        reason="the attention over compressed pages does not cap them",
        hint=ANOTHER_MODEL,
    ),
    Refusal(
        what="different head dimensions of keys and values,",
        found=_value_dim,
        reason="keys and values of a page need the same number of channels",
        hint=ANOTHER_MODEL,
    ),
    Refusal(
        what="head dimension",
        found=_head_dim,
        reason=f"page formats exist for even head dimensions from {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}",
        hint=ANOTHER_MODEL,
    ),
    Refusal(
        what="number format",
        found=_dtype,
        reason=f"pages are made from {', '.join(MODEL_DTYPES)} entries",
        hint="Choose one of these with --dtype",
    ),
)
