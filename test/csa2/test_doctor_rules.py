"""The rules of `csa2 doctor`: each finds its own case and nothing in a healthy server."""

import re
from pathlib import Path

import pytest
from doctor_cases import case, decoding, histogram, load

from csa2.doctor.command import RULES, find
from csa2.doctor.metrics import Metrics, histogram_mean
from csa2.doctor.readings import Load

DOCS = Path(__file__).parents[2] / "docs"
SLOW = histogram("time_to_first_token_seconds", 4.0, 10)
LONG_PROMPTS = histogram("prompt_tokens_histogram", 3000, 10)
DOCUMENT = {"id": "manual", "state": "resident", "bytes": 600_000, "message": ""}

CASES = {
    "radix-cache-off": {"arguments": {"disable_radix_cache": True}, "prefix_hit_tokens_total": 0},
    "low-hit-rate": {"prefix_hit_tokens_total": 5_000},
    "evictions": {"evicted_tokens_total": 20_000, "prefix_hit_tokens_total": 5_000},
    "memory-not-falling": {"used_bytes": 950_000, "slab_bytes": 960_000, "compression_ratio": 1.2, "pages": {"bf16": 950}},
    "pinned-documents": {"pinned": [DOCUMENT], "documents": 1, "pinned_bytes": 600_000},
    "failed-documents": {"pinned": [DOCUMENT | {"state": "failed", "bytes": 0, "message": "aborted"}]},
    "fragmentation": {"used_bytes": 600_000, "slab_bytes": 900_000, "evicted_tokens_total": 64},
    "ratio-at-its-end": {"target_ratio": 8.0, "live_bytes": 900_000},
    "low-agreement": {
        "options": {"guard_min": 0.9},
        "guard_agreement": 0.8,
        "guard_backoffs_total": 1,
        "ratio_ceiling": 4.0,
    },
    "queueing": {"metrics": ("", SLOW + histogram("queue_time_seconds", 3.0, 10)), "loads": [load(4)]},
    "slow-prefill": {"metrics": ("", SLOW + histogram("queue_time_seconds", 0.5, 10))},
    "slow-late-turns": {"metrics": ("", LONG_PROMPTS + histogram("uncached_prompt_tokens_histogram", 2000, 10))},
    "concurrency-lowers-throughput": {"loads": decoding((2, 100), (16, 60))},
    "retractions": {"loads": [load(4, retracted=2)]},
    "reference-implementation": {"options": {"impl": "reference", "impl_detail": "no compiler: c++ is not there"}},
    "mismatched-calibration": {"calibration_fault": "it was made for another model"},
    "no-calibration": {"options": {"calibration": None}, "pages": {"bf16": 2, "csa2-4x": 8}},
}


def test_a_healthy_server_has_no_findings():
    metrics = histogram("time_to_first_token_seconds", 0.2, 100) + histogram("queue_time_seconds", 0.15, 100)
    metrics += histogram("prompt_tokens_histogram", 3000, 100) + histogram("uncached_prompt_tokens_histogram", 200, 100)
    loads = decoding((2, 50), (8, 180), (4, 100), (8, 175))
    assert find(case(metrics=(metrics, metrics), loads=loads)) == []


def test_an_idle_server_has_no_findings():
    new = {
        "used_bytes": 0,
        "slab_bytes": 0,
        "compression_ratio": 1.0,
        "prompt_tokens_total": 0,
        "prefix_hit_tokens_total": 0,
    }
    assert find(case(loads=[load(0), load(0)], **new)) == []


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_found_and_nothing_else(name):
    (finding,) = find(case(**CASES[name]))
    assert finding.name == name
    assert re.search(r"\d|--disable|another|no compiler|manual", finding.seen)


def test_every_rule_has_a_case():
    assert len(RULES) == len(CASES)


@pytest.mark.parametrize("name", CASES)
def test_every_link_leads_to_a_section(name):
    (finding,) = find(case(**CASES[name]))
    page, anchor = finding.link.split("#")
    headings = re.findall(r"^##+ (.*)$", (DOCS.parent / page).read_text(), flags=re.MULTILINE)
    assert anchor in [re.sub(r"[^\w]+", "-", heading.lower()).strip("-") for heading in headings]


def test_queueing_is_seen_without_metrics():
    (finding,) = find(case(loads=[load(3, waiting=2), load(3, waiting=5)]))
    assert finding.name == "queueing"
    assert "2 to 5 requests wait in each of 2 readings" in finding.seen


def test_a_queue_that_empties_is_none():
    assert find(case(loads=[load(3, waiting=2), load(3, waiting=0)])) == []


def test_a_queue_because_of_the_limit_names_the_limit():
    (finding,) = find(case(loads=[load(3, waiting=2, limit=3)]))
    assert "--max-running-requests 3" in finding.why
    assert finding.fix[0] == "a larger --max-running-requests than 3"


def test_a_fixed_ratio_is_offered_to_go():
    fixes = [find(case(loads=[load(3, waiting=2)], options={"ratio": ratio}))[0].fix[0] for ratio in ("1", "auto", "8")]
    assert [fix.startswith("smaller old pages: --csa2-ratio auto instead of 1") for fix in fixes] == [True, False, False]


def test_means_are_those_between_the_readings_where_there_are_enough():
    slow, fast = (histogram("time_to_first_token_seconds", mean, 10) for mean in (9.0, 0.1))
    before, queue = slow, histogram("queue_time_seconds", 0.0, 20)
    after = histogram("time_to_first_token_seconds", (9.0 + 0.1) / 2, 20)
    assert find(case(metrics=(before + queue, after + queue))) == []
    assert [f.name for f in find(case(metrics=(before + queue, slow + queue)))] == ["slow-prefill"]
    assert histogram_mean("sglang:time_to_first_token_seconds", Metrics(fast), least=11) is None


def test_throughput_is_compared_over_all_readings_of_few_and_of_many_requests():
    steady = decoding((4, 100), (5, 60), (4, 100), (4, 100))
    assert find(case(loads=steady)) == [], "nearly as many requests: other things differ"
    (finding,) = find(case(loads=decoding((4, 120), (4, 80), (12, 50), (16, 70))))
    assert finding.seen == "100 tokens/s with about 4 at once, 60 with about 16"
    assert finding.fix[0].startswith("--max-running-requests 4")
    assert find(case(loads=decoding((4, 120), (16, 60)), arguments={"enable_mixed_chunk": True})) == []


def test_prefills_count_as_time_in_which_nothing_was_generated():
    few, many = decoding((2, 50))[1], decoding((2, 50), (8, 200))[2]
    slowed = Load(**{**many.__dict__, "busy_us": many.busy_us + 8e6})
    (finding,) = find(case(loads=[Load(), few, slowed]))
    assert finding.seen == "50 tokens/s with about 2 at once, 22 with about 8"


def test_a_prompt_in_work_is_no_memory_that_stays():
    full = {"used_bytes": 950_000, "slab_bytes": 960_000, "compression_ratio": 1.1, "pages": {"bf16": 950}}
    assert find(case(before={}, **full)) == []
    (finding,) = find(case(arguments={"page_size": 64, "chunked_prefill_size": 51200}, **full))
    assert "by chunks of up to 51200 tokens, and one of them is 80% of the arena" in finding.why
    assert finding.fix[0] == "--chunked-prefill-size 12800"


def test_retractions_are_counted_between_the_readings():
    text = 'sglang:num_retracted_requests_total{model_name="m"} %d\n'
    (finding,) = find(case(metrics=(text % 3, text % 8)))
    assert finding.seen.startswith("5 retracted in 5 s")
    assert find(case(metrics=(text % 3, text % 3))) == []


def test_pins_are_seen_without_a_list_of_documents():
    (finding,) = find(case(documents=2, pinned_bytes=700_000))
    assert finding.seen == "2 documents with 684 KiB, 70% of the arena"


def test_sparse_slabs_are_no_fault_while_nothing_is_evicted():
    assert find(case(used_bytes=600_000, slab_bytes=900_000)) == []


def test_few_prompts_say_nothing_about_hits():
    assert find(case(prompt_tokens_total=4000, prefix_hit_tokens_total=0)) == []


@pytest.mark.parametrize(
    ("options", "largest", "fix"),
    [
        ({"tail_format": "bf16"}, "bf16", "--csa2-tail-format ratio instead of bf16"),
        ({"ratio": "1"}, "fp8", "--csa2-ratio auto instead of 1"),
        ({"shared_format": "fp8"}, "fp8", "--csa2-shared-format k8v4 instead of fp8"),
        ({"hot_tokens": 512}, "bf16", "--csa2-hot-tokens 256"),
    ],
)
def test_memory_that_does_not_fall_is_told_with_its_flag(options, largest, fix):
    full = {"used_bytes": 950_000, "slab_bytes": 960_000, "compression_ratio": 1.9, "pages": {largest: 900}}
    (finding,) = find(case(options=options, **full))
    assert any(text.startswith(fix) for text in finding.fix), finding.fix


def test_metrics_with_odd_lines_are_read():
    metrics = Metrics('# HELP a b\na 1\na{x="1",y="q\\"}{"} 2.5\na{x="2"} NaN_\n\nb{} 3 1700000000\n')
    assert metrics.total("a") == 3.5
    assert metrics.total("a", x="1") == 2.5
    assert metrics.total("b") == 3
    assert metrics.total("c") == 0
