"""Every option and model that `--kv-compress csa2` cannot serve is refused by name, and the rest is not."""

from types import SimpleNamespace

import pytest
import torch
from resolving import resolve, write_model

from csa2.errors import OptionError, UnsupportedModelError
from sglang_csa2.refusals import MODELS, OPTIONS, check_model
from sglang_csa2.resolve import FORCED

REFUSED_OPTIONS = {
    "--pp-size": ["--pp-size", "2"],
    "--nnodes": ["--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "127.0.0.1:5000", "--tp-size", "2"],
    "--enable-dp-attention": ["--enable-dp-attention"],
    "--attn-dp-size": ["--attn-dp-size", "2"],
    "--dcp-size": ["--dcp-size", "2"],
    "--attn-cp-size": ["--attn-cp-size", "2"],
    "--enable-prefill-cp": ["--enable-prefill-cp"],
    "--enable-kv-cache-sharding": ["--enable-kv-cache-sharding"],
    "--speculative-algorithm": ["--speculative-algorithm", "NGRAM"],
    "--decoupled-spec-role": ["--decoupled-spec-role", "verifier"],
    "--kv-cache-dtype": ["--kv-cache-dtype", "fp8_e4m3"],
    "--enable-hierarchical-cache": ["--enable-hicache"],
    "--enable-lmcache": ["--enable-lmcache"],
    "--enable-flexkv": ["--enable-flexkv"],
    "--enable-unified-cache-external-linker": ["--enable-unified-cache-external-linker"],
    "--enable-hisparse": ["--enable-hisparse"],
    "--disaggregation-mode": ["--disaggregation-mode", "prefill"],
    "--enable-pd-role-switch": ["--enable-pd-role-switch"],
    "--encoder-only": ["--encoder-only"],
    "--enable-pdmux": ["--enable-pdmux"],
    "--enable-two-batch-overlap": ["--enable-two-batch-overlap"],
    "--enable-unified-memory": ["--enable-unified-memory"],
    "--enable-page-major-kv-layout": ["--enable-page-major-kv-layout"],
    "--prefill-only-disable-kv-cache": ["--prefill-only-disable-kv-cache"],
    "--is-embedding": ["--is-embedding"],
    "--dllm-algorithm": ["--dllm-algorithm", "LowConfidence"],
    "--enable-mis": ["--enable-mis"],
    "--enable-deterministic-inference": ["--enable-deterministic-inference"],
    "--rl-on-policy-target": ["--rl-on-policy-target", "fsdp"],
    "--enable-session-radix-cache": ["--enable-session-radix-cache"],
    "--enable-streaming-session": ["--enable-streaming-session"],
    "--kv-canary": ["--kv-canary", "log"],
    "--lora-backend": ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"],
    "--enable-lora-overlap-loading": [
        *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "--lora-backend", "torch_native"),
        "--enable-lora-overlap-loading",
    ],
    "--enable-memory-saver": ["--enable-memory-saver"],
    "--enable-torch-compile": ["--enable-torch-compile"],
    "--cuda-graph-backend-decode": ["--cuda-graph-backend-decode", "full"],
    "--cuda-graph-backend-prefill": ["--cuda-graph-backend-prefill", "breakable"],
    "--cuda-graph-config": ["--cuda-graph-config", '{"decode": {"backend": "full"}}'],
    "--tokenizer-worker-num": ["--tokenizer-worker-num", "2"],
    "--grpc-mode": ["--grpc-mode"],
    "--smg-grpc-mode": ["--smg-grpc-mode"],
    "--use-ray": ["--use-ray"],
    "--model-impl": ["--model-impl", "transformers"],
    "SGLANG_RUST_SERVER": [],
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": [],
}

SERVED_OPTIONS = (
    ["--kv-cache-dtype", "bf16"],
    ["--cuda-graph-backend-decode", "disabled"],
    ["--cuda-graph-config", '{"decode": {"max_bs": 4}}'],
    ["--disable-cuda-graph"],
    ["--disable-radix-cache"],
    ["--enable-mixed-chunk"],
    ["--enable-priority-scheduling"],
    ["--radix-eviction-policy", "lfu"],
    ["--max-total-tokens", "4096"],
    ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "--lora-backend", "torch_native"],
    ["--enable-return-hidden-states"],
    ["--grammar-backend", "xgrammar"],
    ["--enable-metrics"],
    ["--dp-size", "1"],
    ["--page-size", "64", "--attention-backend", "csa2", "--radix-cache-backend", "csa2"],
)

CONFLICTS = {
    "--page-size": ["--page-size", "16"],
    "--attention-backend": ["--attention-backend", "triton"],
    "--prefill-attention-backend": ["--prefill-attention-backend", "triton"],
    "--decode-attention-backend": ["--decode-attention-backend", "triton"],
    "--radix-cache-backend": ["--radix-cache-backend", "flexkv"],
}

MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}

REFUSED_MODELS = {
    "sparse attention with an index": {
        **MLA,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "index_topk": 64,
        "index_head_dim": 32,
    },
    "multi-head latent attention (MLA)": MLA,
    "state-space or linear-attention layers": {
        "architectures": ["FalconMambaForCausalLM"],
        "model_type": "falcon_mamba",
        "state_size": 16,
        "conv_kernel": 4,
        "time_step_rank": 8,
    },
    "sliding-window attention": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 512,
    },
    "attention sinks": {"learnable_sink": True},
    "cross-attention with an encoder": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 128,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    },
    "its task (embedding, reward or classification)": {"architectures": ["LlamaForSequenceClassification"]},
    "attention logits capped at": {"attn_logit_softcapping": 50.0},
    "different head dimensions of keys and values,": {"v_head_dim": 32},
    "head dimension": {"head_dim": 16},
}

MORE_WINDOWED = (
    {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 64, "sliding_window": 512},
    {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128},
)

SERVED_MODELS = (
    {},
    {"head_dim": 32},
    {"head_dim": 256},
    {"torch_dtype": "float16"},
    {"torch_dtype": "float32"},
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "sliding_window": 512,
        "use_sliding_window": False,
    },
    {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 1024}},
)  # fmt: skip


@pytest.fixture
def llama(tmp_path):
    return str(write_model(tmp_path / "llama"))


def test_every_row_of_the_tables_is_tested():
    assert set(REFUSED_OPTIONS) == {row.what for row in OPTIONS}
    assert {*REFUSED_MODELS, "number format"} == {row.what for row in MODELS}


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.what)
def test_option_is_refused_by_name(row, llama, monkeypatch):
    if row.what.startswith("SGLANG_"):
        monkeypatch.setenv(row.what, "1")
    with pytest.raises(OptionError) as refused:
        resolve("--model-path", llama, "--kv-compress", "csa2", *REFUSED_OPTIONS[row.what])
    message = str(refused.value)
    assert message.startswith(f"--kv-compress csa2 cannot be combined with {row.what}")
    assert row.reason in message
    assert row.hint in message
    assert "\n" not in message


def test_all_refused_options_are_named_at_once(llama):
    with pytest.raises(OptionError, match=r"with --pp-size 2: .*also refused: --kv-cache-dtype fp8_e4m3, --enable-lm"):
        resolve("--model-path", llama, "--kv-compress", "csa2", "--pp-size", "2", "--enable-lmcache",
                "--kv-cache-dtype", "fp8_e4m3")  # fmt: skip


@pytest.mark.parametrize("argv", SERVED_OPTIONS, ids=lambda argv: argv[0])
def test_option_is_served(argv, llama):
    record = resolve("--model-path", llama, "--kv-compress", "csa2", *argv)
    values = record.resolved_dict()
    here = [forced for forced in FORCED if forced.device in (None, "cpu")]
    assert {forced.field: values[forced.field] for forced in here} == {forced.field: forced.value for forced in here}


@pytest.mark.parametrize("flag", CONFLICTS)
def test_other_value_of_a_forced_option_is_refused_not_overwritten(flag, llama):
    with pytest.raises(OptionError, match=f"{CONFLICTS[flag][1]} cannot be combined with --kv-compress csa2, which"):
        resolve("--model-path", llama, "--kv-compress", "csa2", *CONFLICTS[flag])


@pytest.mark.parametrize("what", REFUSED_MODELS)
def test_model_is_refused_by_name(what, tmp_path):
    row = next(row for row in MODELS if row.what == what)
    folder = write_model(tmp_path / "model", **REFUSED_MODELS[what])
    with pytest.raises(UnsupportedModelError) as refused:
        resolve("--model-path", str(folder), "--kv-compress", "csa2")
    message = str(refused.value)
    architecture = REFUSED_MODELS[what].get("architectures", ["LlamaForCausalLM"])[0]
    assert message.startswith(f"--kv-compress csa2 cannot serve {architecture} because of")
    assert what in message
    assert row.hint in message


@pytest.mark.parametrize("changes", MORE_WINDOWED, ids=lambda changes: changes["model_type"])
def test_models_with_windows_in_some_layers_are_refused(changes, tmp_path):
    folder = write_model(tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModelError, match="sliding-window attention"):
        resolve("--model-path", str(folder), "--kv-compress", "csa2")


@pytest.mark.parametrize("head_dim", [30, 258, 512])
def test_head_dimension_without_a_page_format_is_refused(head_dim, tmp_path):
    folder = write_model(tmp_path / "model", head_dim=head_dim)
    with pytest.raises(UnsupportedModelError, match=f"head dimension {head_dim}: .* from 32 to 256"):
        resolve("--model-path", str(folder), "--kv-compress", "csa2")


@pytest.mark.parametrize("changes", SERVED_MODELS, ids=str)
def test_model_is_served(changes, tmp_path):
    folder = write_model(tmp_path / "model", **changes)
    assert resolve("--model-path", str(folder), "--kv-compress", "csa2").resolved_dict()["page_size"] == 64


def test_what_sglang_itself_does_not_load_today(llama):
    """Float64 models and odd head dimensions stop earlier, so these rows are checked on a stand-in."""
    from sglang.srt.arg_groups.overrides import model_config_of

    served = model_config_of(resolve("--model-path", llama, "--kv-compress", "csa2"))
    stand_in = SimpleNamespace(**{"linear_attn_registry_result": None, **vars(served)})
    check_model(stand_in)
    stand_in.dtype = torch.float64
    with pytest.raises(UnsupportedModelError, match=r"number format float64: .*Choose one of these with --dtype"):
        check_model(stand_in)
    stand_in.dtype = torch.bfloat16
    stand_in.head_dim = stand_in.v_head_dim = 33
    with pytest.raises(UnsupportedModelError, match="head dimension 33: "):
        check_model(stand_in)


def test_without_the_flag_nothing_is_refused(llama):
    values = resolve("--model-path", llama, "--kv-cache-dtype", "bf16", "--tp-size", "2").resolved_dict()
    assert values["kv_compress"] is None
    assert values["page_size"] == 1
    assert values["attention_backend"] == "torch_native"
    assert values["radix_cache_backend"] is None


def test_overlap_scheduling_is_what_it_is_without_the_flag(llama):
    """On by default, and off where the user or SGLang switches it off."""
    for argv, off in ([], False), (["--disable-overlap-schedule"], True):
        values = [
            resolve("--model-path", llama, *flag, *argv).resolved_dict()["disable_overlap_schedule"]
            for flag in ([], ["--kv-compress", "csa2"])
        ]
        assert values == [off, off]


def test_two_ranks_need_heads_and_cores_for_both(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    argv = ("--kv-compress", "csa2", "--tp-size", "2")
    even = str(write_model(tmp_path / "even", num_attention_heads=4, num_key_value_heads=2))
    assert resolve("--model-path", even, *argv).resolved_dict()["tp_size"] == 2
    odd = str(write_model(tmp_path / "odd", num_attention_heads=4, num_key_value_heads=1))
    with pytest.raises(OptionError, match="--tp-size 2 cannot split this model: it has 4 query and 1 KV heads"):
        resolve("--model-path", odd, *argv)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND")
    monkeypatch.setattr("sglang.srt.utils.common.get_cpu_ids_by_node", lambda: ["0,1"])
    with pytest.raises(OptionError, match=r"starts 2 processes on a machine with 1 NUMA nodes: .*BIND='[0-9,]+\|[0-9,]+'"):
        resolve("--model-path", even, *argv)
