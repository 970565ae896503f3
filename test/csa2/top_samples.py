"""What a server says, for the tests of `csa2 top`."""

from stats_samples import cache_stats

from csa2.documents import DocumentView

MIB = 2**20
STATS = cache_stats(
    arena_bytes=100 * MIB,
    used_bytes=48 * MIB,
    slab_bytes=50 * MIB,
    pages={"bf16": 16, "fp8": 32, "fp4": 64},
    page_bytes={"bf16": MIB, "fp8": MIB // 2, "fp4": MIB // 4},
    logical_tokens=7168,
    capacity_tokens=25600,
    compression_ratio=2.3333,
    metadata_fraction=0.03,
    demotions_total={"bf16->fp8": 5, "bf16->fp4": 70, "fp8->fp4": 0},
    compactions_total=2,
    evicted_tokens_total=640,
    prefix_hit_tokens_total=3000,
    prompt_tokens_total=10000,
    turns_total=20,
    prefix_hit_tokens_by_format={"bf16": 200, "fp8": 2800, "fp4": 0},
    target_ratio=1.5,
    live_bytes=20 * MIB,
    documents=0,
    pinned_pages=0,
    pinned_bytes=0,
    options={"ratio": "auto"},
)
MANUAL = DocumentView(
    id="manual",
    state="resident",
    tokens=1280,
    pages=20,
    bytes=11 * MIB,
    format="fp8",
    formats={"bf16": 1, "fp8": 19, "fp4": 0},
    hits=7,
    ttl=None,
    extra_key=None,
    serial=1,
    message="",
)
METRICS = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="demo",tp_rank="0"} 3.0
sglang:num_running_reqs{model_name="demo",tp_rank="1"} 3.0
sglang:num_queue_reqs{model_name="a \\"quoted\\" } name"} 2.0
sglang:generation_tokens_total{model_name="demo"} 1000.0
sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="demo"} 5.0
sglang:time_to_first_token_seconds_bucket{le="0.5",model_name="demo"} 10.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="demo"} 10.0
python_info{version="3"} 1.0
"""
